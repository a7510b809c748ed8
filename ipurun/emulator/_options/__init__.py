"""Parts of ``Options``, and the backend's checks of them."""
