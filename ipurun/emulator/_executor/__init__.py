"""What PoplarExecutor is made of: device, weights, arguments, optimizer and files."""
