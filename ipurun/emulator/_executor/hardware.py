"""What the emulator says of hardware: none, unless it is asked to stand in for some."""

from __future__ import annotations

import os

from ipurun.emulator._errors import native_error

__all__ = [
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "stands_in_for_hardware",
    "uses_ipu_model",
    "version",
]

_SIMULATED_VERSION = 2
_MODEL_VERSIONS = ("ipu1", "ipu2", "ipu21")
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


def stands_in_for_hardware() -> bool:
    """Whether ``POPTORCH_EMULATOR_HARDWARE=1`` asks the emulator to behave as if IPUs were attached."""
    return os.environ.get("POPTORCH_EMULATOR_HARDWARE", "0") not in ("", "0")


def uses_ipu_model() -> bool:
    """Whether an environment variable selects PopTorch's simulator.

    Raises:
        Error: It is selected with a version that does not exist.
    """
    selected = any(int(os.environ.get(name, "0") or "0") != 0 for name in _MODEL_VARIABLES)
    wanted = os.environ.get("POPTORCH_IPU_MODEL_VERSION", "ipu2")
    if selected and wanted not in _MODEL_VERSIONS:
        raise native_error(
            f"Invalid IPU model version {wanted!r} in POPTORCH_IPU_MODEL_VERSION. "
            f"Valid versions: {', '.join(_MODEL_VERSIONS)}."
        )
    return selected


def version(num_ipus: int = 1) -> int:
    """Return the architecture version of the IPUs there are, 0 without any."""
    if num_ipus < 1 or uses_ipu_model() or not stands_in_for_hardware():
        return 0
    return _SIMULATED_VERSION


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether that many IPUs can be attached to."""
    return version(num_ipus) != 0


def ipuHardwareVersion() -> int:
    """Return the architecture version of the IPUs; 0 while the simulator is selected.

    Raises:
        AssertionError: There are none.
    """
    if uses_ipu_model():
        return 0
    found = version()
    assert found != 0, "No IPU hardware available on this system"
    return found
