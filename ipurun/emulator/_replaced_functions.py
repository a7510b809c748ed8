"""Functions of torch that read values back to Python, write behind autograd or do what a device does not."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Union

import torch

from ipurun.emulator._impl import createNativeError
from ipurun.emulator._tracing import current

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


def _batch_norm(
    input: torch.Tensor,
    running_mean: Optional[torch.Tensor],
    running_var: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Leaves the running statistics alone in an inference model: the backend updates them with the weights."""
    recorder = current()
    if training and recorder is not None and not recorder.training:
        running_mean = running_var = None
    return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


REPLACED_FUNCTIONS: Dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.batch_norm: _batch_norm,
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.rrelu: _rrelu,
}
