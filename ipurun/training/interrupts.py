"""Interrupts and the time limit of a run: the loop saves and stops, a second Ctrl-C stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from types import FrameType
from typing import Any, Callable, Dict, Iterator, Optional

__all__ = ["Interrupts", "WaitStoppedError", "announce_to"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST_WAIT_SECONDS = 2.0  # for data, after an interrupt

_announce: Optional[Callable[[str], None]] = None


def announce_to(show: Optional[Callable[[str], None]]) -> None:
    """Give the message of an interrupt to a live view, or to standard error again: written past it, it moves its lines.

    Args:
        show: Called by the signal handler with a line of text, so it may only store it; None: standard error.
    """
    global _announce
    _announce = show


class WaitStoppedError(KeyboardInterrupt):
    """An interrupt came while the loop waited for data: it has nothing to finish."""


class Interrupts:
    """A context in which the first interrupt only sets `requested`.

    Before `arm` is called there is nothing to save, and an interrupt stops the run at once. SIGTERM, which batch
    systems send before they kill a job, and SIGHUP, sent when a connection is lost, count as interrupts. Both may come
    more than once, from a batch system and from a shell that passes them on; only a second Ctrl-C stops the run at
    once. Under `nohup` a lost connection is ignored.

    Args:
        deadline: When to stop, by `time.monotonic`; None: never.
        is_shared: Whether several processes stop together, when they have agreed to: see `agree`.
    """

    def __init__(self, deadline: Optional[float] = None, is_shared: bool = False) -> None:
        self._deadline = deadline
        self._received: Optional[signal.Signals] = None
        self._is_shared = is_shared
        self._is_agreed = False
        self._armed = is_shared  # a process that stops before the others are ready would leave them waiting
        self._waits = False
        self._before: Dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to save and stop."""
        return self._is_agreed if self._is_shared else self.wanted

    @property
    def wanted(self) -> bool:
        """Whether this process was asked to stop."""
        return self._received is not None or self.is_over_time

    def agree(self, stops: bool) -> None:
        """Take what all processes have agreed on: to stop or not."""
        self._is_agreed = stops

    @property
    def is_over_time(self) -> bool:
        """Whether the time limit is reached, and there is something to save."""
        return self._armed and self._deadline is not None and time.monotonic() >= self._deadline

    @property
    def received(self) -> str:
        """Name of the signal that asked the run to stop, empty if none did."""
        return "" if self._received is None else self._received.name

    def arm(self) -> None:
        """Let interrupts wait for the end of the host call from now on."""
        self._armed = True

    @contextlib.contextmanager
    def stop_waiting(self) -> Iterator[None]:
        """Let an interrupt raise `WaitStoppedError` inside, where the loop waits for another process that may hang.

        The time limit does so too. Not at once: a batch that is just arriving is awaited.
        """
        if self._received is not None:
            raise WaitStoppedError
        before = signal.getsignal(signal.SIGALRM)
        deadline = self._deadline if self._armed and self._before else None  # signals are the main thread's
        self._waits = True
        try:
            if deadline is not None:
                _stop_waiting_in(max(deadline - time.monotonic(), 0.0) + _LONGEST_WAIT_SECONDS)
            yield
        finally:
            self._waits = False
            if self._received is not None or deadline is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, before)

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
        if not self._armed or (self._received is not None and number == signal.SIGINT):
            raise KeyboardInterrupt
        if self._received is not None:
            return
        self._received = signal.Signals(number)
        how = "again" if number == signal.SIGINT else "Ctrl-C"
        (_announce or _write_now)(f"{self.received}: saving after this host call; {how} to stop now\n")
        if self._waits:
            _stop_waiting_in(_LONGEST_WAIT_SECONDS)


def _stop_waiting_in(seconds: float) -> None:
    signal.signal(signal.SIGALRM, _stop_waiting)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _stop_waiting(number: int, frame: Optional[FrameType]) -> None:
    raise WaitStoppedError


def _write_now(text: str) -> None:
    """Write to standard error, past Python's buffers: the signal may have come while they were in use."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def _discard_output_to_lost_terminal() -> None:
    """Keep the last messages of the run, which are also in its log file, from raising an error."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)
