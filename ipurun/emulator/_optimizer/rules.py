"""The update rules, for one parameter at a time or for several that are packed into one.

`prepare` computes the tensor that `max_grad_norm` clips; `finish` updates weight and state with it, clipped or not.
Gradients are passed as accumulated: `gradient * factor` is the reduced gradient, still multiplied by the loss scaling.
Values are computed in float32 and rounded to the stored types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

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


# A pack stays in the cache, and the operations on larger parameters take longer than starting them.
_LARGEST_PACK = 2**16
_LARGEST_PACKED = 2**14
_ALIGNMENT = 16


class Pack:
    """Small parameters that are updated as one: the rules compute every element separately.

    Weights, states and gradients become parts of one tensor each.

    Args:
        slots: The parameters; their tensors are replaced.
        accumulation_type: Type of the accumulated gradients, that of the weights by default.
    """

    def __init__(self, slots: Sequence[Slot], accumulation_type: Optional[torch.dtype]) -> None:
        self.slots = list(slots)
        self.names = [slot.name for slot in slots]
        self._is_uniform = False
        self._without = set(self.names)
        self.gradient, self._gradients = self._joined(
            [torch.zeros_like(slot.weight, dtype=accumulation_type) for slot in slots]
        )
        weight, parts = self._joined([slot.weight for slot in slots])
        for slot, part in zip(slots, parts):
            slot.weight.data = part  # the object stays the same: others hold it
        state: Dict[str, torch.Tensor] = {}
        self._steps = torch.zeros(len(slots))
        for prefix in slots[0].state:
            if prefix == "Step":
                parts = list(self._steps.unbind())
                state[prefix] = torch.zeros(())
            else:
                state[prefix], parts = self._joined([slot.state[prefix] for slot in slots])
            for slot, part in zip(slots, parts):
                slot.state[prefix] = part
        self._whole = replace(slots[0], name=", ".join(self.names), weight=weight, state=state)
        self.refresh()

    def refresh(self) -> None:
        """Take over the values of the parameters after they were changed from outside."""
        first = self.slots[0]
        values = [
            ([scalar.value for scalar in slot.scalars.values()], slot.velocity_scaling, slot.nesterov)
            for slot in self.slots
        ]
        steps = self._steps.tolist()
        self._is_uniform = all(each == values[0] for each in values) and all(step == steps[0] for step in steps)
        self._whole.scalars = first.scalars
        self._whole.velocity_scaling, self._whole.nesterov = first.velocity_scaling, first.nesterov
        if "Step" in first.state:
            self._whole.state["Step"].fill_(steps[0])

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add the gradients of the parameters, by name."""
        present = [index for index, name in enumerate(self.names) if name in gradients]
        if present:
            torch._foreach_add_([self._gradients[i] for i in present], [gradients[self.names[i]] for i in present])
        self._without.difference_update(gradients)

    def work(self) -> List[Tuple[Slot, torch.Tensor]]:
        """Return what to update, with its gradient: one slot if all parameters have the same values."""
        if self._is_whole():
            return [(self._whole, self.gradient)]
        return [pair for pair in zip(self.slots, self._gradients) if pair[0].name not in self._without]

    def finish(self) -> None:
        """Clear the gradients after an update."""
        if self._is_whole():
            self._steps.fill_(self._whole.state.get("Step", self._steps[0]))
        else:
            self.refresh()
        self.gradient.zero_()
        self._without.update(self.names)

    def _is_whole(self) -> bool:
        return self._is_uniform and not self._without

    @staticmethod
    def _joined(tensors: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Return one tensor that holds copies of some, and its parts; parts are aligned as separate tensors are."""
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT)
        whole = torch.zeros(starts[-1], dtype=tensors[0].dtype)
        parts = [whole[start : start + t.numel()].view(t.shape) for start, t in zip(starts, tensors)]
        for part, tensor in zip(parts, tensors):
            part.copy_(tensor)
        return whole, parts


def packs_of(
    slots: Iterable[Slot], group_of: Mapping[str, int], accumulation_type: Optional[torch.dtype]
) -> List[Pack]:
    """Pack the parameters of each group that can be updated as one.

    Args:
        slots: The parameters.
        group_of: Index of the optimizer's group of each parameter, by name.
        accumulation_type: Type of the accumulated gradients, that of the weights by default.
    """
    groups: Dict[Tuple[object, ...], List[List[Slot]]] = {}
    for slot in slots:
        tensors = (slot.weight, *slot.state.values())
        fits = all(t.dtype in (torch.float16, torch.float32) and t.is_contiguous() for t in tensors)
        # The trust ratio of LAMB is a value of one parameter, and rows are separate parameters.
        if not fits or slot.variant is Variant.LAMB or slot.rows or slot.weight.numel() > _LARGEST_PACKED:
            continue
        dtypes = tuple(tensor.dtype for tensor in tensors)
        lists = groups.setdefault((slot.variant, group_of.get(slot.name), tuple(slot.state), dtypes), [[]])
        if sum(other.weight.numel() for other in lists[-1]) + slot.weight.numel() > _LARGEST_PACK:
            lists.append([])
        lists[-1].append(slot)
    return [Pack(members, accumulation_type) for lists in groups.values() for members in lists if len(members) > 1]


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
