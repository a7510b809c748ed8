"""What is kept of a stage between its forward and its backward pass, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Mapping, Sequence, Set

from ipurun.estimate.stages import ops_of_stage, received_values
from ipurun.estimate.types import Layout, Settings
from ipurun.inspect.traced_model import ModelProfile, OpProfile

__all__ = ["StageMemory", "stage_memories"]


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


def stage_memories(profile: ModelProfile, layout: Layout, settings: Settings) -> List[StageMemory]:
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


def _waiting(profile: ModelProfile, ops: Sequence[OpProfile], received: Set[int], uses: Mapping[int, int]) -> int:
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


def _everything_kept(ops: Sequence[OpProfile], inputs: int) -> StageMemory:
    # What does not depend on the data, such as a weight in another precision, is the same for all micro-batches.
    shared = sum(op.saved_bytes for op in ops if not op.is_batched)
    return StageMemory(sum(op.saved_bytes for op in ops) - shared + inputs, shared, set())


def _norms_recomputed(ops: Sequence[OpProfile], inputs: int) -> StageMemory:
    """Normalisations and activation functions after them are computed again from what came before."""
    cheap = [op for op in ops if op.kind in ("norm", "elementwise") and op.saved_bytes]
    saved = sum(op.saved_bytes for op in ops)
    again = sum(op.saved_bytes for op in cheap)
    return StageMemory(
        saved - again + inputs, max((op.saved_bytes for op in cheap), default=0), {op.index for op in cheap}
    )


def _between_checkpoints(ops: Sequence[OpProfile], checkpoints: Set[int], inputs: int, is_last: bool) -> StageMemory:
    kept = inputs
    segments: List[List[OpProfile]] = []
    current: List[OpProfile] = []
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
