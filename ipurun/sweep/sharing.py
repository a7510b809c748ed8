"""How points share a machine and executables: how many run at once, with how many threads, and what is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import List, Optional, Sequence, Union

from ipurun import engine as engines
from ipurun.errors import ConfigError
from ipurun.log.format import plural
from ipurun.sweep.check import Checked
from ipurun.sweep.launchers import cores

__all__ = ["AtOnce", "compilations_text", "opening_lines", "points_at_once"]


@dataclass(frozen=True)
class AtOnce:
    """How many points run at the same time.

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


def points_at_once(asked: Union[int, str], checked: Sequence[Checked], where: str) -> AtOnce:
    """Return how many points of a sweep run at the same time.

    Args:
        asked: `sweep.jobs`.
        checked: The points.
        where: Where `sweep.jobs` was set.

    Raises:
        ConfigError: Not a number of points, or there are not as many IPUs.
    """
    plans = [item.plan for item in checked if item.plan is not None]
    on_ipus = [plan for plan in plans if plan.engine == "ipu"]
    if on_ipus:
        available = engines.load("ipu").available_ipus or 1
        largest = max(plan.devices.total for plan in on_ipus)
        room = f"{plural(available, 'IPU')} and up to {plural(largest, 'IPU')} per point"
        fitting = max(available // largest, 1)
    else:
        room, fitting = plural(cores(), "core"), cores()
    would_fit = max(min(fitting, len(checked)), 1)
    text = str(asked).strip().lower()
    if text != "auto" and not (text.isdigit() and int(text) > 0):
        what, fix = "`sweep.jobs` takes a number of points, or auto", f"sweep.jobs={would_fit} or sweep.jobs=auto"
        raise ConfigError(what, where, seen=str(asked), fix=fix, key="sweep.jobs")
    jobs = would_fit if text == "auto" else int(text)
    if on_ipus and jobs > fitting:
        what = "`sweep.jobs` asks for more points at the same time than there are IPUs for"
        raise ConfigError(what, where, seen=f"{asked}; {room}", fix=f"sweep.jobs={fitting}", key="sweep.jobs")
    jobs = min(jobs, max(len(checked), 1))
    threads = None
    if jobs > 1 and not on_ipus and "OMP_NUM_THREADS" not in os.environ:
        threads = max(cores() // jobs, 1)
    return AtOnce(jobs, threads, would_fit, room)


def opening_lines(checked: Sequence[Checked], at_once: AtOnce) -> List[str]:
    """Return what a sweep says before its first point."""
    lines = [f"{plural(len(checked), 'point')}, {compilations_text(checked)}"]
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
