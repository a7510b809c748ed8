"""Every point is inspected and planned before the first one starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from ipurun import engine as engines
from ipurun.build.inspect import inspect
from ipurun.config.compose import Point
from ipurun.errors import ConfigError, Problem
from ipurun.plan import make_plan
from ipurun.plan.types import Plan
from ipurun.prepare import prepare
from ipurun.sweep.manifest import point_id

__all__ = ["Checked", "check_points", "planned"]


@dataclass(frozen=True)
class Checked:
    """A point that may run, or the reason why it cannot although its config is right."""

    point: Point
    id: str
    plan: Optional[Plan]
    obstacle: Optional[ConfigError] = None


def check_points(points: Sequence[Point]) -> List[Checked]:
    """Inspects and plans all points.

    A point whose data is not there is right and cannot run: it becomes a failed row. Anything else that is wrong stops
    the sweep before it starts.

    Raises:
        ConfigError: With the problems of all points, each once.
    """
    by_id: Dict[str, Checked] = {}
    checked: List[Checked] = []
    problems: List[Problem] = []
    for point in points:
        identity = point_id(point)
        if identity not in by_id:
            try:
                by_id[identity] = _check(point, identity)
            except ConfigError as error:
                problems += _of_point(point, error)
                continue
            checked.append(by_id[identity])
    if problems:
        raise ConfigError(problems)
    return checked


def planned(points: Sequence[Point]) -> List[Plan]:
    """The plan of every point, for showing.

    Raises:
        ConfigError: With the problems of all points.
    """
    plans: List[Plan] = []
    problems: List[Problem] = []
    for point in points:
        try:
            plans.append(prepare(point).plan)
        except ConfigError as error:
            problems += _of_point(point, error)
    if problems:
        raise ConfigError(problems)
    return plans


def _check(point: Point, identity: str) -> Checked:
    try:
        return Checked(point, identity, prepare(point).plan)
    except ConfigError as error:
        if point.problems or not _only_data_is_missing(point):
            raise
        return Checked(point, identity, None, error)


def _only_data_is_missing(point: Point) -> bool:
    try:
        engine = engines.load(point.config.engine)
        make_plan(point.config, inspect(point.config, engine, need_data=False).facts)
    except ConfigError:
        return False
    return True


def _of_point(point: Point, error: ConfigError) -> List[Problem]:
    swept = " ".join(f"{key}={value}" for key, value in point.swept.items())
    place = f"sweep point {swept}" if swept else ""
    return [
        Problem(
            problem.what,
            "; ".join(part for part in (problem.where, place) if part),
            problem.seen,
            problem.known,
            problem.fix,
        )
        for problem in error.problems
    ]
