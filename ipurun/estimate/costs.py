"""Cost of one operation on one IPU: seconds forward and backward, and temporary bytes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Dict, List, NamedTuple, Optional, Tuple

from ipurun.estimate.machine import Machine
from ipurun.estimate.types import Settings
from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter

__all__ = [
    "OpCost",
    "Product",
    "Shape",
    "backward_shapes",
    "costs_by_ipu",
    "equal_parts",
    "forward_shape",
    "has_thin_groups",
    "op_costs",
    "parts_of_module",
    "parts_of_readers",
    "plan_product",
    "proportion_of",
    "serial_parts",
]

# Work per value, forward and backward, in units of an addition: reading, writing and one instruction. Norms and softmax
# pass over their data several times, because they need statistics first; functions such as exp take several additions.
_WORK: Dict[str, Tuple[float, float]] = {
    "elementwise": (1.0, 1.0),
    "copy": (1.0, 1.0),
    "gather": (1.0, 1.0),
    "pool": (2.0, 2.0),
    "reduce": (1.0, 1.0),
    "softmax": (8.0, 4.0),  # maximum, exp, sum, division; product, sum, difference, product
    "norm": (6.0, 8.0),  # mean, variance, normalisation, scale and shift; two more sums backward
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
# A dropout is one operation on the device: random numbers, compared and multiplied, drawn again for the backward pass.
_DROPOUT = (3.0, 3.0)
# A permutation moves nothing: the operation that reads it exchanges its operands anyway.
_REARRANGEMENTS = frozenset(["clone", "contiguous"])


@dataclass(frozen=True)
class OpCost:
    """Cost of one operation for one micro-batch.

    Args:
        forward: Seconds.
        backward: Seconds of its share of the backward pass.
        temporary: Bytes on the whole chip while it runs, besides its operands and results.
        crowding: Tiles of the chip for each tile that holds a part of its result.
    """

    forward: float
    backward: float
    temporary: float
    crowding: float = 1.0


_FREE = OpCost(0.0, 0.0, 0.0)


def op_costs(traced: TracedModel, machine: Machine, settings: Settings, proportion: float) -> List[OpCost]:
    """Return the cost of every operation of a model.

    Args:
        traced: The model.
        machine: The device.
        settings: Precision, serialisation, and shares of tile memory by module.
        proportion: Share of tile memory for temporaries of other matmuls and convolutions.
    """
    apart = _costed_apart(traced, settings)
    key = (machine, settings.training, settings.partials_bytes, proportion, tuple(apart.items()))
    if key not in traced.known_costs:
        kinds, first = traced.kinds
        by_kind = [_cost(traced, traced.ops[index], machine, settings, proportion, 1) for index in first]
        costs = [by_kind[kind] for kind in kinds]
        for index, (share, parts) in apart.items():
            costs[index] = _cost(traced, traced.ops[index], machine, settings, share or proportion, parts)
        traced.known_costs[key] = costs
    return traced.known_costs[key]


def _costed_apart(traced: TracedModel, settings: Settings) -> Dict[int, Tuple[Optional[float], int]]:
    """Return the operations with a share of tile memory of their own, or in parts; the share is None if it is not."""
    if not settings.module_proportions and not settings.serialized:
        return {}
    found = {op.index: (settings.module_proportions.get(op.module), serial_parts(op, settings)) for op in traced.ops}
    return {index: apart for index, apart in found.items() if apart != (None, 1)}


def costs_by_ipu(traced: TracedModel, machine: Machine, settings: Settings, num_ipus: int) -> List[List[OpCost]]:
    """Return for each IPU the cost that every operation would have there."""
    known: Dict[float, List[OpCost]] = {}
    by_ipu = []
    for ipu in range(num_ipus):
        proportion = proportion_of(settings, machine, ipu)
        if proportion not in known:
            known[proportion] = op_costs(traced, machine, settings, proportion)
        by_ipu.append(known[proportion])
    return by_ipu


def proportion_of(settings: Settings, machine: Machine, ipu: int) -> float:
    """Return the share of tile memory for matmul and convolution temporaries on an IPU."""
    given = settings.available_proportion
    return given[min(ipu, len(given) - 1)] if given else machine.default_proportion


def _cost(
    traced: TracedModel, op: TracedOp, machine: Machine, settings: Settings, proportion: float, parts: int
) -> OpCost:
    cost = _cost_of_step(traced, op, machine, settings, proportion, parts)
    return replace(cost, forward=cost.forward * op.repeats, backward=cost.backward * op.repeats)


def _cost_of_step(
    traced: TracedModel, op: TracedOp, machine: Machine, settings: Settings, proportion: float, parts: int
) -> OpCost:
    if op.kind == "view" or op.index in traced.dropout_masks or op.name in _REARRANGEMENTS:
        return _FREE
    overhead = machine.op_cycles / machine.clock_hz
    if op.dims:
        return _product_cost(op, machine, settings, proportion, parts)
    is_dropout = not traced.dropout_masks.isdisjoint(op.inputs)
    forward, backward = _DROPOUT if is_dropout else _WORK_BY_NAME.get(op.name, _WORK[op.kind])
    moving = machine.exchange_bytes_per_cycle * machine.exchange_efficiency
    rate = moving if op.kind in ("copy", "gather") else machine.vector_bytes_per_cycle
    once = op.traffic_bytes / (rate * machine.tiles * machine.clock_hz)
    # The gradient of a weight in another precision is cast while it is accumulated.
    is_weight_cast = op.kind == "copy" and not op.is_batched
    back = backward * once + overhead if op.gradients and settings.training and not is_weight_cast else 0.0
    return OpCost(forward * once + overhead, back, 0.0)


def _product_cost(op: TracedOp, machine: Machine, settings: Settings, proportion: float, parts: int) -> OpCost:
    overhead = machine.op_cycles / machine.clock_hz
    has_weight = bool(op.parameters)
    wanted = [forward_shape(op.dims, has_weight)]
    if settings.training and op.gradients:
        data, weight = backward_shapes(op.dims, has_weight)
        wanted += [data, weight] if op.gradients > 1 else [weight if op.parameters else data]
    is_batch = op.kind == "matmul" and not has_weight and op.element_bytes * _SIDE == _VECTOR_BYTES
    seconds, temporary, crowding = [], 0.0, 1.0
    for shape in wanted:
        narrower = _serialised(shape, parts)
        planned = plan_product(machine, narrower, op.element_bytes, settings.partials_bytes, proportion)
        cycles = planned.cycles + (_moved_singly(narrower) * _SINGLE_CYCLES / machine.tiles if is_batch else 0.0)
        seconds.append(parts * (cycles / machine.clock_hz + overhead))
        temporary = max(temporary, planned.tile_bytes * machine.tiles)
        if shape is wanted[0]:
            crowding = machine.tiles / planned.tiles
    return OpCost(seconds[0], sum(seconds[1:]), temporary, crowding)


def _serialised(shape: Shape, parts: int) -> Shape:
    return shape._replace(columns=max(1, -(-shape.columns // parts))) if parts > 1 else shape


def serial_parts(op: TracedOp, settings: Settings) -> int:
    """Return the number of parts of a serialised matmul."""
    return parts_of_module(op.module, settings) if op.dims else 1


def parts_of_module(name: str, settings: Settings) -> int:
    """Return the number of parts in which a module computes, or a parameter of it is updated."""
    return next(
        (parts for module, parts in settings.serialized.items() if name == module or name.startswith(module + ".")), 1
    )


_PARTS = (4, 5, 6, 3, 8, 7, 2)  # numbers of parts, in the order in which they are tried


def equal_parts(op: TracedOp) -> Optional[int]:
    """Return a number of equal parts that a matmul can be split into."""
    for side in op.dims[2:4]:  # its columns, or else its depth: no small number divides a vocabulary of 50,257
        found = next((parts for parts in _PARTS if side % parts == 0), None)
        if found is not None:
            return found
    return None


def parts_of_readers(traced: TracedModel, parameter: TracedParameter) -> Dict[str, int]:
    """Return the embeddings and linear layers that read a parameter, and the parts in which each can do so."""
    readers = [traced.ops[op] for op in parameter.ops if traced.ops[op].kind in ("gather", "matmul")]
    parts = {op.module: _PARTS[0] if op.kind == "gather" else equal_parts(op) for op in readers if op.module}
    return {name: number for name, number in parts.items() if number}


# The matrix unit of a tile multiplies blocks of this many columns and this depth.
_BLOCK = 16


class Shape(NamedTuple):
    """A product of rows x depth with depth x columns, for each group and each point of a kernel.

    Points of a kernel share the rows (a convolution slides over its data); in a weight gradient, each point has a
    separate result. Weights are laid out for their products: a tile that is the only one to need a part already has it.
    """

    groups: int
    rows: int
    columns: int
    depth: int
    kernel: int = 1
    is_weight_gradient: bool = False
    is_weight_at_home: bool = False


@dataclass(frozen=True)
class Product:
    """One way to spread a product over the tiles.

    Args:
        cycles: Clock cycles.
        tile_bytes: Temporary memory on each tile.
        tiles: Tiles that compute, and then hold the result.
    """

    cycles: float
    tile_bytes: float
    tiles: int


def forward_shape(dims: Tuple[int, ...], has_weight: bool = False) -> Shape:
    """Return the product of a traced operation with these `dims`; `has_weight`: whether it has a parameter."""
    groups, rows, columns, depth, kernel = dims
    return Shape(groups, rows, columns, depth, kernel, is_weight_at_home=has_weight)


def backward_shapes(dims: Tuple[int, ...], has_weight: bool = False) -> Tuple[Shape, Shape]:
    """Return the products that compute the gradients of its data and of its weight."""
    groups, rows, columns, depth, kernel = dims
    data = Shape(groups, rows, depth, columns, kernel, is_weight_at_home=has_weight)
    weight = Shape(groups, columns, depth, rows, kernel, is_weight_gradient=True)
    return data, weight


def _channels(shape: Shape) -> int:
    """Return the channels of a group: the larger of those that go in and those that come out."""
    return max(shape.columns, shape.rows if shape.is_weight_gradient else shape.depth)


def _merged(shape: Shape) -> Shape:
    """Merge narrow groups (of 4 to 8 channels) to fill a block, most of which then multiplies zeros."""
    return _together(shape, _BLOCK // _channels(shape)) if _channels(shape) < _BLOCK else shape


def _together(shape: Shape, number: int) -> Shape:
    number = min(shape.groups, number)
    if number <= 1:
        return shape
    groups, columns = math.ceil(shape.groups / number), shape.columns * number
    if shape.is_weight_gradient:
        return shape._replace(groups=groups, columns=columns, rows=shape.rows * number)
    return shape._replace(groups=groups, columns=columns, depth=shape.depth * number)


# A tile reads 8 bytes at a time. Groups that are thinner than that (depthwise convolutions) would have to be fed to the
# matrix unit value by value; vector instructions take less. PopLibs counts these cycles for one position and one point
# of the kernel, and for each output channel the second ones, plus one for each vector of input channels.
_VECTOR_BYTES = 8
_POSITION_CYCLES, _DOT_CYCLES = 7.0, 6.0
# For the gradient of such a weight it multiplies and adds vectors of two registers in three cycles.
_VECTORS_ADDED, _ADDING_CYCLES = 2, 3.0


# PopLibs transposes half-precision matrices in blocks of 4 x 4 if both sides are multiples of 4. Otherwise values are
# moved one by one: it counts ten times the cycles, 2.5 of one of the tile's six workers, for each of them.
_SIDE = 4
_SINGLE_CYCLES = 2.5 * 6


def _moved_singly(shape: Shape) -> int:
    """Return the values of operands and results of a batch of products that have a side which is no multiple of 4."""
    if shape.groups == 1:
        return 0
    matrices = ((shape.rows, shape.depth), (shape.depth, shape.columns), (shape.rows, shape.columns))
    return shape.groups * sum(first * second for first, second in matrices if first % _SIDE or second % _SIDE)


def has_thin_groups(op: TracedOp) -> bool:
    """Return whether an operation is a convolution whose groups have fewer channels than a vector."""
    return bool(op.dims) and op.kind == "conv" and _is_thin(forward_shape(op.dims), op.element_bytes)


def _is_thin(shape: Shape, element_bytes: int) -> bool:
    return shape.groups > 1 and _channels(shape) * element_bytes < _VECTOR_BYTES


def _plan_thin_groups(machine: Machine, shape: Shape, element_bytes: int) -> Product:
    """Return the cost of groups of fewer channels than a vector has; all tiles do the same."""
    width = _VECTOR_BYTES // element_bytes
    if shape.is_weight_gradient:
        macs = shape.groups * shape.rows * shape.columns * shape.depth * shape.kernel
        compute = _ADDING_CYCLES * math.ceil(macs / (width * _VECTORS_ADDED * machine.tiles))
        received = (shape.rows + shape.columns) * shape.depth
    else:
        shape = _together(shape, width // _channels(shape))
        each = _POSITION_CYCLES + shape.columns * (_DOT_CYCLES + shape.depth / width)
        compute = each * math.ceil(shape.groups * shape.rows * shape.kernel / machine.tiles)
        received = shape.rows * shape.depth
    tile_bytes = math.ceil(shape.groups * received / machine.tiles) * element_bytes
    exchange = machine.exchange_bytes_per_cycle * machine.exchange_efficiency
    return Product(compute + tile_bytes / exchange, tile_bytes, machine.tiles)


@functools.lru_cache(maxsize=50_000)
def plan_product(machine: Machine, shape: Shape, element_bytes: int, partials_bytes: int, proportion: float) -> Product:
    """Find the fastest way to spread a product over the tiles within a share of their memory.

    Every tile multiplies a part of the rows with a part of the columns over a part of the depth. It first receives
    both operands over the exchange; if the depth is split, partial sums are exchanged and added.

    Args:
        machine: The device.
        shape: The product.
        element_bytes: Size of a value of the operands.
        partials_bytes: Size of partial sums.
        proportion: Share of a tile's memory for temporaries.
    """
    if _is_thin(shape, element_bytes):
        return _plan_thin_groups(machine, shape, element_bytes)
    shape = _merged(shape)
    limit = proportion * machine.tile_bytes
    best: Optional[Product] = None
    for group_parts in sorted({1, min(shape.groups, machine.tiles)}):
        tiles = machine.tiles // group_parts
        rounds = math.ceil(shape.groups / group_parts)
        for column_parts in _parts(math.ceil(shape.columns / _BLOCK), tiles):
            for depth_parts in _parts(math.ceil(shape.depth / _BLOCK), tiles // column_parts):
                row_parts = min(shape.rows, tiles // (column_parts * depth_parts))
                part = shape._replace(
                    groups=1,
                    rows=math.ceil(shape.rows / row_parts),
                    columns=math.ceil(shape.columns / column_parts),
                    depth=math.ceil(shape.depth / depth_parts),
                )
                split = (row_parts, column_parts, depth_parts)
                found = _on_a_tile(machine, part, split, element_bytes, partials_bytes, limit)
                if best is None or found.cycles * rounds < best.cycles:
                    used = group_parts * row_parts * column_parts * depth_parts
                    best = Product(found.cycles * rounds, found.tile_bytes, used)
    assert best is not None
    return best


def _on_a_tile(
    machine: Machine,
    part: Shape,
    split: Tuple[int, int, int],
    element_bytes: int,
    partials_bytes: int,
    limit: float,
) -> Product:
    """Return the cost on one tile, when rows, columns and depth are split into this many parts."""
    macs = machine.macs_per_cycle(element_bytes, partials_bytes)
    is_partial = split[2] > 1
    results, weights = (part.kernel, 1) if part.is_weight_gradient else (1, part.kernel)
    row_bytes = part.rows * part.depth * element_bytes
    column_bytes = part.columns * part.depth * weights * element_bytes
    result_bytes = part.rows * part.columns * results * (partials_bytes if is_partial else element_bytes)
    away = 1 - 1 / split[0] if part.is_weight_at_home else 1.0
    needed = row_bytes + column_bytes * away + result_bytes
    # A part that does not fit is done in turns, each with some of the rows and all columns.
    turns = 1
    if needed > limit:
        copied = column_bytes * away
        turns = math.ceil((needed - copied) / max(limit - copied, 0.1 * limit))
    # A kernel over few channels is laid out along the depth, so that it fills the blocks.
    depth_blocks = min(math.ceil(part.depth / _BLOCK) * part.kernel, math.ceil(part.depth * part.kernel / _BLOCK))
    blocks = math.ceil(part.columns / _BLOCK) * depth_blocks
    multiply = _BLOCK * _BLOCK * part.rows / (macs * machine.product_efficiency)
    compute = blocks * (multiply + turns * machine.block_load_cycles)
    received = _received(row_bytes, turns * column_bytes * away, split, machine.exchange_pair)
    moved = received + (result_bytes if is_partial else 0)
    exchange = machine.exchange_bytes_per_cycle * machine.exchange_efficiency
    return Product(compute + moved / exchange, min(needed, limit), split[0] * split[1] * split[2])


def _received(row_bytes: float, column_bytes: float, split: Tuple[int, int, int], pair: int) -> float:
    """Return the bytes to wait for: an operand that both tiles of a pair need comes over the buses of both."""
    same_rows, same_columns = split[1] >= pair, split[0] >= pair
    rows_together = row_bytes / pair + column_bytes if same_rows else row_bytes + column_bytes
    columns_together = row_bytes + column_bytes / pair if same_columns else row_bytes + column_bytes
    return min(rows_together, columns_together)


def _parts(most: int, tiles: int) -> List[int]:
    """Return numbers of parts to try: about three per octave."""
    most = max(1, min(most, tiles))
    tried, number = {1, most}, 1.0
    while number < most:
        tried.add(int(number))
        number *= 1.26
    return sorted(tried)
