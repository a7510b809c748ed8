"""Convert an optimizer to the constant and variable values that are sent to the device, and log them."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from numbers import Number
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch

from ipurun.emulator import optim
from ipurun.emulator._logging import logger, native_logger

# Set by torch's or poptorch's constructors: no warning when a program switches between the two.
_CONSTRUCTOR_ATTRIBUTES = frozenset(
    {
        "accum_type",
        "bias_correction",
        "defaults",
        "first_order_momentum_accum_type",
        "loss_scaling",
        "max_grad_norm",
        "param_groups",
        "second_order_momentum_accum_type",
        "state",
        "use_combined_accum",
        "use_tf_variant",
        "variable_attrs",
        "velocity_accum_type",
    }
)
Value = Tuple[Any, bool]
"""A value, and whether it is constant after compilation."""
_FIXED_DEFAULTS: Mapping[str, Any] = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
    "max_grad_norm": float("inf"),
    "use_tf_variant": False,
}
_LOGGED_TYPES: Mapping[str, str] = {
    "accumType": "accum_type",
    "firstOrderMomentumAccumType": "first_order_momentum_accum_type",
    "secondOrderMomentumAccumType": "second_order_momentum_accum_type",
}


class AttributeTracker:
    """Remembers the attributes of an executor's optimizers.

    Args:
        relaxed: Report unexpected attributes only in the debug log.
    """

    def __init__(self, relaxed: bool = False) -> None:
        self._log = logger.debug if relaxed else logger.warning
        self._optimizer_names: Optional[Set[str]] = None
        self._group_names: Set[str] = set()
        self._reported: Set[Tuple[int, str]] = set()

    def observe(self, optimizer: Any) -> None:
        """Record the attributes the first time, and report each new one once afterwards."""
        names = {name for name in vars(optimizer) if not name.startswith("_")} - _CONSTRUCTOR_ATTRIBUTES
        if self._optimizer_names is None:
            self._optimizer_names = names
            self._group_names = {name for group in optimizer.param_groups for name in group}
            return
        kind = type(optimizer).__name__
        for name in sorted(names - self._optimizer_names):
            self._optimizer_names.add(name)
            self._log("Ignoring unexpected optimizer attribute in %s optimizer: %r", kind, name)
        for index, group in enumerate(optimizer.param_groups):
            for name in sorted(set(group) - self._group_names):
                if (index, name) in self._reported:
                    continue
                self._reported.add((index, name))
                self._log("Ignoring unexpected group %d attribute in %s optimizer: %r", index, kind, name)


class OptimizerType(enum.IntEnum):
    """The optimizers of the backend; SGD1 keeps one buffer (combined), SGD2 two (separate)."""

    SGD1 = 0
    SGD2 = 1
    ADAM = 2
    ADAMW = 3
    ADAMW_NO_BIAS = 4
    RMSPROP = 5
    RMSPROP_CENTERED = 6
    LAMB = 7
    LAMB_NO_BIAS = 8


@dataclass
class Converted:
    """An optimizer in the device's terms; equal ones need no update.

    Attributes:
        type: The kind of update.
        attributes: Values for the whole optimizer: `loss_scaling`, accumulator types, `max_grad_norm`, ...
        defaults: Values for parameters without a group.
        groups: Values for the parameters of each group.
        group_sizes: Number of parameters in each group.
    """

    type: OptimizerType
    attributes: Dict[str, Value]
    defaults: Dict[str, Value]
    groups: List[Dict[str, Value]]
    group_sizes: List[int]

    def value(self, name: str) -> Any:
        """Return the value of an attribute of the whole optimizer."""
        return self.attributes[name][0]


@dataclass(frozen=True)
class _Family:
    torch_class: type
    poptorch_class: type
    per_group: Tuple[str, ...]
    # For torch's own classes: constant while the attribute has this value; always constant if not listed.
    constant_value: Mapping[str, Any]


_FAMILIES: Tuple[_Family, ...] = (
    _Family(
        torch.optim.SGD,
        optim.SGD,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        {"momentum": 0, "dampening": 0, "weight_decay": 0},
    ),
    # Before Adam, because recent torch derives AdamW from it.
    _Family(
        torch.optim.AdamW,
        optim.AdamW,
        ("lr", "betas", "weight_decay", "eps"),
        {"weight_decay": 0.01, "eps": 1e-8},
    ),
    _Family(
        torch.optim.Adam,
        optim.Adam,
        ("lr", "betas", "eps", "weight_decay"),
        {"weight_decay": 0, "eps": 1e-8},
    ),
    _Family(
        torch.optim.RMSprop,
        optim.RMSprop,
        ("lr", "momentum", "weight_decay", "alpha", "eps"),
        {"momentum": 0, "weight_decay": 0, "eps": 1e-8},
    ),
    _Family(optim.LAMB, optim.LAMB, ("lr", "weight_decay", "betas", "eps", "max_weight_norm"), {}),
)


def convert(
    optimizer: torch.optim.Optimizer,
    tracker: Optional[AttributeTracker] = None,
    *,
    automatic_loss_scaling: bool = False,
) -> Converted:
    """Convert an optimizer to values for the device.

    Args:
        optimizer: One of torch's SGD, Adam, AdamW, RMSprop, or one of `poptorch.optim`.
        tracker: Records the attributes at the first conversion and warns about new ones later.
        automatic_loss_scaling: Whether the device adjusts the loss scaling, which then cannot be constant.

    Returns:
        The converted values.

    Raises:
        AssertionError: If the class of optimizer is not supported, or a value is not a number.
        ValueError: If amsgrad is on.
    """
    family = _family_of(optimizer)
    if tracker is not None:
        tracker.observe(optimizer)
    per_group = family.per_group
    if isinstance(optimizer, optim.SGD) and optimizer.use_combined_accum:
        per_group = (*per_group, "velocity_scaling")
    groups = optimizer.param_groups
    for values in (optimizer.defaults, *groups):
        if values.get("amsgrad"):
            raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    return Converted(
        type=_type_of(optimizer, family),
        attributes=_attributes(optimizer, automatic_loss_scaling),
        defaults=_values(optimizer, family, per_group, optimizer.defaults),
        groups=[_values(optimizer, family, per_group, group) for group in groups],
        group_sizes=[len(group["params"]) for group in groups],
    )


def forces_running_mean(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the accumulator's type requires the Running mean, regardless of the options."""
    return getattr(optimizer, "accum_type", None) == torch.float16 and not getattr(
        optimizer, "use_combined_accum", False
    )


def _family_of(optimizer: Any) -> _Family:
    for family in _FAMILIES:
        if isinstance(optimizer, family.torch_class):
            if type(optimizer) not in (family.torch_class, family.poptorch_class):
                logger.warning(
                    "%s is a subclass of %s: the device runs the update of the latter. "
                    "Poptorch does not run Python optimizer code directly.",
                    type(optimizer).__name__,
                    family.torch_class.__name__,
                )
            return family
    raise AssertionError(
        f"Unsupported optimizer type {type(optimizer).__name__}. Supported: SGD, Adam, AdamW, RMSprop of "
        "torch.optim and poptorch.optim, and poptorch.optim.LAMB. Poptorch does not run Python optimizer code directly."
    )


def _type_of(optimizer: Any, family: _Family) -> OptimizerType:
    corrected = getattr(optimizer, "bias_correction", True)
    if family.torch_class is torch.optim.SGD:
        return OptimizerType.SGD1 if getattr(optimizer, "use_combined_accum", False) else OptimizerType.SGD2
    if family.torch_class is torch.optim.AdamW:
        return OptimizerType.ADAMW if corrected else OptimizerType.ADAMW_NO_BIAS
    if family.torch_class is torch.optim.Adam:
        return OptimizerType.ADAM
    if family.torch_class is torch.optim.RMSprop:
        centered = {bool(group["centered"]) for group in optimizer.param_groups}
        assert len(centered) <= 1, "All parameter groups must have the same value of 'centered'"
        return OptimizerType.RMSPROP_CENTERED if centered == {True} else OptimizerType.RMSPROP
    return OptimizerType.LAMB if corrected else OptimizerType.LAMB_NO_BIAS


def _attributes(optimizer: Any, automatic_loss_scaling: bool) -> Dict[str, Value]:
    attributes: Dict[str, Value] = {
        name: (getattr(optimizer, name, default), True) for name, default in _FIXED_DEFAULTS.items()
    }
    if hasattr(optimizer, "velocity_accum_type"):
        attributes["first_order_momentum_accum_type"] = (optimizer.velocity_accum_type, True)
    loss_scaling = _number("loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
    if isinstance(optimizer, optim.Optimizer):
        constant = optimizer.variable_attrs.isConstant("loss_scaling")
    else:
        constant = loss_scaling == 1.0
    attributes["loss_scaling"] = (loss_scaling, constant and not automatic_loss_scaling)
    return attributes


def _values(optimizer: Any, family: _Family, names: Tuple[str, ...], source: Mapping[str, Any]) -> Dict[str, Value]:
    values: Dict[str, Value] = {}
    for name in names:
        value = source[name]
        value = _pair(name, value) if name == "betas" else _number(name, value)
        if isinstance(optimizer, optim.Optimizer):
            constant = optimizer.variable_attrs.isConstant(name)
        elif name in family.constant_value:
            constant = value == family.constant_value[name]
        else:
            constant = name != "lr"
        values[name] = (value, constant)
    return values


def _number(name: str, value: Any) -> Any:
    assert isinstance(value, Number), f"The value of {name} must be a number, not {type(value).__name__}"
    return value


def _pair(name: str, value: Any) -> Tuple[Any, Any]:
    assert isinstance(value, tuple) and len(value) == 2, f"The value of {name} must be a tuple of two numbers"
    return _number(name, value[0]), _number(name, value[1])


_LOGGED_NAMES: Mapping[OptimizerType, str] = {
    OptimizerType.SGD1: "SGD1",
    OptimizerType.SGD2: "SGD2",
    OptimizerType.ADAM: "Adam",
    OptimizerType.ADAMW: "AdamW",
    OptimizerType.ADAMW_NO_BIAS: "AdamW (no bias)",
    OptimizerType.RMSPROP: "RMSProp",
    OptimizerType.RMSPROP_CENTERED: "RMSProp (centered)",
    OptimizerType.LAMB: "LAMB",
    OptimizerType.LAMB_NO_BIAS: "LAMB (no bias)",
}


def log_optimizer(converted: Converted) -> None:
    """Log the optimizer's defaults and each group's values at debug level."""
    if not native_logger.isEnabledFor(logging.DEBUG):
        return
    name = _LOGGED_NAMES[converted.type]
    fields = [f"{label}={_type_name(converted.value(key))}" for label, key in _LOGGED_TYPES.items()]
    fields += _fields(_with_velocity_scaling(converted, converted.defaults), prefix="default_")
    if converted.value("max_grad_norm") != float("inf"):
        fields.append(f"maxGradNorm={converted.value('max_grad_norm'):g}")
    fields.append(_field("loss_scaling", converted.attributes["loss_scaling"]))
    native_logger.debug("Updating graph optimizer with %s: %s", name, ", ".join(fields))
    for index, group in enumerate(converted.groups):
        fields = _fields(_with_velocity_scaling(converted, group), prefix="")
        native_logger.debug("Updating group %d optimizer with %s: %s", index, name, ", ".join(fields))


def _with_velocity_scaling(converted: Converted, values: Dict[str, Value]) -> Dict[str, Value]:
    if converted.type is not OptimizerType.SGD2:
        return values
    return {"velocity_scaling": converted.attributes["loss_scaling"], **values}


def _fields(values: Mapping[str, Value], prefix: str) -> List[str]:
    # PopTorch logs the learning rate first and the velocity scaling second.
    first = ("lr", "velocity_scaling")
    ordered = [name for name in first if name in values] + [name for name in values if name not in first]
    return [
        _field(prefix + ("learning_rate" if name == "lr" else name), value)
        for key in ordered
        for name, value in _flattened(key, values[key])
    ]


def _flattened(name: str, value: Value) -> Iterator[Tuple[str, Value]]:
    if name != "betas":
        yield name, value
        return
    for index, beta in enumerate(value[0], start=1):
        yield f"beta{index}", (beta, value[1])


def _field(name: str, value: Value) -> str:
    first, *rest = name.split("_")
    label = first + "".join(word.capitalize() for word in rest)
    return f"{label}={float(value[0]):g}" + (" (const)" if value[1] else "")


def _type_name(dtype: Any) -> str:
    return str(dtype).split(".")[-1] if isinstance(dtype, torch.dtype) else str(dtype)
