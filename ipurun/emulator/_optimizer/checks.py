"""What may not change about an optimizer once the model is compiled."""

from __future__ import annotations

from typing import Dict, List, Tuple

from ipurun.emulator._impl import createNativeError
from ipurun.emulator._optimizer.convert import Converted, OptimizerType, Value
from ipurun.emulator._optimizer.scalars import Variant, variant_for

__all__ = ["check_attributes", "check_replacement"]

_SGD_TYPES = (OptimizerType.SGD1, OptimizerType.SGD2)
_ACCUMULATORS = ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type")


def check_attributes(converted: Converted) -> None:
    """Check the values that the backend refuses when the model is compiled.

    Raises:
        poptorch.Error: For a loss scaling of zero or a norm that is not a number.
    """
    if converted.value("loss_scaling") == 0:
        raise createNativeError("Loss scaling cannot be 0", type="popart_exception")
    max_norm = converted.value("max_grad_norm")
    if max_norm != max_norm:
        raise createNativeError("max_grad_norm is not a number (NaN)", type="popart_exception")


def check_replacement(old: Converted, new: Converted) -> None:
    """Check that the compiled program can take the new values.

    Raises:
        poptorch.Error: If a constant, the const-ness of a value, or the kind of optimizer changed.
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
