"""Checkpoints: written atomically, read with a check."""

from ipurun.checkpoint.store import Checkpoint, best, latest, listed, load, save

__all__ = ["Checkpoint", "best", "latest", "listed", "load", "save"]
