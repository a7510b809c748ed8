"""Whether two ways to compute the same thing agree, up to rounding."""

from __future__ import annotations

from typing import Iterable

import torch

__all__ = ["alike", "largest"]


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the largest finite magnitude in some tensors, 0 if there is none."""
    sizes = (t.detach().abs().nan_to_num(0.0, 0.0, 0.0) for t in tensors if t.is_floating_point() and t.numel())
    return max((float(size.max()) for size in sizes), default=0.0)


def alike(expected: torch.Tensor, got: torch.Tensor, *, among: float = 0.0) -> bool:
    """Whether a result is what was expected; whole numbers must be equal.

    Args:
        expected: What one way gave.
        got: What the other way gave.
        among: Magnitude of the values that the result was made of. Where they cancel, as in the gradient of a
            bias in front of a norm, what is left is their rounding.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    tolerance = 1e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
    smallest = tolerance * max(largest([expected]), 1e-8) + 8 * torch.finfo(expected.dtype).eps * among
    return torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=smallest, equal_nan=True)
