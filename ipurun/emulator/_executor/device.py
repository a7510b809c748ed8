"""The IPUs that an executor attaches to: availability, locking, and simulated faults.

There is nothing to lock on a CPU, unless POPTORCH_EMULATOR_HARDWARE=1 simulates hardware and the options choose an IPU:
then one executor at a time holds it, across all processes of the user, as on a device.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import tempfile
import time
from typing import Any, Dict, Iterator, Optional, Set

from ipurun.emulator._impl import Error, createNativeError
from ipurun.emulator._logging import native_logger, trace
from ipurun.emulator.enums import ConnectionType

HOW_TO_SIMULATE = "POPTORCH_EMULATOR_HARDWARE=1 makes the CPU emulator act as if there were IPUs."

_SIMULATED_VERSION = 2
_MODEL_VERSIONS = ("ipu1", "ipu2", "ipu21")
_MODEL_VARIABLES = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")
# Faults to raise, separated by commas, each once in a process: `call=3:IPU_RESET` raises a recoverable error with that
# recovery action at an executor's third call, `call=5:UNRECOVERABLE` an unrecoverable one, `call=7:ERROR` a plain one.
_FAULTS_VARIABLE = "POPTORCH_EMULATOR_FAULTS"
_RECOVERY_ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")
_raised: Set[str] = set()
_SECONDS_BETWEEN_TRIES = 15


def simulates_hardware() -> bool:
    """Whether ``POPTORCH_EMULATOR_HARDWARE=1`` makes the emulator behave as if IPUs were attached."""
    return os.environ.get("POPTORCH_EMULATOR_HARDWARE", "0") not in ("", "0")


def uses_ipu_model() -> bool:
    """Whether an environment variable selects PopTorch's simulator.

    Raises:
        Error: The selected version does not exist.
    """
    selected = any(int(os.environ.get(name, "0") or "0") != 0 for name in _MODEL_VARIABLES)
    wanted = os.environ.get("POPTORCH_IPU_MODEL_VERSION", "ipu2")
    if selected and wanted not in _MODEL_VERSIONS:
        raise createNativeError(
            f"Invalid IPU model version {wanted!r} in POPTORCH_IPU_MODEL_VERSION. "
            f"Valid versions: {', '.join(_MODEL_VERSIONS)}."
        )
    return selected


def hardware_version(num_ipus: int = 1) -> int:
    """Return the architecture version of the IPUs, 0 if there are none."""
    if num_ipus < 1 or uses_ipu_model() or not simulates_hardware():
        return 0
    return _SIMULATED_VERSION


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether that many IPUs are available."""
    return hardware_version(num_ipus) != 0


def ipuHardwareVersion() -> int:
    """Return the architecture version of the IPUs; 0 while the simulator is selected.

    Raises:
        AssertionError: No IPU is available.
    """
    if uses_ipu_model():
        return 0
    found = hardware_version()
    assert found != 0, f"No IPU hardware available on this system. {HOW_TO_SIMULATE}"
    return found


def raise_requested_fault(call: int) -> None:
    """Raise the fault that the environment requests for this call.

    Args:
        call: Number of the executor's call, from 1.

    Raises:
        RecoverableError: If a recovery action is requested.
        UnrecoverableError: If `UNRECOVERABLE` is requested.
        Error: If `ERROR` is requested.
        ValueError: If the variable cannot be parsed.
    """
    text = os.environ.get(_FAULTS_VARIABLE, "")
    if not text:
        _raised.clear()
        return
    wanted = _parse(text).get(call)
    if wanted is None or f"{call}:{wanted}" in _raised:
        return
    _raised.add(f"{call}:{wanted}")
    raise _fault(wanted, call)


def _parse(text: str) -> Dict[int, str]:
    faults: Dict[int, str] = {}
    for entry in text.split(","):
        position, _, kind = entry.strip().partition(":")
        word, _, number = position.partition("=")
        kind = kind.strip().upper()
        known = (*_RECOVERY_ACTIONS, "UNRECOVERABLE", "ERROR")
        if word.strip() != "call" or not number.strip().isdigit() or kind not in known:
            raise ValueError(
                f"{_FAULTS_VARIABLE}: expected entries such as call=3:IPU_RESET with one of {known}, got {entry!r}"
            )
        faults[int(number)] = kind
    return faults


def _fault(kind: str, call: int) -> Error:
    message = f"Fault requested by {_FAULTS_VARIABLE} at call {call}"
    if kind in _RECOVERY_ACTIONS:
        return createNativeError(message, type="poplar_recoverable_runtime_error", recovery_action=kind)
    if kind == "UNRECOVERABLE":
        return createNativeError(message, type="poplar_unrecoverable_runtime_error", unrecoverable=True)
    return createNativeError(message, type="poplar_application_runtime_error")


class Device:
    """The device that an executor attaches to.

    Args:
        options: The executor's options.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self._lock: Optional[int] = None
        self._owner = os.getpid()

    @property
    def connects(self) -> bool:
        """Whether the options allow attaching."""
        return bool(self._options.connection_type != ConnectionType.Never.value)

    def require_connection(self) -> None:
        """Raise an AssertionError if the options forbid connecting to a device."""
        assert self.connects, (
            "Trying to run a model on an offline device (ConnectionType.Never): the model can only be compiled"
        )

    def acquire(self) -> None:
        """Acquire the IPU that the options choose, unless it is already held.

        Raises:
            Error: Another executor holds it and ``POPTORCH_WAIT_FOR_IPU`` is not set.
        """
        if self._lock is not None or not self.connects or not self._is_exclusive():
            return
        ipu = self._options.ipu_id
        self._owner = os.getpid()
        self._lock = _try_to_lock(ipu)
        if self._lock is None:
            gc.collect()  # unreachable executors release their IPUs
            self._lock = _try_to_lock(ipu)
        waits = _waits_for_ipus()
        while self._lock is None:
            if not waits:
                raise createNativeError(
                    f"Failed to acquire device Id {ipu}: another executor is attached to it. Call detachFromDevice() "
                    "or destroy() on that one first, or set POPTORCH_WAIT_FOR_IPU=1 to wait for it."
                )
            trace("No IPU available, sleeping for %d seconds", _SECONDS_BETWEEN_TRIES)
            time.sleep(_SECONDS_BETWEEN_TRIES)
            self._lock = _try_to_lock(ipu)
        native_logger.debug("Acquired the IPU with device Id %d", ipu)

    def release(self) -> None:
        """Release the IPU, if it is held."""
        if self._lock is None:
            return
        if self._owner == os.getpid():
            # Closing is not enough: a forked process may hold the same open file. Only the owner may unlock it.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        self._lock = None

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Acquire the IPU, and release it if the body fails."""
        self.acquire()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def __getstate__(self) -> Dict[str, Any]:
        """Leave out the lock: a copy is not attached."""
        return {**self.__dict__, "_lock": None}

    def __del__(self) -> None:
        self.release()

    def _is_exclusive(self) -> bool:
        options = self._options
        uses_model = options.exists("use_model") and options.use_model
        return options.exists("ipu_id") and not uses_model and ipuHardwareIsAvailable()


def _try_to_lock(ipu: int) -> Optional[int]:
    """Return an open file that locks the IPU until it is unlocked or the process dies, None if it is in use."""
    path = os.path.join(tempfile.gettempdir(), f"poptorch-emulator-{os.getuid()}-ipu{ipu}.lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _waits_for_ipus() -> bool:
    waits = int(os.environ.get("POPTORCH_WAIT_FOR_IPU", "0") or "0") != 0
    if "POPTORCH_WAIT_FOR_IPU" in os.environ:
        native_logger.info(
            "From POPTORCH_WAIT_FOR_IPU environment variable: If no IPU is available: %s",
            "Wait" if waits else "Fail & exit",
        )
    return waits
