"""Helpers for tests of PopTorch programs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]


def allclose(ref: Any, other: Any) -> bool:
    """Whether two results are equal within torch's tolerances, comparing tuples and lists by element."""
    if isinstance(ref, (tuple, list)):
        if not isinstance(other, (tuple, list)) or len(ref) != len(other):
            return False
        return all(allclose(first, second) for first, second in zip(ref, other))
    return torch.allclose(ref, other)
