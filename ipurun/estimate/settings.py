"""Translate a config and its plan to the terms of the estimate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from ipurun.api.calls import Call, last_call
from ipurun.config.schema import RunConfig
from ipurun.estimate.machine import Machine, machine_from
from ipurun.estimate.stages import checkpoint_ops, layout_of_blocks
from ipurun.estimate.types import Settings, StageLayout
from ipurun.inspect.facts import LoadingRate
from ipurun.inspect.traced_model import TracedModel
from ipurun.planning.optimizer import optimizer_state
from ipurun.planning.plan import Plan

__all__ = [
    "Resets",
    "block_checkpoints",
    "layout_of_plan",
    "loading_of",
    "machine_of",
    "phases_of",
    "resets_of",
    "settings_of",
]

# PopART's RecomputationType by number.
_RECOMPUTATION = {0: "none", 1: "checkpoints", 2: "norm_only", 3: "checkpoints", 4: "checkpoints"}
_STRATEGIES = {
    "PipelinedExecution": "pipelined",
    "ShardedExecution": "sharded",
    "SerialPhasedExecution": "serial_phased",
    "ParallelPhasedExecution": "parallel_phased",
}
_UPDATE_FLOPS = {"Adam": 12.0, "AdamW": 14.0, "LAMB": 20.0, "RMSprop": 10.0, "SGD": 4.0}
_DEFAULT_PREFETCH = 1
# PopART leaves smaller tensors on chip and unsharded by default.
_LEAST_OFF_CHIP = 2
_LEAST_BY_KIND = {
    "state": "min_elements_off_chip",
    "weights": "min_weights_off_chip",
    "accumulators": "min_accumulators_off_chip",
}
_LEAST_SHARDED = 8192
_HALF = ("torch.float16", "torch.half", "float16", "half")
# Keys that place modules, apart from the split, with their unset values.
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


def settings_of(plan: Plan, *, training: bool = True, loading: Optional[Mapping[str, Any]] = None) -> Settings:
    """Return the settings of a plan for training or for inference.

    Args:
        plan: The plan.
        training: Whether for training.
        loading: How data is loaded (`loading_of`); None: as fast as it is needed.
    """
    calls = plan.training_options if training else plan.inference_options
    batch = plan.training if training else plan.inference
    compute_bytes = 2 if plan.precision.startswith("16") else 4
    optimizer = _optimizer(plan.optimizer, 2 if plan.precision.endswith("16") else 4)
    return Settings(
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation=batch.gradient_accumulation,
        replicas=batch.replicas,
        instances=plan.instances.count,
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
        **(loading or {}),
        **optimizer,
        **_locations(calls),
    )


def loading_of(
    config: RunConfig, machine: Machine, measured: Optional[LoadingRate], instances: int, is_synthetic: bool
) -> Dict[str, Any]:
    """Return the settings that say how data is loaded.

    Args:
        config: The run.
        machine: The device, whose `host_samples_per_second` comes before a measurement.
        measured: What `ipurun bench` measured. What it measured on a machine without IPUs is converted to the host of
            a Pod, by what a CPU of each takes for the same work.
        instances: Processes that train; each has its own workers.
        is_synthetic: Whether the data is made up, for which loading is not counted unless it was measured.
    """
    workers = config.loader.workers
    found: Dict[str, Any] = {
        "workers": workers,
        "loads_beside": workers > 0 or config.loader.mode != "sync",
        "hosts": max(1, len(config.distributed.hosts)),
    }
    each, cpus, basis = machine.host_samples_per_second, machine.host_cpus, "machine.host_samples_per_second"
    if not each and measured is not None:
        each, cpus, basis = _on_host_of_ipus(measured, machine)
    if each:
        # Instances on the same host share its CPUs.
        cpus = max(1, cpus * min(found["hosts"], instances) // instances)
        processes = min(max(1, workers), cpus)
        found.update(host_samples_per_second=each * processes * instances, host_cpus=cpus, loading_basis=basis)
    return {**found, "is_loading_known": bool(each) or is_synthetic}


def _on_host_of_ipus(measured: LoadingRate, machine: Machine) -> Tuple[float, int, str]:
    """Return the samples per second that one process loads on the host of IPUs, its CPUs, and where that is from."""
    basis = f"measured by ipurun bench on {measured.day}"
    if measured.has_ipus or not machine.host_core_seconds:
        return measured.samples_per_second, measured.cpus, basis
    slower = machine.host_core_seconds / measured.core_seconds
    basis += f" on a CPU that is {slower:.1f} times as fast as those of a Pod's host"
    return measured.samples_per_second / slower, machine.host_cpus, basis


def _optimizer(call: Call, weight_bytes: int) -> Dict[str, Any]:
    name = call.path.rpartition(".")[2]
    kept = optimizer_state(call, weight_bytes)
    return {
        "optimizer": name,
        "state_bytes": float(sum(kept.moments)),
        "state_tensors": len(kept.moments),
        "accumulator_bytes": float(kept.accumulator),
        "always_accumulates": kept.is_combined,
        "update_flops": _UPDATE_FLOPS.get(name, 12.0),
    }


def _strategy(calls: Sequence[Call]) -> str:
    given = last_call("setExecutionStrategy", calls)
    if given is None or not given.args or not isinstance(given.args[0], Call):
        return "pipelined"
    return _STRATEGIES.get(given.args[0].path.rpartition(".")[2], "pipelined")


def phases_of(calls: Sequence[Call]) -> Dict[str, int]:
    """Return the phase of each block id, in phased execution."""
    if not _strategy(calls).endswith("phased"):
        return {}
    given = last_call("setExecutionStrategy", calls)
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
    # PopTorch turns it on for pipelines; elsewhere checkpoints alone have no effect.
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
    phased = _strategy(calls).endswith("phased")  # everything is off chip there by default
    values: Dict[str, Any] = {
        f"{kind}_on_chip": bool(location.get("useOnChipStorage", not phased)) for kind, location in kinds.items()
    }
    values["state_sharded"] = bool(kinds["state"].get("useReplicatedTensorSharding", False))
    values["weights_sharded"] = bool(kinds["weights"].get("useReplicatedTensorSharding", False))
    for kind, name in _LEAST_BY_KIND.items():
        values[name] = int(kinds[kind].get("minElementsForOffChip", _LEAST_OFF_CHIP))
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
    call = last_call(path, calls)
    if call is None or not call.args:
        return None
    given = call.args[0]
    return str(given) if not isinstance(given, (Call, Mapping, int, float)) else given


def _popart(calls: Sequence[Call], option: str) -> Any:
    matching: Iterable[Call] = (call for call in calls if call.path == "_Popart.set" and call.args[0] == option)
    return next((call.args[1] for call in reversed(list(matching))), None)


def machine_of(config: RunConfig) -> Machine:
    """Return the machine that `machine` describes."""
    return machine_from(dataclasses.asdict(config.machine))


def layout_of_plan(traced: TracedModel, plan: Plan, *, training: bool = True) -> StageLayout:
    """Return the layout of the plan's blocks for training or for inference."""
    placements = plan.placements if training else plan.inference_placements
    numbers = phases_of(plan.training_options if training else plan.inference_options)
    phases = {placed.module: numbers[placed.block_id] for placed in placements if placed.block_id in numbers}
    return layout_of_blocks(traced, [(placed.module, placed.ipu) for placed in placements], plan.recompute, phases)


def block_checkpoints(traced: TracedModel, stacks: Mapping[str, Sequence[str]]) -> Tuple[int, ...]:
    """Return the last operations of the layers of repeated stacks, which `recompute.every=block` keeps."""
    layers: List[str] = [layer for stack in stacks.values() for layer in stack]
    return checkpoint_ops(traced, layers)


@dataclass(frozen=True)
class Resets:
    """Overrides that reset keys of a config which conflict with a suggested change.

    Args:
        placement: For another split: other keys that place modules.
        blocks: The same for `pipeline.blocks`, unless the change sets it.
        ipus: For another number of IPUs in a replica.
        batch: For other batch sizes.
    """

    placement: Tuple[str, ...] = ()
    blocks: Tuple[str, ...] = ()
    ipus: Tuple[str, ...] = ()
    batch: Tuple[str, ...] = ()

    def for_ipus(self, ipus: int, proportions: Sequence[float]) -> Tuple[List[str], Tuple[float, ...]]:
        """Return the overrides for another number of IPUs in a replica, and the shares of tile memory that result.

        Shares by IPU are kept if there is one for each IPU; otherwise the first applies to all.
        """
        key, given = "memory.available_proportion", tuple(proportions)
        if len(given) in (0, 1):
            return list(self.ipus), given
        if len(given) == ipus:
            return [override for override in self.ipus if not override.startswith(key)], given
        return [f"{key}={given[0]:g}" if override.startswith(key) else override for override in self.ipus], given[:1]


def resets_of(config: RunConfig) -> Resets:
    """Return the overrides that changes of a config need in addition."""
    pipeline = config.pipeline
    placement = [
        f"pipeline.{key}={unset}" for key, unset in _PLACEMENT.items() if getattr(pipeline, key) not in (None, [], "")
    ]
    ipus = ["replication.factor=null"] if config.replication.factor is not None else []
    if isinstance(config.memory.available_proportion, (list, tuple, dict)):
        ipus.append("memory.available_proportion=null")
    inference = ("device_iterations", "replicas", "split", "layers_per_ipu")
    ipus += [f"inference.{key}=null" for key in inference if getattr(config.inference, key) is not None]
    return Resets(
        tuple(placement),
        ("pipeline.blocks=null",) if pipeline.blocks else (),
        tuple(ipus),
        ("global_batch_size=null",) if config.global_batch_size is not None else (),
    )
