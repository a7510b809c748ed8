"""Functions of torch that read values back to Python, write behind autograd or do what a device does not."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Optional, Union

import torch
from torch.nn import functional

from ipurun.emulator._capture.recorder import current
from ipurun.emulator._impl import createNativeError

__all__ = ["REPLACED_FUNCTIONS", "attention_by_parts"]


def attention_by_parts() -> Any:
    """Keeps scaled-dot-product attention in matmuls and softmax, which can be batched and placed."""
    attention = getattr(torch.nn, "attention", None)
    if attention is None or not hasattr(attention, "sdpa_kernel"):
        return contextlib.nullcontext()  # torch before 2.3 has no fused kernel for the CPU
    return attention.sdpa_kernel(attention.SDPBackend.MATH)


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention by parts, also where the model itself asks for one of torch's fused kernels."""
    with attention_by_parts():
        return functional.scaled_dot_product_attention(*args, **kwargs)


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
    return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group norm; with the backend's strided grouping channel c belongs to group c % num_groups."""
    recorder = current()
    assert recorder is not None
    if recorder.options is None or not recorder.options._Popart.options.get("groupNormStridedChannelGrouping", False):
        return functional.group_norm(input, num_groups, weight, bias, eps)
    rows, channels, *rest = input.shape
    size = channels // num_groups
    gathered = input.reshape(rows, size, num_groups, *rest).transpose(1, 2).reshape(input.shape)
    norm = functional.group_norm(gathered, num_groups, None, None, eps)
    norm = norm.reshape(rows, num_groups, size, *rest).transpose(1, 2).reshape(input.shape)
    per_channel = (channels, *[1] * len(rest))
    if weight is not None:
        norm = norm * weight.reshape(per_channel)
    return norm if bias is None else norm + bias.reshape(per_channel)


REPLACED_FUNCTIONS: Dict[Callable[..., Any], Callable[..., Any]] = {
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.one_hot: _one_hot,
    functional.rrelu: _rrelu,
    functional.scaled_dot_product_attention: _attention,
}
