"""The version, the errors, and queries about the running capture."""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    import torch

__all__ = [
    "Error",
    "RecoverableError",
    "UnrecoverableError",
    "__version__",
    "createNativeError",
    "createPoptorchError",
    "isDispatchTracing",
    "isRunningOnIpu",
    "rewrapModelIfNecessary",
    "unwrapModelIfNecessary",
]

__version__ = "3.4.0-emulated"


class Error(Exception):
    """PopTorch's error, raised for everything except wrong Python arguments.

    Attributes:
        message: What went wrong, without type or location.
        type: The component that raised it, for example ``poptorch_py_error`` or ``popart_exception``.
        location: Location in the native layer, empty for errors of the Python layer.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.message: str = str(args[0]) if args else ""
        self.type: str = ""
        self.location: str = ""


class RecoverableError(Error):
    """A device fault that a reset can repair.

    Attributes:
        recovery_action: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.recovery_action: str = ""


class UnrecoverableError(Error):
    """A device fault that no reset can repair."""


def _calling_line() -> str:
    """Return ``file:line`` of the code that creates an error."""
    frame: Optional[types.FrameType] = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None, "no calling frame"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def createPoptorchError(msg: str) -> Error:
    """Return, without raising it, an error of PopTorch's Python layer."""
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
    """Return, without raising it, an error of PopTorch's native layer.

    Args:
        message: What went wrong.
        type: The component that raises it.
        origin: ``file:line`` that raises it; the caller's if None.
        context: What the native layer was doing, innermost first, one entry per line.
        recovery_action: The action for a ``RecoverableError``.
        unrecoverable: Whether to return an ``UnrecoverableError``.
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
    """Whether the calling code is being captured for a device."""
    from ipurun.emulator._capture.recorder import current

    return current() is not None


def isDispatchTracing() -> bool:
    """Return False: tensors stay on the CPU during capture.

    Test helpers call this to choose between the devices "ipu" and "cpu" for new tensors.
    """
    return False


def _restoreWrapperIfNecessary(obj: Any) -> Any:
    """Return the object unchanged: here, copies of wrapped objects keep their class anyway."""
    return obj


def unwrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Make the parameters and buffers of a model wrapped for training plain tensors again."""
    from ipurun.emulator._executor import wrapping

    wrapping.unwrap_tensors_for_now(model)


def rewrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Restore the classes of the parameters and buffers that `unwrapModelIfNecessary` made plain tensors."""
    from ipurun.emulator._executor import wrapping

    wrapping.rewrap_tensors(model)
