"""The execution strategy of a layout, as the object that ``setExecutionStrategy`` takes."""

from __future__ import annotations

from typing import List, Optional, Tuple

from ipurun.api.calls import Call, Symbol
from ipurun.config.device_schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.planning.placement.layout import Layout
from ipurun.planning.placement.stages import StageList

__all__ = ["strategy_call"]


def strategy_call(pipeline: PipelineConfig, layout: Layout, found: Findings) -> Call:
    """The execution strategy; problems of its settings go to `found`."""
    if pipeline.strategy in ("pipelined", "sharded"):
        if pipeline.liveness is not None or pipeline.separate_backward_phase is not None:
            found.problem(
                "`pipeline.liveness` and `pipeline.separate_backward_phase` belong to phased execution",
                seen=f"pipeline.strategy={pipeline.strategy}",
                fix="pipeline.strategy=serial_phased, or leave both out",
                key="pipeline.separate_backward_phase" if pipeline.liveness is None else "pipeline.liveness",
            )
        name = "poptorch.PipelinedExecution" if pipeline.strategy == "pipelined" else "poptorch.ShardedExecution"
        if layout.listed is not None:
            return Call(name, tuple(_stages(layout.listed)))
        numbering = "AutoIncrement" if layout.auto_increment else "SameAsIpu"
        return Call(name, (Symbol(f"poptorch.AutoStage.{numbering}"),))
    phases = _phases(layout.listed) if layout.listed is not None else ()
    if pipeline.strategy == "serial_phased":
        return Call("poptorch.SerialPhasedExecution", phases, chain=_serial_setters(pipeline))
    return Call("poptorch.ParallelPhasedExecution", phases, chain=_parallel_setters(pipeline, found))


def _stages(listed: StageList) -> List[Call]:
    return [
        Call("poptorch.Stage", blocks, chain=(Call("ipu", (ipu,)),)) for blocks, ipu in zip(listed.blocks, listed.ipus)
    ]


def _phases(listed: StageList) -> Tuple[Call, ...]:
    stages = _stages(listed)
    numbers = listed.phases or tuple(range(len(stages)))
    return tuple(
        Call("poptorch.Phase", tuple(stage for stage, number in zip(stages, numbers) if number == phase))
        for phase in dict.fromkeys(numbers)
    )


def _serial_setters(pipeline: PipelineConfig) -> Tuple[Call, ...]:
    liveness = pipeline.liveness
    calls = (
        None if liveness is None else Call("setTensorsLiveness", (Symbol(f"poptorch.Liveness.{liveness}"),)),
        _separate(pipeline),
    )
    return tuple(call for call in calls if call is not None)


def _parallel_setters(pipeline: PipelineConfig, found: Findings) -> Tuple[Call, ...]:
    if pipeline.liveness in ("OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"):
        found.problem(
            f"parallel phased execution cannot keep tensors {pipeline.liveness}",
            seen=f"pipeline.liveness={pipeline.liveness}",
            known="AlwaysLive, OffChipAfterFwd",
            fix="pipeline.liveness=OffChipAfterFwd",
            key="pipeline.liveness",
        )
    off_chip = pipeline.liveness == "OffChipAfterFwd"
    calls = (
        None if pipeline.liveness is None else Call("sendTensorsOffChipAfterFwd", (off_chip,)),
        _separate(pipeline),
    )
    return tuple(call for call in calls if call is not None)


def _separate(pipeline: PipelineConfig) -> Optional[Call]:
    use = pipeline.separate_backward_phase
    return None if use is None else Call("useSeparateBackwardPhase", (use,))
