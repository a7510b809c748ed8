"""What one operation costs on one IPU: seconds forward and backward, and temporary bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Set, Tuple

from ipurun.estimate.hardware import Machine
from ipurun.estimate.products import Shape, backward_shapes, forward_shape, plan_product
from ipurun.estimate.types import Settings
from ipurun.inspect.traced_model import ModelProfile, OpProfile

__all__ = ["OpCost", "costs_by_ipu", "op_costs", "proportion_of", "serial_parts"]

# Work per value, forward and backward, in units of an addition: reading, writing and one instruction. Statistics come
# before what uses them, so norms and softmax go over their data several times; functions such as exp take the
# time of several additions.
_WORK: Dict[str, Tuple[float, float]] = {
    "elementwise": (1.0, 1.0),
    "copy": (1.0, 1.0),
    "gather": (1.0, 1.0),
    "pool": (2.0, 2.0),
    "reduce": (1.0, 1.0),
    "softmax": (8.0, 4.0),  # maximum, exp, sum, division; product, sum, difference, product
    "norm": (6.0, 8.0),  # mean, variance, normalisation, scale and shift; two sums more going back
}
_WORK_BY_NAME: Dict[str, Tuple[float, float]] = {
    "gelu": (6.0, 8.0),
    "silu": (5.0, 6.0),
    "tanh": (4.0, 2.0),
    "sigmoid": (4.0, 2.0),
    "exp": (4.0, 1.0),
    "log": (4.0, 1.0),
    "erf": (6.0, 6.0),
    "hardswish": (3.0, 3.0),
    "native_dropout": (4.0, 4.0),
}
# A dropout is one operation on the device: random numbers, compared and multiplied, drawn again going back.
_DROPOUT = (3.0, 3.0)
# A permutation moves nothing by itself: what reads it next exchanges its operands anyway.
_REARRANGEMENTS = frozenset(["clone", "contiguous"])


@dataclass(frozen=True)
class OpCost:
    """What one operation takes for one micro-batch.

    Args:
        forward: Seconds.
        backward: Seconds of its share of the backward pass.
        temporary: Bytes on the whole chip while it runs, its operands and results apart.
    """

    forward: float
    backward: float
    temporary: float


_FREE = OpCost(0.0, 0.0, 0.0)


def op_costs(profile: ModelProfile, machine: Machine, settings: Settings, proportion: float) -> List[OpCost]:
    """The cost of every operation of a profile.

    Args:
        profile: The model.
        machine: The device.
        settings: Precision, serialisation, and shares of tile memory of single modules.
        proportion: Share of tile memory for temporaries of all other matmuls and convolutions.
    """
    known: Dict[Tuple[str, int, int, int, float, bool, bool], OpCost] = {}
    masks = _dropout_masks(profile)
    costs = []
    for op in profile.ops:
        if op.kind == "view" or op.index in masks or op.name in _REARRANGEMENTS:
            costs.append(_FREE)
            continue
        is_dropout = not masks.isdisjoint(op.inputs)
        share = settings.module_proportions.get(op.module, proportion)
        parts = serial_parts(op, settings)
        key = (op.signature, op.gradients, op.traffic_bytes, parts, share, is_dropout, op.is_batched)
        if key not in known:
            known[key] = _cost(op, machine, settings, share, is_dropout)
        costs.append(known[key])
    return costs


def _dropout_masks(profile: ModelProfile) -> Set[int]:
    """Operations that draw the mask of a dropout and scale it: the device does both while it multiplies."""
    masks: Set[int] = set()
    for op in profile.ops:
        if op.name == "bernoulli_" or (op.name == "div_" and op.index - 1 in masks):
            masks.add(op.index)
    return masks


def costs_by_ipu(profile: ModelProfile, machine: Machine, settings: Settings, num_ipus: int) -> List[List[OpCost]]:
    """For each IPU, the cost that every operation would have there."""
    known: Dict[float, List[OpCost]] = {}
    by_ipu = []
    for ipu in range(num_ipus):
        proportion = proportion_of(settings, machine, ipu)
        if proportion not in known:
            known[proportion] = op_costs(profile, machine, settings, proportion)
        by_ipu.append(known[proportion])
    return by_ipu


def proportion_of(settings: Settings, machine: Machine, ipu: int) -> float:
    """Share of tile memory for matmul and convolution temporaries on an IPU."""
    given = settings.available_proportion
    return given[min(ipu, len(given) - 1)] if given else machine.default_proportion


def _cost(op: OpProfile, machine: Machine, settings: Settings, proportion: float, is_dropout: bool) -> OpCost:
    overhead = machine.op_cycles / machine.clock_hz
    if op.dims:
        return _product_cost(op, machine, settings, proportion, overhead)
    forward, backward = _DROPOUT if is_dropout else _WORK_BY_NAME.get(op.name, _WORK[op.kind])
    moving = machine.exchange_bytes_per_cycle * machine.exchange_efficiency
    rate = moving if op.kind in ("copy", "gather") else machine.vector_bytes_per_cycle
    once = op.traffic_bytes / (rate * machine.tiles * machine.clock_hz)
    # The gradient of a weight in another precision is cast while it is accumulated.
    is_weight_cast = op.kind == "copy" and not op.is_batched
    back = backward * once + overhead if op.gradients and settings.training and not is_weight_cast else 0.0
    return OpCost(forward * once + overhead, back, 0.0)


def _product_cost(op: OpProfile, machine: Machine, settings: Settings, proportion: float, overhead: float) -> OpCost:
    parts = serial_parts(op, settings)
    has_weight = bool(op.parameters)
    wanted = [forward_shape(op.dims, has_weight)]
    if settings.training and op.gradients:
        data, weight = backward_shapes(op.dims, has_weight)
        wanted += [data, weight] if op.gradients > 1 else [weight if op.parameters else data]
    seconds, temporary = [], 0.0
    for shape in wanted:
        narrower = _serialised(shape, parts)
        planned = plan_product(machine, narrower, op.element_bytes, settings.partials_bytes, proportion)
        seconds.append(parts * (planned.cycles / machine.clock_hz + overhead))
        temporary = max(temporary, planned.tile_bytes * machine.tiles)
    return OpCost(seconds[0], sum(seconds[1:]), temporary)


def _serialised(shape: Shape, parts: int) -> Shape:
    return shape._replace(columns=max(1, -(-shape.columns // parts))) if parts > 1 else shape


def serial_parts(op: OpProfile, settings: Settings) -> int:
    """Parts that a serialised matmul is done in."""
    if not op.dims:
        return 1
    return next(
        (
            parts
            for module, parts in settings.serialized.items()
            if op.module == module or op.module.startswith(module + ".")
        ),
        1,
    )
