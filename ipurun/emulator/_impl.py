"""Names shared by all modules of the API: the version, errors and the state of the capture."""

from __future__ import annotations

import os
import sys
import types
from typing import Any, Optional

__all__ = [
    "Error",
    "RecoverableError",
    "UnrecoverableError",
    "__version__",
    "createNativeError",
    "createPoptorchError",
    "isDispatchTracing",
    "isRunningOnIpu",
]

__version__ = "3.4.0-emulated"


class Error(Exception):
    """What PopTorch raises for everything but plain misuse of Python arguments.

    Attributes:
        message: What went wrong, without type or location.
        type: The component that raised, for example ``poptorch_py_error`` or ``popart_exception``.
        location: Where in the native layer, empty for errors of the Python layer.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.message: str = str(args[0]) if args else ""
        self.type: str = ""
        self.location: str = ""


class RecoverableError(Error):
    """A fault of the device after which a reset of some scope helps.

    Attributes:
        recovery_action: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.recovery_action: str = ""


class UnrecoverableError(Error):
    """A fault of the device that no reset repairs."""


def _calling_line() -> str:
    """Return ``file:line`` of the code that asked for an error."""
    frame: Optional[types.FrameType] = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None, "no calling frame"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def createPoptorchError(msg: str) -> Error:
    """Build (not raise) the error of PopTorch's Python layer with the given message."""
    error = Error(f"'poptorch_py_error': {msg}")
    error.message = msg
    error.type = "poptorch_py_error"
    return error


def createNativeError(
    message: str,
    type: str = "poptorch_cpp_error",
    *,
    origin: Optional[str] = None,
    context: str = "",
    recovery_action: Optional[str] = None,
    unrecoverable: bool = False,
) -> Error:
    """Build (not raise) an error of PopTorch's native layer.

    Args:
        message: What went wrong.
        type: The component that raised.
        origin: ``file:line`` that raised; the caller's if None.
        context: What the native layer was doing, innermost first, one entry a line.
        recovery_action: Given for a ``RecoverableError``.
        unrecoverable: True for an ``UnrecoverableError``.
    """
    text = f"In {origin or _calling_line()}: '{type}': {message}"
    if recovery_action is not None:
        text += f"\nRecovery action: {recovery_action}"
    if context:
        text += f"\nError raised in:\n{context}"
    error: Error
    if recovery_action is not None:
        error = RecoverableError(text)
        error.recovery_action = recovery_action
    elif unrecoverable:
        error = UnrecoverableError(text)
    else:
        error = Error(text)
    error.message = message
    error.type = type
    error.location = context
    return error


def isRunningOnIpu() -> bool:
    """Whether the calling code is being captured for a device, rather than run by plain torch."""
    from ipurun.emulator._capture.recorder import current

    return current() is not None


def isDispatchTracing() -> bool:
    """Return False: tensors stay on the CPU during capture.

    Test helpers ask this to choose between the devices "ipu" and "cpu" for the tensors they create.
    """
    return False


def _restoreWrapperIfNecessary(obj: Any) -> Any:
    """Return an object as its pickle gave it; copies of wrapped objects keep their class by themselves here."""
    return obj
