"""What ``Options`` is made of, and the backend's checks of it."""
