"""Functions of torch that read values back to Python or write behind autograd, in a form that a graph can hold."""

from __future__ import annotations

from typing import Any, Callable, Dict, Union

import torch

from ipurun.emulator._impl import createNativeError

__all__ = ["REPLACED_FUNCTIONS"]


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """One-hot rows; torch itself reads the values back to check them and to count the classes."""
    if num_classes < 0:
        raise createNativeError("OneHot num classes must be specified and must be constant.")
    classes = torch.arange(num_classes, dtype=tensor.dtype, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _rrelu(
    input: torch.Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> torch.Tensor:
    """Draws the slopes with an operation of its own: torch's writes them into a tensor that backward has saved."""
    if training:
        slopes: Union[torch.Tensor, float] = torch.empty_like(input, requires_grad=False).uniform_(lower, upper)
    else:
        slopes = (lower + upper) / 2
    result = torch.where(input >= 0, input, input * slopes)
    return input.copy_(result) if inplace else result


REPLACED_FUNCTIONS: Dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.rrelu: _rrelu,
}
