"""Ctrl-C: the first one makes the loop save and stop, the second one stops at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
from types import FrameType
from typing import Any, Dict, Optional

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context in which the first interrupt only sets `requested`.

    Before `arm` is called there is nothing to save, and an interrupt stops the run at once. SIGTERM, which batch
    systems send before they kill a job, and SIGHUP, sent when a connection is lost, count as interrupts. Under `nohup`
    a lost connection is ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._armed = False
        self._before: Dict[int, Any] = {}

    def arm(self) -> None:
        """Let interrupts wait for the end of the host call from now on."""
        self._armed = True

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if number == signal.SIGHUP:
            _discard_output_to_lost_terminal()
        if self.requested or not self._armed:
            raise KeyboardInterrupt
        self.requested = True


def _discard_output_to_lost_terminal() -> None:
    """Keep the last messages of the run, which are also in its log file, from raising an error."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
