"""Replacement for Graphcore's pva (reader of PopVision reports), used if that is not installed."""

from __future__ import annotations

from typing import Any

from ipurun.emulator._impl import createPoptorchError

__all__ = ["openReport"]


def openReport(*paths: Any, **options: Any) -> Any:
    """Raise an error: only a device's compiler writes reports that pva can read.

    Raises:
        Error: Always.
    """
    raise createPoptorchError(f"The CPU emulator does not write PopVision reports; it cannot open {paths}.")
