"""Reading data for ``DataLoader``, in this process and ahead in another."""
