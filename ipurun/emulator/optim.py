"""Optimizers that PopTorch runs on the device: torch's, with loss scaling, accumulator types and the like.

An argument left as None takes its default and is baked into the compiled program; an argument that is given
stays changeable through `setOptimizer`, as does what `variable_attrs.markAsVariable` names.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from ipurun.emulator._logging import logger
from ipurun.emulator._optimizer.base import Optimizer, VariableAttributes, accumulation_type, explicit_only
from ipurun.emulator._optimizer.lamb import lamb_step

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

_MOMENT_TYPES = ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type")


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with optional momentum.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Dampening of the momentum; unlike torch's it acts on the first step too.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        maximize: Accepted and ignored.
        foreach: Accepted and ignored.
        differentiable: Accepted and ignored.
        loss_scaling: Factor on the loss during the backward pass, divided out before the update.
        velocity_scaling: Factor on the stored velocity; only with `use_combined_accum`.
        use_combined_accum: Accumulate gradients and velocity in one buffer.
        accum_type: Data type in which gradients are accumulated.
        velocity_accum_type: Data type of the velocity.
        max_grad_norm: Largest norm of all gradients together.
    """

    _own_attributes = (
        "loss_scaling",
        "use_combined_accum",
        "accum_type",
        "velocity_accum_type",
        "max_grad_norm",
    )

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
        for_torch = explicit_only(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
        )
        Optimizer.__init__(self)
        torch.optim.SGD.__init__(self, params, **for_torch)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.use_combined_accum = bool(use_combined_accum)
        self.accum_type = accumulation_type("accum_type", accum_type)
        self.velocity_accum_type = accumulation_type("velocity_accum_type", velocity_accum_type)
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        if self.use_combined_accum:
            self._add_velocity_scaling(1.0 if velocity_scaling is None else velocity_scaling)
        elif velocity_scaling is not None:
            logger.warning("velocity_scaling is ignored: it only applies when use_combined_accum is True")
        explicit = [*for_torch, *explicit_only(loss_scaling=loss_scaling, velocity_scaling=velocity_scaling)]
        self._set_variable_attributes(explicit, self.defaults)

    def _add_velocity_scaling(self, velocity_scaling: float) -> None:
        self.defaults["velocity_scaling"] = velocity_scaling
        for group in self.param_groups:
            group.setdefault("velocity_scaling", velocity_scaling)

    def __getstate__(self) -> Dict[str, Any]:
        return self._pickled(super().__getstate__(), self._own_attributes)


class Adam(Optimizer, torch.optim.Adam):
    """Adam with L2 regularisation.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: Must be False when the model is compiled.
        foreach: Accepted and ignored.
        maximize: Accepted and ignored.
        capturable: Accepted and ignored.
        differentiable: Accepted and ignored.
        fused: Accepted and ignored.
        loss_scaling: Factor on the loss during the backward pass, divided out before the update.
        accum_type: Data type in which gradients are accumulated.
        first_order_momentum_accum_type: Data type of the first moment.
        second_order_momentum_accum_type: Data type of the second moment.
        max_grad_norm: Largest norm of all gradients together.
    """

    _own_attributes = ("loss_scaling", *_MOMENT_TYPES, "max_grad_norm")

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
        for_torch = explicit_only(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        Optimizer.__init__(self)
        torch.optim.Adam.__init__(self, params, **for_torch)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        _set_moment_types(self, accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self._set_variable_attributes([*for_torch, *explicit_only(loss_scaling=loss_scaling)], self.defaults)

    def __getstate__(self) -> Dict[str, Any]:
        return self._pickled(super().__getstate__(), self._own_attributes)


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the denominator.
        weight_decay: Share of the weight taken off at each step, times the learning rate.
        amsgrad: Must be False when the model is compiled.
        maximize: Accepted and ignored.
        foreach: Accepted and ignored.
        capturable: Accepted and ignored.
        differentiable: Accepted and ignored.
        fused: Accepted and ignored.
        loss_scaling: Factor on the loss during the backward pass, divided out before the update.
        bias_correction: Stored; PopTorch 3.4 corrects the bias in either case.
        accum_type: Data type in which gradients are accumulated.
        first_order_momentum_accum_type: Data type of the first moment.
        second_order_momentum_accum_type: Data type of the second moment.
        max_grad_norm: Largest norm of all gradients together.
    """

    _own_attributes = ("loss_scaling", "bias_correction", *_MOMENT_TYPES, "max_grad_norm")

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
        for_torch = explicit_only(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        Optimizer.__init__(self)
        torch.optim.AdamW.__init__(self, params, **for_torch)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.bias_correction = True if bias_correction is None else bias_correction
        _set_moment_types(self, accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self._set_variable_attributes([*for_torch, *explicit_only(loss_scaling=loss_scaling)], self.defaults)

    def __getstate__(self) -> Dict[str, Any]:
        return self._pickled(super().__getstate__(), self._own_attributes)


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop, in torch's or in TensorFlow's variant.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        alpha: Decay of the running mean of squares.
        eps: Added to the denominator (inside the root in TensorFlow's variant).
        weight_decay: L2 penalty.
        momentum: Momentum factor.
        centered: Normalise by an estimate of the variance; the same in all groups.
        foreach: Accepted and ignored.
        maximize: Accepted and ignored.
        differentiable: Accepted and ignored.
        loss_scaling: Factor on the loss during the backward pass, divided out before the update.
        accum_type: Data type in which gradients are accumulated.
        first_order_momentum_accum_type: Data type of the momentum and of the running mean.
        second_order_momentum_accum_type: Data type of the running mean of squares.
        use_tf_variant: Follow TensorFlow's definition.
    """

    _own_attributes = ("loss_scaling", *_MOMENT_TYPES, "use_tf_variant")

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
        for_torch = explicit_only(
            lr=lr,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
        )
        Optimizer.__init__(self)
        torch.optim.RMSprop.__init__(self, params, **for_torch)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        _set_moment_types(self, accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self.use_tf_variant = bool(use_tf_variant)
        self._set_variable_attributes([*for_torch, *explicit_only(loss_scaling=loss_scaling)], self.defaults)

    def __getstate__(self) -> Dict[str, Any]:
        return self._pickled(super().__getstate__(), self._own_attributes)


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments for large batches; `step` runs the same update on the host.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        bias_correction: Correct the bias of the moments.
        loss_scaling: Factor on the loss during the backward pass, divided out before the update.
        max_weight_norm: Largest norm of a weight that counts in the trust ratio; None means 65500.
        accum_type: Data type in which gradients are accumulated.
        first_order_momentum_accum_type: Data type of the first moment.
        second_order_momentum_accum_type: Data type of the second moment.
    """

    _own_attributes = ("loss_scaling", "bias_correction", *_MOMENT_TYPES)

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
        given = explicit_only(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_weight_norm=max_weight_norm)
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": 65500.0,
            **given,
        }
        Optimizer.__init__(self)
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.bias_correction = True if bias_correction is None else bias_correction
        _set_moment_types(self, accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self._set_variable_attributes([*given, *explicit_only(loss_scaling=loss_scaling)], self.defaults)

    def step(self, closure: Optional[Callable] = None) -> Optional[float]:
        """Update the host's parameters from their `.grad`; a compiled model does not call this.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lamb_step(self.param_groups, self.state, bias_correction=self.bias_correction)
        return loss

    def __getstate__(self) -> Dict[str, Any]:
        return self._pickled(super().__getstate__(), self._own_attributes)


def _set_moment_types(
    optimizer: Any,
    accum_type: Optional[torch.dtype],
    first_order: Optional[torch.dtype],
    second_order: Optional[torch.dtype],
) -> None:
    for name, given in zip(_MOMENT_TYPES, (accum_type, first_order, second_order)):
        setattr(optimizer, name, accumulation_type(name, given))
