"""Stand-in for Graphcore's pva (reader of PopVision reports) where that is not installed, so that imports succeed."""

from __future__ import annotations

from typing import Any

from ipurun.emulator._impl import createPoptorchError

__all__ = ["openReport"]


def openReport(*paths: Any, **options: Any) -> Any:
    """Refuse: only a device's compiler writes reports that pva reads.

    Raises:
        Error: Always.
    """
    raise createPoptorchError(f"The CPU emulator writes no PopVision reports: there is none to open at {paths}.")
