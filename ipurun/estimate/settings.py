"""A config and its plan in the terms of the estimate, and changes of them as overrides to type."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ipurun.api.calls import Call
from ipurun.config.schema import RunConfig
from ipurun.estimate.machine import Machine, machine_from
from ipurun.estimate.stages import checkpoint_ops, layout_of_blocks
from ipurun.estimate.types import Settings, StageLayout
from ipurun.inspect.traced_model import TracedModel
from ipurun.planning.plan import Plan

__all__ = [
    "Words",
    "block_checkpoints",
    "layout_of_plan",
    "machine_of",
    "phases_of",
    "resized",
    "settings_of",
    "words_of",
]

# PopART's RecomputationType by number.
_RECOMPUTATION = {0: "none", 1: "checkpoints", 2: "norm_only", 3: "checkpoints", 4: "checkpoints"}
_STRATEGIES = {
    "PipelinedExecution": "pipelined",
    "ShardedExecution": "sharded",
    "SerialPhasedExecution": "serial_phased",
    "ParallelPhasedExecution": "parallel_phased",
}
# Optimizer class -> the types that its moments take unless told otherwise, by argument.
_MOMENTS: Mapping[str, Tuple[str, ...]] = {
    "Adam": ("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "AdamW": ("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "LAMB": ("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
    "RMSprop": ("second_order_momentum_accum_type",),
    "SGD": (),
}
_UPDATE_FLOPS = {"Adam": 12.0, "AdamW": 14.0, "LAMB": 20.0, "RMSprop": 10.0, "SGD": 4.0}
_DEFAULT_PREFETCH = 1
# PopART leaves smaller tensors where they are, unless told otherwise.
_LEAST_OFF_CHIP = 2
_LEAST_SHARDED = 8192


def settings_of(plan: Plan, *, training: bool = True, host_samples_per_second: Optional[float] = None) -> Settings:
    """The settings of a plan's training, or of its inference.

    Args:
        plan: The plan.
        training: Which of the two.
        host_samples_per_second: What the host can load and prepare, where it is known.
    """
    calls = plan.training_options if training else plan.inference_options
    batch = plan.training if training else plan.inference
    compute_bytes = 2 if plan.precision.startswith("16") else 4
    optimizer = _optimizer(plan.optimizer, batch.gradient_accumulation, 2 if plan.precision.endswith("16") else 4)
    return Settings(
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation=batch.gradient_accumulation,
        replicas=batch.replicas,
        device_iterations=batch.device_iterations,
        training=training,
        compute_bytes=compute_bytes,
        partials_bytes=2 if _argument(calls, "Precision.setPartialsType") in _HALF else 4,
        strategy=_strategy(calls),
        recompute=_recomputation(plan, calls) if training else "none",
        available_proportion=_proportions(calls),
        module_proportions=plan.module_proportions,
        serialized={item.module: item.factor for item in plan.serialized},
        io_tiles=int(_argument(calls, "TensorLocations.numIOTiles") or 0),
        prefetch_depth=int(_popart(calls, "defaultPrefetchBufferingDepth") or _DEFAULT_PREFETCH),
        returned=1.0 if plan.output_mode == "all" or not training else 1 / batch.gradient_accumulation,
        host_samples_per_second=host_samples_per_second,
        **optimizer,
        **_locations(calls),
    )


_HALF = ("torch.float16", "torch.half")


def _optimizer(call: Call, accumulation: int, weight_bytes: int) -> Dict[str, Any]:
    name = call.path.rpartition(".")[2]
    moments = [_type_bytes(call.kwargs.get(argument)) for argument in _MOMENTS.get(name, _MOMENTS["Adam"])]
    accumulator = _type_bytes(call.kwargs.get("accum_type")) if accumulation > 1 else 0
    if name == "SGD" and call.kwargs.get("momentum"):
        if call.kwargs.get("use_combined_accum"):
            accumulator = weight_bytes  # one buffer is velocity and accumulator
        else:
            moments.append(_type_bytes(call.kwargs.get("velocity_accum_type")))
    if name == "RMSprop":
        extra = [key for key in ("momentum", "centered") if call.kwargs.get(key)]
        moments += [_type_bytes(call.kwargs.get("first_order_momentum_accum_type"))] * len(extra)
    return {
        "optimizer": name,
        "state_bytes": float(sum(moments)),
        "state_tensors": len(moments),
        "accumulator_bytes": float(accumulator),
        "update_flops": _UPDATE_FLOPS.get(name, 12.0),
    }


def _type_bytes(given: Any) -> int:
    """Accumulators and moments are float32 unless told otherwise."""
    return 2 if str(given) in _HALF or str(given) in ("float16", "half") else 4


def _strategy(calls: Sequence[Call]) -> str:
    given = _last(calls, "setExecutionStrategy")
    if given is None or not given.args or not isinstance(given.args[0], Call):
        return "pipelined"
    return _STRATEGIES.get(given.args[0].path.rpartition(".")[2], "pipelined")


def phases_of(calls: Sequence[Call]) -> Dict[str, int]:
    """Block id -> its phase, in phased execution."""
    if not _strategy(calls).endswith("phased"):
        return {}
    given = _last(calls, "setExecutionStrategy")
    phases = given.args[0].args if given is not None else ()
    return {block: number for number, phase in enumerate(phases) for block in _block_ids(phase)}


def _block_ids(phase: Any) -> List[str]:
    """Return the block ids in a phase or stage, which may be an object, a list or one id."""
    items = phase.args if isinstance(phase, Call) else phase
    return [items] if isinstance(items, str) else [block for item in items for block in _block_ids(item)]


def _recomputation(plan: Plan, calls: Sequence[Call]) -> str:
    given = _popart(calls, "autoRecomputation")
    if given is not None:
        return _RECOMPUTATION.get(int(given), "checkpoints")
    # PopTorch turns it on for pipelines by itself; elsewhere checkpoints alone do nothing.
    pipelined = plan.devices.per_replica > 1 and _strategy(calls) == "pipelined"
    return "checkpoints" if pipelined else "none"


def _proportions(calls: Sequence[Call]) -> Tuple[float, ...]:
    given = _argument(calls, "setAvailableMemoryProportion")
    if not isinstance(given, Mapping) or not given:
        return ()
    by_ipu = {int(str(name)[3:]): float(share) for name, share in given.items()}
    return tuple(by_ipu.get(ipu, min(by_ipu.values())) for ipu in range(max(by_ipu) + 1))


def _locations(calls: Sequence[Call]) -> Dict[str, Any]:
    kinds = {
        "state": _location(calls, "TensorLocations.setOptimizerLocation"),
        "weights": _location(calls, "TensorLocations.setWeightLocation"),
        "accumulators": _location(calls, "TensorLocations.setAccumulatorLocation"),
        "activations": _location(calls, "TensorLocations.setActivationLocation"),
    }
    phased = _strategy(calls).endswith("phased")  # where everything is off chip unless told otherwise
    values: Dict[str, Any] = {
        f"{kind}_on_chip": bool(location.get("useOnChipStorage", not phased)) for kind, location in kinds.items()
    }
    values["state_sharded"] = bool(kinds["state"].get("useReplicatedTensorSharding", False))
    values["weights_sharded"] = bool(kinds["weights"].get("useReplicatedTensorSharding", False))
    values["min_elements_off_chip"] = int(kinds["state"].get("minElementsForOffChip", _LEAST_OFF_CHIP))
    values["min_elements_sharded"] = int(kinds["state"].get("minElementsForReplicatedTensorSharding", _LEAST_SHARDED))
    return values


def _location(calls: Sequence[Call], path: str) -> Dict[str, Any]:
    given = _argument(calls, path)
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, Call):
        return {}
    return {setter.path: setter.args[0] if setter.args else True for setter in given.chain}


def _argument(calls: Sequence[Call], path: str) -> Any:
    call = _last(calls, path)
    if call is None or not call.args:
        return None
    given = call.args[0]
    return str(given) if not isinstance(given, (Call, Mapping, int, float)) else given


def _popart(calls: Sequence[Call], option: str) -> Any:
    matching: Iterable[Call] = (call for call in calls if call.path == "_Popart.set" and call.args[0] == option)
    return next((call.args[1] for call in reversed(list(matching))), None)


def _last(calls: Sequence[Call], path: str) -> Optional[Call]:
    return next((call for call in reversed(calls) if call.path == path), None)


def machine_of(config: RunConfig) -> Machine:
    """The machine that `machine` describes."""
    return machine_from(dataclasses.asdict(config.machine))


def layout_of_plan(profile: TracedModel, plan: Plan, *, training: bool = True) -> StageLayout:
    """Which operation runs where, as the plan's blocks for training or for inference say."""
    placements = plan.placements if training else plan.inference_placements
    numbers = phases_of(plan.training_options if training else plan.inference_options)
    phases = {placed.module: numbers[placed.block_id] for placed in placements if placed.block_id in numbers}
    return layout_of_blocks(profile, [(placed.module, placed.ipu) for placed in placements], plan.recompute, phases)


def block_checkpoints(profile: TracedModel, stacks: Mapping[str, Sequence[str]]) -> Tuple[int, ...]:
    """Operations that end the layers of repeated stacks: what `recompute.every=block` keeps."""
    layers: List[str] = [layer for stack in stacks.values() for layer in stack]
    return checkpoint_ops(profile, layers)


# Keys that place modules, apart from the split itself, with the value that each has when it is not used.
_PLACEMENT = {
    "layers_per_ipu": "[]",
    "layers": "null",
    "embedding": "null",
    "embedding_ipu": "null",
    "head": "null",
    "head_ipu": "null",
    "stages": "[]",
    "phases": "[]",
    "ipus": "null",
}


@dataclass(frozen=True)
class Words:
    """Overrides that undo what stands in a change's way.

    Args:
        placement: For another split: other keys that place modules.
        blocks: The same for `pipeline.blocks`, where the change does not set it.
        resized: For another number of IPUs in a replica.
        batch: For other numbers of a batch.
    """

    placement: Tuple[str, ...] = ()
    blocks: Tuple[str, ...] = ()
    resized: Tuple[str, ...] = ()
    batch: Tuple[str, ...] = ()


def resized(words: Words, proportions: Sequence[float], ipus: int) -> Tuple[List[str], Tuple[float, ...]]:
    """What to type for another number of IPUs in a replica, and the shares of tile memory that then hold.

    A list of shares by IPU stays where it is as long as there are IPUs; else its first one is taken for all.
    """
    key = "memory.available_proportion"
    typed = list(words.resized)
    if len(proportions) in (0, 1):
        return typed, tuple(proportions)
    if len(proportions) == ipus:
        return [word for word in typed if not word.startswith(key)], tuple(proportions)
    return [f"{key}={proportions[0]:g}" if word.startswith(key) else word for word in typed], tuple(proportions[:1])


def words_of(config: RunConfig) -> Words:
    """The overrides that a config makes necessary."""
    pipeline = config.pipeline
    placement = [
        f"pipeline.{key}={empty}" for key, empty in _PLACEMENT.items() if getattr(pipeline, key) not in (None, [], "")
    ]
    resized = []
    if config.replication.factor is not None:
        resized.append("replication.factor=null")
    if isinstance(config.memory.available_proportion, (list, tuple, dict)):
        resized.append("memory.available_proportion=null")
    for key in ("device_iterations", "replicas", "split", "layers_per_ipu"):
        if getattr(config.inference, key) is not None:
            resized.append(f"inference.{key}=null")
    return Words(
        tuple(placement),
        ("pipeline.blocks={}",) if pipeline.blocks else (),
        tuple(resized),
        ("global_batch_size=null",) if config.global_batch_size is not None else (),
    )
