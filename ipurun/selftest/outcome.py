"""Results of cases and their time limits; without torch, for the process that waits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterable, List, Optional

__all__ = ["AGREES", "DIFFERS", "FAILED", "REASONS", "SKIPPED", "Outcome", "agreement", "other_side", "time_limit"]

AGREES, DIFFERS, FAILED, SKIPPED = "agrees", "differs", "failed", "skipped"
REASONS = "; "  # between several reasons
_CPU_SECONDS = 120.0
_DEVICE_SECONDS = 1200.0  # compiling for a device takes minutes, a case compiles up to four times


@dataclass
class Outcome:
    """Result of a case.

    Args:
        case: Its name.
        status: agrees, differs, failed or skipped.
        reason: What differs or went wrong, in a line.
        seconds: How long it took.
        worst: What came closest to its tolerance or exceeded it most: ``change of fc2.weight``.
        share: That difference by its tolerance.
        comparisons: All comparisons, with the numbers of both sides where they differ.
        evidence: Config, plan, traceback and log of a case that does not agree.
    """

    case: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    worst: str = ""
    share: Optional[float] = None
    comparisons: List[Dict[str, Any]] = field(default_factory=list)
    evidence: Dict[str, Any] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        return self.status in (DIFFERS, FAILED)

    def to_dict(self) -> Dict[str, Any]:
        """Return the outcome as JSON-ready data."""
        return asdict(self)


def other_side(engine: str) -> str:
    """Return what a kind of engine is compared with, for people."""
    return "plain torch" if engine == "cpu" else "the CPU engine"


def agreement(sides: Iterable[str]) -> str:
    """Return what a report says of two engines that differ: with which of them plain torch agrees."""
    return f"plain torch agrees with {' and '.join(sides) or 'neither'}"


def time_limit(engine: str, asked: Optional[float]) -> float:
    """Return how many seconds a case may take on a kind of engine."""
    return asked or (_CPU_SECONDS if engine == "cpu" else _DEVICE_SECONDS)
