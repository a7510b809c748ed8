"""PopTorch's casts for operations with both half and float inputs.

PopTorch gives a result the type that torch 2.0.1's own shape inference gives it, and casts the inputs to that type.
Composite functions, such as `linear`, are torch's: they decompose before PopTorch sees them, and some refuse mixed
types. Newer versions of torch refuse and promote differently, so the rules are written out here.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch.nn import functional

_FLOATS = (torch.float16, torch.float32)
_NAMES = {torch.float16: "c10::Half", torch.float32: "float"}
Arguments = Tuple[Tuple[Any, ...], Dict[str, Any]]
_Rule = Callable[[List[Any], Dict[str, Any]], Optional[torch.dtype]]


def in_one_type(function: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Arguments:
    """Return the arguments of a torch function with half and float inputs cast to the type of its result.

    Raises:
        RuntimeError: Torch 2.0.1 refuses the types, in torch's words.
    """
    rule = _RULES.get(function)
    if rule is None or len(_types(args, kwargs)) < 2:
        return args, kwargs
    target = rule(list(args), kwargs)
    if target is None:
        return args, kwargs
    kept = _statistics(function, args, kwargs)

    def cast(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([cast(item) for item in value])
        if not isinstance(value, torch.Tensor) or value.dtype not in _FLOATS or any(value is item for item in kept):
            return value
        return value.to(target)

    return tuple(cast(value) for value in args), {name: cast(value) for name, value in kwargs.items()}


def _types(args: Sequence[Any], kwargs: Dict[str, Any]) -> set:
    found = set()
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and item.dtype in _FLOATS:
                found.add(item.dtype)
    return found


def _argument(args: Sequence[Any], kwargs: Dict[str, Any], index: int, *names: str) -> Any:
    if index < len(args):
        return args[index]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _of(index: int, *names: str) -> _Rule:
    """Return the rule of a function whose result has the type of one argument."""

    def rule(args: List[Any], kwargs: Dict[str, Any]) -> Optional[torch.dtype]:
        given = _argument(args, kwargs, index, *names)
        return given.dtype if isinstance(given, torch.Tensor) and given.dtype in _FLOATS else None

    return rule


def _promoted(args: List[Any], kwargs: Dict[str, Any]) -> torch.dtype:
    return torch.float32


def _conv2d(args: List[Any], kwargs: Dict[str, Any]) -> Optional[torch.dtype]:
    data = _argument(args, kwargs, 0, "input")
    bias = _argument(args, kwargs, 2, "bias")
    named_padding = isinstance(_argument(args, kwargs, 4, "padding"), str)  # another function of torch, which casts
    if isinstance(bias, torch.Tensor) and bias.dtype != data.dtype and not named_padding:
        given = (
            f"Input type ({_NAMES.get(data.dtype, data.dtype)}) and bias type ({_NAMES.get(bias.dtype, bias.dtype)})"
        )
        raise RuntimeError(f"{given} should be the same")
    return _of(0, "input")(args, kwargs)


def _linear(args: List[Any], kwargs: Dict[str, Any]) -> Optional[torch.dtype]:
    data = _argument(args, kwargs, 0, "input")
    is_addmm = data.dim() == 2 or (data.dim() == 3 and data.is_contiguous())
    if is_addmm and _argument(args, kwargs, 2, "bias") is not None:
        return torch.float32
    return data.dtype  # a product, to which the bias is added in place


def _matmul(args: List[Any], kwargs: Dict[str, Any]) -> Optional[torch.dtype]:
    left, right = _argument(args, kwargs, 0, "input", "self"), _argument(args, kwargs, 1, "other", "tensor2")
    if right.dim() == 1 and left.dim() > 1:
        return torch.float32  # mv promotes
    return left.dtype if right.dim() <= 2 else right.dtype  # mm keeps its first type, bmm its second


def _reversed_matmul(args: List[Any], kwargs: Dict[str, Any]) -> Optional[torch.dtype]:
    return _matmul([args[1], args[0]], {})


def _einsum(args: List[Any], kwargs: Dict[str, Any]) -> Optional[torch.dtype]:
    operands = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    return operands[-1].dtype if isinstance(operands[-1], torch.Tensor) else None


def _statistics(function: Callable[..., Any], args: Sequence[Any], kwargs: Dict[str, Any]) -> List[Any]:
    """Return the running statistics among the arguments: they keep their type, and a cast would not be updated."""
    if function not in (functional.batch_norm, functional.instance_norm):
        return []
    return [_argument(args, kwargs, 1, "running_mean"), _argument(args, kwargs, 2, "running_var")]


def _rules() -> Dict[Callable[..., Any], _Rule]:
    rules: Dict[Callable[..., Any], _Rule] = {
        functional.linear: _linear,
        functional.conv2d: _conv2d,
        # Its first projection promotes, and all that follows is computed from that.
        functional.multi_head_attention_forward: _promoted,
        torch.einsum: _einsum,
        torch.tensordot: _of(0, "a"),
        torch.Tensor.__rmatmul__: _reversed_matmul,
    }
    for name in ("batch_norm", "group_norm", "instance_norm", "layer_norm"):
        rules[getattr(functional, name)] = _of(0, "input")
    for name in ("conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        rules[getattr(functional, name)] = _of(0, "input")
    for name, rule in {
        "matmul": _matmul,
        "__matmul__": _matmul,
        "mm": _of(0, "input"),
        "dot": _of(0, "input"),
        "bmm": _of(1, "mat2"),
        "mv": _promoted,
        "addmm": _promoted,
        "addmv": _of(2, "vec"),
        "baddbmm": _of(2, "batch2"),
        "lerp": _promoted,
    }.items():
        for owner in (torch, torch.Tensor):
            if hasattr(owner, name):
                rules[getattr(owner, name)] = rule
    return rules


_RULES = _rules()
