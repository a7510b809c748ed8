"""Turn failures of the engine, the data and the model into one readable problem."""

from __future__ import annotations

import contextlib
import re
import traceback
from types import ModuleType
from typing import Iterator, Optional

from ipurun.build.workers import DeadWorkerError, LoaderTimeoutError
from ipurun.errors import IpurunError, RunError

__all__ = ["explained"]

_REMOTE = "Original Traceback"
_RESETS = {
    "IPU_RESET": "the IPUs must be reset (PopTorch does that when it attaches again)",
    "LINK_RESET": "the links between the IPUs must be reset (`gc-reset`, or ask the partition's administrator)",
    "PARTITION_RESET": "the partition must be reset (`vipu reset partition NAME`)",
    "FULL_RESET": "the machine needs a power cycle: ask its administrator",
}


@contextlib.contextmanager
def explained(
    engine_module: ModuleType, doing: str, checkpoint: Optional[str] = None, resume_command: str = ""
) -> Iterator[None]:
    """Turn any failure inside into a `RunError` that says what was being done.

    Args:
        engine_module: Has the engine's error classes.
        doing: Such as ``compiling the model for training``.
        checkpoint: Path of the newest checkpoint, if any.
        resume_command: The command that resumes from it.
    """
    resume = f"{resume_command} resumes from {checkpoint}" if checkpoint else "start again: no checkpoint was saved"
    try:
        yield
    except (IpurunError, KeyboardInterrupt, SystemExit):
        raise
    except engine_module.RecoverableError as error:
        action = str(getattr(error, "recovery_action", "") or "unknown")
        raise RunError(
            f"the IPU system failed while {doing}, but can recover: {action}",
            seen=str(error),
            fix=f"{_RESETS.get(action, 'see the recovery action')}; then {resume}",
        ) from error
    except engine_module.UnrecoverableError as error:
        raise RunError(
            f"the IPU system failed while {doing}, and cannot recover",
            seen=str(error),
            fix=f"contact the machine's administrator; then {resume}",
        ) from error
    except engine_module.Error as error:
        raise RunError(f"PopTorch failed while {doing}", seen=str(error)) from error
    except LoaderTimeoutError as error:
        raise RunError(
            f"a process of the data loader hangs: {error}",
            where="loader.timeout_seconds",
            seen=f"while {doing}",
            fix=f"a larger loader.timeout_seconds if reading a batch may take that long; then {resume}",
        ) from error
    except DeadWorkerError as error:
        raise RunError(
            "a process of the data loader died",
            seen=f"{error}, while {doing}",
            fix=f"fewer loader.workers or a smaller loader.buffer_size if memory ran out; then {resume}",
        ) from error
    except Exception as error:
        raise RunError(
            f"{doing} failed",
            where=_where(error),
            seen=_one_line(error),
            fix="--debug shows the whole traceback" + (f"; then {resume}" if checkpoint else ""),
        ) from error


def _one_line(error: BaseException) -> str:
    """Return the error as one line; the text of an error in a loader's worker contains that process's traceback."""
    lines = str(error).rstrip().splitlines()
    if any(line.startswith(_REMOTE) for line in lines):
        return f"{lines[-1]} (in a worker process of the loader)"
    return f"{type(error).__name__}: {error}"


def _where(error: BaseException) -> str:
    """Return the innermost line that is neither PyTorch's nor ipurun's: most likely the user's."""
    remote = re.findall(r'File "([^"]+)", line (\d+)', str(error)) if _REMOTE in str(error) else []
    if remote:
        return ":".join(remote[-1])
    frames = traceback.extract_tb(error.__traceback__)
    named = [f for f in frames if not f.filename.startswith("<")]  # `<frozen os>` is not a file
    own = [f for f in named if "/torch/" not in f.filename and "/ipurun/" not in f.filename]
    chosen = (own or named or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno}"
