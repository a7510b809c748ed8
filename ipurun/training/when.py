"""When something falls due: an evaluation, a checkpoint, a record, or an early end."""

from __future__ import annotations

import math
import time
from typing import Optional

from ipurun.config.schema import EarlyStoppingConfig
from ipurun.distributed.team import ALONE, Team
from ipurun.training.state import Progress

__all__ = ["Minutes", "falls_due", "note_for_stopping", "reason_to_stop"]


def falls_due(every: Optional[int], count: int) -> bool:
    """Return whether an interval ends at a count; None never does."""
    return bool(every) and count % int(every or 1) == 0


class Minutes:
    """An interval by the clock, which begins again whenever `restart` is called.

    Args:
        minutes: Its length; None: it never ends.
        team: The processes for which it ends at the same time.
    """

    def __init__(self, minutes: Optional[float], team: Team = ALONE) -> None:
        self._team = team
        self._seconds = None if minutes is None else 60 * minutes
        self._begun = time.monotonic()

    @property
    def are_over(self) -> bool:
        """Whether the interval has ended."""
        return self._seconds is not None and self._team.any(time.monotonic() - self._begun >= self._seconds)

    def restart(self) -> None:
        """Begin the interval again."""
        if self._seconds is not None:
            self._begun = time.monotonic()


def note_for_stopping(config: EarlyStoppingConfig, progress: Progress, value: float, higher: bool) -> None:
    """Record a value of the metric of `early_stopping`.

    Args:
        config: The keys.
        progress: Keeps the best value, and the number of evaluations since.
        value: The value; NaN is not an improvement.
        higher: Whether higher values are better.
    """
    progress.stopping_last = value
    best = progress.stopping_best
    change = math.inf if best is None else value - best if higher else best - value
    if not math.isnan(value) and change > config.min_change:
        progress.stopping_best, progress.stale_evaluations = value, 0
    else:
        progress.stale_evaluations += 1


def reason_to_stop(config: EarlyStoppingConfig, progress: Progress, metric: str, higher: bool) -> str:
    """Return why `early_stopping` ends a run with this progress; empty if it does not."""
    best, last, threshold = progress.stopping_best, progress.stopping_last, config.threshold
    if threshold is not None and last is not None and (last >= threshold if higher else last <= threshold):
        return f"early stopping: {metric} reached {threshold:g}"
    if config.patience is not None and progress.stale_evaluations >= config.patience:
        by = f" by more than {config.min_change:g}" if config.min_change else ""
        since = "" if best is None else f" since {best:.6g}"
        return f"early stopping: {metric} did not improve{by} in {progress.stale_evaluations} evaluations{since}"
    return ""
