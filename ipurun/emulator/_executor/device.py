"""The IPUs that an executor occupies while it is attached.

There is nothing to occupy on a CPU, unless the emulator stands in for hardware and the options choose an IPU: then
one executor has it at a time, over all processes of the user, as on a device.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import tempfile
import time
from typing import Any, Dict, Iterator, Optional

from ipurun.emulator._executor import hardware
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._logging import native_logger, trace
from ipurun.emulator.enums import ConnectionType

__all__ = ["Device"]

_SECONDS_BETWEEN_TRIES = 15


class Device:
    """What an executor with these options attaches to.

    Args:
        options: The executor's options.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self._lock: Optional[int] = None
        self._owner = os.getpid()

    @property
    def connects(self) -> bool:
        """Whether the options allow to attach at all."""
        return bool(self._options.connection_type != ConnectionType.Never.value)

    def require_connection(self) -> None:
        """Raises an AssertionError if the options say that no device is ever connected."""
        assert self.connects, (
            "Trying to run a model on an offline device (ConnectionType.Never): the model can only be compiled"
        )

    def acquire(self) -> None:
        """Takes the IPU that the options choose, if it is not held already.

        Raises:
            Error: Another executor has it, and ``POPTORCH_WAIT_FOR_IPU`` does not say to wait for it.
        """
        if self._lock is not None or not self.connects or not self._is_exclusive():
            return
        ipu = self._options.ipu_id
        self._owner = os.getpid()
        self._lock = _try_to_lock(ipu)
        if self._lock is None:
            gc.collect()  # executors that nobody can reach any more let go of their IPUs
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
        """Lets go of the IPU, if it is held."""
        if self._lock is None:
            return
        if self._owner == os.getpid():
            # Closing is not enough: a forked process may hold the same open file. Unlocking is up to the owner alone.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        self._lock = None

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Takes the IPU, and keeps it unless what is done inside fails."""
        self.acquire()
        try:
            yield
        except BaseException:
            self.release()
            raise

    def __getstate__(self) -> Dict[str, Any]:
        """A copy is not attached to anything."""
        return {**self.__dict__, "_lock": None}

    def __del__(self) -> None:
        self.release()

    def _is_exclusive(self) -> bool:
        options = self._options
        uses_model = options.exists("use_model") and options.use_model
        return options.exists("ipu_id") and not uses_model and hardware.ipuHardwareIsAvailable()


def _try_to_lock(ipu: int) -> Optional[int]:
    """Returns an open file that locks the IPU until it is unlocked or the process dies, None if it is taken."""
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
