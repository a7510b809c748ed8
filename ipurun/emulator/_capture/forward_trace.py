"""Trace the forward pass of a model without computing it, to find out whether its program is known already.

Operations on inputs, weights and random numbers run on meta tensors, which have shapes and no data; operations on
constants alone are computed, because their results are part of the program.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.overrides import TorchFunctionMode

from ipurun.emulator._capture.capture import (
    capturing,
    declare_inputs,
    has_own_gradients,
    recording,
    template_of,
    values_returned,
)
from ipurun.emulator._capture.dtypes import layers_of
from ipurun.emulator._capture.graph import Node, Value
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.structures import tensors_in

_CPU, _META = torch.device("cpu"), torch.device("meta")
_MOVE = torch.ops.aten._to_copy.default
_ANSWERS = {torch.Tensor.device.__get__: _CPU, torch.Tensor.is_meta.__get__: False, torch.Tensor.is_cpu.__get__: True}


class NotTraceableError(Exception):
    """The program of a model cannot be identified without running it."""


@dataclass
class ForwardTrace:
    """The forward pass of a model, as the key of its program and what is not stored with a program.

    Attributes:
        digest: Equal for equal programs.
        returned: The structure that forward returned, with empty tensors.
        constants: The constants of the program.
        sources: The line that called each operation, in order.
        module_paths: The module that called each operation, in order.
    """

    digest: str
    returned: Any
    constants: Dict[Value, torch.Tensor]
    sources: List[str]
    module_paths: List[str]


def trace_forward(
    call: Callable[[], Any],
    *,
    parameters: Dict[str, torch.Tensor],
    buffers: Dict[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    training: bool,
    options: Any,
    modules: Optional[Dict[str, torch.nn.Module]] = None,
    check_op: Optional[Callable[[Node], None]] = None,
    before_backward: Optional[Callable[[Recorder, Any], None]] = None,
) -> ForwardTrace:
    """Run the Python code of a model once, without its computations; the arguments are those of `capture`.

    Raises:
        NotTraceableError: The model has its own gradients.
        Exception: Whatever a model raises that cannot run on meta tensors.
    """
    recorder = _Tracer(training, options, check_op)
    declare_inputs(recorder, parameters, buffers, inputs)
    with capturing(recorder, modules or {}):
        with recording(recorder), _LikeCpu():
            returned = call()
            if before_backward is not None:
                before_backward(recorder, returned)
            tensors = list(tensors_in(returned))
            if training and has_own_gradients(tensors, parameters.values()):
                raise NotTraceableError("the backward pass calls functions or hooks of the model")
            digest = forward_digest(recorder, tensors)
        values_returned(recorder, tensors)
    graph = recorder.finish()
    nodes = graph.nodes
    return ForwardTrace(
        digest, template_of(returned), graph.constants, [n.source for n in nodes], [n.module_path for n in nodes]
    )


def forward_digest(recorder: Recorder, returned: Sequence[torch.Tensor]) -> str:
    """Return a key that is equal for equal forward passes: operations, inputs, constants, marks and results.

    Raises:
        NotTraceableError: It contains what cannot be described, such as a function of the user.
    """
    graph = recorder.graph
    outside = {graph.specs[item.value].storage for item in graph.inputs if item.kind != "constant"}
    if any(graph.specs[value].storage in outside for value in graph.constants):
        raise NotTraceableError("a plain tensor of the model shares memory with a weight or an input")
    if graph.storages_written() & {graph.specs[value].storage for value in graph.constants}:
        raise NotTraceableError("the model writes to a plain tensor")
    digest = hashlib.sha256()

    def add(*items: Any) -> None:
        digest.update(repr(items).encode())

    add(recorder.training, graph.has_own_gradients, recorder.loss_values, [recorder.value_of(t) for t in returned])
    for item in graph.inputs:
        tensor = recorder.tensor_of(item.value)
        add(item.kind, item.name, item.value, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    with recorder.paused():
        for value, constant in graph.constants.items():
            add(value, _content(constant))
    for node in graph.nodes:
        op = _plain_op(node)
        # Shapes follow from the operations; those of unused results differ between kinds of tensors.
        add(op, _described(node.args), _described(node.kwargs), node.outputs, node.grad_enabled)
        add(tuple(node.placement), node.module_path, node.is_random, node.mutated)
    for event in graph.events:
        add(event.kind, event.position, event.value, _described(event.info))
    return digest.hexdigest()


@contextlib.contextmanager
def python_random_kept() -> Iterator[Callable[[], None]]:
    """Yield a function that puts Python's and numpy's random state back to what it was."""
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    yield restore


def _plain_op(node: Node) -> str:
    """Return the name of the operation that the model called, whatever computes it here."""
    _, op = layers_of(node.op)
    if not isinstance(op, torch._ops.OpOverload):
        raise NotTraceableError(f"the model calls {node.name}, which is a Python function")
    return f"{op._schema.name}.{op._schema.overload_name}"


def _described(structure: Any) -> Any:
    """Return arguments as data with a stable text; a trace runs on another device than a capture."""
    if isinstance(structure, torch.device):
        return "device"
    if isinstance(structure, (list, tuple)):
        return [_described(item) for item in structure]
    if isinstance(structure, dict):
        return [(key, _described(item)) for key, item in structure.items()]
    if structure is None or isinstance(structure, _DESCRIBED):
        return structure
    raise NotTraceableError(f"an argument of type {type(structure).__name__} has no description")


_DESCRIBED = (Value, bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


def _content(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        raise NotTraceableError("a plain tensor of the model depends on its inputs")
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    described = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return hashlib.sha256(repr(described).encode() + values.numpy().tobytes()).hexdigest()


class _LikeCpu(TorchFunctionMode):
    """Torch-function mode that reports the device of tensors as a capture would."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        return func(*args, **(kwargs or {}))


class _Tracer(Recorder):
    """Records operations as a recorder does, and computes only those whose results are constants."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._moved: Dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _MOVE and not self._paused and _only_moves(args[0], kwargs):
            return self._move(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the other device, under the same number: a capture has one device."""
        value = self.value_of(tensor)
        with torch._C.DisableTorchFunction():
            moved = _meta_like(tensor) if not tensor.is_meta else torch.ops.aten.alias.default(tensor)
        self._numbers.add_alias(moved, value)
        self._moved[id(moved)] = self._moved.get(id(tensor), tensor)
        self._kept.append(moved)
        return moved

    def _run(
        self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], node: Node, varies: bool
    ) -> Tuple[Callable[..., Any], Tuple[Any, ...], Any]:
        with torch._C.DisableTorchFunction():
            if not varies and not node.is_random:
                host_args, host_kwargs = _mapped(self._on_host, args), _mapped(self._on_host, kwargs)
                op, _, result = super()._run(func, host_args, host_kwargs, node, varies)
                return op, args, result
            given: Dict[int, torch.Tensor] = {}

            def to_meta(item: Any) -> Any:
                if isinstance(item, torch.device):
                    return _META
                if not isinstance(item, torch.Tensor) or item.is_meta:
                    return item
                meta = _meta_like(item)
                given[id(meta)] = item
                meta_tensors.append(meta)
                return meta

            meta_tensors: List[torch.Tensor] = []
            meta_kwargs = _mapped(to_meta, kwargs)
            if node.is_random and not varies and "device" in {a.name for a in func._schema.arguments}:
                meta_kwargs["device"] = _META
            result = func(*_mapped(to_meta, args), **meta_kwargs)
            # An operation in place returns its argument.
            return func, args, _mapped(lambda item: given.get(id(item), item), result)

    def _on_host(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            return _CPU
        return self._moved.get(id(item), item) if isinstance(item, torch.Tensor) else item


def _only_moves(tensor: torch.Tensor, kwargs: Dict[str, Any]) -> bool:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    return device is not None and device.type != tensor.device.type and dtype in (None, tensor.dtype)


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.empty_strided.default(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, list):
        return [_mapped(function, item) for item in structure]
    if isinstance(structure, tuple):
        return tuple(_mapped(function, item) for item in structure)
    if isinstance(structure, dict):
        return {key: _mapped(function, item) for key, item in structure.items()}
    return function(structure)
