"""Wall time of a run by kind, and the throughput of training alone."""

from __future__ import annotations

import contextlib
import time
from typing import Dict, Iterator

__all__ = ["Clock", "Window"]


class Clock:
    """Seconds by kind, such as compile, train, data_wait, eval, averaging; checkpoint_write is in the background."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        kinds = ("compile", "train", "data_wait", "eval", "checkpoint", "checkpoint_write", "recovery", "averaging")
        self._spent: Dict[str, float] = dict.fromkeys(kinds, 0.0)

    def add(self, kind: str, seconds: float) -> None:
        """Add seconds to a kind."""
        self._spent[kind] += seconds

    @contextlib.contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Add the time spent inside to a kind."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - begun)

    def seconds(self) -> Dict[str, float]:
        """Return the seconds of all kinds and the total wall time."""
        return {**self._spent, "total": time.perf_counter() - self._begun}

    @property
    def training_seconds(self) -> float:
        """Time in host calls and waiting for their data."""
        return self._spent["train"] + self._spent["data_wait"]


class Window:
    """The host calls since the last record: their number, time and losses.

    Args:
        loss: Sum of the losses of such host calls before a resume.
        losses: Number of those host calls.
    """

    def __init__(self, loss: float = 0.0, losses: int = 0) -> None:
        self.calls = 0
        self.samples = 0
        self.call_seconds = 0.0
        self.wait_seconds = 0.0
        self.loss = loss
        self.losses = losses

    def add(self, samples: int, call_seconds: float, wait_seconds: float, loss: float) -> None:
        """Add one host call."""
        self.calls += 1
        self.samples += samples
        self.call_seconds += call_seconds
        self.wait_seconds += wait_seconds
        self.loss += loss
        self.losses += 1

    @property
    def mean_loss(self) -> float:
        return self.loss / self.losses

    @property
    def samples_per_second(self) -> float:
        return self.samples / max(self.call_seconds + self.wait_seconds, 1e-9)

    @property
    def data_wait(self) -> float:
        """Share of the time spent waiting for data."""
        return self.wait_seconds / max(self.call_seconds + self.wait_seconds, 1e-9)
