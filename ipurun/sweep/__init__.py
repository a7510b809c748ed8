"""Sweeps: every point checked before the first starts, one process a point, a ranked table at the end."""
