"""Read data for ``DataLoader``, in this process or ahead in another."""
