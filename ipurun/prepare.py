"""From a composed point to everything that is known before training: engine, model, data and plan.

The rooms each find their own problems; here they are gathered, so that a user hears of all of them at once.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import List

from ipurun import engine as engines
from ipurun.build.inspect import Subject, inspect
from ipurun.config.compose import Point
from ipurun.errors import ConfigError, Problem
from ipurun.plan import make_plan
from ipurun.plan.types import Plan

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A point that is ready to be built."""

    point: Point
    engine: engines.Engine
    subject: Subject
    plan: Plan


def prepare(point: Point) -> Prepared:
    """Load the engine, make model and data, and plan the run.

    Raises:
        ConfigError: With the problems of every room that could be asked.
    """
    problems: List[Problem] = list(point.problems)
    try:
        engine = engines.load(point.config.engine)
        subject = inspect(point.config, engine)
        plan = make_plan(point.config, subject.facts)
    except ConfigError as error:
        raise ConfigError([*problems, *(_located(problem, point) for problem in error.problems)]) from error
    if problems:
        raise ConfigError(problems)
    return Prepared(point, engine, subject, plan)


def _located(problem: Problem, point: Point) -> Problem:
    # The rooms behind the config speak of keys; only the point knows who set them.
    if problem.where:
        return problem
    for key in re.findall(r"`([\w.]+)", problem.what):
        where = point.where(key)
        if where:
            return dataclasses.replace(problem, where=where)
    return problem
