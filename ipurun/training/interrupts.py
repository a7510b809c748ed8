"""Ctrl-C: the first one asks the loop to save and end, the second one ends at once."""

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
    """A context in which the first interrupt only sets `asked`.

    Until `arm` is called there is nothing worth saving, and an interrupt ends the run at once. SIGTERM, which batch
    systems send before they kill a job, and SIGHUP, sent when a connection is lost, count as interrupts; under `nohup`
    a lost connection does not matter.
    """

    def __init__(self) -> None:
        self.asked = False
        self._armed = False
        self._before: Dict[int, Any] = {}

    def arm(self) -> None:
        """From now on an interrupt waits for the end of the host call."""
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
            _write_nowhere_instead_of_a_lost_terminal()
        if self.asked or not self._armed:
            raise KeyboardInterrupt
        self.asked = True


def _write_nowhere_instead_of_a_lost_terminal() -> None:
    """Keeps the run's last words from failing: its log file has them too."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
