"""Sweeps: check every point before the first one starts, run each in a process, rank them in a table."""
