"""Checkpoints: written atomically, read with a check."""

from ipurun.checkpoint.store import Checkpoint, best, damaged_files, latest, listed, load, save

__all__ = ["Checkpoint", "best", "damaged_files", "latest", "listed", "load", "save"]
