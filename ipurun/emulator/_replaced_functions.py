"""Functions of torch that read values back to Python, in a form that a graph can hold."""

from __future__ import annotations

from typing import Any, Callable, Dict

import torch

from ipurun.emulator._impl import createNativeError

__all__ = ["REPLACED_FUNCTIONS"]


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """One-hot rows; torch itself reads the values back to check them and to count the classes."""
    if num_classes < 0:
        raise createNativeError("OneHot num classes must be specified and must be constant.")
    classes = torch.arange(num_classes, dtype=tensor.dtype, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


REPLACED_FUNCTIONS: Dict[Callable[..., Any], Callable[..., Any]] = {torch.nn.functional.one_hot: _one_hot}
