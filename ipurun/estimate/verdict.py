"""Fits, tight or does not fit: an estimate against a limit, with the error of the estimate in mind."""

from __future__ import annotations

from typing import Iterable

from ipurun.estimate.hardware import Machine
from ipurun.estimate.types import IpuMemory, Verdict

__all__ = ["verdict_of", "worst"]

_ORDER = (Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT)


def verdict_of(memory: IpuMemory, machine: Machine) -> Verdict:
    """How one IPU stands: from `tight_margin` below the limit to `over_margin` above it only the compiler can tell."""
    if memory.share <= 1 - machine.tight_margin:
        return Verdict.FITS
    return Verdict.TIGHT if memory.share <= 1 + machine.over_margin else Verdict.DOES_NOT_FIT


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of all IPUs together."""
    return max(verdicts, key=_ORDER.index, default=Verdict.FITS)
