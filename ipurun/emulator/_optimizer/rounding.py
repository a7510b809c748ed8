"""Storing float32 results in half precision, to the nearest value or to a random neighbour."""

from __future__ import annotations

import torch

__all__ = ["StochasticRounding", "round_to_nearest"]

_EXPONENT_BITS = 0x7F800000
_HALF_EPSILON = 2.0**-10
_SUBNORMAL_STEP = 2.0**-24
_LARGEST_STEP = 2.0**5  # of the numbers from 32768 on; what is larger than 65504 is infinite in any case
_CHUNK = 2**16  # elements: the intermediate results of a chunk stay in the cache


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
        flat = result.reshape(-1)
        rounded = torch.empty(flat.shape, dtype=torch.float16)
        for target, chunk in zip(rounded.split(_CHUNK), flat.split(_CHUNK)):
            target.copy_(self._round(chunk))
        destination.copy_(rounded.view_as(destination))

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        """Returns each value or one of its two neighbours among the half numbers, in float32."""
        power_of_two = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        step = power_of_two.mul_(_HALF_EPSILON).clamp_(_SUBNORMAL_STEP, _LARGEST_STEP)
        steps = values / step
        below = steps.floor()
        # Compared rather than added: a sum would be rounded itself, and move values that need no rounding.
        upwards = torch.rand(values.shape, generator=self._generator) < steps.sub_(below)
        return below.add_(upwards).mul_(step)
