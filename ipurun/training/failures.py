"""Turn failures of the engine, the data and the model into one readable problem."""

from __future__ import annotations

import re
import time
import traceback
from types import ModuleType
from typing import Any, Callable, Optional

from ipurun.build.workers import DeadWorkerError, LoaderTimeoutError
from ipurun.distributed.team import LostProcessError, lost_instance
from ipurun.errors import IpurunError, RunError

__all__ = ["CompileError", "DeviceFault", "explained", "when_free", "where_raised"]

SECONDS_BETWEEN_TRIES = 5.0
_IN_USE = "Failed to acquire"  # in PopTorch's message about IPUs that are attached to another process

_OF_MODEL = re.compile(r" at (\S+\.py:\d+)")  # in PopTorch's message about an operation of the model
_REMOTE = "Original Traceback"
_ACCESSOR = "AsynchronousDataAccessor"  # in the message about its process that failed
_RESETS = {
    "IPU_RESET": "the IPUs must be reset (PopTorch does that when it attaches again)",
    "LINK_RESET": "the links between the IPUs must be reset (`gc-reset`, or ask the partition's administrator)",
    "PARTITION_RESET": "the partition must be reset (`vipu reset partition NAME`)",
    "FULL_RESET": "the machine needs a power cycle: ask its administrator",
}


class DeviceFault(RunError):
    """The IPU system failed, but can recover.

    Args:
        doing: What was being done.
        action: PopTorch's recovery action, such as ``IPU_RESET``.
        seen: The engine's message.
        then: What to do after the reset.
    """

    def __init__(self, doing: str, action: str, seen: str, then: str) -> None:
        self.doing = doing
        self.action = action
        super().__init__(
            f"the IPU system failed while {doing}, but can recover: {action}",
            seen=seen,
            fix=f"{_RESETS.get(action, 'see the recovery action')}; then {then}",
        )


class CompileError(RunError):
    """The engine could not compile the model: another config may fit, or compile."""


def _start_again() -> str:
    return "run the command again"


class explained:  # noqa: N801  # a context manager that every step enters: as a class it costs a third
    """Turn any failure inside into a `RunError` that says what was being done.

    Args:
        engine_module: Has the engine's error classes.
        doing: Such as ``compiling the model for training``.
        then: Returns how to continue once the machine works again: the command that resumes, and from where.

    Raises:
        DeviceFault: The IPU system failed, but can recover.
        CompileError: The engine could not compile the model.
        RunError: Anything else failed.
    """

    def __init__(self, engine_module: ModuleType, doing: str, then: Callable[[], str] = _start_again) -> None:
        self._engine_module = engine_module
        self._doing = doing
        self._then = then

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Optional[BaseException], place: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, IpurunError):
            raise _explanation(error, self._engine_module, self._doing, self._then) from error


def _explanation(error: Exception, engine_module: ModuleType, doing: str, then: Callable[[], str]) -> RunError:
    if isinstance(error, LostProcessError):
        return lost_instance(error)
    if isinstance(error, engine_module.RecoverableError):
        action = str(getattr(error, "recovery_action", "") or "unknown")
        return DeviceFault(doing, action, str(error), then())
    if isinstance(error, engine_module.UnrecoverableError):
        return RunError(
            f"the IPU system failed while {doing}, and cannot recover",
            seen=str(error),
            fix=f"contact the machine's administrator; then {then()}",
        )
    if isinstance(error, engine_module.Error):
        kind = CompileError if doing.startswith("compiling") else RunError
        fix = ""
        if "floating point exception" in str(error).lower():  # what debug.fp_exceptions asks for
            fix = f"change that operation or its inputs, a smaller optimizer.lr, or another loss_scaling; then {then()}"
        line = _OF_MODEL.search(str(error))
        where = line.group(1) if line else ""
        if line and not fix:
            fix = f"change that line of the model; then {then()}"
        return kind(f"PopTorch failed while {doing}", where, seen=str(error), fix=fix)
    if isinstance(error, LoaderTimeoutError):
        return RunError(
            f"a process of the data loader hangs: {error}",
            where="loader.timeout_seconds",
            seen=f"while {doing}",
            fix=f"a larger loader.timeout_seconds if reading a batch may take that long; then {then()}",
        )
    if isinstance(error, DeadWorkerError):
        return RunError(
            "a process of the data loader died",
            seen=f"{error}, while {doing}",
            fix=f"fewer loader.workers or a smaller loader.buffer_size if memory ran out; then {then()}",
        )
    if isinstance(error, AssertionError) and _ACCESSOR in str(error):
        return RunError(
            f"{doing} failed",
            where="the process of the asynchronous loader, which printed the reason above",
            seen=_one_line(error),
            fix=f"loader.mode=sync shows it without that process; then {then()}",
            key="loader.mode",
        )
    return RunError(
        f"{doing} failed",
        where=where_raised(error),
        seen=_one_line(error),
        fix=f"--debug shows the whole traceback; then {then()}",
    )


def when_free(
    action: Callable[[], Any],
    engine_module: ModuleType,
    minutes: Optional[float],
    report: Callable[[float], None],
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Any:
    """Do what attaches to IPUs; while others use them, wait and try again.

    Args:
        action: Compiles or attaches.
        engine_module: Has the engine's error class.
        minutes: The longest wait; None: none.
        report: Called about once a second with the seconds that are left.
        is_interrupted: Whether to stop waiting.

    Raises:
        RunError: The IPUs are still in use.
    """
    deadline = time.monotonic() + 60 * (minutes or 0.0)
    while True:
        try:
            return action()
        except engine_module.Error as error:
            if _IN_USE not in str(error):
                raise
            left = deadline - time.monotonic()
            if left <= 0:
                raise _in_use(error, minutes) from error
        next_try = time.monotonic() + min(SECONDS_BETWEEN_TRIES, left)
        while time.monotonic() < next_try:
            report(max(0.0, deadline - time.monotonic()))
            time.sleep(min(1.0, max(0.0, next_try - time.monotonic())))
            if is_interrupted():
                raise KeyboardInterrupt


def _in_use(error: Exception, minutes: Optional[float]) -> RunError:
    waited = "" if minutes is None else f" after {minutes:g} minutes"
    return RunError(
        f"the IPUs are still in use by others{waited}" if waited else "the IPUs are in use by others",
        where="poplar.wait_for_ipu_minutes",
        seen=str(error),
        fix="`gc-monitor` shows who uses them; poplar.wait_for_ipu_minutes=30 waits for them, fewer devices need fewer",
        key="poplar.wait_for_ipu_minutes",
    )


def _one_line(error: BaseException) -> str:
    """Return the error as one line; the text of an error in a loader's worker contains that process's traceback."""
    lines = str(error).rstrip().splitlines()
    if any(line.startswith(_REMOTE) for line in lines):
        return f"{lines[-1]} (in a worker process of the loader)"
    return f"{type(error).__name__}: {error}"


def where_raised(error: BaseException) -> str:
    """Return the innermost line that is neither PyTorch's nor ipurun's: most likely the user's."""
    remote = re.findall(r'File "([^"]+)", line (\d+)', str(error)) if _REMOTE in str(error) else []
    if remote:
        return ":".join(remote[-1])
    frames = traceback.extract_tb(error.__traceback__)
    named = [f for f in frames if not f.filename.startswith("<")]  # `<frozen os>` is not a file
    own = [f for f in named if "/torch/" not in f.filename and "/ipurun/" not in f.filename]
    chosen = (own or named or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno}"
