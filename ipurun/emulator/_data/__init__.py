"""Load data for ``DataLoader``, in this process or in a background process."""
