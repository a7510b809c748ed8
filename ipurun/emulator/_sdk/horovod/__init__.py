"""Replacement for Horovod, used if that is not installed: a single process."""
