"""Automatic loss scaling: the scale grows after every update, shrinks when half gradients near overflow."""

from __future__ import annotations

from typing import Any, Mapping

import torch

__all__ = ["AutomaticLossScaling"]

_HALF_MAX = 65504.0
# A loss in half precision could not hold a larger seed with room to spare.
_LARGEST_SCALE = 2.0**15


class AutomaticLossScaling:
    """Keeps the factor on top of the user's loss scaling.

    Args:
        settings: PopART options; `automaticLossScalingSettings.*` overrides the defaults.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        group = "automaticLossScalingSettings."
        self._limit = _HALF_MAX * float(settings.get(group + "binEdgeLocation", 0.125))
        self._tolerated = float(settings.get(group + "thresholdUpperCountProportion", 1e-7))
        self._period = int(settings.get(group + "updatePeriod", 1))
        self.factor = torch.ones((), dtype=torch.float32)
        self._large = 0
        self._seen = 0
        self._updates = 0

    def watch(self, gradient: torch.Tensor) -> None:
        """Count the elements of a half gradient that are near overflow; other types do not count."""
        if gradient.dtype != torch.float16:
            return
        magnitude = gradient.abs()
        self._large += int(((magnitude > self._limit) | ~torch.isfinite(magnitude)).sum())
        self._seen += gradient.numel()

    def step(self, loss_scaling: float) -> None:
        """Adjust the factor after a weight update; without half gradients there is nothing to protect."""
        self._updates += 1
        if self._updates % self._period or not self._seen:
            return
        shrinks = self._large / self._seen > self._tolerated
        factor = float(self.factor) * (0.5 if shrinks else 2.0)
        if shrinks or abs(loss_scaling) * factor <= _LARGEST_SCALE:
            self.factor.fill_(factor)
        self._large = self._seen = 0
