"""Parts of PoplarExecutor: its device, weights, arguments, files, and the wrapping of the model."""
