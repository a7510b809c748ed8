"""Time of one weight update: stages, pipeline, gradient all-reduce, optimizer and host."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ipurun.estimate.costs import OpCost, costs_by_ipu, has_thin_groups
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import ParameterShare, StageMemory, parameter_shares, programs_of, stage_memories
from ipurun.estimate.stages import boundary_values
from ipurun.estimate.types import IpuTime, Settings, StageLayout, TimeEstimate
from ipurun.inspect.traced_model import TracedModel

__all__ = ["class_of_seconds", "compile_class", "compile_seconds", "estimate_time"]


def estimate_time(traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> TimeEstimate:
    """Estimate the seconds of one weight update (in inference: of one batch), and the throughput."""
    stages = _stage_seconds(traced, layout, settings, machine)
    received = boundary_values(traced, layout)
    shares = parameter_shares(traced, layout, settings)
    streaming = _streaming(traced, shares, layout, settings, machine)
    ipus = _ipu_times(stages, received, streaming, layout, settings, machine)
    work = _work(stages, ipus, layout)
    schedule = _schedule(work, layout, settings)
    machines = machine.machines(layout.num_ipus * settings.replicas)
    # Every cycle brings in data, and all IPUs wait for its announcement.
    waiting = machine.transfer_seconds + _reading(traced, layout, settings, machine)
    # Where machines wait for each other beyond the sum of gradients, all cycles do.
    loss = 1 + machine.machine_loss * (machines - 1)
    cycle = (schedule.cycle + waiting) * loss
    compute = (schedule.seconds + schedule.cycles * waiting) * loss
    gateways = _gateways(shares, layout, settings, machine)
    all_reduce = _all_reduce(shares, settings, machine) + gateways
    update = _update(shares, layout, settings, machine)
    host = machine.host_call_seconds / settings.device_iterations
    batches = settings.gradient_accumulation if settings.training else 1
    input_bytes = traced.input_bytes * batches * settings.replicas
    output_bytes = traced.output_bytes * batches * settings.replicas * settings.returned
    # A host sends to all its machines over one adapter.
    connection = min(machine.host_bytes_per_second * machines, machine.host_link_bytes_per_second * settings.hosts)
    host_input = sending = (input_bytes + output_bytes) / connection
    samples = settings.micro_batch_size * batches * settings.replicas
    loading = 0.0
    if settings.host_samples_per_second and settings.loads_beside:
        host_input = max(host_input, samples / settings.host_samples_per_second)
    elif settings.host_samples_per_second:  # the process that trains loads in between
        loading = samples / settings.host_samples_per_second
    device = compute + all_reduce + update
    total = max(device, host_input) + host + loading
    throughput = samples / total
    peak = machine.peak_flops(settings.compute_bytes) * layout.num_ipus * settings.replicas
    return TimeEstimate(
        ipus=ipus,
        stages=tuple((forward, recompute + backward) for forward, recompute, backward in stages),
        cycle=cycle,
        cycles=schedule.cycles,
        bubble=schedule.bubble,
        compute=compute,
        all_reduce=all_reduce,
        update=update,
        host=host,
        host_input=host_input,
        total=total,
        samples_per_second=throughput,
        host_bound=host_input + host + loading > device,
        flops_share=throughput * traced.flops_per_sample / peak,
        link_bytes=sum(received) * (2 if settings.training else 1),
        host_bytes_per_second=input_bytes / total,
        loading=loading,
        sending=sending,
        gateways=gateways,
        error=_error(traced, costs_by_ipu(traced, machine, settings, 1)[0]),
        loading_error=1.0 if settings.is_loading_known else _ERROR_OF_LOADING,
    )


# Published runs are within the first factor (docs/explanation/planner.md). That depthwise convolutions take the time of
# vector instructions was checked with a ratio of two throughputs only, not with one of them, and recurrent layers with
# none.
_ERROR = 1.5
_ERROR_UNCHECKED = 2.0
# Published runs with data, whose host was left out of the estimate, are up to 3.1 times slower: this factor beyond the
# first.
_ERROR_OF_LOADING = 2.1
_MATTERS = 0.05  # share of the work


def _error(traced: TracedModel, costs: List[OpCost]) -> float:
    """Return the factor by which a throughput may be wrong, from what a model spends its time on."""
    total = sum(cost.forward + cost.backward for cost in costs)
    unchecked = (op for op in traced.ops if has_thin_groups(op) or op.repeats > 1)
    work = sum(costs[op.index].forward + costs[op.index].backward for op in unchecked)
    return _ERROR_UNCHECKED if work > _MATTERS * total else _ERROR


def _stage_seconds(
    traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine
) -> List[Tuple[float, float, float]]:
    """Return (forward, recomputation, backward) seconds of each stage."""
    memories: List[StageMemory] = stage_memories(traced, layout, settings)
    computing = dataclasses.replace(machine, tiles=machine.tiles - settings.io_tiles)
    by_ipu = costs_by_ipu(traced, computing, settings, layout.num_ipus)
    seconds = [[0.0, 0.0, 0.0] for _ in layout.ipu_of_stage]
    for op, stage in zip(traced.ops, layout.stage_of_op):
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
    traced: TracedModel, shares: List[ParameterShare], layout: StageLayout, settings: Settings, machine: Machine
) -> List[float]:
    """Return the seconds each IPU spends on streaming memory for one micro-batch; none of it overlaps.

    Weights are read for the forward phase and again for the backward phase; without phases, once for both. Activations
    are written after the forward pass and read for the backward pass.
    """
    passes = 2 if settings.training and settings.strategy.endswith("phased") else 1
    per_ipu = machine.streaming_bytes_per_second / machine.ipus_per_machine
    kept = [0] * layout.num_ipus
    if settings.training and not settings.activations_on_chip:
        for memory, ipu in zip(stage_memories(traced, layout, settings), layout.ipu_of_stage):
            kept[ipu] += memory.kept
    return [
        (passes * share.fetched + 2 * stash) / per_ipu + passes * share.fetches * machine.transfer_seconds
        for share, stash in zip(shares, kept)
    ]


def _reading(traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> float:
    """Return the seconds that tiles wait for a micro-batch, if no tiles are set aside for I/O.

    It is read from the machine's memory, whose rate the replicas on that machine share.
    """
    if settings.io_tiles:
        return 0.0
    readers = min(settings.replicas, max(1, machine.ipus_per_machine // layout.num_ipus))
    return traced.input_bytes * readers / machine.streaming_bytes_per_second


def _work(
    stages: Sequence[Tuple[float, float, float]], ipus: Sequence[IpuTime], layout: StageLayout
) -> List[Tuple[float, float]]:
    """Return (forward, backward) seconds of each stage, with its IPU's transfers divided among what the IPU does."""
    shared = [time.links + time.streaming for time in ipus]
    counts = [layout.ipu_of_stage.count(ipu) for ipu in range(layout.num_ipus)]
    work = []
    for (forward, recompute, backward), ipu in zip(stages, layout.ipu_of_stage):
        moving = shared[ipu] / counts[ipu] / 2
        work.append((forward + moving, recompute + backward + moving))
    return work


class _Schedule(NamedTuple):
    """Cycles of one update (in inference: of one batch).

    Args:
        cycle: Seconds of a cycle in which every stage has work.
        cycles: Number of cycles.
        seconds: Seconds of all of them: one that fills or drains the pipeline lasts as long as its longest work.
        bubble: Share of cycles that fill and drain.
    """

    cycle: float
    cycles: int
    seconds: float
    bubble: float


def _schedule(work: Sequence[Tuple[float, float]], layout: StageLayout, settings: Settings) -> _Schedule:
    micro_batches = settings.micro_batches
    totals = [0.0] * layout.num_ipus
    for (forward, backward), ipu in zip(work, layout.ipu_of_stage):
        totals[ipu] += forward + backward
    if settings.strategy != "pipelined" or layout.num_stages == 1:
        cycles = micro_batches if settings.training else 1
        return _Schedule(sum(totals), cycles, sum(totals) * cycles, 0.0)
    longest, last = max(totals), layout.num_stages - 1
    if not settings.training:  # the pipeline is filled once for all batches of a host call
        each = longest * (micro_batches + last) / micro_batches
        return _Schedule(each, 1, each, last / (micro_batches + last))
    # Forward work of stage i begins in cycle i and backward work in cycle 2 (S - 1) - i. Draining mirrors this.
    mirrored = [(backward, forward) for forward, backward in work]
    ends = _filling(work, layout) + _filling(mirrored, layout)
    extra = 2 * last
    cycles = micro_batches + extra
    if micro_batches >= extra:
        seconds = ends + (micro_batches - extra) * longest
    else:  # it drains before it was full
        seconds = ends * cycles / (2 * extra)
    return _Schedule(longest, cycles, seconds, extra / cycles)


def _filling(work: Sequence[Tuple[float, float]], layout: StageLayout) -> float:
    """Return the seconds of the cycles until every stage does its first and its second work."""
    last = layout.num_stages - 1
    busy = [0.0] * layout.num_ipus
    longest = seconds = 0.0
    for cycle in range(2 * last):
        stage = min(cycle, 2 * last - cycle)
        ipu, (first, second) = layout.ipu_of_stage[stage], work[stage]
        busy[ipu] += (first if cycle <= last else 0.0) + (second if cycle >= last else 0.0)
        longest = max(longest, busy[ipu])
        seconds += longest
    return seconds


def _all_reduce(shares: List[ParameterShare], settings: Settings, machine: Machine) -> float:
    """Return the seconds to sum gradients over replicas: corresponding IPUs do so at the same time.

    They form a ring, around which parts of the sum pass twice; every step takes a synchronisation.
    """
    if not settings.training or settings.replicas < 2:
        return 0.0
    passed = 2 * (settings.replicas - 1) / settings.replicas * _gradient_bytes(shares, settings)
    steps = 2 * (settings.replicas - 1)
    return passed / machine.all_reduce_bytes_per_second + steps * machine.all_reduce_step_seconds


def _gateways(shares: List[ParameterShare], layout: StageLayout, settings: Settings, machine: Machine) -> float:
    """Return the seconds to sum over IPU-Link domains: within one, each replica has a part of the sum by then."""
    domains = machine.domains(layout.num_ipus * settings.replicas)
    if not settings.training or settings.replicas < 2 or domains == 1:
        return 0.0
    own = _gradient_bytes(shares, settings) / max(1, settings.replicas // domains)
    return 2 * (domains - 1) / domains * own / (machine.gateway_bytes_per_second / machine.ipus_per_machine)


def _gradient_bytes(shares: List[ParameterShare], settings: Settings) -> float:
    return max(share.trained for share in shares) * max(settings.gradient_bytes, settings.compute_bytes)


# Seconds to compile: for any graph, for each IPU beyond the first, for each distinct program of an IPU whose result
# fills all tiles with the fewest bytes, and for each trained tensor, which has an update of its own. The first two are
# from small CNNs on one IPU and on four (23 to 39 and 91 s), the others are fitted to 15 published compiles.
_COMPILE = (15.0, 17.0, 0.3, 0.68)
# PopLibs gives no tile fewer bytes of a tensor: smaller ones have vertices on some tiles only.
_LEAST_BYTES_PER_TILE = 128
_COMPILE_CLASSES = (
    (60.0, "under a minute"),
    (300.0, "1 to 5 minutes"),
    (900.0, "5 to 15 minutes"),
    (1800.0, "15 to 30 minutes"),
)


def compile_class(traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> str:
    """Return how long an executable that is not cached takes to compile, as one of a few classes."""
    return class_of_seconds(compile_seconds(traced, layout, settings, machine))


def compile_seconds(traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> float:
    """Return about how many seconds it takes: vertices and exchanges grow with the data, as its square root."""
    fixed, per_ipu, per_program, per_update = _COMPILE
    programs: Dict[Tuple[str, int, int], float] = {}
    for op, stage in zip(traced.ops, layout.stage_of_op):
        size = math.sqrt(op.output_bytes / (_LEAST_BYTES_PER_TILE * machine.tiles))
        programs[op.signature, op.gradients, layout.ipu_of_stage[stage]] = programs_of(op, settings) * size
    updates = sum(item.trainable for item in traced.parameters) if settings.training else 0
    return fixed + per_ipu * (layout.num_ipus - 1) + per_program * sum(programs.values()) + per_update * updates


def class_of_seconds(seconds: float) -> str:
    """Return the class of a time to compile."""
    return next((text for most, text in _COMPILE_CLASSES if seconds < most), "half an hour or more")


def _update(shares: List[ParameterShare], layout: StageLayout, settings: Settings, machine: Machine) -> float:
    """Return the seconds of the optimizer: arithmetic on chip, and transfers of its state."""
    if not settings.training:
        return 0.0
    largest = max(share.trained for share in shares)
    vector = machine.vector_bytes_per_cycle * machine.tiles * machine.clock_hz
    # State, accumulator and weight are read and written.
    seconds = 2 * largest * (settings.state_bytes + settings.gradient_bytes + settings.compute_bytes) / vector
    moved = _of_a_machine([share.streamed for share in shares], layout, settings, machine)
    # All IPUs of a replica wait for each transfer to be announced.
    begun = sum(share.transfers for share in shares) * machine.transfer_seconds
    return seconds + moved / machine.streaming_bytes_per_second + begun


def _of_a_machine(amounts: Sequence[float], layout: StageLayout, settings: Settings, machine: Machine) -> float:
    """Return the sum over the IPUs that share a machine, of the machine with most."""
    size = machine.ipus_per_machine
    if layout.num_ipus >= size:
        return max(sum(amounts[first : first + size]) for first in range(0, layout.num_ipus, size))
    return sum(amounts) * min(settings.replicas, size // layout.num_ipus)
