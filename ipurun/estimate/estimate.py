"""Estimate memory, time and verdict of a model under a layout, and list the assumptions made."""

from __future__ import annotations

from typing import List, Tuple

from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import estimate_memory
from ipurun.estimate.timing import estimate_time
from ipurun.estimate.types import Estimate, EstimatedModel, IpuMemory, Settings, StageLayout, Verdict, worst
from ipurun.inspect.traced_model import TracedModel

__all__ = ["assumptions_of", "estimate", "verdict_of"]


def estimate(traced: TracedModel, layout: StageLayout, settings: Settings, machine: Machine) -> Estimate:
    """Estimate a model under a layout.

    Args:
        traced: The model, which is scaled to the settings' micro-batch.
        layout: The stages of its operations.
        settings: How it runs.
        machine: The device.
    """
    traced = traced.with_micro_batch(settings.micro_batch_size)
    ipus = estimate_memory(traced, layout, settings, machine)
    verdicts = tuple(verdict_of(ipu, machine, training=settings.training) for ipu in ipus)
    streaming = sum(ipu.streaming for ipu in ipus) * settings.replicas
    limit = round(machine.machines(layout.num_ipus * settings.replicas) * machine.streaming_bytes_per_machine)
    return Estimate(
        ipus=ipus,
        verdicts=verdicts,
        verdict=worst(verdicts) if streaming <= limit else Verdict.DOES_NOT_FIT,
        time=estimate_time(traced, layout, settings, machine),
        streaming=streaming,
        streaming_limit=limit,
    )


def verdict_of(memory: IpuMemory, machine: Machine, *, training: bool = True) -> Verdict:
    """Return the verdict of one IPU: tight from a margin below the limit to `over_margin` above it.

    The margin of inference is for what the compiler may take for temporaries beyond the estimate. Where that fits too,
    the margin of training decides.
    """
    most = (memory.fullest + memory.allowed) / memory.limit
    if memory.share <= 1 - _margin(machine, training) or (not training and most <= 1 - machine.tight_margin):
        return Verdict.FITS
    return Verdict.TIGHT if memory.share <= 1 + machine.over_margin else Verdict.DOES_NOT_FIT


def _uneven(machine: Machine) -> str:
    more = f" and {machine.tile_imbalance_bytes:,.0f} bytes more" if machine.tile_imbalance_bytes else ""
    return f"{machine.code_imbalance:.0%} more code{more}"


def _margin(machine: Machine, training: bool) -> float:
    return machine.tight_margin if training else machine.inference_margin


def _where_bounded(machine: Machine, training: bool) -> str:
    if training:
        return ""
    return f" ({machine.tight_margin:.0%} where it fits even if matmuls use all of their share of a tile)"


def assumptions_of(model: EstimatedModel) -> List[Tuple[str, str]]:
    """Return (topic, text) of each assumption that matters for a model, its layout and its settings."""
    layout, settings, machine = model.layout, model.settings, model.machine
    found = [
        ("all", "Every figure is an estimate from the traced model; nothing was compiled or run."),
        (
            "device",
            f"{machine.name}: {machine.tiles} tiles of {machine.tile_bytes:,} bytes at "
            f"{machine.clock_hz / 1e9:.3g} GHz; its constants and their sources are in conf/machine, and "
            "`machine.NAME=VALUE` overrides one.",
        ),
        (
            "fit",
            f"The fullest tile holds {_uneven(machine)} than the average one, and a result that few tiles compute is "
            "on those. From "
            f"{_margin(machine, settings.training):.0%} below the limit{_where_bounded(machine, settings.training)} to "
            f"{machine.over_margin:.0%} above it the verdict is `tight`, because the estimate is no more accurate than "
            "that.",
        ),
        *_about_compute(machine, settings),
    ]
    if settings.training:
        found += _about_training(model)
    if layout.num_stages > 1 and settings.strategy == "pipelined":
        found.append(
            (
                "pipeline",
                f"{layout.num_stages} forward stages on {layout.num_ipus} IPUs run in step, at the pace of the IPU "
                "with the most work; filling and draining take two cycles per additional stage in training, one in "
                "inference, each as long as the work that there is.",
            )
        )
    found += _about_host(machine, settings)
    if model.traced.unsupported:
        shown = "; ".join(model.traced.unsupported[:5])
        found.append(("model", f"PopTorch is not known to support: {shown}; these operations are still counted."))
    return found


def _about_compute(machine: Machine, settings: Settings) -> List[Tuple[str, str]]:
    precision = "half-precision" if settings.compute_bytes == 2 else "single-precision"
    shares = ", ".join(f"{share:g}" for share in settings.available_proportion or (machine.default_proportion,))
    macs = machine.macs_per_cycle(settings.compute_bytes, settings.partials_bytes)
    return [
        (
            "compute",
            f"Each {precision} matmul or convolution is spread over the tiles in the fastest way that keeps its "
            f"temporaries within {shares} of a tile; operands are exchanged at {machine.exchange_efficiency:.0%} of "
            f"{machine.exchange_bytes_per_cycle:g} bytes per cycle and tile, data shared by neighbouring tiles "
            f"{machine.exchange_pair} times as fast; products run at {machine.product_efficiency:.0%} of the matrix "
            f"unit's {macs:g} multiply-adds per cycle and tile.",
        ),
        (
            "compute",
            f"All other operations process {machine.vector_bytes_per_cycle:.3g} bytes per cycle and tile; every "
            f"operation has an overhead of {machine.op_cycles:,.0f} cycles.",
        ),
        (
            "code",
            "Operations of equal kind and shape on an IPU share their code: "
            f"{machine.code_bytes_per_tile:,.0f} bytes per tile, plus {machine.code_bytes_per_op:g} for each distinct "
            f"operation and {machine.code_bytes_per_call:g} for each call of one.",
        ),
    ]


def _about_training(model: EstimatedModel) -> List[Tuple[str, str]]:
    layout, settings, machine = model.layout, model.settings, model.machine
    recomputation = {
        "none": "Nothing is recomputed: everything that the backward pass reads is kept.",
        "norm_only": "Normalisations and activation functions are recomputed.",
    }
    by_checkpoints = (
        f"Stage inputs and {len(layout.checkpoints)} checkpoints are kept; the rest is recomputed, except after the "
        "last checkpoint of the last stage."
    )
    found = [("activations", recomputation.get(settings.recompute, by_checkpoints))]
    if layout.num_stages > 1 and settings.strategy == "pipelined":
        text = "Stage i of S (counted from 0) keeps the activations of 2 (S - i) - 1 micro-batches."
        found.append(("activations", text))
    place = "on chip" if settings.state_on_chip else "in streaming memory"
    if settings.state_sharded and settings.sharding_replicas > 1:
        place += f", sharded over {settings.sharding_replicas} replicas"
    found.append(
        (
            "optimizer",
            f"{settings.optimizer} keeps {settings.state_bytes:g} bytes of state for each parameter value {place}, and "
            f"{settings.gradient_bytes:g} bytes of gradient accumulator.",
        )
    )
    if not settings.state_on_chip:
        rate = machine.streaming_bytes_per_second / 1e9
        text = (
            f"The four IPUs of a machine share {rate:g} GB/s of streaming memory; updates do not overlap with compute."
        )
        found.append(("optimizer", text))
    if settings.replicas > 1:
        found.append(
            (
                "replicas",
                f"Gradients are summed at {machine.all_reduce_bytes_per_second / 1e9:g} GB/s per IPU, in "
                f"{2 * (settings.replicas - 1)} steps of {machine.all_reduce_step_seconds * 1e6:g} µs.",
            )
        )
    return found


def _about_host(machine: Machine, settings: Settings) -> List[Tuple[str, str]]:
    loading = "the host prepares data as fast as it is needed"
    if settings.host_samples_per_second:
        loading = (
            f"the host loads {settings.host_samples_per_second:,.0f} samples per second ({settings.loading_basis})"
        )
    reading = (
        f"{settings.io_tiles} tiles read micro-batches while the others compute."
        if settings.io_tiles
        else "All tiles wait while a micro-batch is read from the machine's memory, one replica after another, at "
        f"{machine.streaming_bytes_per_second / 1e9:g} GB/s."
    )
    rate = f"{machine.host_bytes_per_second / 1e9:g} GB/s from its host"
    most = f"{machine.host_link_bytes_per_second / 1e9:g} GB/s for all machines of a host"
    text = f"Each machine of {machine.ipus_per_machine} IPUs gets {rate} (at most {most}), {loading}, and a host call "
    return [("host", f"{text}costs {machine.host_call_seconds * 1e3:g} ms."), ("host", reading)]
