"""Place the measured operations of one micro-batch on the schedule of the IPUs of a replica.

A pipeline works in cycles: every stage works on another micro-batch, and all IPUs begin the next cycle together. In any
other execution the IPUs take turns. Then every IPU updates its parameters, and the next update begins.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

from ipurun.profiling.trace_file import Span

__all__ = ["MODELLED", "Schedule", "schedule_of"]

MODELLED = "schedule modelled from op times measured on this CPU"
_Work = Tuple[int, str, int, Sequence[Any]]  # IPU, kind of pass, micro-batch, operations


@dataclass(frozen=True)
class Schedule:
    """Timeline of the IPUs of one replica in one call.

    Args:
        seconds: How long it lasts.
        spans: By IPU: blocks of work and waits, in order.
        operations: By IPU: the operations inside the blocks, in order.
        waits: By IPU: seconds that it waits, by reason.
    """

    seconds: float
    spans: Dict[int, List[Span]]
    operations: Dict[int, List[Span]]
    waits: Dict[int, Dict[str, float]]


class _Timeline:
    def __init__(self, ipus: Sequence[int]) -> None:
        self.now: Dict[int, float] = dict.fromkeys(ipus, 0.0)
        self.spans: Dict[int, List[Span]] = {ipu: [] for ipu in ipus}
        self.operations: Dict[int, List[Span]] = {ipu: [] for ipu in ipus}
        self.waits: Dict[int, Dict[str, float]] = {ipu: {} for ipu in ipus}

    def work(self, ipu: int, micro_batch: int, operations: Sequence[Any], extra: float = 0.0) -> None:
        """Add operations to an IPU, in blocks of one kind."""
        for kind, block in itertools.groupby(operations, key=lambda operation: operation.kind):
            begin = self.now[ipu]
            for operation in block:
                details = {"module": operation.module or "(model)", "micro-batch": micro_batch}
                if operation.source:
                    details["source"] = operation.source
                self._operation(ipu, operation.name, operation.seconds, kind, details)
            if kind == "backward" and extra:
                self._operation(ipu, "accumulate gradients", extra, kind, {"micro-batch": micro_batch})
                extra = 0.0
            self._block(ipu, f"{kind} {micro_batch}", begin, kind, {"micro-batch": micro_batch})

    def update(self, ipu: int, parameters: Sequence[Any], number: int) -> None:
        begin = self.now[ipu]
        for parameter in parameters:
            note = "share by size of the measured update of all parameters"
            self._operation(ipu, f"update {parameter.parameter}", parameter.seconds, "update", {"time": note})
        if parameters:
            self._block(ipu, "update", begin, "update", {"weight update": number})

    def wait(self, ipu: int, until: float, reason: str) -> None:
        seconds = until - self.now[ipu]
        if seconds > 0.0:
            self.spans[ipu].append(Span(f"wait: {reason}", self.now[ipu], seconds, "wait"))
            self.waits[ipu][reason] = self.waits[ipu].get(reason, 0.0) + seconds
            self.now[ipu] = until

    def meet(self, reason: str) -> None:
        """Let all IPUs wait for the last one."""
        last = max(self.now.values())
        slowest = next(ipu for ipu, now in self.now.items() if now == last)
        for ipu in self.now:
            self.wait(ipu, last, reason.format(slowest))

    def _operation(self, ipu: int, name: str, seconds: float, kind: str, details: Dict[str, Any]) -> None:
        self.operations[ipu].append(Span(name, self.now[ipu], seconds, kind, details))
        self.now[ipu] += seconds

    def _block(self, ipu: int, name: str, begin: float, kind: str, details: Dict[str, Any]) -> None:
        self.spans[ipu].append(Span(name, begin, self.now[ipu] - begin, kind, details))


def schedule_of(call: Any) -> Schedule:
    """Return the schedule of a call.

    Args:
        call: Its measured operations: `CallTimes` of the CPU engine.
    """
    ipus = sorted({operation.ipu for operation in call.operations} | {update.ipu for update in call.parameters})
    timeline = _Timeline(ipus or [0])
    pipelined = call.strategy == "pipelined" and len({operation.stage for operation in call.operations}) > 1
    sizes = {ipu: sum(update.seconds for update in call.parameters if update.ipu == ipu) for ipu in ipus}
    total = sum(sizes.values()) or 1.0
    accumulating = {ipu: call.accumulate_seconds * size / total for ipu, size in sizes.items()}
    for number in range(call.updates):
        if pipelined:
            _pipeline(timeline, call, accumulating)
        else:
            _in_turn(timeline, call, accumulating)
        if call.training:
            for ipu in ipus:
                timeline.update(ipu, [update for update in call.parameters if update.ipu == ipu], number)
            timeline.meet("update of IPU {}")
    seconds = max(timeline.now.values())
    return Schedule(seconds, timeline.spans, timeline.operations, timeline.waits)


def _pipeline(timeline: _Timeline, call: Any, accumulating: Dict[int, float]) -> None:
    stages = sorted({operation.stage for operation in call.operations})
    last = len(stages) - 1
    passes: List[Tuple[int, bool, List[Any]]] = []  # cycles after the first one, whether backward, operations
    for position, stage in enumerate(stages):
        own = [operation for operation in call.operations if operation.stage == stage]
        passes.append((position, False, [operation for operation in own if operation.kind == "forward"]))
        passes.append((2 * last - position, True, [operation for operation in own if operation.kind != "forward"]))
    passes = [item for item in passes if item[2]]
    most = max((delay for delay, _, _ in passes), default=0)
    for cycle in range(call.micro_batches + most):
        worked = set()
        for delay, is_backward, operations in passes:
            micro_batch = cycle - delay
            if 0 <= micro_batch < call.micro_batches:
                ipu = operations[0].ipu
                timeline.work(ipu, micro_batch, operations, accumulating.get(ipu, 0.0) if is_backward else 0.0)
                worked.add(ipu)
        end = max(timeline.now.values())
        slowest = next(ipu for ipu, now in timeline.now.items() if now == end)
        reason = "pipeline fills" if cycle < call.micro_batches else "pipeline drains"
        for ipu in timeline.now:
            timeline.wait(ipu, end, f"IPU {slowest}" if ipu in worked else reason)


def _in_turn(timeline: _Timeline, call: Any, accumulating: Dict[int, float]) -> None:
    for micro_batch in range(call.micro_batches):
        left = dict(accumulating)
        for ipu, block in itertools.groupby(call.operations, key=lambda operation: operation.ipu):
            operations = list(block)
            timeline.wait(ipu, max(timeline.now.values()), "its turn")
            is_backward = any(operation.kind == "backward" for operation in operations)
            timeline.work(ipu, micro_batch, operations, left.pop(ipu, 0.0) if is_backward else 0.0)
    timeline.meet("its turn")
