"""Profile a run: record what host and device do, write it for viewers, and say what takes the time."""
