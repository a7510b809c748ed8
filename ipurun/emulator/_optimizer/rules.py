"""The update rules, for one parameter at a time.

`prepare` computes the tensor that `max_grad_norm` clips; `finish` updates weight and state with it, clipped or not.
Gradients are passed as accumulated: `gradient * factor` is the reduced gradient, still multiplied by the loss scaling.
Values are computed in float32 and rounded to the stored types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

import torch

from ipurun.emulator._optimizer.lamb import bias_corrections, trust_ratio
from ipurun.emulator._optimizer.scalars import Scalar, Variant

Rounding = Callable[[torch.Tensor, torch.Tensor], object]
"""Stores a float32 result (second argument) in a tensor of another type (first argument)."""


@dataclass
class Slot:
    """A parameter on the device with everything that its update needs.

    Attributes:
        name: Name of the parameter, as in the names of its state.
        weight: The device's weight, changed in place.
        variant: The kind of update.
        scalars: The scalars of that update.
        scalar_owner: Last part of the scalars' names: the parameter, or the defaults shared by all.
        state: Persistent tensors, by the prefix of their names.
        velocity_scaling: Factor on the stored velocity of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        bias_corrected: Whether LAMB corrects its moments.
        centered: Whether RMSprop subtracts the mean.
        tf_variant: Whether RMSprop follows TensorFlow.
        rows: If values differ between replicas, the row that each replica computes with; rows are then updated as
            separate parameters.
    """

    name: str
    weight: torch.Tensor
    variant: Variant
    scalars: Dict[str, Scalar]
    scalar_owner: str
    state: Dict[str, torch.Tensor] = field(default_factory=dict)
    velocity_scaling: float = 1.0
    nesterov: bool = False
    bias_corrected: bool = True
    centered: bool = False
    tf_variant: bool = False
    rows: Tuple[int, ...] = ()

    def __getitem__(self, scalar: str) -> float:
        return self.scalars[scalar].value


@dataclass
class UpdateValues:
    """Values shared by all parameters of one update."""

    factor: float
    loss_scaling: float
    round_into: Rounding

    def store(self, destination: torch.Tensor, result: torch.Tensor) -> None:
        """Store a float32 result in its tensor; do nothing if it was computed in place."""
        if destination is not result:
            self.round_into(destination, result)


def working(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is float32, else a float32 copy."""
    return tensor if tensor.dtype == torch.float32 else tensor.float()


class Rule:
    """An update rule. Each subclass implements one optimizer."""

    def prepare(self, slot: Slot, gradient: torch.Tensor, step: UpdateValues) -> torch.Tensor:
        """Return the tensor that gradient clipping applies to."""
        return working(gradient)

    def clip_divisor(self, slot: Slot) -> float:
        """Return the divisor of the prepared tensor's norm for the comparison with `max_grad_norm`."""
        return 1.0

    def finish(self, slot: Slot, prepared: torch.Tensor, gradient: torch.Tensor, step: UpdateValues) -> None:
        """Update the weight and the state."""
        raise NotImplementedError


class _PlainSgd(Rule):
    def finish(self, slot: Slot, prepared: torch.Tensor, gradient: torch.Tensor, step: UpdateValues) -> None:
        weight = working(slot.weight)
        decay = slot["weightDecayScaleFactor0"]
        if decay != 1.0:
            weight.mul_(decay)
        weight.add_(prepared, alpha=-slot["scaledLearningRate0"] * step.factor)
        step.store(slot.weight, weight)


class _SeparateSgd(Rule):
    def prepare(self, slot: Slot, gradient: torch.Tensor, step: UpdateValues) -> torch.Tensor:
        stored = slot.state["Accl1"]
        velocity = working(stored)
        velocity.mul_(slot["scaledMomentum2"])
        velocity.add_(working(gradient), alpha=slot["dampeningScaleFactor2"] * step.factor)
        decay = slot["weightDecayScaleFactor2"]
        if decay != 0.0:
            velocity.add_(working(slot.weight), alpha=decay)
        step.store(stored, velocity)
        return working(stored)

    def clip_divisor(self, slot: Slot) -> float:
        return slot.velocity_scaling

    def finish(self, slot: Slot, prepared: torch.Tensor, gradient: torch.Tensor, step: UpdateValues) -> None:
        weight = working(slot.weight)
        direction = prepared
        if slot.nesterov:
            # Like the backend, divide this gradient only by the loss scaling, not by the number of
            # micro-batches; it matters if an update accumulates several.
            direction = working(gradient) + slot["scaledMomentum2"] * prepared
            direction.add_(weight, alpha=slot["weightDecayScaleFactor2"])
        weight.add_(direction, alpha=-slot["scaledLearningRate2"])
        step.store(slot.weight, weight)


class _CombinedSgd(Rule):
    def prepare(self, slot: Slot, gradient: torch.Tensor, step: UpdateValues) -> torch.Tensor:
        stored = slot.state["Accl"]
        velocity = working(stored)
        velocity.add_(working(gradient), alpha=slot["dampeningScaleFactor1"] * step.factor)
        step.store(stored, velocity)
        return working(stored)

    def clip_divisor(self, slot: Slot) -> float:
        return slot.velocity_scaling

    def finish(self, slot: Slot, prepared: torch.Tensor, gradient: torch.Tensor, step: UpdateValues) -> None:
        weight = working(slot.weight)
        direction = prepared
        if slot.nesterov:
            scale = slot["dampeningScaleFactor1"] * step.factor
            direction = working(gradient) * scale + slot["scaledMomentum1"] * prepared
            direction.add_(weight, alpha=slot["weightDecayScaleFactor1"])
        weight.add_(direction, alpha=-slot["scaledLearningRate1"])
        step.store(slot.weight, weight)
        stored = slot.state["Accl"]
        velocity = working(stored)
        velocity.mul_(slot["scaledMomentum1"]).add_(weight, alpha=slot["weightDecayScaleFactor1"])
        step.store(stored, velocity)


def _unscaled(slot: Slot, gradient: torch.Tensor, step: UpdateValues, *, l2: bool) -> torch.Tensor:
    scale = step.factor / step.loss_scaling
    unscaled = working(gradient) if scale == 1.0 else working(gradient) * scale
    if l2 and slot["weightDecay"] != 0.0:
        return torch.add(unscaled, working(slot.weight), alpha=slot["weightDecay"])
    return unscaled


class _Adam(Rule):
    def prepare(self, slot: Slot, gradient: torch.Tensor, step: UpdateValues) -> torch.Tensor:
        return _unscaled(slot, gradient, step, l2=slot.variant is Variant.ADAM)

    def finish(self, slot: Slot, prepared: torch.Tensor, gradient: torch.Tensor, step: UpdateValues) -> None:
        first, second = self._moments(slot, prepared, step)
        correction1 = correction2 = 1.0
        if slot.bias_corrected:
            slot.state["Step"].add_(1)
            correction1, correction2 = bias_corrections(slot["adamBeta1"], slot["adamBeta2"], float(slot.state["Step"]))
        denominator = second.sqrt().div_(_root(correction2)).add_(slot["adamEps"])
        weight = working(slot.weight)
        self._move(slot, weight, first, denominator, correction1)
        step.store(slot.weight, weight)

    def _moments(self, slot: Slot, prepared: torch.Tensor, step: UpdateValues) -> Tuple[torch.Tensor, torch.Tensor]:
        beta1, beta2 = slot["adamBeta1"], slot["adamBeta2"]
        first = working(slot.state["Accl1"])
        first.mul_(beta1).add_(prepared, alpha=1 - beta1)
        step.store(slot.state["Accl1"], first)
        second = working(slot.state["Accl2"])
        second.mul_(beta2).addcmul_(prepared, prepared, value=1 - beta2)
        step.store(slot.state["Accl2"], second)
        return first, second

    def _move(
        self,
        slot: Slot,
        weight: torch.Tensor,
        first: torch.Tensor,
        denominator: torch.Tensor,
        correction: float,
    ) -> None:
        if slot.variant is Variant.ADAMW:
            weight.mul_(1 - slot["learningRate"] * slot["weightDecay"])
        rate = slot["learningRate"] / correction if correction else math.nan
        weight.addcdiv_(first, denominator, value=-rate)


class _Lamb(_Adam):
    def _move(
        self,
        slot: Slot,
        weight: torch.Tensor,
        first: torch.Tensor,
        denominator: torch.Tensor,
        correction: float,
    ) -> None:
        direction = (first / denominator).div_(correction)
        direction.add_(weight, alpha=slot["weightDecay"])
        direction.mul_(trust_ratio(weight, direction, slot["maxWeightNorm"], by_row=bool(slot.rows)))
        weight.add_(direction, alpha=-slot["learningRate"])


def _root(value: float) -> float:
    # State loaded by a user may hold any number; the device would continue with NaN.
    return math.sqrt(value) if value >= 0 else math.nan


class _RmsProp(Rule):
    def prepare(self, slot: Slot, gradient: torch.Tensor, step: UpdateValues) -> torch.Tensor:
        return _unscaled(slot, gradient, step, l2=True)

    def finish(self, slot: Slot, prepared: torch.Tensor, gradient: torch.Tensor, step: UpdateValues) -> None:
        direction = prepared / self._denominator(slot, prepared, step)
        learning_rate = slot["learningRate"]
        if "Accl3" in slot.state:
            momentum = working(slot.state["Accl3"])
            momentum.mul_(slot["adaptiveMomentum"])
            momentum.add_(direction, alpha=learning_rate if slot.tf_variant else 1.0)
            step.store(slot.state["Accl3"], momentum)
            direction = momentum
            learning_rate = 1.0 if slot.tf_variant else learning_rate
        weight = working(slot.weight)
        weight.add_(direction, alpha=-learning_rate)
        step.store(slot.weight, weight)

    def _denominator(self, slot: Slot, prepared: torch.Tensor, step: UpdateValues) -> torch.Tensor:
        alpha, eps = slot["adaptiveAlpha"], slot["adaptiveEps"]
        squares = working(slot.state["Accl1"])
        squares.mul_(alpha).addcmul_(prepared, prepared, value=1 - alpha)
        step.store(slot.state["Accl1"], squares)
        variance = squares
        if slot.centered:
            mean = working(slot.state["Accl2"])
            mean.mul_(alpha).add_(prepared, alpha=1 - alpha)
            step.store(slot.state["Accl2"], mean)
            variance = squares - mean * mean
        if slot.tf_variant:
            return (variance + eps).sqrt_()
        return variance.sqrt().add_(eps)


RULES: Mapping[Variant, Rule] = {
    Variant.SGD: _PlainSgd(),
    Variant.SGD_SEPARATE: _SeparateSgd(),
    Variant.SGD_COMBINED: _CombinedSgd(),
    Variant.ADAM: _Adam(),
    Variant.ADAMW: _Adam(),
    Variant.LAMB: _Lamb(),
    Variant.RMSPROP: _RmsProp(),
}


def clipped(prepared: Sequence[Tuple[Slot, torch.Tensor]], max_norm: float) -> List[torch.Tensor]:
    """Return the tensors scaled such that the norm of everything that a replica updates is at most `max_norm`.

    If values of a parameter differ between replicas, so do the norms. Each row is scaled as in the first replica that
    uses it. Parameters shared by all replicas are scaled as in the first one, which the host reads.

    Args:
        prepared: The parameters with their prepared tensors.
        max_norm: The limit.
    """
    replicas = max((len(slot.rows) for slot, _ in prepared), default=0) or 1
    squares = torch.zeros(replicas, dtype=torch.float64)
    for slot, tensor in prepared:
        by_row = tensor.double().square().reshape(len(tensor) if slot.rows else 1, -1).sum(dim=1)
        squares += by_row[list(slot.rows or [0])] / RULES[slot.variant].clip_divisor(slot) ** 2
    factors = [max_norm / max(max_norm, math.sqrt(square)) for square in squares.tolist()]
    return [tensor * _factor_for(slot, tensor, factors) for slot, tensor in prepared]


def _factor_for(slot: Slot, tensor: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    if not slot.rows:
        return tensor.new_tensor(factors[0])
    of_rows = [factors[slot.rows.index(row)] for row in range(len(tensor))]
    return tensor.new_tensor(of_rows).reshape(-1, *[1] * (tensor.dim() - 1))
