"""Log lines of PopTorch's native layer and of its backend."""
