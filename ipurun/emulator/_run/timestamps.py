"""When the tensors of a call were read, computed and handed over."""

from __future__ import annotations

import time
from typing import Dict, List, Tuple

__all__ = ["Timestamps"]


class Timestamps:
    """The times of the last call, in seconds on one clock."""

    def __init__(self) -> None:
        self._stamps: Dict[str, List[float]] = {}
        self._last_output = 0.0
        self.duration = 0.0
        self.begin_call()

    def begin_call(self) -> None:
        """Forgets the previous call."""
        self._stamps = {"input": [], "input_complete": [], "output": [], "output_complete": []}

    def begin_runs(self, count: int) -> None:
        """Notes that the inputs of some runs are about to be read."""
        self._stamps["input"] += [time.perf_counter()] * count

    def inputs_complete(self, count: int) -> None:
        """Notes that the inputs of some runs were read."""
        self._stamps["input_complete"] += [time.perf_counter()] * count

    def outputs(self) -> None:
        """Notes that the outputs of some runs were computed."""
        self._last_output = time.perf_counter()

    def end_run(self) -> None:
        """Notes that the outputs of one run were kept for the host."""
        self._stamps["output"].append(self._last_output)
        self._stamps["output_complete"].append(time.perf_counter())

    def end_call(self) -> None:
        """Notes that the results of the call are whole: no output is complete before."""
        now = time.perf_counter()
        self.duration = now - self._stamps["input"][0]
        self._stamps["output_complete"] = [now for _ in self._stamps["output_complete"]]

    def counters(self, num_inputs: int, num_outputs: int) -> Dict[str, List[List[float]]]:
        """Returns the times of every input and output tensor, by event."""
        counts = {"input": num_inputs, "input_complete": num_inputs}
        return {
            event: [list(times) for _ in range(counts.get(event, num_outputs))] for event, times in self._stamps.items()
        }

    def latency(self, start: str, end: str) -> Tuple[float, float, float]:
        """Returns minimum, maximum and mean seconds between two events.

        There can be more starts than ends; each end is then measured from the earliest start of its share.
        """
        starts, ends = self._stamps[start], self._stamps[end]
        if not ends or not starts:
            return (0.0, 0.0, 0.0)
        share = max(1, len(starts) // len(ends))
        spans = [
            last - min(starts[min(index * share, len(starts) - 1) : (index + 1) * share] or starts[-1:])
            for index, last in enumerate(ends)
        ]
        return (min(spans), max(spans), sum(spans) / len(spans))
