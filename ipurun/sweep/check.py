"""Inspect and plan every point of a sweep before the first one starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, replace
from typing import Dict, List, Optional, Sequence

from ipurun import engine as engines
from ipurun.build.cached_executables import about_program
from ipurun.config.compose import Point
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.data import check_data, make_splits
from ipurun.inspect.facts import Purpose
from ipurun.inspect.model_and_data import facts_without_data
from ipurun.inspect.sampling import seeded
from ipurun.planning import make_plan
from ipurun.planning.plan import Plan
from ipurun.runs.prepare import PreparedRun, prepare, prepare_job
from ipurun.sweep.ledger import point_id

__all__ = ["Checked", "check_point", "check_points", "planned", "program_of"]


_PLENTY = 1 << 40
_MOST_PLACES = 3


@dataclass(frozen=True)
class Checked:
    """A point that may run, or the reason why it cannot although its config is right."""

    point: Point
    id: str
    plan: Optional[Plan]
    obstacle: Optional[ConfigError] = None

    @property
    def program(self) -> str:
        """Key that distinguishes its executables from those of other points."""
        return program_of(self.point)


def check_points(points: Sequence[Point]) -> List[Checked]:
    """Inspect and plan all points.

    A point whose data is not there is right and cannot run: it becomes a failed row. Anything else that is wrong stops
    the sweep before it starts.

    Raises:
        ConfigError: With the problems of all points, each once.
    """
    by_id: Dict[str, Checked] = {}
    checked: List[Checked] = []
    problems = _Problems()
    for point in points:
        identity = point_id(point)
        if identity not in by_id:
            try:
                by_id[identity] = check_point(point)
            except ConfigError as error:
                problems.add(point, error)
                continue
            checked.append(by_id[identity])
    problems.raise_any()
    return checked


def planned(points: Sequence[Point]) -> List[PreparedRun]:
    """Inspect and plan every point, to show it.

    Raises:
        ConfigError: With the problems of all points.
    """
    prepared: List[PreparedRun] = []
    problems = _Problems()
    for point in points:
        try:
            prepared.append(prepare(point, Purpose.PLAN))
        except ConfigError as error:
            problems.add(point, error)
    problems.raise_any()
    return prepared


def check_point(point: Point) -> Checked:
    """Inspect and plan a point.

    Raises:
        ConfigError: Anything but its data is wrong.
    """
    keys = point.config.distributed
    if keys.kind == "torchrun" and len(keys.hosts) > 1:
        raise ConfigError(
            "a sweep cannot start points on several machines with torchrun, which is to be started on each of them",
            point.where("distributed.hosts"),
            seen=f"distributed.hosts={','.join(keys.hosts)}",
            fix="leave out distributed.hosts; hydra/launcher=submitit_slurm runs points on several machines",
            key="distributed.hosts",
        )
    identity = point_id(point)
    # `resume` names the sweep, not a run of this point.
    alone = replace(point, config=replace(point.config, resume=None))
    try:
        return Checked(point, identity, prepare_job(alone, Purpose.CHECK).plan)
    except ConfigError as error:
        if point.problems or not _only_data_is_missing(point):
            raise
        return Checked(point, identity, None, error)


def program_of(point: Point) -> str:
    """Return a hash of the keys that the executables of a point depend on."""
    program = about_program(point.config, "", "")["config"]
    return hashlib.sha256(json.dumps(program, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _only_data_is_missing(point: Point) -> bool:
    """Return whether the data cannot be made, and everything that can be checked without it is right."""
    try:
        engine = engines.load(point.config.engine)
        with contextlib.suppress(ConfigError), seeded(point.config.seed):
            make_splits(point.config.data, engine.module)
            return False
        facts = facts_without_data(point.config, engine)
        # How much data there will be is unknown: what only a small amount would break is not yet a config error.
        make_plan(point.config, replace(facts, train_samples=_PLENTY), keys=point.given)
    except ConfigError:
        return False
    return not check_data(point.config.data, engine.module)


class _Problems:
    """Problems of many points, each once with the points it occurs in."""

    def __init__(self) -> None:
        self._places: Dict[Problem, List[str]] = {}

    def add(self, point: Point, error: ConfigError) -> None:
        swept = " ".join(f"{key}={value}" for key, value in point.swept.items())
        for problem in error.problems:
            self._places.setdefault(problem, []).append(swept)

    def raise_any(self) -> None:
        if self._places:
            raise ConfigError(_placed(problem, places) for problem, places in self._places.items())


def _placed(problem: Problem, places: Sequence[str]) -> Problem:
    shown = [place for place in dict.fromkeys(places) if place]
    if not shown:
        return problem
    rest = f"; and {len(shown) - _MOST_PLACES} more" if len(shown) > _MOST_PLACES else ""
    label = "sweep point" if len(shown) == 1 else "sweep points"
    text = f"{label} {'; '.join(shown[:_MOST_PLACES])}{rest}"
    return replace(problem, where=f"{problem.where}; {text}" if problem.where else text)
