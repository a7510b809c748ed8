"""Memory of each IPU: parameters, activations kept by the pipeline, and temporaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ipurun.estimate.costs import OpCost, costs_by_ipu, parts_of_module, proportion_of, serial_parts
from ipurun.estimate.machine import Machine
from ipurun.estimate.stages import boundary_values, ops_of_stage, received_values
from ipurun.estimate.types import IpuMemory, Settings, StageLayout
from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter

__all__ = [
    "ParameterShare",
    "StageMemory",
    "code_bytes",
    "estimate_memory",
    "in_flight",
    "op_bytes",
    "parameter_shares",
    "programs_of",
    "share_of",
    "stage_memories",
    "uneven_bytes",
]


@dataclass(frozen=True)
class ParameterShare:
    """The parameters of one IPU.

    Args:
        weights: Bytes on chip.
        gradients: Bytes of accumulators on chip.
        state: Bytes of optimizer state on chip.
        trained: Values that are updated.
        streaming: Bytes in streaming memory.
        streamed: Bytes that one update moves to and from streaming memory.
        transfers: Tensors that one update moves.
        fetched: Bytes that one pass over the weights reads from streaming memory.
        fetches: Tensors that one pass reads.
        update: Temporary bytes on chip for the update of the largest parameter.
        loaded: Bytes of the largest weight in streaming memory, which is on chip while it is used.
    """

    weights: int
    gradients: int
    state: int
    trained: int
    streaming: int
    streamed: int
    transfers: int
    fetched: int
    fetches: int
    update: int
    loaded: int = 0

    @property
    def on_chip(self) -> int:
        """Bytes of weights, accumulators and optimizer state on chip."""
        return self.weights + self.gradients + self.state


def parameter_shares(traced: TracedModel, layout: StageLayout, settings: Settings) -> List[ParameterShare]:
    """Return the memory and traffic of the parameters of every IPU."""
    owned: List[List[TracedParameter]] = [[] for _ in range(layout.num_ipus)]
    for parameter in traced.parameters:
        for ipu in {layout.ipu_of_op(op) for op in parameter.ops}:
            owned[ipu].append(parameter)
    return [share_of(parameters, settings, traced) for parameters in owned]


def _update_parts(parameter: TracedParameter, settings: Settings, traced: TracedModel) -> int:
    """Return the number of parts in which a parameter is updated: those of a serialised matmul or embedding."""
    if not settings.serialized:
        return 1
    readers = [traced.ops[op].module for op in parameter.ops]
    return max(parts_of_module(name, settings) for name in (parameter.name, *readers))


def share_of(parameters: Sequence[TracedParameter], settings: Settings, traced: TracedModel) -> ParameterShare:
    """Return the memory and traffic of parameters on one IPU."""
    names = ("weights", "gradients", "state", "streaming", "streamed", "transfers", "fetched", "fetches")
    totals: Dict[str, float] = dict.fromkeys(names, 0.0)
    trained, update, loaded = 0, 0.0, 0
    for parameter in parameters:
        count = parameter.elements if parameter.trainable and settings.training else 0
        trained += count
        parts = settings.sharding_replicas if parameter.elements >= settings.min_elements_sharded else 1
        weight_parts = parts if settings.weights_sharded else 1
        if settings.weights_on_chip or parameter.elements < settings.min_weights_off_chip:
            totals["weights"] += parameter.num_bytes / weight_parts
            update = max(update, parameter.num_bytes if weight_parts > 1 else 0.0)
        else:
            totals["streaming"] += parameter.num_bytes / weight_parts
            totals["fetched"] += parameter.num_bytes / weight_parts
            totals["fetches"] += 1
            totals["streamed"] += 2 * parameter.num_bytes / weight_parts
            totals["transfers"] += 2
            loaded = max(loaded, parameter.num_bytes)
        if not count:
            continue
        accumulator = count * settings.gradient_bytes
        if settings.accumulators_on_chip or parameter.elements < settings.min_accumulators_off_chip:
            totals["gradients"] += accumulator
        else:
            totals["streaming"] += accumulator
            totals["streamed"] += 2 * accumulator * settings.gradient_accumulation
            totals["transfers"] += 2 * settings.gradient_accumulation
        state = count * settings.state_bytes / (parts if settings.state_sharded else 1)
        if settings.state_on_chip or parameter.elements < settings.min_elements_off_chip:
            totals["state"] += state
        else:
            totals["streaming"] += state
            update_parts = _update_parts(parameter, settings, traced)
            totals["streamed"] += 2 * state
            totals["transfers"] += 2 * settings.state_tensors * update_parts
            update = max(update, state / update_parts)
    whole = {name: round(size) for name, size in totals.items()}
    return ParameterShare(trained=trained, update=round(update), loaded=loaded, **whole)


def in_flight(stage: int, num_stages: int, settings: Settings) -> int:
    """Return the number of micro-batches between the forward and the backward pass of a stage."""
    if settings.strategy != "pipelined" or not settings.training:
        return 1
    return 2 * (num_stages - stage) - 1


def estimate_memory(
    traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine
) -> Tuple[IpuMemory, ...]:
    """Return the memory of every IPU of one replica."""
    shares = parameter_shares(traced, layout, settings)
    activations = stage_memories(traced, layout, settings)
    received = boundary_values(traced, layout)
    costs = costs_by_ipu(traced, machine, settings, layout.num_ipus)
    ipus = []
    for ipu, share in enumerate(shares):
        stages = [stage for stage, at in enumerate(layout.ipu_of_stage) if at == ipu]
        ops = [op for stage in stages for op in ops_of_stage(traced, layout, stage)]
        stash = sum(activations[stage].kept * in_flight(stage, layout.num_stages, settings) for stage in stages)
        streaming = share.streaming
        if not settings.activations_on_chip:
            streaming += stash
            stash = max((activations[stage].kept for stage in stages), default=0)
        fetched, accumulated = _of_largest_phase(traced, layout, settings, stages)
        at_once = [_most_at_once(traced, layout, activations, settings, costs, stage) for stage in stages]
        temporary = max(at_once, default=0)
        allowed = 0.0
        if not settings.training:
            most = [_most_at_once(traced, layout, activations, settings, costs, stage, machine) for stage in stages]
            allowed = max(most, default=0) - temporary
        # Weights are updated when the pipeline is empty: state replaces activations.
        temporary = max(temporary, share.update - stash)
        if not layout.phase_of_stage:  # the weights of phases are counted as such
            temporary += share.loaded
        io = _transfers(traced, layout, settings, stages) + sum(received[stage] for stage in stages)
        code = _code(ops, settings, machine)
        ipus.append(
            IpuMemory(
                ipu=ipu,
                weights=share.weights + fetched + traced.buffers_bytes // layout.num_ipus,
                gradients=share.gradients + accumulated,
                optimizer_state=share.state,
                activations=stash,
                temporary=round(temporary),
                io=io,
                code=code,
                limit=machine.memory_bytes,
                imbalance=round(uneven_bytes(code, machine)),
                streaming=streaming,
                allowed=round(allowed),
            )
        )
    return tuple(ipus)


def _most_at_once(
    traced: TracedModel,
    layout: StageLayout,
    memories: Sequence[StageMemory],
    settings: Settings,
    costs: Sequence[Sequence[OpCost]],
    stage: int,
    allowed_on: Optional[Machine] = None,
) -> float:
    """Return the most bytes that an operation of a stage needs, together with the values that wait beside it.

    Args:
        traced: The model.
        layout: Its stages.
        memories: The activations of every stage.
        settings: How it runs.
        costs: For each IPU the cost of every operation there.
        stage: The stage.
        allowed_on: If given, temporaries of products take all that they may on this device.
    """
    ipu = layout.ipu_of_stage[stage]
    most = 0.0
    for op, beside in zip(ops_of_stage(traced, layout, stage), memories[stage].beside):
        needed = beside + op_bytes(traced, op, settings, costs[ipu])
        if allowed_on is not None and op.dims:
            share = settings.module_proportions.get(op.module) or proportion_of(settings, allowed_on, ipu)
            needed += max(0.0, share * allowed_on.memory_bytes - costs[ipu][op.index].temporary)
        most = max(most, needed)
    return most


def _of_largest_phase(
    traced: TracedModel, layout: StageLayout, settings: Settings, stages: Sequence[int]
) -> Tuple[int, int]:
    """Return the bytes of weights and accumulators brought on chip by the phase that needs most."""
    by_phase: Dict[int, Set[int]] = {}
    for stage in stages if layout.phase_of_stage else ():
        by_phase.setdefault(layout.phase_of_stage[stage], set()).add(stage)
    weights = gradients = 0
    for running in by_phase.values():
        used = [item for item in traced.parameters if any(layout.stage_of_op[op] in running for op in item.ops)]
        if not settings.weights_on_chip:
            moved = (item.num_bytes for item in used if item.elements >= settings.min_weights_off_chip)
            weights = max(weights, sum(moved))
        if settings.training and not settings.accumulators_on_chip:
            least = settings.min_accumulators_off_chip
            trained = sum(item.elements for item in used if item.trainable and item.elements >= least)
            gradients = max(gradients, round(trained * settings.gradient_bytes))
    return weights, gradients


def op_bytes(traced: TracedModel, op: TracedOp, settings: Settings, costs: Sequence[OpCost]) -> float:
    """Return the bytes an operation needs while it runs: operands, results, gradients and temporaries."""
    live, gradient = traced.working_bytes[op.index]
    parts = serial_parts(op, settings) if settings.serialized else 1
    if op.kind == "gather" and settings.gradient_bytes:
        gradient = 0  # the rows that were looked up are added to the accumulator
    crowded = (costs[op.index].crowding - 1) * op.output_bytes
    return live + crowded + (gradient / parts if settings.training else 0) + costs[op.index].temporary


def _transfers(traced: TracedModel, layout: StageLayout, settings: Settings, stages: List[int]) -> int:
    """Return the bytes of host buffers: the first stage reads, the last one returns."""
    size = traced.input_bytes if 0 in stages else 0
    if layout.num_stages - 1 in stages:
        size += round(traced.output_bytes * min(1.0, settings.returned))
    return size


def programs_of(op: TracedOp, settings: Settings) -> int:
    """Return the number of programs of an operation: its forward pass and the gradients of its operands."""
    if op.kind == "view":
        return 0
    return 1 + op.gradients if settings.training else 1


def code_bytes(programs: int, calls: int, machine: Machine) -> float:
    """Return the bytes of vertices, exchange code and control code of distinct programs and their calls."""
    per_tile = machine.code_bytes_per_tile + machine.code_bytes_per_op * programs + machine.code_bytes_per_call * calls
    return per_tile * machine.tiles


def uneven_bytes(code: float, machine: Machine) -> float:
    """Return what the fullest tile holds above the average one, times the number of tiles.

    Poplar spreads tensors evenly; vertices, the exchange's instructions and what small tensors add to them are not.
    """
    return code * machine.code_imbalance + machine.tile_imbalance_bytes * machine.tiles


def _code(ops: List[TracedOp], settings: Settings, machine: Machine) -> int:
    """Return the bytes of code; equal operations share it."""
    distinct = {(op.signature, op.gradients): programs_of(op, settings) for op in ops if op.kind != "view"}
    calls = sum(programs_of(op, settings) for op in ops)
    return round(code_bytes(sum(distinct.values()), calls, machine))


@dataclass(frozen=True)
class StageMemory:
    """Activations of one stage, in bytes for one micro-batch.

    Args:
        kept: Bytes kept for the backward pass, per micro-batch in flight.
        beside: For each operation, the bytes that wait while it runs. In training: what was (re)computed since the last
            checkpoint, up to it; later values do not exist yet in the forward pass, and no longer in the backward pass.
            In inference: the values that wait for later operations.
        recomputed: Operations that run twice.
    """

    kept: int
    beside: Sequence[int]
    recomputed: Set[int]


def stage_memories(traced: TracedModel, layout: StageLayout, settings: Settings) -> List[StageMemory]:
    """Return the activations of every stage."""
    received = received_values(traced, layout)
    uses = {producer: op.index for op in traced.ops for producer in op.inputs}  # the last of each
    last = layout.num_stages - 1
    memories = []
    for stage, producers in enumerate(received):
        ops = ops_of_stage(traced, layout, stage)
        inputs = sum(traced.ops[producer].output_bytes for producer in producers)
        if not settings.training or not traced.training:
            memories.append(StageMemory(0, _waiting(traced, ops, producers, uses), set()))
        elif settings.recompute == "none":
            memories.append(_everything_kept(ops, inputs))
        elif settings.recompute == "norm_only":
            memories.append(_norms_recomputed(ops, inputs))
        else:
            memories.append(_between_checkpoints(ops, set(layout.checkpoints), inputs, stage == last))
    return memories


def _waiting(traced: TracedModel, ops: Sequence[TracedOp], received: Set[int], uses: Mapping[int, int]) -> List[int]:
    """Return for each operation the bytes that wait for later ones while it runs, besides its own operands."""
    live = {producer: traced.ops[producer].output_bytes for producer in received}
    waiting = []
    for op in ops:
        waiting.append(sum(size for producer, size in live.items() if producer not in op.inputs))
        for producer in op.inputs:
            if uses[producer] == op.index:
                live.pop(producer, None)
        if op.index in uses and op.output_bytes:
            live[op.index] = op.output_bytes
    return waiting


def _everything_kept(ops: Sequence[TracedOp], inputs: int) -> StageMemory:
    # Values independent of the data, such as a cast weight, are the same for all micro-batches.
    shared = sum(op.saved_bytes for op in ops if not op.is_batched)
    return StageMemory(sum(op.saved_bytes for op in ops) - shared + inputs, [shared] * len(ops), set())


def _norms_recomputed(ops: Sequence[TracedOp], inputs: int) -> StageMemory:
    """Recompute normalisations and the activation functions after them from their inputs."""
    cheap = [op for op in ops if op.kind in ("norm", "elementwise") and op.saved_bytes]
    saved = sum(op.saved_bytes for op in ops)
    again = sum(op.saved_bytes for op in cheap)
    largest = max((op.saved_bytes for op in cheap), default=0)
    return StageMemory(saved - again + inputs, [largest] * len(ops), {op.index for op in cheap})


def _between_checkpoints(ops: Sequence[TracedOp], checkpoints: Set[int], inputs: int, is_last: bool) -> StageMemory:
    kept, since = inputs, 0
    beside: List[int] = []
    recomputed: Set[int] = set()
    current: List[TracedOp] = []
    for op in ops:
        if op.index in checkpoints:
            beside.append(since)
            kept += op.output_bytes
            recomputed |= _read_again(current)
            since, current = 0, []
        else:
            since += op.saved_bytes
            beside.append(since)
            current.append(op)
    # Results after the last checkpoint of the last stage are used by the backward pass at once.
    return StageMemory(kept, beside, recomputed if is_last else recomputed | _read_again(current))


def _read_again(ops: Sequence[TracedOp]) -> Set[int]:
    """Return the operations between two checkpoints that run again: those that are trained, and what they read.

    PopART computes again only what the backward pass depends on, so nothing of a frozen model in a stage of its own.
    """
    found: Set[int] = set()
    for op in reversed(ops):
        if op.gradients or op.index in found:
            found.add(op.index)
            found.update(op.inputs)
    return found & {op.index for op in ops}
