"""One operation on the CPU: in another way where torch has no kernel for these types, or one that is far too slow."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from ipurun.emulator._capture import half

__all__ = ["run_op", "with_boxed_numbers"]


def run_op(func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Callable[..., Any], Tuple[Any, ...], Any]:
    """Runs an operation.

    Returns:
        What was called in its place, with which positional arguments, and the result.
    """
    if half.is_slow_in_half(func, args):
        func = half.HalfThroughFloat(func)
    try:
        return func, args, func(*args, **kwargs)
    except RuntimeError as error:
        boxed = with_boxed_numbers(func, args)
        if boxed is not None:
            return func, boxed, func(*boxed, **kwargs)
        substitute = half.substitute_for(func, (args, kwargs))
        if substitute is None:
            raise
        try:
            return substitute, args, substitute(*args, **kwargs)
        except RuntimeError:
            raise error from None


def with_boxed_numbers(func: Any, args: Tuple[Any, ...]) -> Optional[Tuple[Any, ...]]:
    """Puts numbers in tensors where the operation wants tensors; None if there is nothing to do.

    Torch 2.0 hands a number that an operator such as `^` wrapped in a tensor over as a plain number.
    """
    numbers = [
        str(argument.type) == "Tensor" and isinstance(given, (bool, int, float))
        for argument, given in zip(func._schema.arguments, args)
    ]
    if not any(numbers):
        return None
    return tuple(torch.tensor(given) if number else given for number, given in zip(numbers, args))
