"""The exception classes of PopTorch's native layer, and how their texts are made."""

from __future__ import annotations

import os
import sys
import types
from typing import Optional

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "native_error", "python_error"]


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
    while frame is not None and os.path.basename(frame.f_code.co_filename) in ("_errors.py", "_impl.py"):
        frame = frame.f_back
    assert frame is not None, "an error was asked for by nobody"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def python_error(message: str) -> Error:
    """Build the error that PopTorch's Python layer raises with ``message``."""
    error = Error(f"'poptorch_py_error': {message}")
    error.message = message
    error.type = "poptorch_py_error"
    return error


def native_error(
    message: str,
    *,
    type: str = "poptorch_cpp_error",
    origin: Optional[str] = None,
    context: str = "",
    recovery_action: Optional[str] = None,
    unrecoverable: bool = False,
) -> Error:
    """Build the error that PopTorch's native layer raises.

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
