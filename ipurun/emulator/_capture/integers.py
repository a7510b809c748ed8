"""Integers of 64 bits hold what fits in 32, as on a device, which computes with 32.

The tensors stay int64, the type that torch's kernels want of an index; values that leave the range wrap around.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch

from ipurun.emulator._capture.op_kinds import names_in

__all__ = ["kept_in_32_bits", "wrapped"]

# Operations that make values beyond the range of values within it; in place they end in "_".
_MAY_OVERFLOW = names_in(
    "abs add addbmm addcmul addmm addmv baddbmm bmm cumprod cumsum dot index_add mm mul "
    "mv neg pow prod rsub scatter_add square sub sum"
)


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 tensor with its values wrapped into the range of int32."""
    return tensor.to(torch.int32).to(torch.int64)


def kept_in_32_bits(op: Callable[..., Any], name: str, result: Any) -> Tuple[Callable[..., Any], Any]:
    """Returns an operation and its result, both as they are on a device.

    Args:
        op: The operation that was run.
        name: Its name, without an overload.
        result: What it returned.
    """
    if not isinstance(result, torch.Tensor) or result.dtype != torch.int64:
        return op, result
    in_place = name.endswith("_")
    if (name[:-1] if in_place else name) not in _MAY_OVERFLOW:
        return op, result
    return _Wrapping(op, in_place), _wrap(result, in_place)


def _wrap(result: torch.Tensor, in_place: bool) -> torch.Tensor:
    return result.copy_(wrapped(result)) if in_place else wrapped(result)


class _Wrapping:
    """An aten operation whose int64 result is wrapped into the range of int32."""

    def __init__(self, op: Any, in_place: bool) -> None:
        self._op = op
        self._in_place = in_place
        self._schema = op._schema
        self.overloadpacket = getattr(op, "overloadpacket", None)
        self.__name__ = op._schema.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _wrap(self._op(*args, **kwargs), self._in_place)
