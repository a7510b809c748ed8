"""Handwritten digits: a small CNN that learns in seconds, on data that ships with ipurun."""
