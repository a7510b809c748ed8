"""Clipping of gradients by their norm (`max_grad_norm`)."""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import torch

from ipurun.emulator._optimizer.rules import RULES, Slot

__all__ = ["clipped"]


def clipped(prepared: Sequence[Tuple[Slot, torch.Tensor]], max_norm: float) -> List[torch.Tensor]:
    """Returns the tensors scaled so that the norm of all that a replica updates is at most `max_norm`.

    Replicas whose values of a parameter differ have norms that differ. Each row is scaled as in the first replica that
    computes with it. What all replicas share is scaled as in the first one, which is the one that the host reads.

    Args:
        prepared: The parameters with the tensors that their rules prepared.
        max_norm: The limit.
    """
    replicas = max((len(slot.rows) for slot, _ in prepared), default=0) or 1
    squares = torch.zeros(replicas, dtype=torch.float64)
    for slot, tensor in prepared:
        by_row = tensor.double().square().reshape(len(tensor) if slot.rows else 1, -1).sum(dim=1)
        squares += by_row[list(slot.rows or [0])] / RULES[slot.variant].clip_divisor(slot) ** 2
    factors = [max_norm / max(max_norm, math.sqrt(square)) for square in squares.tolist()]
    return [tensor * _factor_for(slot, tensor, factors) for slot, tensor in prepared]


def _factor_for(slot: Slot, tensor: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    if not slot.rows:
        return tensor.new_tensor(factors[0])
    of_rows = [factors[slot.rows.index(row)] for row in range(len(tensor))]
    return tensor.new_tensor(of_rows).reshape(-1, *[1] * (tensor.dim() - 1))
