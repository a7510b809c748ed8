"""All that is known of a plan before it is compiled, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from ipurun.estimate.needs import Needs
from ipurun.estimate.remedies import Remedy, Situation
from ipurun.estimate.schedule import Schedule
from ipurun.estimate.types import Estimate, Verdict
from ipurun.estimate.verdict import worst

__all__ = ["Cache", "Outlook"]


@dataclass(frozen=True)
class Cache:
    """What a run would find in its executable cache.

    Args:
        training: Of the executable of training: ``hit``, ``miss``, ``unknown``, or ``off`` without a cache.
        executables: Executables in the folder.
        inference: The same of the executable of inference; "" where that of training is unknown, or no file is there.
        why: Why it is unknown.
    """

    training: str
    executables: int = 0
    inference: str = ""
    why: str = ""


@dataclass(frozen=True)
class Outlook:
    """What the planner tells of a plan. Every figure is an estimate.

    Args:
        situation: Model, layout, settings, machine and estimate.
        schedule: The pipeline in cycles.
        cache: What the run would find in its executable cache.
        remedies: Changes that help, best first.
        needs: What it would take, where no change makes it fit.
        inference: The same of evaluation and prediction; None where the model cannot be traced in eval mode.
    """

    situation: Situation
    schedule: Schedule
    cache: Cache
    remedies: Tuple[Remedy, ...] = ()
    needs: Optional[Needs] = None
    inference: Optional[Situation] = None

    @property
    def verdict(self) -> Verdict:
        """The worse of the verdicts of training and of inference."""
        return worst(each.estimate.verdict for each in (self.situation, self.inference) if each is not None)

    @property
    def estimate(self) -> Estimate:
        """The estimate of the plan."""
        return self.situation.estimate
