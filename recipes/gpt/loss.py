"""The loss of a language model."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["next_token_loss"]


def next_token_loss(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all positions.

    Args:
        scores: Batch x positions x tokens.
        tokens: The correct tokens, batch x positions.
    """
    return functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), tokens.reshape(-1))
