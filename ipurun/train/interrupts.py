"""Ctrl-C: the first one asks the loop to save and end, the second one ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Dict, Optional

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which the first interrupt only sets `asked`.

    Until `arm` is called there is nothing worth saving, and an interrupt ends the run at once. SIGTERM, which batch
    systems send before they kill a job, counts as an interrupt.
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
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if self.asked or not self._armed:
            raise KeyboardInterrupt
        self.asked = True
