"""The operations and annotations of ``poptorch.ops``."""
