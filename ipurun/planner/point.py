"""From a config and its plan to the planner's own terms: machine, settings and layout."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Tuple

from ipurun.config.schema import RunConfig
from ipurun.plan.types import Plan
from ipurun.planner.hardware import Machine, machine_from
from ipurun.planner.stages import layout_of_blocks
from ipurun.planner.types import Layout, ModelProfile, Settings

__all__ = ["layout_of_plan", "machine_of", "settings_of"]

# Optimizer -> state tensors of one parameter, as keys of their dtypes.
_FIRST, _SECOND = "first_order_momentum_accum_type", "second_order_momentum_accum_type"
_STATE: Mapping[str, Tuple[str, ...]] = {
    "Adam": (_FIRST, _SECOND),
    "AdamW": (_FIRST, _SECOND),
    "LAMB": (_FIRST, _SECOND),
    "RMSprop": (_SECOND,),
}
_SINGLE, _HALF = 4, 2


def machine_of(config: RunConfig) -> Machine:
    """The machine that `machine` describes."""
    return machine_from(dataclasses.asdict(config.machine))


def settings_of(config: RunConfig, plan: Plan) -> Settings:
    """What of a training run matters for memory and time."""
    batch = plan.training
    memory = config.memory
    state_bytes, tensors = _state(plan.optimizer.path.rpartition(".")[2], plan.optimizer.kwargs)
    weight_bytes = _HALF if plan.precision == "16.16" else _SINGLE
    accumulator = _bytes_of(plan.optimizer.kwargs.get("accum_type"), weight_bytes)
    on_chip = memory.optimizer_state.on_chip
    # Sharded state lives off chip unless the config says otherwise: that is PopTorch's default location of it.
    sharded = bool(config.replication.tensor_sharding or memory.optimizer_state.sharded)
    return Settings(
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation=batch.gradient_accumulation,
        replicas=batch.replicas,
        device_iterations=batch.device_iterations,
        training=True,
        strategy=config.pipeline.strategy,
        recompute=_recompute(config, plan),
        compute_bytes=_HALF if plan.precision.startswith("16") else _SINGLE,
        partials_bytes=_HALF if config.partials == "half" else _SINGLE,
        optimizer=plan.optimizer.path.rpartition(".")[2],
        state_bytes=state_bytes,
        state_tensors=tensors,
        accumulator_bytes=float(accumulator) if batch.gradient_accumulation > 1 else 0.0,
        state_on_chip=on_chip is not False,
        state_sharded=sharded,
        weights_on_chip=memory.weights.on_chip is not False,
        weights_sharded=bool(memory.weights.sharded),
        accumulators_on_chip=memory.accumulators.on_chip is not False,
        activations_on_chip=memory.activations.on_chip is not False,
        available_proportion=_proportions(memory.available_proportion, plan.devices.per_replica),
        serialized={item.module: item.factor for item in plan.serialized},
        io_tiles=memory.io_tiles or 0,
        prefetch_depth=memory.prefetch_depth or 2,
        returned=_returned(config, plan),
    )


def layout_of_plan(profile: ModelProfile, plan: Plan) -> Layout:
    """Which operation runs where, as the plan's blocks say."""
    blocks = [(placement.module, placement.ipu) for placement in plan.placements]
    return layout_of_blocks(profile, blocks, plan.recompute)


def _state(optimizer: str, arguments: Mapping[str, Any]) -> Tuple[float, int]:
    """Bytes of state of one parameter value, and tensors of state of one parameter."""
    kinds = list(_STATE.get(optimizer, ()))
    if optimizer == "SGD" and arguments.get("momentum"):
        kinds.append("velocity_accum_type")
    if optimizer == "RMSprop":
        kinds += [_FIRST] * bool(arguments.get("momentum")) + [_FIRST] * bool(arguments.get("centered"))
    return float(sum(_bytes_of(arguments.get(kind), _SINGLE) for kind in kinds)), len(kinds)


def _bytes_of(dtype: Any, otherwise: int) -> int:
    text = "" if dtype is None else str(dtype)
    return _HALF if text.endswith("16") else _SINGLE if text else otherwise


def _recompute(config: RunConfig, plan: Plan) -> str:
    mode = config.recompute.mode
    if mode is None:
        # PopTorch recomputes by itself where a model is pipelined over several IPUs.
        pipelined = config.pipeline.strategy == "pipelined" and plan.stages > 1
        return "checkpoints" if pipelined else "none"
    return {"none": "none", "norm_only": "norm_only"}.get(mode, "checkpoints")


def _proportions(value: Any, ipus: int) -> Tuple[float, ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        by_name: Dict[str, float] = {str(name): float(share) for name, share in value.items()}
        listed = [by_name.get(f"IPU{ipu}", 0.6) for ipu in range(ipus)]
        return tuple(listed)
    if isinstance(value, (list, tuple)):
        return tuple(float(share) for share in value)
    return (float(value),)


def _returned(config: RunConfig, plan: Plan) -> float:
    batches = plan.training.gradient_accumulation * plan.training.device_iterations
    if plan.output_mode == "every_n":
        return 1 / config.output.every
    return 1.0 if plan.output_mode == "all" else 1 / batches
