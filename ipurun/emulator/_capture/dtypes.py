"""Compute with a device's number types on the CPU: half precision and 32-bit integers."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.op_kinds import names_in, written_arguments

_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32}
# Torch's half kernels for these are up to 200 times slower than its float32 kernels, which accumulate as IPUs do.
_SLOW_IN_HALF = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("addmm", "addmv", "baddbmm", "bmm", "convolution", "convolution_backward", "mm", "mv")
)
# Their other results are statistics, which stay in float32.
_ONLY_FIRST_RESULT_HALF = frozenset(["native_batch_norm", "native_group_norm", "native_layer_norm"])
# Integers stay int64, which torch's kernels need for indices, but values beyond 32 bits wrap around, as on a device.
# These operations can leave the range; their in-place variants end in "_".
_MAY_OVERFLOW = names_in(
    "abs add addbmm addcmul addmm addmv baddbmm bmm cumprod cumsum dot index_add mm mul "
    "mv neg pow prod rsub scatter_add square sub sum"
)


def narrowed(dtype: torch.dtype) -> torch.dtype:
    """Return the 32-bit type that a device has in place of a 64-bit one."""
    return _NARROWED.get(dtype, dtype)


def substitute_for(op: Any, arguments: Any) -> Optional[HalfThroughFloat]:
    """Return a replacement for an operation that failed on half arguments, None if no argument is half."""
    return HalfThroughFloat(op) if holds_half(arguments) else None


def is_slow_in_half(op: Any, arguments: Tuple[Any, ...]) -> bool:
    """Whether the CPU may have a half kernel for the operation that is far slower than computing in float32."""
    first = arguments[0] if arguments else None
    return (
        isinstance(first, torch.Tensor)
        and first.dtype == torch.float16
        and not first.is_meta
        and getattr(op, "overloadpacket", None) in _SLOW_IN_HALF
    )


def holds_half(item: Any) -> bool:
    """Whether the arguments contain a half tensor or type."""
    if isinstance(item, torch.Tensor):
        return item.dtype == torch.float16
    if isinstance(item, dict):
        return any(holds_half(entry) for entry in item.values())
    if isinstance(item, (list, tuple)):
        return any(holds_half(entry) for entry in item)
    return item is torch.float16


def to_nearest_half(tensor: torch.Tensor) -> torch.Tensor:
    """Round a tensor to the nearest values in half precision."""
    return tensor.to(torch.float16)


class HalfThroughFloat:
    """An aten operation on half tensors, computed in float32 and rounded to half.

    Args:
        op: The operation that has no half kernel here.
        to_half: How float32 results are rounded.
    """

    def __init__(self, op: Any, to_half: Callable[[torch.Tensor], torch.Tensor] = to_nearest_half) -> None:
        self.widened = op
        self._to_half = to_half
        self._schema = op._schema
        self.__name__ = op._schema.name
        # Micro-batches are computed together by what kind of operation this is.
        self.overloadpacket = getattr(op, "overloadpacket", None)
        self.tags = getattr(op, "tags", ())
        self._overloadname = getattr(op, "_overloadname", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        widened: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}

        def widen(item: Any) -> Any:
            if isinstance(item, torch.Tensor) and item.dtype == torch.float16:
                if id(item) not in widened:
                    widened[id(item)] = (item, item.float())
                return widened[id(item)][1]
            return torch.float32 if item is torch.float16 else item

        wide_kwargs = {name: _map_leaves(widen, item) for name, item in kwargs.items()}
        result = self.widened(*[_map_leaves(widen, item) for item in args], **wide_kwargs)
        originals = {id(wide): original for original, wide in widened.values()}
        written = written_arguments(self._schema, args, kwargs)
        if self._schema.name == "aten::native_batch_norm":
            written += args[3:5]  # its schema does not say that it updates the running statistics
        for given in written:
            if id(given) in widened:
                given.copy_(self._to_half(widened[id(given)][1]))
        if kwargs.get("dtype") is torch.float32:
            return result

        def narrow(item: Any) -> Any:
            if id(item) in originals:
                return originals[id(item)]
            return self._to_half(item) if isinstance(item, torch.Tensor) and item.dtype == torch.float32 else item

        if isinstance(result, tuple) and self._schema.name.split("::")[-1] in _ONLY_FIRST_RESULT_HALF:
            first = narrow(result[0]) if args[0].dtype == torch.float16 else result[0]
            return (first, *result[1:])
        return _map_leaves(narrow, result)


def _map_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    """Return nested lists and tuples with the function applied to every item."""
    # A recursive closure inside __call__ would keep the tensors alive until the next garbage collection.
    if isinstance(item, (list, tuple)):
        return type(item)([_map_leaves(function, entry) for entry in item])
    return function(item)


def run_op(
    func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], is_random: bool = False
) -> Tuple[Callable[..., Any], Tuple[Any, ...], Any]:
    """Run an operation.

    Args:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its named arguments.
        is_random: Whether it draws random numbers.

    Returns:
        The operation that was actually called, its positional arguments, and the result.
    """
    if is_slow_in_half(func, args):
        func = HalfThroughFloat(func)
    # Torch 2.0 draws numbers before it refuses a type; a replay calls only the operation that works.
    random_state = torch.get_rng_state() if is_random else None
    try:
        return func, args, func(*args, **kwargs)
    except RuntimeError as error:
        if random_state is not None:
            torch.set_rng_state(random_state)
        boxed = with_boxed_numbers(func, args)
        if boxed is not None:
            return func, boxed, func(*boxed, **kwargs)
        substitute = substitute_for(func, (args, kwargs))
        if substitute is None:
            raise
        try:
            return substitute, args, substitute(*args, **kwargs)
        except RuntimeError:
            raise error from None


def with_boxed_numbers(func: Any, args: Tuple[Any, ...]) -> Optional[Tuple[Any, ...]]:
    """Wrap numbers in tensors where the operation expects tensors; return None if there are none.

    Torch 2.0 unwraps numbers that an operator such as `^` had wrapped in a tensor.
    """
    numbers = [
        str(argument.type) == "Tensor" and isinstance(given, (bool, int, float))
        for argument, given in zip(func._schema.arguments, args)
    ]
    if not any(numbers):
        return None
    return tuple(torch.tensor(given) if number else given for number, given in zip(numbers, args))


def wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 tensor with its values wrapped into the range of int32."""
    return tensor.to(torch.int32).to(torch.int64)


def kept_in_32_bits(op: Callable[..., Any], name: str, result: Any) -> Tuple[Callable[..., Any], Any]:
    """Return an operation and its result with int64 values wrapped to 32 bits, as on a device.

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


def layers_of(op: Any) -> Tuple[Tuple[str, ...], Any]:
    """Return how this module changed an operation, outermost first, and the operation of torch inside.

    `with_layers` is the inverse. An operation of another kind is returned as it is.
    """
    layers: Tuple[str, ...] = ()
    while isinstance(op, (HalfThroughFloat, _Wrapping)):
        if isinstance(op, HalfThroughFloat):
            layers, op = (*layers, "half"), op.widened
        else:
            layers, op = (*layers, "wrapped_in_place" if op._in_place else "wrapped"), op._op
    return layers, op


def with_layers(layers: Sequence[str], op: Any) -> Any:
    """Change an operation of torch in the ways that `layers_of` returned.

    Raises:
        KeyError: The way is unknown.
    """
    ways: Dict[str, Callable[[Any], Any]] = {
        "half": HalfThroughFloat,
        "wrapped": lambda inner: _Wrapping(inner, in_place=False),
        "wrapped_in_place": lambda inner: _Wrapping(inner, in_place=True),
    }
    for layer in reversed(layers):
        op = ways[layer](op)
    return op
