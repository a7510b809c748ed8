"""Small services that every module of the API shares: errors and the state of the capture."""

from __future__ import annotations

from typing import Any

from ipurun.emulator._errors import Error, native_error, python_error

__all__ = ["createNativeError", "createPoptorchError", "isDispatchTracing", "isRunningOnIpu"]


def createPoptorchError(msg: str) -> Error:
    """Build (not raise) the error of PopTorch's Python layer with the given message."""
    return python_error(msg)


def createNativeError(msg: str, type: str = "poptorch_cpp_error") -> Error:
    """Build (not raise) an error as the native layer of PopTorch would raise it."""
    return native_error(msg, type=type)


def isRunningOnIpu() -> bool:
    """Whether the calling code is being captured for a device, rather than run by plain torch."""
    from ipurun.emulator._capture.recorder import current

    return current() is not None


def isDispatchTracing() -> bool:
    """Always False: tensors stay on the CPU during capture.

    Test helpers ask this to choose between the devices "ipu" and "cpu" for the tensors they create.
    """
    return False


def _restoreWrapperIfNecessary(obj: Any) -> Any:
    """Return an object as its pickle gave it; copies of wrapped objects keep their class by themselves here."""
    return obj
