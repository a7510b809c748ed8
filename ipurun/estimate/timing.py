"""Time: what a stage computes, how the pipeline adds it up, and what a weight update costs beside it."""

from __future__ import annotations

import dataclasses
from typing import List, Tuple

from ipurun.estimate.costs import costs_by_ipu
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import ParameterShare, StageMemory, parameter_shares, stage_memories
from ipurun.estimate.stages import boundary_values
from ipurun.estimate.types import IpuTime, Settings, StageLayout, TimeEstimate
from ipurun.inspect.traced_model import TracedModel

__all__ = ["estimate_time"]


def estimate_time(profile: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> TimeEstimate:
    """Seconds of one weight update (of one batch in inference), and the throughput that follows."""
    stages = _stage_seconds(profile, layout, settings, machine)
    received = boundary_values(profile, layout)
    shares = parameter_shares(profile, layout, settings)
    streaming = _streaming(profile, shares, layout, settings, machine)
    ipus = _ipu_times(stages, received, streaming, layout, settings, machine)
    cycle, cycles, bubble = _cycles(ipus, layout, settings)
    machines = machine.machines(layout.num_ipus * settings.replicas)
    # Data comes in at every cycle, and all IPUs wait for it to be announced.
    cycle += machine.transfer_seconds + _reading(profile, layout, settings, machine)
    # A synchronisation passes from machine to machine, and every replica waits for it.
    cycle *= 1 + machine.machine_loss * (machines - 1)
    compute = cycle * cycles
    all_reduce = _all_reduce(shares, settings, machine)
    update = _update(shares, settings, machine)
    host = machine.host_call_seconds / settings.device_iterations
    batches = settings.gradient_accumulation if settings.training else 1
    input_bytes = profile.input_bytes * batches * settings.replicas
    output_bytes = profile.output_bytes * batches * settings.replicas * settings.returned
    host_input = (input_bytes + output_bytes) / (machine.host_bytes_per_second * machines)
    samples = settings.micro_batch_size * batches * settings.replicas
    if settings.host_samples_per_second:
        host_input = max(host_input, samples / settings.host_samples_per_second)
    device = compute + all_reduce + update
    total = max(device, host_input) + host
    throughput = samples / total
    peak = machine.peak_flops(settings.compute_bytes) * layout.num_ipus * settings.replicas
    return TimeEstimate(
        ipus=ipus,
        stages=tuple((forward, recompute + backward) for forward, recompute, backward in stages),
        cycle=cycle,
        cycles=cycles,
        bubble=bubble,
        compute=compute,
        all_reduce=all_reduce,
        update=update,
        host=host,
        host_input=host_input,
        total=total,
        samples_per_second=throughput,
        host_bound=host_input + host > device,
        flops_share=throughput * profile.flops_per_sample / peak,
        link_bytes=sum(received) * (2 if settings.training else 1),
        host_bytes_per_second=input_bytes / total,
    )


def _stage_seconds(
    profile: TracedModel, layout: StageLayout, settings: Settings, machine: Machine
) -> List[Tuple[float, float, float]]:
    """(forward, recomputation, backward) of each stage."""
    memories: List[StageMemory] = stage_memories(profile, layout, settings)
    computing = dataclasses.replace(machine, tiles=machine.tiles - settings.io_tiles)
    by_ipu = costs_by_ipu(profile, computing, settings, layout.num_ipus)
    seconds = [[0.0, 0.0, 0.0] for _ in layout.ipu_of_stage]
    for op, stage in zip(profile.ops, layout.stage_of_op):
        cost = by_ipu[layout.ipu_of_stage[stage]][op.index]
        seconds[stage][0] += cost.forward
        seconds[stage][1] += cost.forward if op.index in memories[stage].recomputed else 0.0
        seconds[stage][2] += cost.backward
    return [(forward, recompute, backward) for forward, recompute, backward in seconds]


def _ipu_times(
    stages: List[Tuple[float, float, float]],
    received: List[int],
    streaming: List[float],
    layout: StageLayout,
    settings: Settings,
    machine: Machine,
) -> Tuple[IpuTime, ...]:
    directions = 2 if settings.training else 1
    times = []
    for ipu in range(layout.num_ipus):
        own = [stage for stage, at in enumerate(layout.ipu_of_stage) if at == ipu]
        moved = sum(received[stage] for stage in own) * directions
        times.append(
            IpuTime(
                ipu=ipu,
                forward=sum(stages[stage][0] for stage in own),
                recompute=sum(stages[stage][1] for stage in own),
                backward=sum(stages[stage][2] for stage in own),
                links=moved / machine.link_bytes_per_second,
                streaming=streaming[ipu],
            )
        )
    return tuple(times)


def _streaming(
    profile: TracedModel, shares: List[ParameterShare], layout: StageLayout, settings: Settings, machine: Machine
) -> List[float]:
    """Seconds that each IPU exchanges with streaming memory for one micro-batch: nothing of it overlaps.

    Weights are read for the forward phase and again for the backward phase; without phases once for both. Activations
    go out after the forward pass and come back for the backward pass.
    """
    passes = 2 if settings.training and settings.strategy.endswith("phased") else 1
    per_ipu = machine.streaming_bytes_per_second / machine.ipus_per_machine
    kept = [0] * layout.num_ipus
    if settings.training and not settings.activations_on_chip:
        for memory, ipu in zip(stage_memories(profile, layout, settings), layout.ipu_of_stage):
            kept[ipu] += memory.kept
    return [
        (passes * share.fetched + 2 * stash) / per_ipu + passes * share.fetches * machine.transfer_seconds
        for share, stash in zip(shares, kept)
    ]


def _reading(profile: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> float:
    """Seconds that the tiles stand still while a micro-batch comes in, where no tiles are set aside for that.

    It waits in the machine's memory, whose rate the replicas on that machine share.
    """
    if settings.io_tiles:
        return 0.0
    readers = min(settings.replicas, max(1, machine.ipus_per_machine // layout.num_ipus))
    return profile.input_bytes * readers / machine.streaming_bytes_per_second


def _cycles(ipus: Tuple[IpuTime, ...], layout: StageLayout, settings: Settings) -> Tuple[float, int, float]:
    """Length of a cycle, cycles of one update, and the share of them that fills and drains the pipeline."""
    micro_batches = settings.gradient_accumulation if settings.training else settings.device_iterations
    if settings.strategy != "pipelined" or layout.num_stages == 1:
        return sum(time.total for time in ipus), micro_batches if settings.training else 1, 0.0
    longest = max(time.total for time in ipus)
    passes = 2 if settings.training else 1
    extra = passes * (layout.num_stages - 1)
    cycles = micro_batches + extra
    if not settings.training:  # the pipeline is filled once for all batches of a host call
        return longest * cycles / micro_batches, 1, extra / cycles
    return longest, cycles, extra / cycles


def _all_reduce(shares: List[ParameterShare], settings: Settings, machine: Machine) -> float:
    """Seconds to sum the gradients of all replicas: each IPU with its like, all at the same time."""
    if not settings.training or settings.replicas < 2:
        return 0.0
    part = 2 * (settings.replicas - 1) / settings.replicas
    largest = max(share.trained for share in shares) * max(settings.accumulator_bytes, settings.compute_bytes)
    return part * largest / machine.all_reduce_bytes_per_second


def _update(shares: List[ParameterShare], settings: Settings, machine: Machine) -> float:
    """Seconds of the optimizer: its arithmetic on chip, and its state to streaming memory and back."""
    if not settings.training:
        return 0.0
    largest = max(share.trained for share in shares)
    vector = machine.vector_bytes_per_cycle * machine.tiles * machine.clock_hz
    # State, accumulator and weight are read and written.
    seconds = 2 * largest * (settings.state_bytes + settings.accumulator_bytes + settings.compute_bytes) / vector
    per_ipu = machine.streaming_bytes_per_second / machine.ipus_per_machine
    streams = max(share.streamed / per_ipu + share.transfers * machine.transfer_seconds for share in shares)
    return seconds + streams
