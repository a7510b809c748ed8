"""One estimate of memory and time, its verdict, and the assumptions it rests on."""

from __future__ import annotations

from typing import Iterable, List, Tuple

from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import estimate_memory
from ipurun.estimate.timing import estimate_time
from ipurun.estimate.types import Assumption, Estimate, IpuMemory, Settings, StageLayout, Verdict
from ipurun.inspect.traced_model import TracedModel

__all__ = ["assumptions_of", "estimate", "verdict_of", "worst"]


def estimate(profile: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> Estimate:
    """Memory, time and verdict of a model under a layout. Every figure is an estimate.

    Args:
        profile: The model; scaled to the settings' micro-batch where it was traced with another.
        layout: Where it runs.
        settings: How it runs.
        machine: On what it runs.
    """
    profile = profile.with_micro_batch(settings.micro_batch_size)
    ipus = estimate_memory(profile, layout, settings, machine)
    verdicts = tuple(verdict_of(ipu, machine) for ipu in ipus)
    time = estimate_time(profile, layout, settings, machine)
    streaming = sum(ipu.streaming for ipu in ipus) * settings.replicas
    limit = round(machine.machines(layout.num_ipus * settings.replicas) * machine.streaming_bytes_per_machine)
    overall = worst(verdicts) if streaming <= limit else Verdict.DOES_NOT_FIT
    return Estimate(
        ipus=ipus,
        verdicts=verdicts,
        verdict=overall,
        time=time,
        assumptions=assumptions_of(profile, layout, settings, machine),
        streaming=streaming,
        streaming_limit=limit,
    )


_ORDER = (Verdict.FITS, Verdict.TIGHT, Verdict.DOES_NOT_FIT)


def verdict_of(memory: IpuMemory, machine: Machine) -> Verdict:
    """How one IPU stands: from `tight_margin` below the limit to `over_margin` above it only the compiler can tell."""
    if memory.share <= 1 - machine.tight_margin:
        return Verdict.FITS
    return Verdict.TIGHT if memory.share <= 1 + machine.over_margin else Verdict.DOES_NOT_FIT


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of all IPUs together."""
    return max(verdicts, key=_ORDER.index, default=Verdict.FITS)


def assumptions_of(
    profile: TracedModel, layout: StageLayout, settings: Settings, machine: Machine
) -> Tuple[Assumption, ...]:
    """The assumptions that matter for this model, this layout and these settings."""
    told = [
        Assumption("all", "Every figure is an estimate from the traced model; nothing was compiled or run."),
        Assumption(
            "device",
            f"{machine.name}: {machine.tiles} tiles of {machine.tile_bytes:,} bytes at "
            f"{machine.clock_hz / 1e9:.3g} GHz; "
            "its constants and their sources are in conf/machine, and `machine.NAME=VALUE` overrides one.",
        ),
        Assumption(
            "fit",
            f"The fullest tile is taken to hold {machine.tile_imbalance_bytes:,.0f} bytes more than the "
            "average one. From "
            f"{machine.tight_margin:.0%} below the limit to {machine.over_margin:.0%} above it the verdict is `tight`, "
            "because the estimate is no better than that.",
        ),
    ]
    told += _about_compute(machine, settings)
    if settings.training:
        told += _about_training(layout, machine, settings)
    if layout.num_stages > 1 and settings.strategy == "pipelined":
        told.append(
            Assumption(
                "pipeline",
                f"{layout.num_stages} forward stages on {layout.num_ipus} IPUs run in step, at the pace of "
                "the IPU with most "
                "work; filling and draining take two cycles per further stage in training, one in inference.",
            )
        )
    told += _about_host(machine, settings)
    if profile.unsupported:
        told.append(
            Assumption(
                "model",
                "PopTorch is not known to support: " + "; ".join(profile.unsupported[:5]) + "; counted all the same.",
            )
        )
    return tuple(told)


def _about_compute(machine: Machine, settings: Settings) -> List[Assumption]:
    words = "half" if settings.compute_bytes == 2 else "single"
    given = settings.available_proportion or (machine.default_proportion,)
    shares = ", ".join(f"{share:g}" for share in given)
    macs = machine.macs_per_cycle(settings.compute_bytes, settings.partials_bytes)
    return [
        Assumption(
            "compute",
            f"Matmuls and convolutions of {words} values are spread over the tiles in the quickest way that "
            "leaves temporaries "
            f"within {shares} of a tile; operands are exchanged at {machine.exchange_efficiency:.0%} of "
            f"{machine.exchange_bytes_per_cycle:g} bytes per cycle and tile, what neighbours share "
            f"{machine.exchange_pair} times as fast; products are done at "
            f"{machine.product_efficiency:.0%} of the matrix unit's {macs:g} multiply-adds per cycle and tile.",
        ),
        Assumption(
            "compute",
            f"All other operations go over their data at {machine.vector_bytes_per_cycle:.3g} bytes per "
            "cycle and tile; every "
            f"operation takes {machine.op_cycles:,.0f} cycles to begin and end.",
        ),
        Assumption(
            "code",
            "Code is shared by operations of equal kind and shape on an IPU; "
            f"{machine.code_bytes_per_tile:,.0f} bytes a tile, {machine.code_bytes_per_op:g} for each "
            f"different operation and {machine.code_bytes_per_call:g} for each call of one.",
        ),
    ]


def _about_training(layout: StageLayout, machine: Machine, settings: Settings) -> List[Assumption]:
    told = []
    if settings.recompute == "none":
        told.append(Assumption("activations", "Nothing is recomputed: all that the backward pass reads is kept."))
    elif settings.recompute == "norm_only":
        told.append(Assumption("activations", "Normalisations and activation functions are recomputed."))
    else:
        kept = len(layout.checkpoints)
        told.append(
            Assumption(
                "activations",
                f"Inputs of stages and {kept} checkpoints are kept, the rest is recomputed, except after "
                "the last checkpoint "
                "of the last stage.",
            )
        )
    if layout.num_stages > 1 and settings.strategy == "pipelined":
        told.append(
            Assumption("activations", "Stage i of S keeps what 2 (S - i) - 1 micro-batches need, counted from stage 0.")
        )
    where = "on chip" if settings.state_on_chip else "in streaming memory"
    shared = (
        f", shared out over {settings.replicas} replicas" if settings.state_sharded and settings.replicas > 1 else ""
    )
    told.append(
        Assumption(
            "optimizer",
            f"{settings.optimizer} keeps {settings.state_bytes:g} bytes of state for each parameter value "
            f"{where}{shared}, and "
            f"{settings.accumulator_bytes:g} bytes of gradient accumulator.",
        )
    )
    if not settings.state_on_chip:
        told.append(
            Assumption(
                "optimizer",
                f"The four IPUs of a machine share {machine.streaming_bytes_per_second / 1e9:g} GB/s of "
                "streaming memory, and "
                "nothing of an update overlaps with computation.",
            )
        )
    machines = machine.machines(layout.num_ipus * settings.replicas)
    if settings.replicas > 1:
        told.append(
            Assumption(
                "replicas",
                f"Gradients are summed at {machine.all_reduce_bytes_per_second / 1e9:g} GB/s by IPU, and "
                "synchronisation over "
                f"{machines} machine{'s' if machines > 1 else ''} makes a cycle "
                f"{machine.machine_loss * (machines - 1):.0%} longer.",
            )
        )
    return told


def _about_host(machine: Machine, settings: Settings) -> List[Assumption]:
    loading = (
        f"the host prepares {settings.host_samples_per_second:,.0f} samples per second"
        if settings.host_samples_per_second
        else "the host prepares data as fast as they are wanted"
    )
    return [
        Assumption(
            "host",
            f"Each machine of {machine.ipus_per_machine} IPUs gets {machine.host_bytes_per_second / 1e9:g} "
            "GB/s from its host, "
            f"{loading}, and a host call costs {machine.host_call_seconds * 1e3:g} ms.",
        ),
        Assumption("host", _about_reading(machine, settings)),
    ]


def _about_reading(machine: Machine, settings: Settings) -> str:
    if settings.io_tiles:
        return f"{settings.io_tiles} tiles read micro-batches while the others compute."
    rate = machine.streaming_bytes_per_second / 1e9
    return f"All tiles wait while a micro-batch is read from the machine's memory, replica by replica: {rate:g} GB/s."
