"""The parts of PopTorch's native module that programs use: errors, option checks and a few queries."""

from __future__ import annotations

import enum
from typing import Any, Dict

from ipurun.emulator import _logging
from ipurun.emulator._impl import Error, RecoverableError, UnrecoverableError, createNativeError

__all__ = [
    "CompilerOptions",
    "Error",
    "RecoverableError",
    "TestErrorType",
    "TracingMode",
    "UnrecoverableError",
    "importPoptorchMetadataFromFile",
    "ipuHardwareVersion",
    "isCompilingWithDispatcher",
    "poptorchAtExit",
    "setCustomCodeletsPath",
    "setLogLevel",
    "setPopartLogLevel",
]


class TracingMode(enum.IntEnum):
    """The ways to capture a model; only one is left."""

    PopART = 0


class TestErrorType(enum.IntEnum):
    """The errors that ``_throwTestError`` can raise."""

    __test__ = False  # pytest would collect a class with this name

    Poptorch = 0
    Popart = 1
    PopartInternal = 2
    Poplibs = 3
    PoplarUnrecoverable = 4
    PoplarUnknown = 5
    PoplarRecoverableFullReset = 6
    PoplarLinkError = 7


class CompilerOptions:
    """Options of the removed eager compiler; accepts any attribute."""


_TEST_CONTEXT = "  [0] throwTestError::bottomLevel\n  [1] throwTestError::topLevel"
_TEST_FAULTS: Dict[TestErrorType, Dict[str, Any]] = {
    TestErrorType.Poptorch: {"type": "poptorch_cpp_error"},
    TestErrorType.Popart: {"type": "popart_exception"},
    TestErrorType.PopartInternal: {"type": "popart_internal_exception"},
    TestErrorType.Poplibs: {"type": "poplibs_exception"},
    TestErrorType.PoplarUnrecoverable: {
        "type": "poplar_unrecoverable_runtime_error",
        "unrecoverable": True,
    },
    TestErrorType.PoplarUnknown: {"type": "poplar_unknown_runtime_error"},
    TestErrorType.PoplarRecoverableFullReset: {
        "type": "poplar_recoverable_runtime_error",
        "recovery_action": "FULL_RESET",
    },
    TestErrorType.PoplarLinkError: {"type": "poplar_link_error"},
}


def _throwTestError(error_type: TestErrorType) -> None:
    """Raise an error of a native component, to test error handling."""
    message = f"This is a test error of kind {error_type.name}"
    if error_type is TestErrorType.PoplarLinkError:
        message += ". Output: -lfoo not found"
    raise createNativeError(message, context=_TEST_CONTEXT, **_TEST_FAULTS[error_type])


def _validateOptions(options: Dict[str, Any]) -> None:
    """Check the keys and value types of ``Options.toDict()`` as the backend does at compile time.

    Raises:
        Error: If the backend has no such key with that type of value.
    """
    from ipurun.emulator._options import checks

    checks.check_backend_options(options)


def importPoptorchMetadataFromFile(filename: str) -> bytes:
    """Return the metadata that ``PoplarExecutor.save`` wrote to a file."""
    from ipurun.emulator._executor import files

    return files.read_metadata(filename)


def ipuHardwareVersion(num_ipus: int = 1) -> int:
    """Return the architecture version of the attached IPUs, 0 if there are none."""
    from ipurun.emulator._executor import device

    return device.hardware_version(num_ipus)


def isCompilingWithDispatcher() -> bool:
    """Whether a model is being captured now."""
    from ipurun.emulator._capture.recorder import current

    return current() is not None


def setCustomCodeletsPath(path: str) -> None:
    """Accept the folder of device code, which is not used on a CPU."""
    if not isinstance(path, str):
        raise TypeError(f"The codelets path must be a str, got {path!r}")


def setLogLevel(level: int) -> None:
    """Set the level of the native logger by number."""
    _logging.setLogLevel(level)


def setPopartLogLevel(level: str) -> None:
    """Set the level of the backend's log by name."""
    _logging.setPopartLogLevel(level)


def poptorchAtExit() -> None:
    """Do nothing: there are no devices to release at exit."""
