"""Where the points of a sweep run: processes of this machine, or jobs of joblib and submitit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

from ipurun.sweep.child import GRACE_SECONDS, Child, Outcome, outcome_of
from ipurun.sweep.forks import ForkServer
from ipurun.sweep.ledger import INTERRUPTED

__all__ = ["Launcher", "LocalLauncher", "RunningPoint", "Task", "cores"]

_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Task:
    """A point that is ready to run.

    Args:
        files: Its files, without their endings: ``<sweep>/jobs/003``.
        environment: Variables that must be set before anything is imported.
        secrets: Variables that its process reads.
        can_be_forked: Whether it runs on the CPU engine, which needs no variables of its own.
        timeout_seconds: Time limit; None: none.
    """

    files: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    can_be_forked: bool = False
    timeout_seconds: Optional[float] = None

    @property
    def job_file(self) -> Path:
        return self.files.with_suffix(".json")

    @property
    def result_file(self) -> Path:
        return self.files.with_suffix(".result.json")

    @property
    def output_file(self) -> Path:
        return self.files.with_suffix(".output.txt")

    @property
    def messages_file(self) -> Path:
        """File for the messages of a point that has no pipe to the sweep."""
        return self.files.with_suffix(".messages.jsonl")

    @property
    def stop_file(self) -> Path:
        """Asks such a point to save and stop."""
        return self.files.with_suffix(".stop")


class RunningPoint:
    """A point from its start to its end, watched without waiting.

    Args:
        task: The point.
    """

    job: Optional[str] = None  # how a batch system calls it
    is_waiting = False  # for its turn in a queue

    def __init__(self, task: Task) -> None:
        self.task = task
        self.begun = time.monotonic()
        self.outcome: Optional[Outcome] = None

    def poll(self) -> List[str]:
        """Return the messages that have come; set `outcome` when the point has ended."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Let it save and stop."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it at once."""
        raise NotImplementedError


class Launcher:
    """Starts points.

    Args:
        at_once: How many may run, or wait to run, at the same time.
    """

    is_elsewhere = False  # points run on other machines, or wait for their turn

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once

    def start(self, tasks: Sequence[Task]) -> List[RunningPoint]:
        """Start points."""
        raise NotImplementedError

    def find(self, task: Task, job: str) -> Optional[RunningPoint]:
        """Return a point that an earlier process of this sweep has started and that runs or has ended since."""
        return None

    def wait(self, running: Sequence[RunningPoint]) -> None:
        """Wait until there may be something new, a moment at most."""
        time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End what remains; no point runs any more."""


class LocalLauncher(Launcher):
    """Processes of this machine.

    Args:
        at_once: How many points run at the same time.
        forks: Starts points quickly where that is possible.
    """

    def __init__(self, at_once: int, forks: Optional[ForkServer] = None) -> None:
        super().__init__(at_once)
        self._forks = forks

    def start(self, tasks: Sequence[Task]) -> List[RunningPoint]:
        return [_LocalPoint(task, self._forks_for(task)) for task in tasks]

    def wait(self, running: Sequence[RunningPoint]) -> None:
        open_pipes = [point.child for point in running if isinstance(point, _LocalPoint) and point.child.is_open]
        select.select(open_pipes, [], [], _POLL_SECONDS)

    def _forks_for(self, task: Task) -> Optional[ForkServer]:
        if self._forks is None or not task.can_be_forked:
            return None
        # Some variables are read when a library is loaded, which the fork server has done.
        has = self._forks.environment
        return self._forks if all(has.get(name) == value for name, value in task.environment.items()) else None


class _LocalPoint(RunningPoint):
    def __init__(self, task: Task, forks: Optional[ForkServer]) -> None:
        super().__init__(task)
        with contextlib.suppress(FileNotFoundError):
            task.result_file.unlink()
        environment: Dict[str, str] = {**task.environment, **task.secrets}
        arguments = (str(task.job_file), str(task.result_file))
        entry = "ipurun.sweep.worker.console"
        try:
            self.child = Child(entry, arguments, task.output_file, environment, forks)
        except OSError:
            if forks is None:
                raise
            self.child = Child(entry, arguments, task.output_file, environment)  # the fork server has died
        self._ended_by = ""
        self._kill_at: Optional[float] = None

    def poll(self) -> List[str]:
        now = time.monotonic()
        limit = self.task.timeout_seconds
        if self._kill_at is not None and now >= self._kill_at:
            self.child.signal(signal.SIGKILL)
        elif limit is not None and now >= self.begun + limit and not self._ended_by:
            self._ended_by, self._kill_at = "timeout", now + GRACE_SECONDS
            self.child.signal(signal.SIGTERM)
        code = self.child.poll()
        messages = self.child.waiting_lines()
        if code is not None:
            self.child.__exit__()
            task = self.task
            self.outcome = outcome_of(code, task.result_file, task.output_file, self._ended_by, limit)
        return messages

    def interrupt(self) -> None:
        self._ended_by = self._ended_by or "interrupt"
        self.child.signal(signal.SIGINT)

    def kill(self) -> None:
        self.child.signal(signal.SIGKILL)
        self.child.__exit__()
        self.outcome = Outcome(INTERRUPTED, "interrupted")


def cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
