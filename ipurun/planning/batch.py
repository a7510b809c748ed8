"""Batch arithmetic: which micro-batches make one weight update, and one host call."""

from __future__ import annotations

from typing import Optional

from ipurun.errors import Findings
from ipurun.planning.plan import Batch

__all__ = ["check_stages", "solve_accumulation"]


def solve_accumulation(
    micro_batch_size: int,
    distinct_replicas: int,
    accumulation: Optional[int],
    global_batch_size: Optional[int],
    least: int,
    found: Findings,
) -> int:
    """Micro-batches per weight update: as given, or as the global batch asks for.

    Args:
        micro_batch_size: Samples of one forward pass.
        distinct_replicas: Replicas that read data of their own.
        accumulation: `gradient_accumulation`, None where it was not set.
        global_batch_size: Samples per weight update, None where it was not set.
        least: The smallest accumulation that works (2 S - 1 for a pipeline of S stages).
        found: Takes the problems.
    """
    if global_batch_size is None:
        return accumulation or 1
    per_micro_step = micro_batch_size * distinct_replicas
    if accumulation is not None and accumulation * per_micro_step != global_batch_size:
        found.problem(
            "`global_batch_size` and `gradient_accumulation` contradict each other",
            seen=f"micro_batch_size {micro_batch_size} x gradient_accumulation {accumulation} x "
            f"{distinct_replicas} replicas = {accumulation * per_micro_step}, global_batch_size={global_batch_size}",
            fix="gradient_accumulation=null, or global_batch_size=" + str(accumulation * per_micro_step),
            key="global_batch_size",
        )
        return accumulation
    solved, rest = divmod(global_batch_size, per_micro_step)
    if rest == 0 and solved >= least:
        return solved
    candidates = sorted({max(solved, least), max(solved + 1, least)})
    what = f"`global_batch_size` must be a multiple of {per_micro_step}"
    if least > 1:
        what += f", at least {least * per_micro_step} for this pipeline"
    found.problem(
        what,
        seen=f"global_batch_size={global_batch_size} with micro_batch_size {micro_batch_size} x "
        f"{distinct_replicas} replicas = {per_micro_step} samples per accumulation step",
        fix=" or ".join(f"global_batch_size={value * per_micro_step}" for value in candidates),
        key="global_batch_size",
    )
    return candidates[0]


def check_stages(training: Batch, stages: int, from_global_batch: bool, found: Findings) -> None:
    """A pipeline of S stages has to be filled and drained: it needs 2 S - 1 micro-batches per weight update."""
    least = 2 * stages - 1
    if training.gradient_accumulation < least and not from_global_batch:
        found.problem(
            f"a pipeline of {stages} stages needs `gradient_accumulation` of {least} or more in training",
            seen=f"gradient_accumulation={training.gradient_accumulation}",
            fix=f"gradient_accumulation={least} (or pipeline.strategy=sharded)",
            key="gradient_accumulation",
        )
