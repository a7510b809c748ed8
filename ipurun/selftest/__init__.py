"""Small runs on an engine, compared with another way to compute the same numbers."""
