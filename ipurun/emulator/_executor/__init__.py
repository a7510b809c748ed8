"""Parts of PoplarExecutor: device, weights, arguments, files, and model wrapping."""
