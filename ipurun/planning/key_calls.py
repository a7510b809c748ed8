"""Calls on `poptorch.Options` that follow from ipurun's keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Mapping, Optional, Tuple

from ipurun.api.calls import Call, Symbol
from ipurun.config.schema import PipelineConfig, RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.memory import memory_calls
from ipurun.planning.placement.layout import Layout
from ipurun.planning.placement.stages import StageList
from ipurun.planning.plan import BatchSizes, Instances
from ipurun.planning.sizes import Sizes
from ipurun.planning.user_settings import STRATEGIES, TWINS, UserSettings

__all__ = ["KeyCalls", "batch_calls", "input_group_type", "shared_calls", "training_calls"]

_REDUCTIONS = {"mean": "Mean", "sum": "Sum"}
_MEAN_STRATEGIES = {"post": "Post", "running": "Running"}
_PARTIALS = {"float": "float32", "half": "float16"}
# PopART's RecomputationType, which _Popart.set takes as a number.
_RECOMPUTATION = {"none": 0, "standard": 1, "norm_only": 2, "pipeline": 3, "recompute_all": 4}


@dataclass
class KeyCalls:
    """Calls of the keys that were set, and of the defaults, which override nothing."""

    defaults: List[Call] = field(default_factory=list)
    chosen: List[Call] = field(default_factory=list)

    def add(self, path: str, *args: Any, origin: str, chosen: bool = True) -> None:
        """Add a call."""
        (self.chosen if chosen else self.defaults).append(Call(path, args, origin=origin))


def batch_calls(
    batch: BatchSizes,
    group_type: Symbol,
    training: bool,
    origins: Mapping[str, str],
    grouped: bool,
    instances: Instances,
) -> List[Call]:
    """The sizes of the batch arithmetic, which has looked at every source already.

    Args:
        batch: The sizes.
        group_type: How replicas form input groups.
        training: False leaves out what only training has.
        origins: What decided each number.
        grouped: Whether groups of one replica are written, too, because another source has larger ones.
        instances: The processes that share the replicas.
    """
    calls = [Call("deviceIterations", (batch.device_iterations,), origin=origins["device_iterations"])]
    if not instances.uses_popdist:  # popdist gives each process its replicas, and its number
        local = batch.share_of(instances).replicas
        calls.append(Call("replicationFactor", (local,), origin=origins["replicas"]))
        if instances.count > 1:
            number = (instances.index, instances.count)
            calls.append(Call("Distributed.configureProcessId", number, origin="distributed.instances"))
    if training:
        accumulation = batch.gradient_accumulation
        calls.append(Call("Training.gradientAccumulation", (accumulation,), origin=origins["gradient_accumulation"]))
    if batch.input_group_size > 1 or grouped:
        grouping = (batch.input_group_size, group_type)
        calls.append(Call("inputReplicaGrouping", grouping, origin=origins["input_group"]))
    return calls


def input_group_type(config: RunConfig, settings: UserSettings) -> Symbol:
    """Return how replicas form input groups: by the config, else by `options` or poptorch.conf."""
    wanted = settings.argument("inputReplicaGrouping", 1)
    if wanted is not None and not settings.has("replication.input_group_type"):
        return Symbol(str(wanted))
    return Symbol(f"poptorch.CommGroupType.{config.replication.input_group_type}")


def shared_calls(
    config: RunConfig, facts: Facts, sizes: Sizes, settings: UserSettings, training: bool, found: Findings
) -> KeyCalls:
    """Return the calls that training and inference have in common, with the sizes of one of them."""
    calls = KeyCalls()
    batch = sizes.training if training else sizes.inference
    layout = sizes.layout if training else sizes.inference_layout
    if facts.engine == "ipu_model":
        calls.add("useIpuModel", True, origin="engine=ipu_model")
    elif config.engine == "ipu" and settings.argument("useIpuModel"):
        calls.add("useIpuModel", False, origin="engine=ipu")
    if settings.has("pipeline.auto_round"):
        calls.add("autoRoundNumIPUs", config.pipeline.auto_round, origin="pipeline.auto_round")
    chosen = settings.has(*TWINS["setExecutionStrategy"]) and settings.strategy(config.pipeline) is None
    phased = config.pipeline.strategy.endswith("phased")
    if layout.placements or layout.auto_increment or (chosen and not phased):
        strategy = _strategy_call(config.pipeline, layout, found)
        calls.add("setExecutionStrategy", strategy, origin="pipeline", chosen=chosen)
    if config.partials is not None:
        calls.add("Precision.setPartialsType", Symbol(f"torch.{_PARTIALS[config.partials]}"), origin="partials")
    if settings.has("debug.fp_exceptions"):
        stops = config.debug.fp_exceptions
        calls.add("Precision.enableFloatingPointExceptions", stops, origin="debug.fp_exceptions")
    calls.add("randomSeed", config.seed, origin="seed", chosen=settings.has("seed"))
    local = batch.share_of(sizes.instances).replicas  # PopART shards over the replicas of one process only
    calls.chosen += memory_calls(config, settings, layout.ipus, local, training, found)
    return calls


def training_calls(config: RunConfig, facts: Facts, sizes: Sizes, settings: UserSettings, found: Findings) -> KeyCalls:
    """Return the calls that only training has."""
    calls = KeyCalls()
    replication = config.replication
    if settings.has("replication.reduction"):
        kind = Symbol(f"poptorch.ReductionType.{_REDUCTIONS[replication.reduction]}")
        calls.add("Training.accumulationAndReplicationReductionType", kind, origin="replication.reduction")
    if settings.has("replication.mean_strategy"):
        strategy = Symbol(f"poptorch.MeanReductionStrategy.{_MEAN_STRATEGIES[replication.mean_strategy]}")
        calls.add(
            "Training.setMeanAccumulationAndReplicationReductionStrategy",
            strategy,
            origin="replication.mean_strategy",
        )
    if config.stochastic_rounding is not None:
        calls.add("Precision.enableStochasticRounding", config.stochastic_rounding, origin="stochastic_rounding")
    automatic = str(config.loss_scaling).lower() == "auto"
    wanted = settings.argument("Training.setAutomaticLossScaling") is not None
    if automatic or (wanted and settings.has("loss_scaling")):
        calls.add("Training.setAutomaticLossScaling", automatic, origin=f"loss_scaling={config.loss_scaling}")
    mode = config.recompute.mode
    if mode is not None:
        calls.add("_Popart.set", "autoRecomputation", _RECOMPUTATION[mode], origin=f"recompute.mode={mode}")
    _add_broadcast(calls, config, facts, sizes.training, settings, found)
    return calls


def _add_broadcast(
    calls: KeyCalls, config: RunConfig, facts: Facts, batch: BatchSizes, settings: UserSettings, found: Findings
) -> None:
    """Add `broadcastBuffers`: PopTorch refuses to compile replicas if forward writes to buffers that they share."""
    wanted: Optional[bool] = config.replication.broadcast_buffers
    origin = "replication.broadcast_buffers"
    if wanted is None:
        wanted = settings.argument("broadcastBuffers")
        origin = settings.origin("broadcastBuffers", default=origin)
    several = batch.distinct_replicas > 1 and bool(facts.written_buffers)
    names = ", ".join(facts.written_buffers[:3]) + (", ..." if len(facts.written_buffers) > 3 else "")
    if several and wanted:
        found.problem(
            "PopTorch cannot broadcast buffers to replicas if forward writes to them",
            seen=f"{origin}=true, {batch.replicas} replicas, written: {names}",
            fix="replication.broadcast_buffers=false",
            key=origin,
        )
    if config.replication.broadcast_buffers is not None:
        calls.add("broadcastBuffers", config.replication.broadcast_buffers, origin=origin)
    elif several and wanted is None:
        calls.add("broadcastBuffers", False, origin="rule: forward writes to buffers", chosen=False)
    if several and not wanted:
        found.note(
            f"each of the {batch.replicas} replicas keeps its own buffers (broadcastBuffers(False)), because forward "
            f"writes to {names}; those of the first replica are saved, and a resumed run gives them to all"
        )
    if facts.batch_norms and batch.distinct_replicas > 1:
        found.note(
            f"each of the {batch.replicas} replicas keeps its own batch norm statistics; those of the first replica "
            "are evaluated and saved"
        )


def _strategy_call(pipeline: PipelineConfig, layout: Layout, found: Findings) -> Call:
    name, listed = STRATEGIES[pipeline.strategy], layout.listed
    if pipeline.strategy.endswith("phased"):
        return Call(name, () if listed is None else _phases(listed), chain=_phase_setters(pipeline, found))
    if pipeline.liveness is not None or pipeline.separate_backward_phase is not None:
        found.problem(
            "`pipeline.liveness` and `pipeline.separate_backward_phase` are for phased execution only",
            seen=f"pipeline.strategy={pipeline.strategy}",
            fix="pipeline.strategy=serial_phased, or remove both",
            key="pipeline.separate_backward_phase" if pipeline.liveness is None else "pipeline.liveness",
        )
    if listed is not None:
        return Call(name, tuple(_stages(listed)))
    numbering = "AutoIncrement" if layout.auto_increment else "SameAsIpu"
    return Call(name, (Symbol(f"poptorch.AutoStage.{numbering}"),))


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


def _phase_setters(pipeline: PipelineConfig, found: Findings) -> Tuple[Call, ...]:
    calls = []
    liveness = pipeline.liveness
    if liveness is not None and pipeline.strategy == "serial_phased":
        calls.append(Call("setTensorsLiveness", (Symbol(f"poptorch.Liveness.{liveness}"),)))
    elif liveness is not None:
        if liveness not in ("AlwaysLive", "OffChipAfterFwd"):
            found.problem(
                f"parallel phased execution does not support the liveness {liveness}",
                seen=f"pipeline.liveness={liveness}",
                known="AlwaysLive, OffChipAfterFwd",
                fix="pipeline.liveness=OffChipAfterFwd",
                key="pipeline.liveness",
            )
        calls.append(Call("sendTensorsOffChipAfterFwd", (liveness == "OffChipAfterFwd",)))
    if pipeline.separate_backward_phase is not None:
        calls.append(Call("useSeparateBackwardPhase", (pipeline.separate_backward_phase,)))
    return tuple(calls)
