"""Memory of each IPU: what lives there all the time, what the pipeline keeps, and what comes and goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Mapping, Sequence, Set, Tuple

from ipurun.estimate.costs import OpCost, costs_by_ipu, serial_parts
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
    "stage_memories",
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
        transfers: Tensors that it moves.
        fetched: Bytes that one pass over the weights reads from streaming memory.
        fetches: Tensors that it reads.
        update: Bytes on chip that the update of the largest parameter needs beside.
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


def parameter_shares(profile: TracedModel, layout: StageLayout, settings: Settings) -> List[ParameterShare]:
    """What the parameters take on every IPU."""
    owned: List[List[TracedParameter]] = [[] for _ in range(layout.num_ipus)]
    for parameter in profile.parameters:
        for ipu in {layout.ipu_of_op(op) for op in parameter.ops}:
            owned[ipu].append(parameter)
    return [share_of(parameters, settings) for parameters in owned]


def share_of(parameters: Sequence[TracedParameter], settings: Settings) -> ParameterShare:
    """What parameters take on the IPU that has them."""
    names = ("weights", "gradients", "state", "streaming", "streamed", "transfers", "fetched", "fetches")
    totals: Dict[str, float] = dict.fromkeys(names, 0.0)
    trained, update = 0, 0.0
    for parameter in parameters:
        count = parameter.elements if parameter.trainable and settings.training else 0
        trained += count
        parts = settings.replicas if parameter.elements >= settings.min_elements_sharded else 1
        is_small = parameter.elements < settings.min_elements_off_chip
        weight_parts = parts if settings.weights_sharded else 1
        if settings.weights_on_chip or is_small:
            totals["weights"] += parameter.num_bytes / weight_parts
            update = max(update, parameter.num_bytes if weight_parts > 1 else 0.0)
        else:
            totals["streaming"] += parameter.num_bytes / weight_parts
            totals["fetched"] += parameter.num_bytes / weight_parts
            totals["fetches"] += 1
            totals["streamed"] += 2 * parameter.num_bytes / weight_parts
            totals["transfers"] += 2
            update = max(update, parameter.num_bytes)
        if not count:
            continue
        accumulator = count * settings.accumulator_bytes
        if settings.accumulators_on_chip or is_small:
            totals["gradients"] += accumulator
        else:
            totals["streaming"] += accumulator
            totals["streamed"] += 2 * accumulator * settings.gradient_accumulation
            totals["transfers"] += 2 * settings.gradient_accumulation
        state = count * settings.state_bytes / (parts if settings.state_sharded else 1)
        if settings.state_on_chip or is_small:
            totals["state"] += state
        else:
            totals["streaming"] += state
            totals["streamed"] += 2 * state
            totals["transfers"] += 2 * settings.state_tensors
            update = max(update, state)
    return ParameterShare(trained=trained, update=round(update), **{name: round(size) for name, size in totals.items()})


def in_flight(stage: int, num_stages: int, settings: Settings) -> int:
    """Micro-batches that are between the forward and the backward pass of a stage."""
    if settings.strategy != "pipelined" or not settings.training:
        return 1
    return 2 * (num_stages - stage) - 1


def estimate_memory(
    profile: TracedModel, layout: StageLayout, settings: Settings, machine: Machine
) -> Tuple[IpuMemory, ...]:
    """The memory of every IPU of one replica."""
    shares = parameter_shares(profile, layout, settings)
    activations = stage_memories(profile, layout, settings)
    received = boundary_values(profile, layout)
    costs = costs_by_ipu(profile, machine, settings, layout.num_ipus)
    ipus = []
    for ipu, share in enumerate(shares):
        stages = [stage for stage, at in enumerate(layout.ipu_of_stage) if at == ipu]
        ops = [op for stage in stages for op in ops_of_stage(profile, layout, stage)]
        stash = sum(activations[stage].kept * in_flight(stage, layout.num_stages, settings) for stage in stages)
        streaming = share.streaming
        if not settings.activations_on_chip:
            streaming += stash
            stash = max((activations[stage].kept for stage in stages), default=0)
        fetched, accumulated = _of_largest_phase(profile, layout, settings, stages)
        working = max((activations[stage].working for stage in stages), default=0)
        temporary = working + max((op_bytes(profile, op, settings, costs[ipu]) for op in ops), default=0.0)
        # Weights are updated when the pipeline is empty: state takes the place of activations.
        temporary = max(temporary, share.update - stash)
        io = _transfers(profile, layout, settings, stages) + sum(received[stage] for stage in stages)
        ipus.append(
            IpuMemory(
                ipu=ipu,
                weights=share.weights + fetched + profile.buffers_bytes // layout.num_ipus,
                gradients=share.gradients + accumulated,
                optimizer_state=share.state,
                activations=stash,
                temporary=round(temporary),
                io=io,
                code=_code(ops, settings, machine),
                limit=machine.memory_bytes,
                imbalance=round(machine.tile_imbalance_bytes * machine.tiles),
                streaming=streaming,
            )
        )
    return tuple(ipus)


def _of_largest_phase(
    profile: TracedModel, layout: StageLayout, settings: Settings, stages: Sequence[int]
) -> Tuple[int, int]:
    """Weights and accumulators from streaming memory that are on chip while their phase runs: the most of any."""
    by_phase: Dict[int, Set[int]] = {}
    for stage in stages if layout.phase_of_stage else ():
        by_phase.setdefault(layout.phase_of_stage[stage], set()).add(stage)
    weights = gradients = 0
    for running in by_phase.values():
        moved = [
            parameter
            for parameter in profile.parameters
            if parameter.elements >= settings.min_elements_off_chip
            and any(layout.stage_of_op[op] in running for op in parameter.ops)
        ]
        if not settings.weights_on_chip:
            weights = max(weights, sum(parameter.num_bytes for parameter in moved))
        if settings.training and not settings.accumulators_on_chip:
            trained = sum(parameter.elements for parameter in moved if parameter.trainable)
            gradients = max(gradients, round(trained * settings.accumulator_bytes))
    return weights, gradients


def op_bytes(profile: TracedModel, op: TracedOp, settings: Settings, costs: Sequence[OpCost]) -> float:
    """What an operation needs while it runs: operands and results or their gradients, and temporaries."""
    if op.kind == "view":
        return 0.0
    operands = max((profile.ops[index].output_bytes for index in op.inputs), default=0)
    # Operations value by value write over what they read.
    live = max(op.output_bytes, operands) if op.kind == "elementwise" else op.output_bytes + operands
    gradient = 0
    if settings.training and op.gradients:
        gradient = sum(profile.trained_bytes.get(name, 0) for name in op.parameters)
    return live + gradient / serial_parts(op, settings) + costs[op.index].temporary


def _transfers(profile: TracedModel, layout: StageLayout, settings: Settings, stages: List[int]) -> int:
    """Buffers of data from and to the host: the first stage reads, the last one returns."""
    size = profile.input_bytes if 0 in stages else 0
    if layout.num_stages - 1 in stages:
        size += round(profile.output_bytes * min(1.0, settings.returned))
    return size


def programs_of(op: TracedOp, settings: Settings) -> int:
    """Programs that an operation is compiled to: its forward pass and the gradients of its operands."""
    if op.kind == "view":
        return 0
    return 1 + op.gradients if settings.training else 1


def code_bytes(programs: int, calls: int, machine: Machine) -> float:
    """Vertices, exchange code and control code of different programs and of all their calls."""
    per_tile = machine.code_bytes_per_tile + machine.code_bytes_per_op * programs + machine.code_bytes_per_call * calls
    return per_tile * machine.tiles


def _code(ops: List[TracedOp], settings: Settings, machine: Machine) -> int:
    """Code is shared by operations that are equal."""
    distinct = {(op.signature, op.gradients): programs_of(op, settings) for op in ops if op.kind != "view"}
    calls = sum(programs_of(op, settings) for op in ops)
    return round(code_bytes(sum(distinct.values()), calls, machine))


@dataclass(frozen=True)
class StageMemory:
    """Activations of one stage, in bytes for one micro-batch.

    Args:
        kept: What waits for the backward pass, once per micro-batch in flight.
        working: What is computed again, or just computed, at a time: the largest part between checkpoints. In
            inference: what waits beside the operation that runs.
        recomputed: Operations that run twice.
    """

    kept: int
    working: int
    recomputed: Set[int]


def stage_memories(profile: TracedModel, layout: StageLayout, settings: Settings) -> List[StageMemory]:
    """Activations of every stage."""
    received = received_values(profile, layout)
    uses = {producer: op.index for op in profile.ops for producer in op.inputs}  # the last of each
    last = layout.num_stages - 1
    memories = []
    for stage, producers in enumerate(received):
        ops = ops_of_stage(profile, layout, stage)
        inputs = sum(profile.ops[producer].output_bytes for producer in producers)
        if not settings.training or not profile.training:
            memories.append(StageMemory(0, _waiting(profile, ops, producers, uses), set()))
        elif settings.recompute == "none":
            memories.append(_everything_kept(ops, inputs))
        elif settings.recompute == "norm_only":
            memories.append(_norms_recomputed(ops, inputs))
        else:
            memories.append(_between_checkpoints(ops, set(layout.checkpoints), inputs, stage == last))
    return memories


def _waiting(profile: TracedModel, ops: Sequence[TracedOp], received: Set[int], uses: Mapping[int, int]) -> int:
    """Most bytes that wait for later operations while another one runs, its own operands and results apart."""
    live = {producer: profile.ops[producer].output_bytes for producer in received}
    most = 0
    for op in ops:
        most = max(most, sum(size for producer, size in live.items() if producer not in op.inputs))
        for producer in op.inputs:
            if uses[producer] == op.index:
                live.pop(producer, None)
        if op.index in uses and op.output_bytes:
            live[op.index] = op.output_bytes
    return most


def _everything_kept(ops: Sequence[TracedOp], inputs: int) -> StageMemory:
    # What does not depend on the data, such as a weight in another precision, is the same for all micro-batches.
    shared = sum(op.saved_bytes for op in ops if not op.is_batched)
    return StageMemory(sum(op.saved_bytes for op in ops) - shared + inputs, shared, set())


def _norms_recomputed(ops: Sequence[TracedOp], inputs: int) -> StageMemory:
    """Normalisations and activation functions after them are computed again from what came before."""
    cheap = [op for op in ops if op.kind in ("norm", "elementwise") and op.saved_bytes]
    saved = sum(op.saved_bytes for op in ops)
    again = sum(op.saved_bytes for op in cheap)
    return StageMemory(
        saved - again + inputs, max((op.saved_bytes for op in cheap), default=0), {op.index for op in cheap}
    )


def _between_checkpoints(ops: Sequence[TracedOp], checkpoints: Set[int], inputs: int, is_last: bool) -> StageMemory:
    kept = inputs
    segments: List[List[TracedOp]] = []
    current: List[TracedOp] = []
    for op in ops:
        if op.index in checkpoints:
            kept += op.output_bytes
            segments.append(current)
            current = []
        else:
            current.append(op)
    # What follows the last checkpoint of the last stage goes straight into the backward pass.
    recomputed = {op.index for segment in segments for op in segment}
    if not is_last:
        recomputed |= {op.index for op in current}
    working = max((sum(op.saved_bytes for op in segment) for segment in [*segments, current]), default=0)
    return StageMemory(kept, working, recomputed)
