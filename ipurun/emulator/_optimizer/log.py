"""The lines that PopTorch's native layer logs when an optimizer reaches the device."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Tuple

import torch

from ipurun.emulator._logging import native_logger
from ipurun.emulator._optimizer.convert import Converted, OptimizerType, Value

__all__ = ["log_optimizer"]

_NAMES: Mapping[OptimizerType, str] = {
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
_TYPES: Mapping[str, str] = {
    "accumType": "accum_type",
    "firstOrderMomentumAccumType": "first_order_momentum_accum_type",
    "secondOrderMomentumAccumType": "second_order_momentum_accum_type",
}


def log_optimizer(converted: Converted) -> None:
    """Log the optimizer's defaults and each group's values at debug level."""
    name = _NAMES[converted.type]
    fields = [f"{label}={_type_name(converted.value(key))}" for label, key in _TYPES.items()]
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
    # The learning rate comes first, the velocity scaling before what follows it: each ends in a comma.
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
