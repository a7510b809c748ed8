"""Half precision for a whole model, for its inputs, for its weights where they are read, and for single modules."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ipurun.inspect.batch_items import as_call, map_tensors, split_target

__tracebackhide__ = True  # errors name the model's lines, not those that cast its weights
__all__ = ["CastingCollate", "HalfWeights", "cast_hooks", "cast_weights", "half_inputs"]

_DTYPES = {"16": torch.float16, "32": torch.float32}
# Questions about a tensor, which need no cast, and conversions, which start from the master weight.
_NOT_CAST = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "stride",
        "storage_offset",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "data_ptr",
        "requires_grad_",
        "register_hook",
        "__len__",
        "__hash__",
        "__repr__",
        "to",
        "type",
        "type_as",
        "float",
        "half",
        "double",
    ]
)
_VALUE_PROPERTIES = tuple(
    getattr(torch.Tensor, name).__get__
    for name in ("T", "mT", "H", "mH", "data", "real")
    if hasattr(torch.Tensor, name)
)
_READ_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # a descriptor
_KEEPS_STATISTICS = (functional.batch_norm, functional.instance_norm)


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
        handles.append(module.register_forward_pre_hook(_CastInputs(word), with_kwargs=True))
        handles.append(module.register_forward_hook(_CastOutput(surrounding)))
    return handles


class HalfWeights(TorchFunctionMode):
    """Mixed precision: inside it, operations read the float32 weights of a model in half precision.

    Each operation gets its own cast, in the block and on the IPU that it belongs to, and gradients flow through the
    cast to the float32 weight. Torch would refuse some operations with two types, and compute others in float32.
    Buffers are read in half as well, but written in their own type. Modules with the rule ``32`` are left out.

    Args:
        model: The model, with its loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._weights: Dict[int, torch.Tensor] = {}
        self.words = ["16"]  # that of the innermost running module with a rule is the last

    def __enter__(self) -> HalfWeights:
        # An engine may put other tensors in place of the weights while it traces the model.
        owned = [w for m in self._model.modules() for w in (*m._parameters.values(), *m._buffers.values())]
        self._weights = {id(weight): weight for weight in owned if weight is not None and weight.dtype == torch.float32}
        self.words = ["16"]
        _running.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _running.remove(self)
        self._weights = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.words[-1] == "32" or name in _NOT_CAST:
            return func(*args, **kwargs)
        if name == "__get__" and func not in _VALUE_PROPERTIES:
            is_weight = func == _READ_DTYPE and id(args[0]) in self._weights
            return torch.float16 if is_weight else func(*args, **kwargs)
        writes = name == "__set__" or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        writes = writes or (name.startswith("__i") and name.endswith("__") and name != "__invert__")
        kept = args[:1] if writes else args[1:3] if func in _KEEPS_STATISTICS else ()
        named = {key for key in kwargs if key in ("out", "running_mean", "running_var")}

        def cast(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)([cast(item) for item in value]) if type(value) in (list, tuple) else value
            if id(value) not in self._weights or any(value is item for item in kept):
                return value
            return value.to(torch.float16)

        return func(*[cast(arg) for arg in args], **{k: v if k in named else cast(v) for k, v in kwargs.items()})


_running: List[HalfWeights] = []


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

    @property
    def padding_share(self) -> Optional[float]:
        """The share of padding in the batches so far, None where the collate function does not count it."""
        return getattr(self._collate, "padding_share", None)

    def __call__(self, samples: List[Any]) -> Any:
        return half_inputs(self._collate(samples), self._has_target, self._target)


class _CastInputs:
    def __init__(self, word: str) -> None:
        self._word = word

    def __call__(
        self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        for weights in _running:
            weights.words.append(self._word)
        return _cast(args, _DTYPES[self._word]), _cast(kwargs, _DTYPES[self._word])


class _CastOutput:
    def __init__(self, word: str) -> None:
        self._word = word

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for weights in _running:
            weights.words.pop()
        return _cast(output, _DTYPES[self._word])


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
