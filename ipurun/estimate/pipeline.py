"""The pipeline in time: which IPU works on which micro-batch in which cycle, and how much of it is filling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

from ipurun.estimate.types import Settings, StageLayout, TimeEstimate

__all__ = ["Bar", "PipelineTimeline", "gantt", "timeline_of"]


@dataclass(frozen=True)
class PipelineTimeline:
    """One weight update (in inference: one host call) of a pipeline, in cycles.

    A cycle is as long as the IPU with most work takes for one micro-batch; all IPUs move on together.

    Args:
        stages: Forward stages.
        micro_batches: Micro-batches that pass.
        fill: Cycles until every stage has work.
        steady: Cycles in which every stage has work.
        drain: Cycles from then to the end.
        bubble: Share of the cycles that the pipeline needs beyond one per micro-batch.
        idle: Share of all IPUs' time that no IPU works in: the bubble, and waiting for the slowest stage.
    """

    stages: int
    micro_batches: int
    fill: int
    steady: int
    drain: int
    bubble: float
    idle: float

    @property
    def cycles(self) -> int:
        """All cycles."""
        return self.fill + self.steady + self.drain


@dataclass(frozen=True)
class Bar:
    """One piece of work in a Gantt chart.

    Args:
        ipu: Who does it.
        start: Seconds since the first shown work began.
        seconds: How long it takes.
        kind: ``forward`` or ``backward`` (with recomputation).
        stage: Forward stage.
        micro_batch: Number of the micro-batch, from 0.
    """

    ipu: int
    start: float
    seconds: float
    kind: str
    stage: int
    micro_batch: int


def timeline_of(layout: StageLayout, settings: Settings, time: TimeEstimate) -> PipelineTimeline:
    """The schedule of an estimate: IPUs of a pipeline side by side, of any other strategy one after another."""
    stages = layout.num_stages if settings.strategy == "pipelined" else 1
    micro_batches = settings.gradient_accumulation if settings.training else settings.device_iterations
    extra = (2 if settings.training else 1) * (stages - 1)
    cycles = micro_batches + extra
    steady = max(0, micro_batches - extra)
    fill = (cycles - steady + 1) // 2
    work = sum(ipu.total for ipu in time.ipus)
    longest = max((ipu.total for ipu in time.ipus), default=0.0)
    if stages == 1:
        idle = 1 - 1 / max(1, layout.num_ipus)
    else:
        available = cycles * longest * layout.num_ipus
        idle = 1 - micro_batches * work / available if available else 0.0
    return PipelineTimeline(stages, micro_batches, fill, steady, cycles - steady - fill, extra / cycles, idle)


def gantt(layout: StageLayout, settings: Settings, time: TimeEstimate, most_cycles: int = 24) -> List[Bar]:
    """Bars of the first cycles of an update, those of all strategies.

    Args:
        layout: Stages and their IPUs.
        settings: Strategy and number of micro-batches.
        time: Seconds of each stage.
        most_cycles: Where to stop: a long accumulation repeats itself.
    """
    micro_batches = settings.gradient_accumulation if settings.training else settings.device_iterations
    if settings.strategy != "pipelined" or layout.num_stages == 1:
        return _in_turn(layout, settings, time, min(micro_batches, max(1, most_cycles // 4)))
    last = layout.num_stages - 1
    longest = max(ipu.total for ipu in time.ipus)
    bars: List[Bar] = []
    for cycle in range(min(most_cycles, micro_batches + (2 if settings.training else 1) * last)):
        free = [cycle * longest] * layout.num_ipus
        work = [("forward", stage, cycle - stage) for stage in range(last + 1)]
        if settings.training:
            work += [("backward", stage, cycle - 2 * last + stage) for stage in range(last, -1, -1)]
        for kind, stage, micro_batch in work:
            if 0 <= micro_batch < micro_batches:
                ipu = layout.ipu_of_stage[stage]
                seconds = time.stages[stage][kind == "backward"]
                bars.append(Bar(ipu, free[ipu], seconds, kind, stage, micro_batch))
                free[ipu] += seconds
    return bars


def _in_turn(layout: StageLayout, settings: Settings, time: TimeEstimate, micro_batches: int) -> List[Bar]:
    bars: List[Bar] = []
    now = 0.0
    stages = list(range(layout.num_stages))
    for micro_batch in range(micro_batches):
        work: List[Tuple[str, int]] = [("forward", stage) for stage in stages]
        if settings.training:
            work += [("backward", stage) for stage in reversed(stages)]
        for kind, stage in work:
            seconds = time.stages[stage][kind == "backward"]
            bars.append(Bar(layout.ipu_of_stage[stage], now, seconds, kind, stage, micro_batch))
            now += seconds
    return bars
