"""From a composed point to everything that is known before training: engine, model, data and plan.

Each package finds problems; here they are gathered, so that all are reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from ipurun import engine as engines
from ipurun.config.compose import Point
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.facts import Facts, Purpose
from ipurun.inspect.model_and_data import ModelAndData, inspect, inspect_again
from ipurun.planning import make_plan
from ipurun.planning.placement.forms import is_auto
from ipurun.planning.plan import Plan

__all__ = ["PreparedRun", "prepare"]


@dataclass(frozen=True)
class PreparedRun:
    """A point that is ready to be built."""

    point: Point
    engine: engines.Engine
    inspected: ModelAndData
    plan: Plan


def prepare(point: Point, purpose: Purpose = Purpose.RUN, before: Optional[PreparedRun] = None) -> PreparedRun:
    """Load the engine, make model and data, and plan the run.

    Args:
        point: The point.
        purpose: What it is prepared for.
        before: The same point with other words, prepared before: its model and data are used again.

    Raises:
        ConfigError: With all problems that could be found.
    """
    problems: List[Problem] = list(point.problems)
    engine = inspected = plan = None
    config = point.config
    try:
        engine = engines.load(point.config.engine, offline=purpose is Purpose.COMPILE)
        if before is None:
            inspected = inspect(config, engine, purpose)
        else:
            inspected = inspect_again(config, engine, before.point.config, before.inspected)
        facts = inspected.facts
        if is_auto(config.pipeline.split):
            from ipurun.estimate.plan_estimate import auto_split  # deferred: other runs need no estimate

            config, facts = auto_split(config, inspected, point.given)
    except ConfigError as error:
        problems += _new_problems(error, problems)
        # Without the model and the data much can still be checked.
        facts = Facts("cpu", "", purpose=purpose)
        if engine is not None:
            facts = Facts(engine.kind, engine.version, engine.available_ipus, purpose=purpose)
    try:
        plan = make_plan(config, facts, keys=point.given)
    except ConfigError as error:
        problems += _new_problems(error, problems)
    if problems or engine is None or inspected is None or plan is None:
        raise ConfigError(point.complete(problems))
    return PreparedRun(point, engine, inspected, plan)


def _new_problems(error: ConfigError, problems: List[Problem]) -> List[Problem]:
    """Return what an error adds: one problem for each key is enough."""
    reported = {problem.key for problem in problems if problem.key}
    return [problem for problem in error.problems if problem.key not in reported]
