"""One training run from a prepared point to its summary: folder, observers, loop, and the files that stay.

`ipurun train` runs it in its own process, a sweep in a process for each point.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
import time
import traceback
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipurun.build import Run, build_run
from ipurun.checkpoint import Checkpoint, latest, newest_good
from ipurun.config.compose import Point
from ipurun.distributed.environment import launched
from ipurun.distributed.notes import LaunchFolder, write_to
from ipurun.distributed.team import Team, join
from ipurun.errors import ConfigError, IpurunError, Problem, RunError, in_short
from ipurun.inspect.targets import make
from ipurun.log.console import console_for
from ipurun.log.jsonl import JsonlLogger
from ipurun.log.screen import PlainScreen, Screen
from ipurun.log.tracking import DroppedIfFailing
from ipurun.profiling.ipu_sensors import IpuSensors
from ipurun.profiling.recorders import Profiler
from ipurun.runs.compile import with_remedies
from ipurun.runs.folder import RunFolder
from ipurun.runs.lock import locked
from ipurun.runs.prepare import PreparedRun
from ipurun.runs.reload import skipped_notes
from ipurun.training.callbacks import Callback, make_callbacks
from ipurun.training.events import Note, Observer, Observers, Summary
from ipurun.training.failures import CompileError
from ipurun.training.loop import train

__all__ = ["FinishedRun", "reproduce_command", "run_job"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end, or that was interrupted and has saved."""

    folder: RunFolder
    summary: Summary
    higher_is_better: bool  # of the monitored metric


def run_job(
    prepared: PreparedRun,
    screen: Screen,
    resume_folder: Optional[RunFolder] = None,
    began: Optional[float] = None,
    callbacks: Optional[Mapping[str, Callback]] = None,
) -> FinishedRun:
    """Train what was prepared.

    Args:
        prepared: The point with its engine, model, data and plan.
        screen: Where the panel, the bars and the summary are shown.
        resume_folder: An earlier run to continue, in its folder.
        began: When the time of `max_minutes` began, by `time.monotonic`; None: now.
        callbacks: Name -> callback, besides those of the config.

    Raises:
        ConfigError: Something about the config that only building shows; no folder is left.
        RunError: The run failed; the traceback is in the log of its folder.
    """
    point, plan, engine = prepared.point, prepared.plan, prepared.engine
    deadline = _deadline(point.config.max_minutes, began)
    team = join(plan.instances.count, point.config.distributed.rendezvous)
    run = build_run(point.config, plan, prepared.inspected, engine, team)
    if not team.is_first:
        return _follow(prepared, run, deadline, callbacks or {})
    described = (point.config, point, plan, engine)
    resume_folder = _folder_of_restart() or resume_folder
    folder = resume_folder or RunFolder.create(*described)
    try:
        with locked(folder.path, "run", screen.remark):
            checkpoint, skipped = _checkpoint_to_resume(folder) if resume_folder else (None, {})
            if not team.is_alone:
                _share_folder(team, folder, checkpoint)
            with folder.described_as(*described) if resume_folder else nullcontext():
                summary = _train_in(folder, prepared, run, screen, checkpoint, skipped, deadline, callbacks or {})
            if summary.samples or not folder.finished:
                then = {"reproduce_command": reproduce_command(point)}
                folder.write_summary({"name": plan.name, **summary.to_dict(), **then})
    except ConfigError:
        if resume_folder is None:
            folder.discard()
        raise
    except CompileError as error:
        raise with_remedies(error, prepared) from error
    except OSError as error:  # the files of the folder: `_guarded` reports everything else that fails inside
        raise _unwritable(folder, error) from error
    return FinishedRun(folder, summary, run.eval_metrics.higher_is_better(run.monitor))


def _follow(
    prepared: PreparedRun, run: Run, deadline: Optional[float], own_callbacks: Mapping[str, Callback]
) -> FinishedRun:
    """Train as one of several processes but the first, which has the folder and writes everything in it."""
    point, plan = prepared.point, prepared.plan
    folder, checkpoint = _share_folder(run.team)
    log = folder.instance_log(run.team.rank)
    with suppress(OSError):  # a machine that does not share the folder keeps the log where it is
        _move_log(log)
    console = console_for(plan, PlainScreen(sys.stdout))
    console.show_panel(point, plan, str(folder))
    callbacks = {**make_callbacks(point.config.callbacks), **own_callbacks}
    try:
        summary = train(run, folder, [console], checkpoint, deadline, callbacks=callbacks)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__)
        raise
    finally:
        sys.stdout.flush()
    return FinishedRun(folder, summary, run.eval_metrics.higher_is_better(run.monitor))


def _share_folder(
    team: Team, folder: Optional[RunFolder] = None, checkpoint: Optional[Checkpoint] = None
) -> Tuple[RunFolder, Optional[Checkpoint]]:
    """Let all processes know the run folder and the checkpoint of the first one."""
    agreed: Tuple[RunFolder, Optional[Checkpoint]] = team.from_first((folder, checkpoint))
    notes = LaunchFolder.of_this_process()
    if notes is not None:
        notes.note_run(team.rank, agreed[0].path.absolute())
    return agreed


def _folder_of_restart() -> Optional[RunFolder]:
    """Return the folder of this run if it was started before, and has a checkpoint."""
    notes, started = LaunchFolder.of_this_process(), launched()
    if notes is None or started is None or not started.attempt or not notes.run_file.is_file():
        return None
    folder = RunFolder(os.path.relpath(notes.run_file.read_text(encoding="utf-8")))
    return folder if latest(folder) is not None else None


def _move_log(log: Path) -> None:
    """Write to the run folder from now on, beginning with what was written before there was one."""
    notes, started = LaunchFolder.of_this_process(), launched()
    log.parent.mkdir(exist_ok=True)
    if notes is not None and started is not None:
        early = notes.early_log(started.rank)
        with log.open("ab") as stream:
            stream.write(early.read_bytes() if early.is_file() else b"")
    write_to(log)


def _restart_note(prepared: PreparedRun) -> Iterator[str]:
    """Yield why this run was started again, if it was."""
    notes, started = LaunchFolder.of_this_process(), launched()
    if notes is None or started is None or not started.attempt:
        return
    rank, how = notes.culprit(started.attempt - 1)
    what = "an instance ended" if rank is None else f"instance {rank} {how}"
    most = prepared.point.config.distributed.max_restarts
    yield f"{what}: all instances were started again, {started.attempt} of {most}"


def _checkpoint_to_resume(folder: RunFolder) -> Tuple[Checkpoint, Dict[str, str]]:
    """Return the newest good checkpoint, and the newer ones that are broken."""
    checkpoint, skipped = newest_good(folder)
    if checkpoint is None:
        raise RunError(
            f"the run `{folder}` has no checkpoint that can be used",
            where=str(folder.checkpoints),
            seen="; ".join(f"{name}: {why}" for name, why in skipped.items()),
            fix="start again without resume",
        )
    return checkpoint, skipped


def _deadline(max_minutes: Optional[float], began: Optional[float]) -> Optional[float]:
    if max_minutes is None:
        return None
    return (time.monotonic() if began is None else began) + 60 * max_minutes


def _train_in(
    folder: RunFolder,
    prepared: PreparedRun,
    run: Run,
    screen: Screen,
    checkpoint: Optional[Checkpoint],
    skipped: Mapping[str, str],
    deadline: Optional[float],
    own_callbacks: Mapping[str, Callback],
) -> Summary:
    point, plan = prepared.point, prepared.plan
    with closing(folder.log_file.open("a", encoding="utf-8")) as file:
        log: Any = _MaskedLog(file, point) if point.hidden else file
        consoles = [console_for(plan, screen), console_for(plan, PlainScreen(log))]
        for console in consoles:
            console.show_panel(point, plan, str(folder))
            for note in (*_restart_note(prepared), *(skipped_notes(skipped, checkpoint) if checkpoint else ())):
                console.on_note(Note(note, level="warning"))

        def warn(text: str) -> None:
            for console in consoles:
                console.on_note(Note(point.without_secrets(text), level="warning"))

        observers = [*consoles, *_loggers(point, folder, warn), *_sensors(prepared, folder, consoles)]
        callbacks = {**make_callbacks(point.config.callbacks), **own_callbacks}
        profiler = Profiler(run, folder.path)
        summary = _guarded(
            lambda: train(run, folder, observers, checkpoint, deadline, profiler.phases, callbacks),
            folder,
            screen,
            log,
            point,
        )
        _move_profile(prepared, folder)
        report = profiler.finish()
        for console in consoles:
            console.show_summary(summary, plan.name, str(folder), reproduce_command(point))
            if report is not None:
                console.show_profile(report)
    return summary


class _MaskedLog:
    """A log file in which no secret of the config is written, not even by a traceback."""

    def __init__(self, stream: IO[str], point: Point) -> None:
        self._stream = stream
        self._point = point

    def write(self, text: str) -> int:
        return self._stream.write(self._point.without_secrets(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def reproduce_command(point: Point) -> str:
    """Return the command that runs the same config from the beginning."""
    words = [word for word in point.overrides if not word.lstrip("+").startswith("resume=")]
    return shlex.join(["ipurun", "train", *words])


def _guarded(action: Callable[[], Summary], folder: RunFolder, screen: Screen, log: IO[str], point: Point) -> Summary:
    """Run the loop; whatever it raises is first written to the log, with its traceback."""
    try:
        return action()
    except BaseException as error:
        screen.close()
        reason = point.without_secrets(in_short(error))
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(OSError):  # on a full disk the reason is worth more than its record
            log.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
            folder.write_summary({"status": status, "reason": reason})
        if isinstance(error, IpurunError):
            error.set_problems(_without_secrets(problem, point) for problem in error.problems)
        if isinstance(error, (IpurunError, KeyboardInterrupt, SystemExit)):
            raise
        if isinstance(error, OSError) and (error.errno in _NO_ROOM or not folder.path.is_dir()):
            raise _unwritable(folder, error) from error
        raise RunError(
            f"the run failed: {reason}",
            where=_last_line(error),
            fix=f"the whole traceback is in {folder.log_file}",
        ) from error


def _without_secrets(problem: Problem, point: Point) -> Problem:
    masked = {name: point.without_secrets(text) for name, text in vars(problem).items() if isinstance(text, str)}
    return replace(problem, **masked)


def _unwritable(folder: RunFolder, error: OSError) -> RunError:
    if not folder.path.is_dir():
        return RunError(
            f"the run folder `{folder}` was deleted while the run used it",
            seen=str(error),
            fix="start the run again; its checkpoints are gone",
        )
    saved = latest(folder)
    then = f"ipurun train resume={folder}" if saved is not None else "start again"
    return RunError(
        f"the run folder `{folder}` can no longer be written",
        seen=str(error.strerror or error),
        fix=f"free some space, then {then}; runs_dir=FOLDER puts runs elsewhere, checkpoint.keep=1 needs less",
    )


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _loggers(point: Point, folder: RunFolder, warn: Callable[[str], None]) -> Sequence[Observer]:
    loggers: List[Observer] = []
    for name, node in point.config.logger.items():
        made = make(node, f"logger.{name}", folder=folder.path)
        loggers.append(DroppedIfFailing(name, made, warn))
    # Last: the others may look up the steps that it drops from its file when a run resumes or rolls back.
    return [*loggers, JsonlLogger(folder.metrics_file)]


def _sensors(prepared: PreparedRun, folder: RunFolder, consoles: Sequence[Observer]) -> List[Observer]:
    """Return the observer of the IPUs' sensors, on a host that has IPUs and the tool that reads them."""
    interval = prepared.point.config.poplar.monitor_seconds
    if prepared.engine.kind != "ipu" or interval is None or shutil.which("gc-monitor") is None:
        return []
    return [IpuSensors(folder.path / "ipus.jsonl", interval, Observers(consoles))]


def _move_profile(prepared: PreparedRun, folder: RunFolder) -> None:
    """Move PopVision's report into the run folder, unless the user chose another one."""
    source = prepared.plan.profile_dir
    if source is None or prepared.point.config.profile.dir is not None or not Path(source).is_dir():
        return
    shutil.move(source, str(folder.path / "profile"))
