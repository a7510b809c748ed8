"""All that is known of a plan before it is compiled, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

from ipurun.planner.needs import Needs
from ipurun.planner.remedies import Remedy, Situation
from ipurun.planner.schedule import Schedule
from ipurun.planner.types import Estimate

__all__ = ["Outlook"]


@dataclass(frozen=True)
class Outlook:
    """What the planner tells of a plan. Every figure is an estimate.

    Args:
        situation: Model, layout, settings, machine and estimate.
        schedule: The pipeline in cycles.
        cached: Executables in the cache folder; None: no cache.
        remedies: Changes that help, best first.
        needs: What it would take, where no change makes it fit.
    """

    situation: Situation
    schedule: Schedule
    cached: Optional[int]
    remedies: Tuple[Remedy, ...] = ()
    needs: Optional[Needs] = None

    @property
    def estimate(self) -> Estimate:
        """The estimate of the plan."""
        return self.situation.estimate
