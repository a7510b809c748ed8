"""User-defined operations: custom_op with its CPU implementations, and the host function CPU."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._impl import createNativeError, createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, call_recorded, natively, refuse_training

AttributeValue = Union[float, int, str, list, tuple]
_FLOAT_LIMIT = torch.finfo(torch.float32).max


class _Implementation(NamedTuple):
    """The functions that run a custom op on the CPU."""

    forward: Callable[..., Any]
    backward: Optional[Callable[..., Any]]


def _gather_last_dim(data: torch.Tensor, index: torch.Tensor, axis: int = -1) -> torch.Tensor:
    if axis not in (-1, data.dim() - 1):
        raise createNativeError(f"FastGatherLastDim: axis must be the last one, got {axis}.", "popart_exception")
    if data.dim() != index.dim() or data.shape[:-1] != index.shape[:-1]:
        raise createNativeError(
            "FastGatherLastDim: data and index must have the same dimensions but for the last: "
            f"{list(data.shape)} vs {list(index.shape)}.",
            "popart_exception",
        )
    return torch.gather(data, -1, index.to(torch.int64))


# Ops that come with PopTorch.
_implementations: Dict[Tuple[str, str], _Implementation] = {
    ("FastGatherLastDim", "poptorch.custom_ops"): _Implementation(_gather_last_dim, None),
}


def register_cpu_implementation(
    name: str, domain: str, fn: Optional[Callable[..., Any]], backward: Optional[Callable[..., Any]] = None
) -> None:
    """Register the CPU implementation of a custom op. Not part of PopTorch.

    Args:
        name: Name of the op, as passed to `custom_op`.
        domain: Domain of the op.
        fn: Called with the input tensors and the attributes as keywords; returns a tensor or a sequence of
            tensors. None removes the implementation.
        backward: Called with (inputs, outputs, gradients of the outputs), each a tuple, and the attributes as
            keywords; returns the gradient of each input, None where there is none. Without it the gradient is
            that of the torch operations in `fn`.
    """
    if fn is None:
        _implementations.pop((name, domain), None)
    else:
        _implementations[name, domain] = _Implementation(fn, backward)


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[torch.Tensor],
    attributes: Optional[Dict[str, AttributeValue]] = None,
) -> List[torch.Tensor]:
    """Apply a custom operation.

    Args:
        inputs: The input tensors.
        name: Name of the op.
        domain: Its domain.
        domain_version: Version of the domain.
        example_outputs: Tensors with the types and shapes of the results.
        attributes: Settings of the op: floats, ints, strings, or lists of one of these types.

    Returns:
        The outputs of the op. Outside an executor, zeros like `example_outputs`.

    Raises:
        ValueError: An attribute has the wrong type, or contains non-ASCII text.
        poptorch.Error: In an executor, a float is out of range for float32, or the op has no CPU implementation.
    """
    settings = dict(attributes or {})
    _check_attributes(settings)
    recorder = active_recorder()
    if recorder is None:
        return [torch.zeros_like(example) for example in example_outputs]

    _check_float_range(settings)
    if (name, domain) not in _implementations:
        raise createPoptorchError(
            f"The custom op {name} of domain {domain} has no implementation for the CPU. Register one with "
            f"ipurun.emulator.ops.register_cpu_implementation({name!r}, {domain!r}, fn)."
        )
    forward, backward = _implementations[name, domain]

    def run(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        with natively():
            return _as_tuple(forward(*tensors, **settings))

    def gradients(tensors: Any, outputs: Any, grads: Any) -> Any:
        with natively():
            if backward is not None:
                return backward(tensors, outputs, grads, **settings)
            return _vector_jacobian_product(run, tensors, grads)

    results = list(call_recorded(recorder, run, list(inputs), backward=gradients, name=name))
    if len(results) != len(example_outputs):
        raise createPoptorchError(
            f"The CPU implementation of the custom op {name} returned {len(results)} tensors, but "
            f"example_outputs has {len(example_outputs)}."
        )
    return results


def _as_tuple(result: Any) -> Tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def _vector_jacobian_product(
    run: Callable[..., Tuple[torch.Tensor, ...]],
    tensors: Sequence[torch.Tensor],
    grads: Sequence[Optional[torch.Tensor]],
) -> List[Optional[torch.Tensor]]:
    """Return the gradient of each input by running the op again under autograd."""
    with torch.enable_grad():
        watched = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        outputs = run(*watched)
        pairs = [(out, grad) for out, grad in zip(outputs, grads) if out.requires_grad and grad is not None]
        sources = [tensor for tensor in watched if tensor.requires_grad]
        if not pairs or not sources:
            return [None] * len(tensors)
        found = torch.autograd.grad([out for out, _ in pairs], sources, [grad for _, grad in pairs], allow_unused=True)
    remaining = iter(found)
    return [next(remaining) if tensor.requires_grad else None for tensor in watched]


def _check_attributes(attributes: Dict[str, AttributeValue]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings, got {key!r}.")
        if not isinstance(value, (float, int, str, list, tuple)):
            raise ValueError(
                "Attribute values must be floats, ints, strings or a list/tuple of one of these, "
                f"got {value!r} for {key}."
            )
        elements = value if isinstance(value, (list, tuple)) else [value]
        if any(not isinstance(element, type(elements[0])) for element in elements):
            raise ValueError(f"The types in a list/tuple attribute must all be the same, got {value!r} for {key}.")
        for text in [key, *elements]:
            if isinstance(text, str) and not text.isascii():
                raise ValueError(f"{text} contains non-ASCII characters.")


def _check_float_range(attributes: Dict[str, AttributeValue]) -> None:
    for value in attributes.values():
        for element in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(element, float) and abs(element) > _FLOAT_LIMIT:
                side = "high" if element > 0 else "low"
                raise createPoptorchError(f"{element:g} is too {side} for a Popart float attribute.")


# Within a compile, one name means one function: the first that was registered under it.
_functions: weakref.WeakKeyDictionary[Recorder, Dict[str, Callable[..., Any]]] = weakref.WeakKeyDictionary()


class CPU:
    """Wraps a function or module so that an inference model calls it on the host with run-time values.

    Args:
        layer_to_call: The function or module; a module's parameters are frozen.
        ID: Name of the op. A second op with the same name in one model calls the function of the first.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        self._ID = ID
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self.in_shapes: Optional[List[torch.Size]] = None
        self.out_shapes: Optional[List[torch.Size]] = None
        self.inputs: Optional[List[torch.Tensor]] = None
        self.outputs: Optional[List[torch.Tensor]] = None

    def execute(self) -> None:
        """Call the function on the persistent inputs and copy the results to the outputs."""
        for kept, value in zip(self.outputs or [], _as_tuple(self._layer_to_call(*(self.inputs or [])))):
            kept.copy_(value)

    def registerPersistentData(self) -> None:
        """Create tensors for inputs and outputs with the shapes of the last call."""
        self.inputs = [torch.zeros(shape) for shape in self.in_shapes or []]
        self.outputs = [torch.zeros(shape) for shape in self.out_shapes or []]

    def __call__(self, *input: torch.Tensor, **kwargs: Any) -> Any:
        recorder = active_recorder()
        if recorder is None:
            result = self._layer_to_call(*input)
        else:
            refuse_training(recorder, "CPU")
            function = _functions.setdefault(recorder, {}).setdefault(self._ID, self._layer_to_call)
            result = call_recorded(recorder, _on_host(function), input, backward=_no_gradient, name=self._ID)
        self.in_shapes = [tensor.shape for tensor in input]
        self.out_shapes = [tensor.shape for tensor in _as_tuple(result)]
        return result


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        with natively():
            result = function(*tensors)
        return tuple(result) if isinstance(result, list) else result

    return call


def _no_gradient(*_: Any) -> Any:
    raise createPoptorchError("poptorch.CPU() is only supported in inference models: it has no gradient.")
