"""Half precision for a whole model, for its inputs, and for single modules with casts around them."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipurun.inspect.batch_items import as_call, map_tensors, split_target

__all__ = ["CastingCollate", "cast_hooks", "cast_weights", "half_inputs"]

_DTYPES = {"16": torch.float16, "32": torch.float32}


def cast_weights(model: nn.Module, precision: str, rules: Mapping[str, str]) -> None:
    """Cast parameters and buffers by the second half of the precision, then by the rules.

    Args:
        model: The user's model.
        precision: ``<operations>.<weights>``.
        rules: Module name -> ``16`` or ``32``; inner modules win over outer ones.
    """
    if precision.endswith(".16"):
        model.half()
    for name, word in _outer_first(rules):
        module = model.get_submodule(name)
        if word == "32":
            module.float()
        elif precision != "16.32":  # which keeps all weights in float32
            module.half()


def cast_hooks(model: nn.Module, precision: str, rules: Mapping[str, str]) -> List[Any]:
    """Add casts around every module that a rule names, and return the handles of the hooks.

    Inputs of such a module are cast to its type, outputs to the type around it: that of the nearest enclosing module
    with a rule, or the run's.
    """
    handles = []
    for name, word in _outer_first(rules):
        surrounding = _surrounding(name, rules, precision.split(".")[0])
        module = model.get_submodule(name)
        inner, outer = _DTYPES[word], _DTYPES[surrounding]
        handles.append(module.register_forward_pre_hook(_CastInputs(inner), with_kwargs=True))
        handles.append(module.register_forward_hook(_CastOutput(outer)))
    return handles


def half_inputs(batch: Any, has_target: bool, target: Optional[str]) -> Any:
    """Cast the floating-point items of a batch to half precision, except the target, whose type the loss needs.

    Args:
        batch: The batch.
        has_target: Whether one item is the target.
        target: Its index or key, see `split_target`.
    """
    kept: List[int] = []
    if has_target:
        args, kwargs = as_call(batch)
        map_tensors(lambda t: kept.append(id(t)), split_target(args, kwargs, target)[2])
    return map_tensors(lambda t: t if id(t) in kept else _cast(t, torch.float16), batch)


class CastingCollate:
    """A collate function that returns floating-point inputs in half precision.

    Casting on the host halves the traffic to the device. It is a class so that it can be sent to worker processes.
    """

    def __init__(self, collate: Callable[[List[Any]], Any], has_target: bool, target: Optional[str]) -> None:
        self._collate = collate
        self._has_target = has_target
        self._target = target

    def __call__(self, samples: List[Any]) -> Any:
        return half_inputs(self._collate(samples), self._has_target, self._target)


class _CastInputs:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        return _cast(args, self._dtype), _cast(kwargs, self._dtype)


class _CastOutput:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self._dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value)


def _outer_first(rules: Mapping[str, str]) -> List[Tuple[str, str]]:
    return sorted(rules.items(), key=lambda rule: (rule[0].count("."), rule[0]))


def _surrounding(name: str, ruled: Mapping[str, str], operations: str) -> str:
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:depth])
        if around in ruled:
            return ruled[around]
    return operations
