"""A run of several processes, as the process that starts them sees it: the command, and what came of it."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from ipurun.checkpoint import latest
from ipurun.distributed.launch import Outcome, run_poprun, run_torchrun
from ipurun.errors import EXIT_CONFIG, ConfigError, RunError
from ipurun.log.screen import Screen
from ipurun.module_search import python_command
from ipurun.runs.folder import RunFolder
from ipurun.runs.prepare import PreparedRun
from ipurun.training.events import Summary

__all__ = ["launch_job"]


def launch_job(prepared: PreparedRun, words: Sequence[str], screen: Screen, quiet: bool) -> Tuple[RunFolder, Summary]:
    """Start the processes of a run, and wait for their end.

    Args:
        prepared: The run, checked and planned.
        words: The words of ``ipurun train``, which each process is given.
        screen: Where the command is shown; the first process then has the terminal.
        quiet: Whether the processes show nothing.

    Returns:
        The run folder, and the summary that the first process wrote.

    Raises:
        RunError: A process died, more often than `distributed.max_restarts`.
        KeyboardInterrupt: A signal ended the run before it had anything to save.
    """
    keys, plan = prepared.point.config.distributed, prepared.plan
    given = [*words, "--quiet"] if quiet else list(words)
    if keys.kind == "poprun":
        program = plan.instances.command[: -len(words)] if words else plan.instances.command
        screen.line(shlex.join(plan.instances.command))
        screen.close()
        outcome = run_poprun(
            [*program, *given], keys.hosts, keys.rendezvous, keys.max_restarts, plan.environment, screen.remark
        )
    else:
        screen.close()
        command = [*python_command("ipurun.cli.main.console"), "train", *given]
        hosts = max(len(keys.hosts), 1)
        outcome = run_torchrun(
            command, plan.instances.count, hosts, keys.rendezvous, keys.max_restarts, _threads(prepared)
        )
    return _result(outcome)


def _threads(prepared: PreparedRun) -> Optional[Mapping[str, str]]:
    threads = prepared.point.config.threads
    return None if threads is None else {"OMP_NUM_THREADS": str(threads)}


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
