"""Parts of PoplarExecutor: device, weights, arguments, files, model wrapping, and times of operations."""
