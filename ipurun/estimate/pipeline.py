"""Timeline of a pipeline: the micro-batches that IPUs work on in each cycle, and the time lost to filling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

from ipurun.estimate.types import EstimatedModel

__all__ = ["Bar", "PipelineTimeline", "gantt", "timeline_of"]


@dataclass(frozen=True)
class PipelineTimeline:
    """One weight update (in inference: one host call) of a pipeline, in cycles.

    A cycle is the time the slowest IPU takes for one micro-batch; all IPUs start the next one together.

    Args:
        stages: Forward stages.
        micro_batches: Micro-batches that pass through.
        fill: Cycles until every stage has work.
        steady: Cycles in which every stage has work.
        drain: Cycles after that.
        bubble: Share of cycles beyond one per micro-batch.
        idle: Share of all IPUs' time in which they wait: the bubble, and waiting for the slowest stage.
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
        """Cycles in total."""
        return self.fill + self.steady + self.drain


@dataclass(frozen=True)
class Bar:
    """One piece of work in a Gantt chart.

    Args:
        ipu: The IPU.
        start: Seconds since the first bar.
        seconds: Duration.
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


def timeline_of(model: EstimatedModel) -> PipelineTimeline:
    """Return the timeline of an estimate: IPUs of a pipeline work in parallel, of other strategies in turn."""
    layout, settings, time = model.layout, model.settings, model.estimate.time
    stages = layout.num_stages if settings.strategy == "pipelined" else 1
    micro_batches = settings.micro_batches
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


def gantt(model: EstimatedModel, most_cycles: int = 24, first_cycle: int = 0) -> List[Bar]:
    """Return the bars of some cycles of an update.

    Args:
        model: The model.
        most_cycles: How many: a long accumulation repeats itself.
        first_cycle: Where to begin; only in a pipeline.
    """
    layout, settings, time = model.layout, model.settings, model.estimate.time
    micro_batches = settings.micro_batches
    if settings.strategy != "pipelined" or layout.num_stages == 1:
        return _in_turn(model, min(micro_batches, max(1, most_cycles // 4)))
    last = layout.num_stages - 1
    longest = max(ipu.total for ipu in time.ipus)
    bars: List[Bar] = []
    end = micro_batches + (2 if settings.training else 1) * last
    for cycle in range(first_cycle, min(first_cycle + most_cycles, end)):
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


def _in_turn(model: EstimatedModel, micro_batches: int) -> List[Bar]:
    bars: List[Bar] = []
    now = 0.0
    stages = list(range(model.layout.num_stages))
    for micro_batch in range(micro_batches):
        work: List[Tuple[str, int]] = [("forward", stage) for stage in stages]
        if model.settings.training:
            work += [("backward", stage) for stage in reversed(stages)]
        for kind, stage in work:
            seconds = model.estimate.time.stages[stage][kind == "backward"]
            bars.append(Bar(model.layout.ipu_of_stage[stage], now, seconds, kind, stage, micro_batch))
            now += seconds
    return bars
