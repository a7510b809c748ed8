"""Run code in a separate process, with its environment set before any import, and survive its crashes and hangs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ipurun.errors import EXIT_INTERRUPTED
from ipurun.module_search import python_command
from ipurun.sweep.forks import ForkedProcess, ForkServer
from ipurun.sweep.ledger import FAILED, FINISHED, INTERRUPTED, PRUNED

__all__ = ["GRACE_SECONDS", "Child", "Outcome", "outcome_of", "run_process"]

GRACE_SECONDS = 10.0  # between asking a process to end and ending it
_POLL_SECONDS = 0.5
_TAIL_BYTES = 16000
_CRASH = "Fatal Python error"  # how faulthandler begins


@dataclass(frozen=True)
class Outcome:
    """Result of a point's process.

    Args:
        status: finished, pruned, failed or interrupted.
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


class Child:
    """A process that calls a function and sends lines of text through a pipe.

    Args:
        entry: Dotted path of the function.
        arguments: Its command line; the descriptor to which it writes its lines is added.
        output_file: File for its output.
        environment: Additional environment variables.
        forks: Forks the process instead of starting a new Python; the entry is then that of the fork server.
    """

    def __init__(
        self,
        entry: str,
        arguments: Sequence[str],
        output_file: Path,
        environment: Mapping[str, str],
        forks: Optional[ForkServer] = None,
    ) -> None:
        reader, writer = os.pipe()
        try:
            self._process: Union[subprocess.Popen, ForkedProcess] = (
                _start(entry, arguments, output_file, environment, writer)
                if forks is None
                else forks.start(arguments, output_file, environment, writer)
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._reader = reader
        self._pending = b""
        self._is_open = True

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        """End what is left of the process and of those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reader)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there are lines."""
        return self._reader

    @property
    def is_open(self) -> bool:
        """Whether lines can still come."""
        return self._is_open

    def lines(self) -> List[str]:
        """Return the lines that are there by now; waits for the first only if the descriptor is not readable."""
        chunk = os.read(self._reader, 65536)
        self._is_open = bool(chunk)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def waiting_lines(self) -> List[str]:
        """Return the lines that are there by now, without waiting."""
        found: List[str] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while self._is_open and selector.select(0):
                found += self.lines()
        return found

    def poll(self) -> Optional[int]:
        """Return the exit code, None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the process and to those that it has started, such as the workers of a loader."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self, number: int) -> None:
        """Ask it to end with a signal, and end it if it does not."""
        self.signal(number)
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        return self._process.wait()


def _start(
    entry: str, arguments: Sequence[str], output_file: Path, environment: Mapping[str, str], writer: int
) -> subprocess.Popen:
    with output_file.open("ab") as output:
        return subprocess.Popen(
            [*python_command(entry), *arguments, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=(writer,),
            # A separate session: Ctrl-C reaches only this process, which passes it on exactly once.
            start_new_session=True,
        )


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
        on_interrupt: Called after Ctrl-C was passed on. A second Ctrl-C ends the process.
        deadline: Returns when to end it, by `time.monotonic`; None: never. It may change.

    Returns:
        The exit code, and ``timeout`` or ``interrupt`` if that ended it, else an empty string.
    """
    with Child(entry, arguments, output_file, environment) as child:
        ended_by = _watch(child, on_message, on_interrupt, deadline)
        return child.wait(), ended_by


def _watch(
    child: Child,
    on_message: Callable[[str], None],
    on_interrupt: Callable[[], None],
    deadline: Callable[[], Optional[float]],
) -> str:
    """Wait for the end of the process; return ``timeout`` or ``interrupt`` if that caused it."""
    ended_by = ""
    while True:
        try:
            if _relay(child, on_message, deadline):
                child.wait()
                return ended_by
            ended_by = "timeout"
            child.end(signal.SIGTERM)
            return ended_by
        except KeyboardInterrupt:
            if ended_by == "interrupt":
                child.end(signal.SIGKILL)
                return ended_by
            ended_by = "interrupt"
            child.signal(signal.SIGINT)
            on_interrupt()


def _relay(child: Child, on_message: Callable[[str], None], deadline: Callable[[], Optional[float]]) -> bool:
    """Pass messages on until the process has ended (True) or the time is up (False)."""
    with selectors.DefaultSelector() as selector:
        selector.register(child, selectors.EVENT_READ)
        while True:
            latest = deadline()
            if latest is not None and time.monotonic() >= latest:
                return False
            # With a timeout: loader workers keep the pipe open after the process itself has crashed.
            if not selector.select(_POLL_SECONDS):
                if child.poll() is not None:
                    return True
                continue
            for line in child.lines():
                on_message(line)
            if not child.is_open:
                return True


def outcome_of(
    code: int,
    result_file: Path,
    output_file: Path,
    ended_by: str,
    timeout_seconds: Optional[float],
) -> Outcome:
    """Return how a point ended.

    Args:
        code: Exit code of its process.
        result_file: What the process wrote about its result, if it came to that.
        output_file: Its output.
        ended_by: ``timeout`` or ``interrupt`` if that ended it.
        timeout_seconds: The limit that was passed in case of a timeout.
    """
    result = _read(result_file)
    folder = result.get("folder")
    if ended_by == "timeout":
        reason = f"took longer than sweep.timeout_seconds={timeout_seconds:g}"
        return Outcome(FAILED, reason, reason, folder)
    if (ended_by == "interrupt" and code != 0) or code == EXIT_INTERRUPTED:
        return Outcome(INTERRUPTED, "interrupted", "", folder)
    if code == 0 and result.get("status") in (FINISHED, PRUNED):
        return Outcome(result["status"], result.get("reason", ""), folder=folder, results=result["results"])
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
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return "  no output"
    crash = next((place for place, line in enumerate(lines) if line.startswith(_CRASH)), None)
    first = len(lines) - num_lines if crash is None else crash - num_lines // 3
    shown = lines[max(0, first) :][:num_lines]
    return "\n".join([f"  | {line}" for line in shown] + [f"  full output: {path}"])
