"""The device side of an optimizer: accumulate and reduce gradients, and update the weights."""

from __future__ import annotations

import math
from typing import AbstractSet, Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from ipurun.emulator import enums
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._optimizer.convert import Converted, OptimizerType, Value, log_optimizer
from ipurun.emulator._optimizer.rules import RULES, Pack, Rounding, Slot, UpdateValues, clipped, packs_of
from ipurun.emulator._optimizer.scalars import Scalar, Variant, make_scalars, single, variant_for
from ipurun.emulator._optimizer.state import StateTable, initial_state
from ipurun.emulator._run.rounding import StochasticRounding, round_to_nearest
from ipurun.emulator.processes import Processes

_SGD_TYPES = (OptimizerType.SGD1, OptimizerType.SGD2)
_ACCUMULATORS = ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type")
_HALF_MAX = 65504.0
# A larger seed could overflow a loss in half precision.
_LARGEST_SCALE = 2.0**15
_OPERATIONS: Mapping[Variant, Tuple[str, ...]] = {
    Variant.SGD: ("SGD0VarUpdate",),
    Variant.SGD_COMBINED: ("SGD1Accumulate", "SGD1VarUpdate", "SGD1AcclUpdate"),
    Variant.SGD_SEPARATE: ("Accumulate", "SGD2VarUpdate"),
    Variant.ADAM: ("Accumulate", "Accumulate", "AdamUpdater", "AdamVarUpdate"),
    Variant.ADAMW: ("Accumulate", "Accumulate", "AdamUpdater", "AdamVarUpdate"),
    Variant.LAMB: ("Accumulate", "Accumulate", "AdamUpdater", "LambSquare", "AdamVarUpdate"),
    Variant.RMSPROP: ("Accumulate", "RMSPropUpdater", "AdaptiveVarUpdate"),
}


def check_attributes(converted: Converted) -> None:
    """Check for values that the backend rejects at compile time.

    Raises:
        poptorch.Error: If the loss scaling is zero or max_grad_norm is NaN.
    """
    if converted.value("loss_scaling") == 0:
        raise createNativeError("Loss scaling cannot be 0", type="popart_exception")
    max_norm = converted.value("max_grad_norm")
    if max_norm != max_norm:
        raise createNativeError("max_grad_norm is not a number (NaN)", type="popart_exception")


def check_replacement(old: Converted, new: Converted) -> None:
    """Check that the compiled program can use the new values.

    Raises:
        poptorch.Error: If a constant, the set of constants, or the kind of optimizer changed.
    """
    check_attributes(new)
    problems = _type_problems(old, new)
    if not problems:
        problems = _value_problems("optimizer", _compared(old), _compared(new))
        problems += _value_problems("default", old.defaults, new.defaults)
        for index, (before, after) in enumerate(zip(old.groups, new.groups)):
            problems += _value_problems(f"group {index}", before, after)
    if problems:
        raise createNativeError(
            "Optimizer cannot be replaced after the model was compiled: " + "; ".join(problems),
            type="popart_exception",
        )


def _type_problems(old: Converted, new: Converted) -> List[str]:
    same_family = old.type in _SGD_TYPES and new.type in _SGD_TYPES
    if not same_family and old.type is not new.type:
        return [f"the type changed from {old.type.name} to {new.type.name}"]
    if old.type is not new.type and (_keeps_state(old) or _keeps_state(new)):
        return ["use_combined_accum changed"]
    if old.group_sizes != new.group_sizes:
        return [f"the parameters per group changed from {old.group_sizes} to {new.group_sizes}"]
    return []


def _keeps_state(converted: Converted) -> bool:
    if converted.type not in _SGD_TYPES:
        return True
    return any(variant_for(converted, values) is not Variant.SGD for values in (converted.defaults, *converted.groups))


def _compared(converted: Converted) -> Dict[str, Value]:
    if _keeps_state(converted):
        return converted.attributes
    return {name: value for name, value in converted.attributes.items() if name not in _ACCUMULATORS}


def _value_problems(where: str, old: Dict[str, Value], new: Dict[str, Value]) -> List[str]:
    problems = []
    for name in sorted(set(old) & set(new) - {"dampening"}):
        problem = _difference(old[name], new[name])
        if problem:
            problems.append(f"{where} {name} {problem}")
    return problems


def _difference(old: Value, new: Value) -> str:
    words: Tuple[str, str] = ("variable", "constant")
    if old[1] != new[1]:
        return f"was {words[old[1]]} and is now {words[new[1]]}"
    if old[1] and old[0] != new[0]:
        return f"is constant and cannot change from {old[0]} to {new[0]}"
    return ""


class AutomaticLossScaling:
    """Adjusts an additional factor on the user's loss scaling.

    Args:
        settings: PopART options; `automaticLossScalingSettings.*` overrides the defaults.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        group = "automaticLossScalingSettings."
        self._limit = _HALF_MAX * float(settings.get(group + "binEdgeLocation", 0.125))
        self._tolerated = float(settings.get(group + "thresholdUpperCountProportion", 1e-7))
        self._period = int(settings.get(group + "updatePeriod", 1))
        self.factor = torch.ones((), dtype=torch.float32)
        self._large = 0
        self._seen = 0
        self._updates = 0

    def watch(self, gradient: torch.Tensor) -> None:
        """Count the elements of a gradient that was computed in half and are near overflow."""
        magnitude = gradient.abs()
        self._large += int(((magnitude > self._limit) | ~torch.isfinite(magnitude)).sum())
        self._seen += gradient.numel()

    def sum_over(self, processes: Processes) -> None:
        """Count what all processes have seen."""
        counts = torch.tensor([self._large, self._seen])
        processes.reduce_(counts)
        self._large, self._seen = int(counts[0]), int(counts[1])

    def step(self, loss_scaling: float) -> None:
        """Adjust the factor after a weight update, if there are half gradients."""
        self._updates += 1
        if self._updates % self._period or not self._seen:
            return
        shrinks = self._large / self._seen > self._tolerated
        factor = float(self.factor) * (0.5 if shrinks else 2.0)
        if shrinks or abs(loss_scaling) * factor <= _LARGEST_SCALE:
            self.factor.fill_(factor)
        self._large = self._seen = 0


class DeviceOptimizer:
    """An optimizer compiled for a set of device weights.

    Args:
        converted: The optimizer's values.
        named_params: Device weights by name; updated in place.
        group_of: Index of the group of each parameter; parameters without one use the defaults.
        options: The executor's options.
        accumulation: Gradient accumulation factor.
        num_replicas: Number of replicas in all processes.
        rows: For parameters whose values differ between replicas, the row that each replica computes with.
        processes: The processes over which accumulated gradients are summed; None: this one alone.
        from_half: Names of float32 weights whose gradients are computed in half and then cast.

    Raises:
        poptorch.Error: If the backend rejects a value.
    """

    def __init__(
        self,
        converted: Converted,
        named_params: Mapping[str, torch.Tensor],
        group_of: Mapping[str, int],
        options: Any,
        accumulation: int = 1,
        num_replicas: int = 1,
        *,
        rows: Optional[Mapping[str, Sequence[int]]] = None,
        processes: Optional[Processes] = None,
        from_half: AbstractSet[str] = frozenset(),
    ) -> None:
        check_attributes(converted)
        self._converted = converted
        self._from_half = from_half
        self._processes = processes
        self._group_of = dict(group_of)
        self._accumulation_type: torch.dtype = converted.value("accum_type") if accumulation > 1 else None
        training = options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        is_mean = training.accumulation_and_replication_reduction_type == enums.ReductionType.Mean
        if is_mean and strategy == enums.MeanReductionStrategy.PostAndLoss:
            raise createNativeError(
                "meanAccumulationAndReplicationReductionStrategy: PostAndLoss is not supported",
                type="popart_exception",
            )
        self._running = is_mean and strategy == enums.MeanReductionStrategy.Running
        self._mean_over = accumulation * num_replicas if is_mean else 1
        settings = options._Popart.options
        automatic = bool(settings.get("automaticLossScalingSettings.enabled", False))
        self._automatic: Optional[AutomaticLossScaling] = AutomaticLossScaling(settings) if automatic else None
        self._loss_scaling = Scalar(0.0, True)
        self._slots: Dict[str, Slot] = {}
        self._set_loss_scaling()
        for name, weight in named_params.items():
            self._slots[name] = self._make_slot(name, weight, self._values_of(name))
            self._slots[name].rows = tuple((rows or {}).get(name, ()))
        plain = not self._running and self._automatic is None and self._accumulation_type in (None, torch.float32)
        self._packs: List[Pack] = []
        if plain:
            self._packs = packs_of(self._slots.values(), self._group_of, self._accumulation_type)
        self._packed = {name for pack in self._packs for name in pack.names}
        self._rounding: Optional[StochasticRounding] = None
        if settings.get("enableStochasticRounding", False):
            tensors = [slot.weight for slot in self._slots.values()] + [pack.gradient for pack in self._packs]
            self._rounding = StochasticRounding(tensor.numel() for tensor in tensors)
        self._gradients: Dict[str, torch.Tensor] = {}
        self._owned: Set[str] = set()
        self._micro_batches = 0
        log_optimizer(converted)

    @property
    def loss_scaling(self) -> float:
        """Return the factor on the loss for the backward pass, including the automatic one."""
        factor = 1.0 if self._automatic is None else float(self._automatic.factor)
        return self._loss_scaling.value * factor

    @property
    def watches_gradients(self) -> bool:
        """Whether the gradients of every micro-batch are inspected."""
        return self._automatic is not None

    @torch.no_grad()
    def accumulate(self, grads: Mapping[str, torch.Tensor], micro_batches: int = 1) -> None:
        """Add the gradients of one or more micro-batches.

        Args:
            grads: Gradients by parameter name, scaled by `loss_scaling`, summed over the micro-batches.
            micro_batches: Number of micro-batches summed.
        """
        for pack in self._packs:
            pack.add(grads)
        for name, gradient in grads.items():
            if name in self._packed:
                continue
            if self._automatic is not None and (gradient.dtype == torch.float16 or name in self._from_half):
                self._automatic.watch(gradient)
            self._add(name, gradient, micro_batches)
        self._micro_batches += micro_batches

    @torch.no_grad()
    def apply(self) -> None:
        """Reduce the accumulated gradients, update weights and state, and reset the accumulators."""
        automatic_factor = 1.0 if self._automatic is None else float(self._automatic.factor)
        # The running mean covers only this process; the result must cover all processes.
        factor = (self._micro_batches if self._running else 1) / self._mean_over
        if self._rounding is not None:
            self._rounding.renew()
        rounding: Rounding = self._rounding or round_to_nearest
        step = UpdateValues(factor / automatic_factor, self._loss_scaling.value, rounding)
        if self._processes is not None:
            self._sum_over(self._processes)
        max_norm = float(self._converted.value("max_grad_norm"))
        work = [(self._slots[name], gradient) for name, gradient in self._gradients.items()]
        work += [part for pack in self._packs for part in pack.work()]
        if math.isinf(max_norm):
            for slot, gradient in work:
                rule = RULES[slot.variant]
                rule.finish(slot, rule.prepare(slot, gradient, step), gradient, step)
        else:
            prepared = [(slot, RULES[slot.variant].prepare(slot, gradient, step)) for slot, gradient in work]
            for (slot, gradient), tensor in zip(work, clipped(prepared, max_norm)):
                RULES[slot.variant].finish(slot, tensor, gradient, step)
        for pack in self._packs:
            pack.finish()
        self._gradients.clear()
        self._owned.clear()
        self._micro_batches = 0
        if self._automatic is not None:
            self._automatic.step(self._loss_scaling.value)

    def _sum_over(self, processes: Processes) -> None:
        """Sum what this process has accumulated over all of them."""
        names = list(self._gradients)
        gradients = [*self._gradients.values(), *(pack.gradient for pack in self._packs)]
        sums = processes.summed(gradients)
        self._gradients = dict(zip(names, sums))
        self._owned = set(names)
        for pack, total in zip(self._packs, sums[len(names) :]):
            pack.gradient.copy_(total)
        if self._automatic is not None:
            self._automatic.sum_over(processes)

    def update(self, converted: Converted) -> None:
        """Use the values of another optimizer (`setOptimizer`); do nothing if they are equal.

        Raises:
            poptorch.Error: If a constant of the compiled program changed.
        """
        if converted == self._converted:
            return
        check_replacement(self._converted, converted)
        self._converted = converted
        self._set_loss_scaling()
        made: Dict[Tuple[int, Variant], Dict[str, Scalar]] = {}
        for name, slot in self._slots.items():
            values = self._values_of(name)
            kind = id(values), slot.variant
            if kind not in made:
                made[kind] = make_scalars(slot.variant, values, converted.attributes["loss_scaling"])
            self._refresh(slot, values, made[kind])
        for pack in self._packs:
            pack.refresh()
        log_optimizer(converted)

    def read_state(self) -> Dict[str, Dict[str, torch.Tensor]]:
        """Return a copy of the state and the variable scalars: `ipu_state` and `ipu_param`."""
        return self._table().read()

    @torch.no_grad()
    def write_state(self, state: Mapping[str, Optional[Mapping[str, torch.Tensor]]]) -> None:
        """Overwrite state and variable scalars by name; warn about missing ones and keep their values."""
        self._table().write(state)
        for slot in self._slots.values():
            if slot.variant is Variant.SGD_SEPARATE:
                slot.velocity_scaling = self._loss_scaling.value  # the velocity was stored with the loaded value
        for pack in self._packs:
            pack.refresh()

    def operations(self) -> List[str]:
        """Return the backend's names for the operations that update the weights, for dumps of the program."""
        return [operation for slot in self._slots.values() for operation in _OPERATIONS[slot.variant]]

    def _table(self) -> StateTable:
        factor = None if self._automatic is None else self._automatic.factor
        return StateTable(self._slots.values(), self._loss_scaling, self._accumulation_type, factor)

    def _values_of(self, name: str) -> Dict[str, Value]:
        if name in self._group_of:
            return self._converted.groups[self._group_of[name]]
        return self._converted.defaults

    def _set_loss_scaling(self) -> None:
        value, is_const = self._converted.attributes["loss_scaling"]
        self._loss_scaling.value = single(value)
        self._loss_scaling.is_const = is_const

    def _make_slot(self, name: str, weight: torch.Tensor, values: Dict[str, Value]) -> Slot:
        converted = self._converted
        variant = variant_for(converted, values)
        slot = Slot(
            name=name,
            weight=weight,
            variant=variant,
            scalars=make_scalars(variant, values, converted.attributes["loss_scaling"]),
            scalar_owner=f"specific___{name}" if values is not converted.defaults else "default___FLOAT",
            velocity_scaling=self._velocity_scaling(variant, values),
            nesterov=_uses_nesterov(values),
            bias_corrected=converted.type is not OptimizerType.LAMB_NO_BIAS,
            centered=converted.type is OptimizerType.RMSPROP_CENTERED,
            tf_variant=bool(converted.value("use_tf_variant")),
        )
        momentum, momentum_const = values.get("momentum", (0.0, True))
        with torch.no_grad():
            slot.state = initial_state(
                slot,
                converted.value("first_order_momentum_accum_type"),
                converted.value("second_order_momentum_accum_type"),
                keeps_momentum=not (momentum_const and momentum == 0),
            )
        return slot

    def _refresh(self, slot: Slot, values: Dict[str, Value], scalars: Mapping[str, Scalar]) -> None:
        # Scalars are not shared between slots: a loaded state may set those of a single one.
        for name, scalar in scalars.items():
            slot.scalars[name].value = scalar.value
            slot.scalars[name].is_const = scalar.is_const
        slot.nesterov = _uses_nesterov(values)
        scaling = self._velocity_scaling(slot.variant, values)
        if slot.variant is Variant.SGD_SEPARATE and scaling != slot.velocity_scaling:
            # The stored velocity includes the loss scaling, so it is rescaled when that changes.
            with torch.no_grad():
                slot.state["Accl1"].mul_(scaling / slot.velocity_scaling)
        slot.velocity_scaling = scaling

    def _velocity_scaling(self, variant: Variant, values: Dict[str, Value]) -> float:
        if variant is Variant.SGD_COMBINED:
            return single(values["velocity_scaling"][0])
        return self._loss_scaling.value

    def _add(self, name: str, gradient: torch.Tensor, micro_batches: int) -> None:
        dtype = self._accumulation_type or self._slots[name].weight.dtype
        gradient = gradient.to(dtype)
        seen = self._micro_batches
        if self._running and seen + micro_batches > 1:
            gradient = gradient / (seen + micro_batches)
        total = self._gradients.get(name)
        if total is None:
            self._gradients[name] = gradient
            return
        if name not in self._owned:
            # Gradients from the backward pass may be shared between parameters: never change them in place.
            total = total.clone()
            self._owned.add(name)
        if self._running:
            total.mul_(seen / (seen + micro_batches))
        self._gradients[name] = total.add_(gradient)


def _uses_nesterov(values: Mapping[str, Value]) -> bool:
    return bool(values.get("nesterov", (False, True))[0]) and values["momentum"][0] > 0
