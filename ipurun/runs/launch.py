"""A run of several processes, as the process that starts them sees it: the command, and what came of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.checkpoint import latest
from ipurun.distributed.launch import Outcome, run_poprun, run_torchrun
from ipurun.errors import EXIT_CONFIG, ConfigError, RunError
from ipurun.log.screen import Screen
from ipurun.module_search import python_command
from ipurun.planning.devices import start_command
from ipurun.runs.folder import RunFolder
from ipurun.runs.prepare import PreparedRun
from ipurun.training.events import Summary

__all__ = ["launch_job", "train_program"]


def launch_job(
    prepared: PreparedRun, program: Sequence[str], screen: Screen, environment: Optional[Mapping[str, str]] = None
) -> Tuple[RunFolder, Summary]:
    """Start the processes of a run, and wait for their end.

    Args:
        prepared: The run, checked and planned.
        program: What each process runs: Python and its arguments.
        screen: Where poprun's command is shown; the first process then has the terminal.
        environment: Variables that the processes need.

    Returns:
        The run folder, and the summary that the first process wrote.

    Raises:
        RunError: A process died, more often than `distributed.max_restarts`.
        KeyboardInterrupt: A signal ended the run before it had anything to save.
    """
    keys, plan = prepared.point.config.distributed, prepared.plan
    given = dict(environment or {})
    if keys.kind == "poprun":
        command = start_command(prepared.point.config, plan, program, list(given))
        screen.line(shlex.join(command), to_copy=True)
        screen.close()
        given = {**plan.environment, **given}
        outcome = run_poprun(command, keys.hosts, keys.rendezvous, keys.max_restarts, given, screen.remark)
    else:
        screen.close()
        threads = prepared.point.config.threads
        if threads is not None:
            given["OMP_NUM_THREADS"] = str(threads)
        hosts = max(len(keys.hosts), 1)
        outcome = run_torchrun(program, plan.instances.count, hosts, keys.rendezvous, keys.max_restarts, given)
    return _result(outcome)


def train_program(prepared: PreparedRun, words: Sequence[str], quiet: bool) -> List[str]:
    """Return what each process of a run runs, for `launch_job`.

    Args:
        prepared: The run.
        words: The words of ``ipurun train``.
        quiet: Whether the processes show nothing.
    """
    is_shown = prepared.point.config.distributed.kind == "poprun"  # as the plan has it, to be typed
    python = [sys.executable, "-m", "ipurun"] if is_shown else python_command("ipurun.cli.main.console")
    return [*python, "train", *words, *(["--quiet"] if quiet else [])]


def _result(outcome: Outcome) -> Tuple[RunFolder, Summary]:
    folder = None if outcome.run is None else RunFolder(_as_typed(outcome.run))
    written = _summary(folder)
    if outcome.failure is not None and outcome.failure.problems:
        kind = ConfigError if outcome.failure.code == EXIT_CONFIG else RunError
        raise kind(outcome.failure.problems)
    if outcome.failure is not None and not outcome.is_interrupted:
        saved = None if folder is None else latest(folder)
        raise RunError(
            outcome.failure.what,
            where="" if outcome.failure.log is None or folder is None else str(outcome.failure.log),
            seen=outcome.failure.log_end,
            fix="start again" if saved is None else f"ipurun train resume={folder} resumes from {saved}",
        )
    if folder is None or written is None:
        raise KeyboardInterrupt if outcome.is_interrupted else RunError("the instances ended without a result")
    return folder, written


def _as_typed(path: Path) -> Path:
    """Return a path below the working folder relative to it."""
    return Path(os.path.relpath(path)) if Path.cwd() in path.parents else path


def _summary(folder: Optional[RunFolder]) -> Optional[Summary]:
    try:
        document: Dict[str, Any] = json.loads(folder.summary_file.read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return None
    known = {field.name for field in fields(Summary)}
    found = {name: value for name, value in document.items() if name in known}
    return Summary(**found) if {"status", "step", "epoch", "samples"} <= set(found) else None
