"""Runs of several processes: what each of them knows about the others, and how they are started."""
