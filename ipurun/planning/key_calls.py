"""Calls on `poptorch.Options` that follow from ipurun's own keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Mapping, Optional, Tuple

from ipurun.api.calls import Call, Symbol
from ipurun.config.schema import PipelineConfig, RecomputeConfig, RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.memory import memory_calls
from ipurun.planning.placement.layout import Layout
from ipurun.planning.placement.stages import StageList
from ipurun.planning.plan import BatchSizes
from ipurun.planning.sizes import Sizes
from ipurun.planning.user_settings import TWINS, UserSettings

__all__ = ["KeyCalls", "input_group_type", "resolved_calls", "shared_calls", "strategy_call", "training_calls"]

_REDUCTIONS = {"mean": "Mean", "sum": "Sum"}
_MEAN_STRATEGIES = {"post": "Post", "running": "Running"}
_PARTIALS = {"float": "float32", "half": "float16"}
# PopART's RecomputationType, which _Popart.set takes as a number.
_RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}


@dataclass
class KeyCalls:
    """Calls of keys that somebody set, apart from those of defaults, which win over nothing."""

    defaults: List[Call] = field(default_factory=list)
    chosen: List[Call] = field(default_factory=list)

    def add(self, path: str, *args: Any, origin: str, chosen: bool = True) -> None:
        """Record one call."""
        (self.chosen if chosen else self.defaults).append(Call(path, args, origin=origin))


def resolved_calls(
    batch: BatchSizes, group_type: Symbol, training: bool, origins: Mapping[str, str], grouped: bool
) -> List[Call]:
    """The numbers of the batch arithmetic, which has looked at every source already.

    Args:
        batch: The numbers.
        group_type: How replicas form input groups.
        training: False leaves out what only training has.
        origins: What decided each number.
        grouped: Whether groups of one replica are written, too, because another source has larger ones.
    """
    calls = [
        Call("deviceIterations", (batch.device_iterations,), origin=origins["device_iterations"]),
        Call("replicationFactor", (batch.replicas,), origin=origins["replicas"]),
    ]
    if training:
        accumulation = batch.gradient_accumulation
        calls.append(Call("Training.gradientAccumulation", (accumulation,), origin=origins["gradient_accumulation"]))
    if batch.input_group_size > 1 or grouped:
        grouping = (batch.input_group_size, group_type)
        calls.append(Call("inputReplicaGrouping", grouping, origin=origins["input_group"]))
    return calls


def input_group_type(config: RunConfig, given: UserSettings) -> Symbol:
    """How replicas form input groups: as the config says, else as `options` or poptorch.conf say."""
    asked = given.argument("inputReplicaGrouping", 1)
    if asked is not None and not given.has("replication.input_group_type"):
        return Symbol(str(asked))
    return Symbol(f"poptorch.CommGroupType.{config.replication.input_group_type}")


def shared_calls(
    config: RunConfig, facts: Facts, numbers: Sizes, given: UserSettings, training: bool, found: Findings
) -> KeyCalls:
    """What training and inference have in common, with the numbers of one of them."""
    own = KeyCalls()
    batch = numbers.training if training else numbers.inference
    layout = numbers.layout if training else numbers.inference_layout
    if facts.engine == "ipu_model":
        own.add("useIpuModel", True, origin="engine=ipu_model")
    elif config.engine == "ipu" and given.argument("useIpuModel"):
        own.add("useIpuModel", False, origin="engine=ipu")
    if given.has("pipeline.auto_round"):
        own.add("autoRoundNumIPUs", config.pipeline.auto_round, origin="pipeline.auto_round")
    chosen = given.has(*TWINS["setExecutionStrategy"]) and given.strategy(config.pipeline) is None
    phased = config.pipeline.strategy.endswith("phased")
    if layout.placements or layout.auto_increment or (chosen and not phased):
        strategy = strategy_call(config.pipeline, layout, found)
        own.add("setExecutionStrategy", strategy, origin="pipeline", chosen=chosen)
    if config.partials is not None:
        own.add("Precision.setPartialsType", Symbol(f"torch.{_PARTIALS[config.partials]}"), origin="partials")
    if given.has("debug.fp_exceptions"):
        stops = config.debug.fp_exceptions
        own.add("Precision.enableFloatingPointExceptions", stops, origin="debug.fp_exceptions")
    own.add("randomSeed", config.seed, origin="seed", chosen=given.has("seed"))
    own.chosen += memory_calls(config, given, layout.ipus, batch.replicas, training, found)
    return own


def training_calls(config: RunConfig, facts: Facts, numbers: Sizes, given: UserSettings, found: Findings) -> KeyCalls:
    """What only training has."""
    own = KeyCalls()
    replication = config.replication
    if given.has("replication.reduction"):
        kind = Symbol(f"poptorch.ReductionType.{_REDUCTIONS[replication.reduction]}")
        own.add("Training.accumulationAndReplicationReductionType", kind, origin="replication.reduction")
    if given.has("replication.mean_strategy"):
        strategy = Symbol(f"poptorch.MeanReductionStrategy.{_MEAN_STRATEGIES[replication.mean_strategy]}")
        own.add(
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
            strategy,
            origin="replication.mean_strategy",
        )
    if config.stochastic_rounding is not None:
        own.add("Precision.enableStochasticRounding", config.stochastic_rounding, origin="stochastic_rounding")
    automatic = str(config.loss_scaling).lower() == "auto"
    asked = given.argument("Training.setAutomaticLossScaling") is not None
    if automatic or (asked and given.has("loss_scaling")):
        own.add("Training.setAutomaticLossScaling", automatic, origin=f"loss_scaling={config.loss_scaling}")
    own.chosen += _recompute_calls(config.recompute)
    _add_broadcast(own, config, facts, numbers.training, given, found)
    return own


def _recompute_calls(recompute: RecomputeConfig) -> List[Call]:
    if recompute.mode is not None:
        mode = _RECOMPUTATION[recompute.mode]
        return [Call("_Popart.set", ("autoRecomputation", mode), origin=f"recompute.mode={recompute.mode}")]
    return []


def _add_broadcast(
    own: KeyCalls, config: RunConfig, facts: Facts, batch: BatchSizes, given: UserSettings, found: Findings
) -> None:
    """Replicas cannot share buffers that training changes: PopTorch refuses to compile that."""
    asked: Optional[bool] = config.replication.broadcast_buffers
    origin = "replication.broadcast_buffers"
    if asked is None:
        asked = given.argument("broadcastBuffers")
        origin = given.origin("broadcastBuffers", default=origin)
    several = batch.distinct_replicas > 1 and bool(facts.changing_buffers)
    names = ", ".join(facts.changing_buffers[:3]) + (", ..." if len(facts.changing_buffers) > 3 else "")
    if several and asked:
        found.problem(
            "PopTorch cannot keep buffers equal over replicas while training changes them",
            seen=f"{origin}=true, {batch.replicas} replicas, changing: {names}",
            fix="replication.broadcast_buffers=false",
            key=origin,
        )
    if config.replication.broadcast_buffers is not None:
        own.add("broadcastBuffers", config.replication.broadcast_buffers, origin=origin)
    elif several and asked is None:
        own.add("broadcastBuffers", False, origin="rule: training changes buffers", chosen=False)
        found.note(
            f"each of the {batch.replicas} replicas keeps buffers of its own (broadcastBuffers(False)), because "
            f"training changes {names}; the first replica's are saved"
        )


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
