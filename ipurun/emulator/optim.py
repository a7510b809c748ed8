"""Optimizers that PopTorch runs on the device: torch's, with loss scaling and accumulator types.

An argument left as None has its default value as a constant of the compiled program; one that is given can be changed
with `setOptimizer`, as can attributes marked with `variable_attrs.markAsVariable`.

Arguments mean the same as in torch. `foreach`, `maximize`, `capturable`, `differentiable` and `fused` are accepted
and ignored; `amsgrad` must be False when the model is compiled. PopTorch adds these to several optimizers:

- `loss_scaling`: Factor on the loss during the backward pass, divided out before the update.
- `accum_type`: Data type in which gradients are accumulated.
- `first_order_momentum_accum_type`, `second_order_momentum_accum_type`: Data types of the two moments.
- `max_grad_norm`: Upper limit for the norm of all gradients together.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from ipurun.emulator._logging import logger
from ipurun.emulator._optimizer.base import DeviceState, Optimizer, VariableAttributes
from ipurun.emulator._optimizer.lamb import lamb_step

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
    "read_device_state",
    "write_device_state",
]


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with optional momentum; unlike in torch, dampening also applies to the first step.

    `velocity_accum_type` is the data type of the velocity. With `use_combined_accum`, gradients and velocity are
    accumulated in one buffer, and `velocity_scaling` is a factor on the stored velocity.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: Optional[float] = None,
        dampening: Optional[float] = None,
        weight_decay: Optional[float] = None,
        nesterov: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        velocity_scaling: Optional[float] = None,
        use_combined_accum: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        velocity_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        self._bind(locals())

    def _start_torch(self, params: Iterable, given: Dict[str, Any]) -> None:
        velocity_scaling = given.pop("velocity_scaling", None)
        super()._start_torch(params, given)
        if self.use_combined_accum:
            self.defaults["velocity_scaling"] = 1.0 if velocity_scaling is None else velocity_scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])
        elif velocity_scaling is not None:
            logger.warning("velocity_scaling is ignored: it only applies when use_combined_accum is True")


class Adam(Optimizer, torch.optim.Adam):
    """Adam with L2 regularisation."""

    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        self._bind(locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay; PopTorch 3.4 corrects the bias regardless of `bias_correction`."""

    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        amsgrad: Optional[bool] = None,
        maximize: Optional[bool] = None,
        foreach: Optional[bool] = None,
        capturable: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        fused: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        max_grad_norm: Optional[float] = None,
    ) -> None:
        self._bind(locals())


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop as in torch, or as in TensorFlow with `use_tf_variant`, which adds `eps` inside the root.

    `centered` must be the same in all groups.
    """

    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        alpha: Optional[float] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        momentum: Optional[float] = None,
        centered: Optional[bool] = None,
        foreach: Optional[bool] = None,
        maximize: Optional[bool] = None,
        differentiable: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
        use_tf_variant: Optional[bool] = None,
    ) -> None:
        self._bind(locals())


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments for large batches; `step` runs the same update on the host.

    `max_weight_norm` limits the norm of a weight in the trust ratio, 65500 by default.
    """

    def __init__(
        self,
        params: Iterable,
        lr: Optional[float] = None,
        betas: Optional[Tuple[float, float]] = None,
        eps: Optional[float] = None,
        weight_decay: Optional[float] = None,
        bias_correction: Optional[bool] = None,
        loss_scaling: Optional[float] = None,
        max_weight_norm: Optional[float] = None,
        accum_type: Optional[torch.dtype] = None,
        first_order_momentum_accum_type: Optional[torch.dtype] = None,
        second_order_momentum_accum_type: Optional[torch.dtype] = None,
    ) -> None:
        self._bind(locals())

    def _start_torch(self, params: Iterable, given: Dict[str, Any]) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "max_weight_norm": 65500.0}
        torch.optim.Optimizer.__init__(self, params, {**defaults, **given})

    def step(self, closure: Optional[Callable] = None) -> Optional[float]:
        """Update the host's parameters from their `.grad`; a compiled model does not call this.

        Args:
            closure: Re-evaluates the model and returns the loss.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lamb_step(self.param_groups, self.state, bias_correction=self.bias_correction)
        return loss


def read_device_state(executor: Any) -> DeviceState:
    """Return the state of the optimizer of a compiled training model, `torch.optim` classes included.

    PopTorch has no such function: it exposes the state of `poptorch.optim` classes only, by `state_dict()`.
    """
    return executor._optimizer.read_device_state()


def write_device_state(executor: Any, state: DeviceState) -> None:
    """Overwrite the state of the optimizer of a compiled training model with what `read_device_state` returned."""
    executor._optimizer.write_device_state(state)
