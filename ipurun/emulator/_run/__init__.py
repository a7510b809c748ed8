"""Compiling a captured graph, and running it."""
