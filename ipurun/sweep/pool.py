"""Run the points of a sweep, several at once where asked for: start, watch, record, and stop on Ctrl-C."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from ipurun.config.compose import Point
from ipurun.log.format import count, duration, metric
from ipurun.log.screen import Screen
from ipurun.runs.folder import RunFolder
from ipurun.sweep.check import Checked
from ipurun.sweep.child import Outcome
from ipurun.sweep.launchers import Launcher, RunningPoint, Task
from ipurun.sweep.ledger import ENDED, FAILED, FINISHED, INTERRUPTED, PRUNED, RUNNING, Ledger, Record
from ipurun.sweep.remote import ScreenReceiver, TableReceiver, read_message
from ipurun.sweep.table import SPEED, short, value_of
from ipurun.sweep.worker import Job, job_environment, write_job

__all__ = ["Pool", "Source", "swept_text"]


class Source:
    """The points to run: those of a list, the ones that share an executable next to each other.

    Args:
        records: All points of the sweep.
        checked: The same points, checked.
    """

    def __init__(self, records: Sequence[Record], checked: Sequence[Checked]) -> None:
        self.total = len(records)
        waiting = [(record, item) for record, item in zip(records, checked) if record.status not in ENDED]
        order = {item.program: place for place, (_, item) in reversed(list(enumerate(waiting)))}
        self._waiting = sorted(waiting, key=lambda pair: order[pair[1].program])

    def take(self, compiling: Set[str]) -> Optional[Tuple[Record, Checked]]:
        """Return the next point, None if there is none.

        Args:
            compiling: Programs that points are compiling now: others are taken first, since points that need the same
                one would wait for it.
        """
        free = (place for place, (_, item) in enumerate(self._waiting) if item.program not in compiling)
        return self._waiting.pop(next(free, 0)) if self._waiting else None

    def trial(self, record: Record) -> Optional[Dict[str, object]]:
        """Return how the process of a point reports what it has reached; None: it does not."""
        return None

    def ended(self, record: Record) -> None:
        """Learn that a point has ended."""

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing can be taken any more."""
        return not self._waiting


@dataclass
class _Active:
    record: Record
    item: Checked
    label: str
    is_compiling: bool = True
    is_shown: bool = False


class Pool:
    """Points that run at the same time.

    Args:
        ledger: The records, saved at every change.
        launcher: Starts points.
        screen: Shows progress.
        errors: Shows failed points.
        began: When the time of `max_minutes` began, by `time.monotonic`; None: with each point.
        threads: CPU threads of each point that does not set its own; None: torch's choice.
        on_change: Called when a point has ended.
    """

    def __init__(
        self,
        ledger: Ledger,
        launcher: Launcher,
        screen: Screen,
        errors: Screen,
        began: Optional[float],
        threads: Optional[int],
        on_change: Callable[[], object],
    ) -> None:
        self._ledger = ledger
        self._launcher = launcher
        self._screen = screen
        self._errors = errors
        self._began = began
        self._threads = threads
        self._on_change = on_change
        self._display = TableReceiver(screen) if launcher.at_once > 1 else ScreenReceiver(screen)
        self._active: Dict[RunningPoint, _Active] = {}
        self._stopping = False  # no further points are started
        self._was_interrupted = False  # a point was, though not by this process

    def run(self, source: Source) -> bool:
        """Run all points; return True if the sweep or one of its points was interrupted.

        The first Ctrl-C is passed on, so that the points can save; the second one ends them.
        """
        interrupts = 0
        try:
            while True:
                try:
                    if not self._step(source):
                        return interrupts > 0 or self._was_interrupted
                except KeyboardInterrupt:
                    interrupts += 1
                    self._stopping = True
                    self._interrupt(at_once=interrupts > 1)
        finally:
            for running in list(self._active):
                running.kill()
            self._screen.close()

    def _step(self, source: Source) -> bool:
        """Start what can be started and look after what runs; return False when all is done."""
        if not self._stopping:
            self._start(source)
        if not self._active:
            return False
        self._launcher.wait(list(self._active))
        for running, active in list(self._active.items()):
            messages = running.poll()
            if not running.is_waiting and not active.is_shown:
                active.is_shown = True
                self._display.begin(active.label)
                self._count_neighbours()
            for message in messages:
                active.is_compiling = active.is_compiling and not _is_training(message)
                self._display.show(message, active.label)
            if running.outcome is not None:
                del self._active[running]
                self._end(active, running.outcome, source)
        self._display.refresh(self._counts(source))
        return True

    def _start(self, source: Source) -> None:
        chosen: List[_Active] = []
        tasks: List[Task] = []
        while len(self._active) + len(tasks) < self._launcher.at_once and not self._stopping:
            busy = [*self._active.values(), *chosen]
            taken = source.take({active.item.program for active in busy if active.is_compiling})
            if taken is None:
                break
            record, item = taken
            active = _Active(record, item, self._label(record, source))
            if item.plan is None:
                reason = item.obstacle.problems[0].what if item.obstacle else "it has no plan"
                self._end(active, Outcome(FAILED, reason, str(item.obstacle)), source)
                continue
            earlier = self._found(record, item)
            if earlier is not None:
                self._active[earlier] = active
                continue
            chosen.append(active)
            tasks.append(self._task(record, item, source.trial(record)))
        if not tasks:
            return
        for active, running in zip(chosen, self._launcher.start(tasks)):
            active.record.job = running.job
            self._active[running] = active
        self._ledger.save()

    def _count_neighbours(self) -> None:
        """Record for each point how many ran beside it on the same machine."""
        if self._launcher.is_elsewhere:
            return
        running = [active for active in self._active.values() if active.is_shown]
        for active in running:
            active.record.at_once = max(active.record.at_once, len(running))

    def _found(self, record: Record, item: Checked) -> Optional[RunningPoint]:
        """Return a job that outlived an earlier process of this sweep."""
        if record.status != RUNNING or record.job is None:
            return None
        return self._launcher.find(self._described(record, item), record.job)

    def _described(self, record: Record, item: Checked) -> Task:
        assert item.plan is not None
        jobs = self._ledger.folder / "jobs"
        jobs.mkdir(exist_ok=True)
        return Task(
            jobs / f"{record.index:03d}",
            item.plan.environment,
            job_environment(item.point),
            can_be_forked=item.plan.engine == "cpu",
            timeout_seconds=item.point.config.sweep.timeout_seconds,
        )

    def _task(self, record: Record, item: Checked, trial: Optional[Dict[str, object]]) -> Task:
        folder = self._ledger.folder / f"{record.index:03d}"
        earlier = [record.folder] if record.folder else []
        point = self._with_threads(item.point)
        task = self._described(record, item)
        write_job(task.job_file, Job(point, str(folder), earlier, self._began, trial))
        record.status, record.folder, record.at_once = RUNNING, record.folder or str(folder), 1
        return task

    def _with_threads(self, point: Point) -> Point:
        if self._threads is None or point.config.threads is not None:
            return point
        return replace(point, config=replace(point.config, threads=self._threads))

    def _end(self, active: _Active, outcome: Outcome, source: Source) -> None:
        record, label = active.record, active.label
        record.status, record.reason = outcome.status, outcome.reason
        record.folder = outcome.folder or record.folder
        record.results = outcome.results
        self._display.end(label)
        self._ledger.save()
        source.ended(record)
        self._on_change()
        if outcome.status in ENDED:
            self._screen.remark(f"{label} {_result_text(record)}")
        elif outcome.status == FAILED:
            self._errors.line(f"{label} failed\n{outcome.detail}{_log_text(record)}")
            self._stopping = self._stopping or active.item.point.config.sweep.on_error == "stop"
        elif outcome.status == INTERRUPTED and not self._stopping:
            # By `max_minutes` or by someone else: the point can be resumed, and so can the sweep.
            self._errors.line(f"{label} was interrupted")
            self._was_interrupted = True
            self._stopping = not self._launcher.is_elsewhere  # a cluster ends single jobs

    def _interrupt(self, at_once: bool) -> None:
        for running, active in self._active.items():
            if at_once:
                running.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    running.interrupt()
                if running.outcome is None:
                    then = "press Ctrl-C again to stop it at once"
                    self._screen.remark(f"{active.label} is saving before it stops; {then}")

    def _label(self, record: Record, source: Source) -> str:
        return f"[{record.index + 1}/{source.total}] {swept_text(record)}".rstrip()

    def _counts(self, source: Source) -> str:
        states = [record.status for record in self._ledger.records]
        shown = sum(active.is_shown for active in self._active.values())
        waiting = source.total - shown - sum(state in (*ENDED, FAILED, INTERRUPTED) for state in states)
        parts = [f"{sum(state == FINISHED for state in states)} of {source.total} finished"]
        for state in (PRUNED, FAILED):
            if state in states:
                parts.append(f"{states.count(state)} {state}")
        return ", ".join([*parts, f"{max(waiting, 0)} waiting"])


def swept_text(record: Record) -> str:
    """Return the swept keys of a point with its values."""
    return " ".join(f"{key}={short(value)}" for key, value in record.swept.items())


def _is_training(message: str) -> bool:
    call = read_message(message)
    return call is not None and call["do"] == "live"


def _log_text(record: Record) -> str:
    log = RunFolder(record.folder).log_file if record.folder else None
    return f"\n  log    {log}" if log is not None and Path(log).is_file() else ""


def _result_text(record: Record) -> str:
    results = record.results
    parts = [record.status]
    if results.get("best") is not None:
        parts.append(f"best {results['monitor']} {metric(results['best'])}")
    speed = value_of(record, SPEED)
    if speed is not None:
        parts.append(f"{count(speed)} samples/s" + (" side by side" if record.at_once > 1 else ""))
    parts.append(duration(results["seconds"].get("total")))
    return ", ".join(parts)
