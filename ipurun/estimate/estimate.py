"""One call from a profile, a layout and settings to everything the planner can tell."""

from __future__ import annotations

from ipurun.estimate.assumptions import assumptions_of
from ipurun.estimate.hardware import Machine
from ipurun.estimate.memory import estimate_memory
from ipurun.estimate.timing import estimate_time
from ipurun.estimate.types import Estimate, Layout, Settings, Verdict
from ipurun.estimate.verdict import verdict_of, worst
from ipurun.inspect.traced_model import ModelProfile

__all__ = ["estimate"]


def estimate(profile: ModelProfile, layout: Layout, settings: Settings, machine: Machine) -> Estimate:
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
