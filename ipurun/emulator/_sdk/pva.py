"""Replacement for Graphcore's pva (reader of PopVision reports), used if that is not installed."""

from __future__ import annotations

from typing import Any

from ipurun.emulator._impl import createPoptorchError

__all__ = ["openReport", "openTrace"]

_ONLY_WITH_THE_SDK = "The CPU emulator does not write PopVision"


def openReport(*paths: Any, **options: Any) -> Any:
    """Raise an error: only a device's compiler writes reports that pva can read.

    Raises:
        Error: Always.
    """
    raise createPoptorchError(f"{_ONLY_WITH_THE_SDK} reports; it cannot open {paths}.")


def openTrace(*paths: Any, **options: Any) -> Any:
    """Raise an error: only libpvti of the SDK writes traces that pva can read.

    Raises:
        Error: Always.
    """
    raise createPoptorchError(f"{_ONLY_WITH_THE_SDK} traces; it cannot open {paths}.")
