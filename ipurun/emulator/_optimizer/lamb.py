"""LAMB's arithmetic, shared by `step()` on the host and the compiled optimizer."""

from __future__ import annotations

import math
from typing import Any, Iterable, MutableMapping, Tuple

import torch


def bias_corrections(beta1: float, beta2: float, step: float) -> Tuple[float, float]:
    """Return `1 - beta ** step` for both moments, NaN if the power is not real."""
    return 1.0 - _power(beta1, step), 1.0 - _power(beta2, step)


def trust_ratio(
    weight: torch.Tensor, direction: torch.Tensor, max_weight_norm: float, *, by_row: bool = False
) -> torch.Tensor:
    """Return the step length along `direction`: the capped norm of the weight over that of the direction.

    Args:
        weight: The parameter.
        direction: Direction of the step.
        max_weight_norm: Upper limit of the weight's norm.
        by_row: Whether each row is a separate parameter with a separate ratio.
    """
    weight_norm = torch.clamp(_norm(weight, by_row), max=max_weight_norm)
    direction_norm = _norm(direction, by_row)
    usable = (weight_norm > 0) & (direction_norm > 0)
    return torch.where(usable, weight_norm / direction_norm, torch.ones_like(weight_norm))


@torch.no_grad()
def lamb_step(
    param_groups: Iterable[MutableMapping[str, Any]],
    state: MutableMapping[Any, Any],
    *,
    bias_correction: bool,
) -> None:
    """Update every parameter that has a gradient."""
    for group in param_groups:
        beta1, beta2 = group["betas"]
        for weight in group["params"]:
            if weight.grad is None:
                continue
            own = state[weight]
            if not own:
                own.update(step=0, exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
            own["step"] += 1
            first = own["exp_avg"].mul_(beta1).add_(weight.grad, alpha=1 - beta1)
            second = own["exp_avg_sq"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
            correction1, correction2 = bias_corrections(beta1, beta2, own["step"]) if bias_correction else (1.0, 1.0)
            direction = (first / correction1) / ((second / correction2).sqrt() + group["eps"])
            direction.add_(weight, alpha=group["weight_decay"])
            ratio = trust_ratio(weight, direction, group["max_weight_norm"])
            weight.sub_(group["lr"] * ratio * direction)


def _norm(tensor: torch.Tensor, by_row: bool) -> torch.Tensor:
    tensor = tensor.float()
    if not by_row:
        return tensor.norm()
    return tensor.reshape(len(tensor), -1).norm(dim=1).reshape(-1, *[1] * (tensor.dim() - 1))


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except (ValueError, OverflowError):
        return math.nan
