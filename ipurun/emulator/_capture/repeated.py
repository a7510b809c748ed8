"""Record a layer that equals an earlier one by copying that one's operations, without running it.

Models of many equal layers are then captured at the cost of one, for tools that need the graph but no values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any, Callable, Dict, Hashable, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

from ipurun.emulator._capture.graph import Node, Value, map_values
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.structures import rebuild, tensors_in

# Attributes in which a layer keeps its own number, which says nothing about what it computes.
_NUMBER = re.compile(r"(^|_)(layer|block|depth)?_?(idx|index|id|number|num)$")
_NOT_OWN = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "forward"])


@contextlib.contextmanager
def repeated_layers(recorder: Recorder, modules: Dict[str, nn.Module]) -> Iterator[None]:
    """Copy the operations of layers that equal an earlier one of their list, instead of running them.

    Args:
        recorder: The recorder of the capture.
        modules: All modules of the model, by name.
    """
    copier = _Copier(recorder)
    wrapped: List[nn.Module] = []
    for name, layer, structure in _equal_layers(modules):
        if "forward" not in vars(layer):
            layer.forward = copier.wrapper(name, layer, structure)  # type: ignore[method-assign]  # until the end
            wrapped.append(layer)
    try:
        yield
    finally:
        for layer in wrapped:
            del layer.forward


@contextlib.contextmanager
def answered_layers(model: nn.Module) -> Iterator[None]:
    """Answer calls of layers that equal an earlier one with empty tensors, to find the shapes of a model's results."""
    answers: Dict[Hashable, Tuple[Any, List[torch.Tensor]]] = {}

    def wrapper(layer: nn.Module, structure: Hashable) -> Callable[..., Any]:
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in((args, kwargs))]
            key = (structure, tuple(tensors), repr(_plain((args, kwargs))))
            if key not in answers:
                returned = original(*args, **kwargs)
                answers[key] = returned, list(tensors_in(returned))
                return returned
            returned, results = answers[key]
            return rebuild(returned, (torch.empty_like(result) for result in results))

        return forward

    wrapped = [(layer, wrapper(layer, structure)) for _, layer, structure in _equal_layers(dict(model.named_modules()))]
    for layer, forward in wrapped:
        layer.forward = forward  # type: ignore[method-assign]  # until the end
    try:
        yield
    finally:
        for layer, _ in wrapped:
            vars(layer).pop("forward", None)


def _equal_layers(modules: Dict[str, nn.Module]) -> Iterator[Tuple[str, nn.Module, Hashable]]:
    """Yield the name, the module and the structure of every layer that has an equal in its list."""
    for name, several in modules.items():
        if not isinstance(several, (nn.ModuleList, nn.Sequential)) or len(several) < 2:
            continue
        alike: Dict[Hashable, List[Tuple[str, nn.Module]]] = {}
        for index, layer in enumerate(several):
            if next(layer.children(), None) is not None:  # a single operation is as quick to run as to copy
                alike.setdefault(_structure(layer, index), []).append(
                    (f"{name}.{index}" if name else str(index), layer)
                )
        for structure, layers in alike.items():
            if len(layers) > 1:
                yield from ((own, layer, structure) for own, layer in layers)


def _structure(layer: nn.Module, index: int) -> Hashable:
    """Return a value that is equal for layers which run the same operations on arguments of the same shapes."""
    parts: List[Hashable] = []
    for name, module in layer.named_modules():
        own = sorted((key, _attribute(key, value, index)) for key, value in vars(module).items() if key not in _NOT_OWN)
        tensors = [
            (key, None if value is None else (tuple(value.shape), value.dtype, value.requires_grad))
            for key, value in (*module._parameters.items(), *module._buffers.items())
        ]
        parts.append((name, type(module), repr(own), tuple(tensors)))
    return tuple(parts)


def _attribute(key: str, value: Any, index: int) -> Any:
    """Return what matters of an attribute; objects count as equal only if they are the same one."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, type, torch.dtype)):
        return value
    if isinstance(value, int):
        return "own number" if _NUMBER.search(key) and value - index in (0, 1) else value
    if isinstance(value, float):
        return ("float", value != 0)  # a rate that grows from layer to layer changes no shape
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, (list, tuple)):
        return [_attribute(key, item, index) for item in value]
    if key.endswith("_hooks"):
        return [getattr(hook, "__qualname__", type(hook).__name__) for hook in value.values()]
    if isinstance(value, dict):
        return [(repr(name), _attribute(key, item, index)) for name, item in value.items()]
    return id(value)


@dataclasses.dataclass
class _Recorded:
    """One call of a layer that was run, as ranges of what the recorder counts.

    Attributes:
        path: Name of the layer.
        nodes: Its operations.
        values: First and last of its new values.
        storages: First and last of its new storages.
        constants: Those of its new values that are constants, which its copies share.
        arguments: The values of its tensor arguments.
        weights: The values of its parameters and buffers.
        returned: What it returned, with empty tensors.
        results: The value, the stride and `requires_grad` of each returned tensor.
        saved: The storages that autograd saved meanwhile.
        calls: The modules that were called inside, each after a number of its operations.
    """

    path: str
    nodes: List[Node]
    values: Tuple[int, int]
    storages: Tuple[int, int]
    constants: Set[Value]
    arguments: List[Value]
    weights: List[Value]
    returned: Any
    results: List[Tuple[Value, Tuple[int, ...], bool]]
    saved: List[int]
    calls: List[Tuple[str, int]]


class _Copier:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recorded: Dict[Hashable, Optional[_Recorded]] = {}

    def wrapper(self, path: str, layer: nn.Module, structure: Hashable) -> Callable[..., Any]:
        """Return a function to call in place of a layer's `forward`."""
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            described = self._described(args, kwargs)
            weights = self._weights(layer)
            if described is None or weights is None:
                return original(*args, **kwargs)
            key = (structure, layer.training, described)
            if key not in self._recorded:
                self._recorded[key], result = self._record(path, weights, original, args, kwargs)
                return result
            template = self._recorded[key]
            if template is None:
                return original(*args, **kwargs)
            return self._copy(template, path, weights, list(tensors_in((args, kwargs))))

        return forward

    def _described(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[Hashable]:
        """Return what the operations of a layer may depend on in its arguments; None if that is not known."""
        recorder = self._recorder
        tensors = list(tensors_in((args, kwargs)))
        values = [recorder.number_of(tensor) for tensor in tensors]
        if any(value is None for value in values) or not recorder.is_placed:
            return None
        storages = [recorder.graph.specs[value].storage for value in values if value is not None]
        about = tuple(
            (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride(), recorder.mask_of(value))
            for tensor, value in zip(tensors, values)
            if value is not None
        )
        same = tuple(storages.index(storage) for storage in storages)
        return about, same, torch.is_grad_enabled(), repr(_plain((args, kwargs)))

    def _weights(self, layer: nn.Module) -> Optional[List[Value]]:
        found: List[Value] = []
        named = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
        for _, tensor in named:
            value = self._recorder.number_of(tensor)
            if value is None:
                return None
            found.append(value)
        return found

    def _record(
        self, path: str, weights: List[Value], original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Tuple[Optional[_Recorded], Any]:
        recorder = self._recorder
        before, arguments = recorder.counts(), [recorder.value_of(tensor) for tensor in tensors_in((args, kwargs))]
        returned = original(*args, **kwargs)
        after = recorder.counts()
        nodes = recorder.graph.nodes[before.nodes : after.nodes]
        results = list(tensors_in(returned))
        known = [recorder.number_of(tensor) for tensor in results]
        # Marks, blocks and losses belong to one place; what a branch runs is not listed.
        if before.events != after.events or any(node.bodies for node in nodes) or None in known:
            return None, returned
        values, storages = (before.values, after.values), (before.storages, after.storages)
        kept = {*arguments, *weights}
        if any(value < before.values and value not in kept for node in nodes for value in node.mutated):
            return None, returned
        recorded = _Recorded(
            path,
            nodes,
            values,
            storages,
            {item.value for item in recorder.graph.inputs if item.value >= before.values},
            arguments,
            weights,
            rebuild(returned, (torch.empty(0) for _ in results)),
            [
                (value, tensor.stride(), tensor.requires_grad)
                for value, tensor in zip(known, results)
                if value is not None
            ],
            recorder.graph.saved[before.saved : after.saved],
            [(module, at - before.nodes) for module, at in recorder.calls[before.calls : after.calls]],
        )
        return recorded, returned

    def _copy(self, template: _Recorded, path: str, weights: List[Value], tensors: List[torch.Tensor]) -> Any:
        recorder, graph = self._recorder, self._recorder.graph
        counts = recorder.counts()
        first, end = template.values
        outside: Dict[Value, Value] = dict(zip(template.weights, weights))
        outside.update(zip(template.arguments, (recorder.value_of(tensor) for tensor in tensors)))
        storage_of = {graph.specs[old].storage: graph.specs[new].storage for old, new in outside.items()}
        shared = {graph.specs[value].storage for value in template.constants}

        def number(value: Value) -> Value:
            if value in outside:
                return outside[value]
            return Value(value - first + counts.values) if value >= first and value not in template.constants else value

        def storage(old: int) -> int:
            if old in storage_of or old < template.storages[0] or old in shared:
                return storage_of.get(old, old)
            return old - template.storages[0] + counts.storages

        for old in range(first, end):
            spec = graph.specs.get(Value(old))
            if spec is not None and old not in template.constants:
                recorder.add_copy(Value(old), number(Value(old)), spec._replace(storage=storage(spec.storage)))
        recorder.reserve(end - first, template.storages[1] - template.storages[0])
        named = (template.path, path)
        graph.nodes += [
            dataclasses.replace(
                node,
                args=map_values(number, node.args),
                kwargs=map_values(number, node.kwargs),
                outputs=map_values(number, node.outputs),
                mutated=tuple(number(value) for value in node.mutated),
                placement=recorder.placement,
                module_path=_renamed(node.module_path, *named),
                position=counts.nodes + offset,
            )
            for offset, node in enumerate(template.nodes)
        ]
        graph.saved += [storage(old) for old in template.saved]
        recorder.calls += [(_renamed(module, *named), counts.nodes + offset) for module, offset in template.calls]
        made: Dict[Value, torch.Tensor] = {}
        passed = {recorder.value_of(tensor): tensor for tensor in tensors}
        for value, stride, needs_gradient in template.results:
            new = number(value)
            if new in passed:
                made[new] = passed[new]
            elif new < counts.values:
                made[new] = recorder.tensor_of(new)
            elif new not in made:
                made[new] = recorder.adopt(new, stride, needs_gradient)
        return rebuild(template.returned, (made[number(value)] for value, _, _ in template.results))


def _renamed(module: str, template: str, path: str) -> str:
    is_inside = module == template or module.startswith(template + ".")
    return path + module[len(template) :] if is_inside else module


def _plain(structure: Any) -> Any:
    """Return a structure without its tensors, whose values must not be read."""
    if isinstance(structure, torch.Tensor):
        return "tensor"
    if isinstance(structure, (list, tuple)):
        return [_plain(item) for item in structure]
    if isinstance(structure, dict):
        return [(key, _plain(item)) for key, item in structure.items()]
    return structure if isinstance(structure, (bool, int, float, str, type(None), torch.dtype)) else id(structure)
