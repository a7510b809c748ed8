"""Capture of a model as a graph."""
