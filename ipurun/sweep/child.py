"""Run code in a separate process, with its environment set before any import, and survive its crashes and hangs."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from ipurun.errors import EXIT_INTERRUPTED
from ipurun.module_search import python_command
from ipurun.sweep.ledger import FAILED, FINISHED, INTERRUPTED

__all__ = ["Outcome", "run_child", "run_process"]

_GRACE_SECONDS = 10.0  # between asking a process to end and ending it
_POLL_SECONDS = 0.5
_TAIL_BYTES = 16000
_CRASH = "Fatal Python error"  # how faulthandler begins


@dataclass(frozen=True)
class Outcome:
    """How a point's process ended.

    Args:
        status: finished, failed or interrupted.
        reason: One line, for the table.
        detail: The error blocks, or the last lines of output.
        folder: The run folder, if one was created.
        results: Numbers of the summary.
    """

    status: str
    reason: str = ""
    detail: str = ""
    folder: Optional[str] = None
    results: Dict[str, Any] = field(default_factory=dict)


def run_child(
    job_file: Path,
    output_file: Path,
    environment: Mapping[str, str],
    on_message: Callable[[str], None],
    on_interrupt: Callable[[], None],
    timeout_seconds: Optional[float] = None,
) -> Outcome:
    """Run the point of a job file and wait for its end.

    The first Ctrl-C is passed on, so that the point can save; the second one kills it.

    Args:
        job_file: The point, for `ipurun.sweep.worker`.
        output_file: File for the output of the process.
        environment: Additional environment variables of the process.
        on_message: Called with each line that the point sends to the screen.
        on_interrupt: Called after Ctrl-C was passed on, while the point is saving.
        timeout_seconds: Time limit.
    """
    result_file = job_file.with_suffix(".result.json")
    if result_file.exists():
        result_file.unlink()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    code, ended_by = run_process(
        "ipurun.sweep.worker.console",
        (str(job_file), str(result_file)),
        output_file,
        environment,
        on_message,
        on_interrupt,
        lambda: deadline,
    )
    return _outcome(code, result_file, output_file, ended_by, timeout_seconds)


def run_process(
    entry: str,
    arguments: Sequence[str],
    output_file: Path,
    environment: Mapping[str, str],
    on_message: Callable[[str], None],
    on_interrupt: Callable[[], None],
    deadline: Callable[[], Optional[float]],
) -> Tuple[int, str]:
    """Call a function in a new Python and wait for its end.

    Args:
        entry: Dotted path of the function.
        arguments: Its command line; the descriptor to which it writes its messages is added.
        output_file: File for its output.
        environment: Additional environment variables.
        on_message: Called with each line that it writes to the descriptor.
        on_interrupt: Called after Ctrl-C was passed on.
        deadline: Returns when to end it, by `time.monotonic`; None: never. It may change.

    Returns:
        The exit code, and ``timeout`` or ``interrupt`` if that ended it, else an empty string.
    """
    reader, writer = os.pipe()
    with output_file.open("ab") as output:
        process = subprocess.Popen(
            [*python_command(entry), *arguments, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=(writer,),
            # A separate session: Ctrl-C reaches only this process, which passes it on exactly once.
            start_new_session=True,
        )
    os.close(writer)
    with os.fdopen(reader, "r", encoding="utf-8", errors="replace") as messages:
        ended_by = _watch(process, messages, on_message, on_interrupt, deadline)
    _kill_orphans(process)
    return process.returncode, ended_by


def _watch(
    process: subprocess.Popen,
    messages: IO[str],
    on_message: Callable[[str], None],
    on_interrupt: Callable[[], None],
    deadline: Callable[[], Optional[float]],
) -> str:
    """Wait for the end of the process; return ``timeout`` or ``interrupt`` if that caused it."""
    ended_by = ""
    while True:
        try:
            if _relay(process, messages, on_message, deadline):
                process.wait()
                return ended_by
            ended_by = "timeout"
            _end(process, signal.SIGTERM)
            return ended_by
        except KeyboardInterrupt:
            if ended_by == "interrupt":
                _end(process, signal.SIGKILL)
                return ended_by
            ended_by = "interrupt"
            _signal(process, signal.SIGINT)
            on_interrupt()


def _relay(
    process: subprocess.Popen,
    messages: IO[str],
    on_message: Callable[[str], None],
    deadline: Callable[[], Optional[float]],
) -> bool:
    """Pass messages on until the process has ended (True) or the time is up (False)."""
    descriptor = messages.fileno()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            latest = deadline()
            if latest is not None and time.monotonic() >= latest:
                return False
            # With a timeout: loader workers keep the pipe open after the process itself has crashed.
            if not selector.select(_POLL_SECONDS):
                if process.poll() is not None:
                    return True
                continue
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return True
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                on_message(line.decode("utf-8", "replace"))


def _end(process: subprocess.Popen, number: int) -> None:
    _signal(process, number)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    if process.poll() is None:
        # The session includes the loader's worker processes.
        os.killpg(process.pid, number)


def _kill_orphans(process: subprocess.Popen) -> None:
    """End the worker processes that a crashed process has left in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _outcome(
    code: int,
    result_file: Path,
    output_file: Path,
    ended_by: str,
    timeout_seconds: Optional[float],
) -> Outcome:
    result = _read(result_file)
    folder = result.get("folder")
    if ended_by == "timeout":
        reason = f"took longer than sweep.timeout_seconds={timeout_seconds:g}"
        return Outcome(FAILED, reason, reason, folder)
    if (ended_by == "interrupt" and code != 0) or code == EXIT_INTERRUPTED:
        return Outcome(INTERRUPTED, "interrupted", "", folder)
    if code == 0 and result.get("status") == FINISHED:
        return Outcome(FINISHED, folder=folder, results=result["results"])
    if code < 0:
        reason = f"its process was killed by {signal.Signals(-code).name}"
        return Outcome(FAILED, reason, f"error: {reason}\n{_tail(output_file)}", folder)
    reason = result.get("reason") or f"its process ended with code {code} and without a result"
    detail = result.get("detail") or f"error: {reason}\n{_tail(output_file)}"
    return Outcome(FAILED, reason, detail, folder)


def _read(path: Path) -> Dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _tail(path: Path, num_lines: int = 12) -> str:
    """Return the last lines of output, or those around the beginning of a native crash."""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _TAIL_BYTES))
        lines = stream.read().decode("utf-8", "replace").splitlines()
    crash = next((place for place, line in enumerate(lines) if line.startswith(_CRASH)), None)
    first = len(lines) - num_lines if crash is None else crash - num_lines // 3
    shown = lines[max(0, first) :][:num_lines]
    return "\n".join([f"  | {line}" for line in shown] + [f"  full output: {path}"])
