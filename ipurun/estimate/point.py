"""From a config and its plan to the planner's own terms: machine and layout. Settings are in `settings`."""

from __future__ import annotations

import dataclasses
from typing import List, Mapping, Sequence, Tuple

from ipurun.config.schema import RunConfig
from ipurun.estimate.hardware import Machine, machine_from
from ipurun.estimate.settings import phases_of
from ipurun.estimate.stages import checkpoint_ops, layout_of_blocks
from ipurun.estimate.types import Layout
from ipurun.inspect.traced_model import ModelProfile
from ipurun.planning.plan import Plan

__all__ = ["block_checkpoints", "layout_of_plan", "machine_of"]


def machine_of(config: RunConfig) -> Machine:
    """The machine that `machine` describes."""
    return machine_from(dataclasses.asdict(config.machine))


def layout_of_plan(profile: ModelProfile, plan: Plan, *, training: bool = True) -> Layout:
    """Which operation runs where, as the plan's blocks for training or for inference say."""
    placements = plan.placements if training else plan.inference_placements
    numbers = phases_of(plan.training_options if training else plan.inference_options)
    phases = {placed.module: numbers[placed.block_id] for placed in placements if placed.block_id in numbers}
    return layout_of_blocks(profile, [(placed.module, placed.ipu) for placed in placements], plan.recompute, phases)


def block_checkpoints(profile: ModelProfile, stacks: Mapping[str, Sequence[str]]) -> Tuple[int, ...]:
    """Operations that end the layers of repeated stacks: what `recompute.every=block` keeps."""
    layers: List[str] = [layer for stack in stacks.values() for layer in stack]
    return checkpoint_ops(profile, layers)
