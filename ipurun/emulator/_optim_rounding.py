"""Storing float32 results in half precision, to the nearest value or to a random neighbour."""

from __future__ import annotations

import torch

__all__ = ["StochasticRounding", "round_to_nearest"]

_DROPPED_BITS = 13  # mantissa bits that float32 has over float16
_SMALLEST_NORMAL_HALF = 2.0**-14
_SUBNORMAL_STEP = 2.0**-24


def round_to_nearest(destination: torch.Tensor, result: torch.Tensor) -> None:
    """Store with the usual rounding."""
    destination.copy_(result)


class StochasticRounding:
    """Rounds up or down with the probability that keeps the expected value.

    Args:
        seed: Start of the random stream; it is the rounding's own, torch's global one is left alone.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, destination: torch.Tensor, result: torch.Tensor) -> None:
        """Store `result` in `destination`, at random when that is half precision."""
        if destination.dtype != torch.float16:
            destination.copy_(result)
            return
        noise = torch.rand(result.shape, generator=self._generator)
        bits = result.contiguous().view(torch.int32) + (noise * 2**_DROPPED_BITS).to(torch.int32)
        normal = ((bits >> _DROPPED_BITS) << _DROPPED_BITS).view(torch.float32)
        subnormal = torch.floor(result / _SUBNORMAL_STEP + noise) * _SUBNORMAL_STEP
        rounded = torch.where(result.abs() < _SMALLEST_NORMAL_HALF, subnormal, normal)
        destination.copy_(torch.where(torch.isfinite(result), rounded, result))
