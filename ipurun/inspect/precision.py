"""Half precision: of the whole model, of its inputs, and by rules with casts at a module's edges."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipurun.inspect.batch_items import as_call, map_tensors, split_target

__all__ = ["CastingCollate", "cast_hooks", "cast_weights"]

_WORDS = {"16": torch.float16, "32": torch.float32}


def cast_weights(model: nn.Module, precision: str, rules: Mapping[str, str]) -> None:
    """Give parameters and buffers their type: by the precision's second half, then by the rules.

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
        elif precision != "16.32":  # which keeps weights in float32 whatever computes in half
            module.half()


def cast_hooks(model: nn.Module, precision: str, rules: Mapping[str, str]) -> List[Any]:
    """Put casts at the edges of every module that a rule names; gives the hooks' handles.

    What flows into such a module is cast to its type, what comes out to the type that surrounds it: that of the
    nearest ruled module around it, or the run's own.
    """
    handles = []
    for name, word in _outer_first(rules):
        surrounding = _surrounding(name, rules, precision.split(".")[0])
        module = model.get_submodule(name)
        inner, outer = _WORDS[word], _WORDS[surrounding]
        handles.append(module.register_forward_pre_hook(_CastInputs(inner), with_kwargs=True))
        handles.append(module.register_forward_hook(_CastOutput(outer)))
    return handles


class CastingCollate:
    """A collate function whose floating-point inputs come out in half precision.

    Casting on the host halves what crosses to the device. The target keeps its type, because losses want it
    as it is. A class, so that worker processes can be handed one.
    """

    def __init__(self, collate: Callable[[List[Any]], Any], has_target: bool, target: Optional[str]) -> None:
        self._collate = collate
        self._has_target = has_target
        self._target = target

    def __call__(self, samples: List[Any]) -> Any:
        batch = self._collate(samples)
        if not self._has_target:
            return _cast(batch, torch.float16)
        args, kwargs = as_call(batch)
        target = split_target(args, kwargs, self._target)[2]
        return map_tensors(lambda t: t if _is_part_of(t, target) else _cast(t, torch.float16), batch)


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


def _is_part_of(tensor: torch.Tensor, whole: Any) -> bool:
    found: List[bool] = []
    map_tensors(lambda t: found.append(t is tensor), whole)
    return any(found)


def _outer_first(rules: Mapping[str, str]) -> List[Tuple[str, str]]:
    return sorted(rules.items(), key=lambda rule: (rule[0].count("."), rule[0]))


def _surrounding(name: str, ruled: Mapping[str, str], operations: str) -> str:
    parts = name.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:depth])
        if around in ruled:
            return ruled[around]
    return operations
