"""From a composed point to everything that is known before training: engine, model, data and plan.

The rooms each find their own problems; here they are gathered, so that a user hears of all of them at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import List

from ipurun import engine as engines
from ipurun.config.compose import Point
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.facts import Facts
from ipurun.inspect.model_and_data import ModelAndData, inspect
from ipurun.planning import make_plan
from ipurun.planning.placement.forms import is_auto
from ipurun.planning.plan import Plan

__all__ = ["PreparedRun", "prepare"]


@dataclass(frozen=True)
class PreparedRun:
    """A point that is ready to be built."""

    point: Point
    engine: engines.Engine
    subject: ModelAndData
    plan: Plan


def prepare(point: Point, on_paper: bool = False, checks_only: bool = False) -> PreparedRun:
    """Load the engine, make model and data, and plan the run.

    Args:
        point: The point.
        on_paper: Whether it is only for planning: a large model is then made without memory for its weights.
        checks_only: Whether it is to be checked as for a run, and not run: the same goes for a large model.

    Raises:
        ConfigError: With the problems of every room that could be asked.
    """
    problems: List[Problem] = list(point.problems)
    engine = subject = plan = None
    config = point.config
    try:
        engine = engines.load(point.config.engine)
        subject = inspect(config, engine, on_paper=on_paper or checks_only)
        facts = subject.facts
        if is_auto(config.pipeline.split):
            from ipurun.estimate.plan_estimate import auto_split  # deferred: other runs need no estimate

            config, facts = auto_split(config, subject, point.given, on_paper)
    except ConfigError as error:
        problems += _new_problems(error, problems, point)
        # Without the model and the data much can still be checked.
        facts = Facts("cpu", "") if engine is None else Facts(engine.kind, engine.version, engine.available_ipus)
    try:
        plan = make_plan(config, dataclasses.replace(facts, on_paper=on_paper), keys=point.given)
    except ConfigError as error:
        problems += _new_problems(error, problems, point)
    if problems or engine is None or subject is None or plan is None:
        raise ConfigError(problems)
    return PreparedRun(point, engine, subject, plan)


def _new_problems(error: ConfigError, problems: List[Problem], point: Point) -> List[Problem]:
    """What an error adds: of a key that has its problem already, no second one is reported."""
    reported = {problem.key for problem in problems if problem.key}
    return [_located(problem, point) for problem in error.problems if problem.key not in reported]


def _located(problem: Problem, point: Point) -> Problem:
    # Later packages speak of keys; only the point knows who set them.
    if problem.where or not problem.key:
        return problem
    return dataclasses.replace(problem, where=point.where(problem.key))
