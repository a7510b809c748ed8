"""The host's random states, as plain values that a checkpoint can hold."""

from __future__ import annotations

import random
from typing import Any, Dict, Mapping

import numpy
import torch

__all__ = ["random_state", "restore_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> Dict[str, Any]:
    """The states of all three generators."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on with states that `random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
