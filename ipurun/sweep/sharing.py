"""How points share a machine and executables: how many run at once, with how many threads, and what is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple, Union

from ipurun import engine as engines
from ipurun.config.compose import Points
from ipurun.errors import ConfigError
from ipurun.log.format import plural
from ipurun.sweep.batch import JoblibLauncher
from ipurun.sweep.check import Checked
from ipurun.sweep.launchers import cores
from ipurun.sweep.search import Search

__all__ = ["AtOnce", "compilations_text", "opening_lines", "points_at_once"]


@dataclass(frozen=True)
class AtOnce:
    """Number of points that run at the same time.

    Args:
        jobs: That number.
        threads: CPU threads of each; None: torch's choice.
        would_fit: How many the machine has room for.
        room: What it has room for, in words.
    """

    jobs: int
    threads: Optional[int]
    would_fit: int
    room: str


def points_at_once(points: Points, checked: Sequence[Checked], search: Optional[Search]) -> AtOnce:
    """Return how many points of a sweep run at the same time.

    Args:
        points: The command line.
        checked: The points.
        search: What chooses the points, if they are not listed.

    Raises:
        ConfigError: Not a number of points, or there are not as many IPUs.
    """
    total = len(checked) if search is None else search.num_trials
    launcher, keys = points.launching.launcher, points.launching.launcher_keys
    asked, key = _asked(points, search)
    if launcher == "submitit_slurm":  # the queue knows what there is room for
        number = _number(asked, key, total, points, total) if search or key != "sweep.jobs" else total
        return AtOnce(max(min(number, keys["array_parallelism"], total), 1), None, 1, "")
    plans = [item.plan for item in checked if item.plan is not None]
    on_ipus = [plan for plan in plans if plan.engine == "ipu" or plan.instances.uses_popdist]
    processes = max((plan.instances.count for plan in plans), default=1)
    if any(plan.instances.uses_popdist for plan in plans):
        room, fitting = "the points of poprun share a partition", 1
    elif on_ipus:
        available = engines.load("ipu").available_ipus or 1
        largest = max(plan.devices.total for plan in on_ipus)
        room = f"{plural(available, 'IPU')} and up to {plural(largest, 'IPU')} per point"
        fitting = max(available // largest, 1)
    else:
        room, fitting = plural(cores(), "core"), max(cores() // processes, 1)
        if processes > 1:
            room += f" and up to {processes} processes per point"
    would_fit = max(min(fitting, total), 1)
    if launcher == "submitit_local" and points.points[0].given is not None and key not in points.points[0].given:
        asked = "auto"
    jobs = _number(asked, key, would_fit, points, total)
    if on_ipus and jobs > fitting:
        what = f"`{key}` asks for more points at the same time than there are IPUs for"
        where = points.points[0].where(key)
        raise ConfigError(what, where, seen=f"{jobs}; {room}", fix=f"{key}={fitting}", key=key)
    threads = None
    if jobs > 1 and not on_ipus and "OMP_NUM_THREADS" not in os.environ:
        threads = max(cores() // (jobs * processes), 1)
    return AtOnce(jobs, threads, would_fit, room)


def _asked(points: Points, search: Optional[Search]) -> Tuple[Union[int, str], str]:
    """Return how many points are asked for, and with which key."""
    if points.launching.launcher == "joblib":
        return JoblibLauncher.num_jobs(points.launching.launcher_keys), "hydra.launcher.n_jobs"
    if search is not None and search.num_jobs is not None:
        return search.num_jobs, "hydra.sweeper.n_jobs"
    return points.points[0].config.sweep.jobs, "sweep.jobs"


def _number(asked: Union[int, str], key: str, automatic: int, points: Points, total: int) -> int:
    text = str(asked).strip().lower()
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        what, fix = f"`{key}` takes a number of points, or auto", f"{key}={automatic} or {key}=auto"
        raise ConfigError(what, points.points[0].where(key), seen=str(asked), fix=fix, key=key)
    return max(min(automatic if text == "auto" else int(text), total), 1)


def opening_lines(checked: Sequence[Checked], at_once: AtOnce, search: Optional[Search] = None) -> List[str]:
    """Return what a sweep says before its first point."""
    lines = [f"{plural(len(checked), 'point')}, {compilations_text(checked)}"]
    if search is not None:
        keys = ", ".join(search.distributions)
        lines = [f"{plural(search.num_trials, 'trial')}: Optuna searches {keys} to {search.direction} {search.metric}"]
    if at_once.jobs > 1:
        threads = f", {plural(at_once.threads, 'thread')} each" if at_once.threads else ""
        lines[0] += f", {at_once.jobs} at a time{threads}"
    elif at_once.would_fit > 1:
        how = f"sweep.jobs={at_once.would_fit} runs as many at a time, and their speeds then cannot be compared"
        lines.append(f"note: {at_once.would_fit} points would fit on this machine ({at_once.room}): {how}")
    return lines


def compilations_text(checked: Sequence[Checked], cached: int = 0) -> str:
    """Return how many different programs points have.

    Args:
        checked: The points.
        cached: How many of these programs are in the executable cache.
    """
    programs = len({item.program for item in checked})
    text = f"{plural(programs, 'program')} to compile"
    return f"{text}, {cached} of them cached" if cached else text
