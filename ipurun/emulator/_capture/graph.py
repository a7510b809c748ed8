"""The captured program: a flat list of operations over numbered values."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch


class Value(int):
    """The number of a tensor in the captured program."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"v{int(self)}"


class TensorSpec(NamedTuple):
    """Shape, type and storage of a value."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    storage: int
    """Values that share memory have the same number here."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the value in memory."""
        count = 1
        for size in self.shape:
            count *= size
        return count * torch.empty((), dtype=self.dtype).element_size()


class Placement(NamedTuple):
    """Where an operation runs on the device."""

    stage_id: int = 0
    phase_id: int = 0
    ipu_id: int = 0
    block_id: str = ""


class Event(NamedTuple):
    """An event between two operations: a mark on a value, a scope or an attribute."""

    kind: str
    position: int
    """Number of nodes recorded before it."""
    value: Optional[Value]
    info: Dict[str, Any]


class GraphInput(NamedTuple):
    """One tensor that the program reads from outside."""

    kind: str
    """parameter, buffer, input, constant or seed."""
    name: str
    value: Value


@dataclasses.dataclass
class Node:
    """One operation of the captured program.

    Attributes:
        op: What is called: an aten overload, or a Python function for an opaque operation.
        args: Positional arguments; a `Value` in place of each tensor.
        kwargs: Keyword arguments, likewise.
        outputs: Result, a `Value` for each tensor, in the shape the op returns it.
        placement: Stage, phase and IPU.
        module_path: Dotted path of the module whose forward called it, "" for the model itself.
        source: `file:line` of the model that called it, "" where unknown.
        is_backward: Whether it computes gradients.
        grad_enabled: Whether autograd was on when it was called.
        mutated: Values that it changes in place.
        is_random: Whether it draws random numbers.
        name: Its name in messages.
        is_recomputed: Whether it repeats a forward operation for the backward pass.
        bodies: The graphs that a branch chooses between at run time.
        position: Its number in the recorded forward pass, -1 for an operation of the backward pass.
    """

    op: Callable[..., Any]
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    outputs: Any
    placement: Placement
    module_path: str = ""
    source: str = ""
    is_backward: bool = False
    grad_enabled: bool = True
    mutated: Tuple[Value, ...] = ()
    is_random: bool = False
    name: str = ""
    is_recomputed: bool = False
    bodies: Tuple[Graph, ...] = ()
    position: int = -1

    def reads(self) -> Iterator[Value]:
        """Yield every value among the arguments."""
        found: List[Value] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(self.kwargs, found)
        return iter(found)

    def writes(self) -> Iterator[Value]:
        """Yield every value that the node produces or changes."""
        yield from values_in(self.outputs)
        yield from self.mutated


@dataclasses.dataclass
class Graph:
    """A captured forward pass and, in training, its backward pass.

    Attributes:
        nodes: The operations in the order they ran.
        inputs: The tensors read from outside.
        constants: The tensors compiled in as constants, by value.
        outputs: What forward returned, a `Value` for each tensor.
        specs: Shape and type of every value.
        loss: The value that training minimises, None in inference.
        grads: The gradient of each trained parameter, by parameter name.
        events: Marks and scopes.
        has_own_gradients: Whether the backward pass called hooks or autograd functions of the user.
        varying: Values that depend on an input, a parameter, a buffer or a random draw.
        saved: Storages that autograd saved for the backward pass, in the order it did.
    """

    nodes: List[Node] = dataclasses.field(default_factory=list)
    inputs: List[GraphInput] = dataclasses.field(default_factory=list)
    constants: Dict[Value, torch.Tensor] = dataclasses.field(default_factory=dict)
    outputs: Any = None
    specs: Dict[Value, TensorSpec] = dataclasses.field(default_factory=dict)
    loss: Optional[Value] = None
    grads: Dict[str, Value] = dataclasses.field(default_factory=dict)
    events: List[Event] = dataclasses.field(default_factory=list)
    has_own_gradients: bool = False
    varying: set = dataclasses.field(default_factory=set)
    saved: List[int] = dataclasses.field(default_factory=list)

    def inputs_of(self, *kinds: str) -> List[GraphInput]:
        """Return the graph inputs of the given kinds, in the order they were added."""
        return [item for item in self.inputs if item.kind in kinds]

    def storages_written(self) -> set:
        """Return the storages that some node changes in place."""
        return {self.specs[value].storage for node in self.nodes for value in node.mutated}

    def buffers_written(self) -> List[str]:
        """Return the floating-point buffers whose values change, by writing in place or as running statistics."""
        return self._buffers_among(self.storages_written())

    def buffers_written_in_place(self) -> List[str]:
        """Return the floating-point buffers that an operation declares to write.

        The running statistics of batch norm are not among them: on a device, an output of batch norm replaces them.
        """
        nodes = [node for node in self.nodes if node.name != "native_batch_norm"]
        return self._buffers_among({self.specs[value].storage for node in nodes for value in node.mutated})

    def _buffers_among(self, storages: set) -> List[str]:
        return [
            item.name
            for item in self.inputs_of("buffer")
            if self.specs[item.value].storage in storages and self.persists(item)
        ]

    def persists(self, item: GraphInput) -> bool:
        """Whether the value of an input outlives a run: integer parameters and buffers are constants on a device."""
        return item.kind not in ("parameter", "buffer") or self.specs[item.value].dtype.is_floating_point

    def placements(self) -> List[Tuple[str, Placement, str]]:
        """Return (operation, placement, source line) of every forward operation."""
        return [(n.name, n.placement, n.source) for n in self.nodes if not n.is_backward]


def map_values(function: Callable[[Value], Any], structure: Any) -> Any:
    """Return the structure with the function applied to every value."""
    if isinstance(structure, Value):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        mapped = [map_values(function, item) for item in structure]
        if isinstance(structure, tuple) and hasattr(structure, "_fields"):
            return type(structure)(*mapped)
        return mapped if isinstance(structure, list) else tuple(mapped)
    if isinstance(structure, dict):
        return {key: map_values(function, item) for key, item in structure.items()}
    return structure


def values_in(structure: Any) -> Iterator[Value]:
    """Yield every value of a structure of lists, tuples and dicts."""
    found: List[Value] = []
    _collect(structure, found)
    return iter(found)


def _collect(structure: Any, found: List[Value]) -> None:
    # Nested generators would take several times as long, and compiling asks for the values of each node often.
    if isinstance(structure, Value):
        found.append(structure)
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            _collect(item, found)
    elif isinstance(structure, dict):
        for item in structure.values():
            _collect(item, found)


def grads_from_half(graph: Graph) -> Set[str]:
    """Return the parameters whose gradients are casts of float16 values, or sums of such casts."""
    makers = {value: node for node in graph.nodes if node.is_backward for value in values_in(node.outputs)}

    def is_from_half(value: Value) -> bool:
        node = makers.get(value)
        if graph.specs[value].dtype == torch.float16:
            return True
        return node is not None and node.name in ("_to_copy", "add") and any(map(is_from_half, node.reads()))

    return {name for name, value in graph.grads.items() if is_from_half(value)}


def prune(graph: Graph) -> None:
    """Remove the nodes that affect no output, gradient or persistent tensor, in place."""
    needed: Set[Value] = set(values_in(graph.outputs)) | set(graph.grads.values())
    if graph.loss is not None:
        needed.add(graph.loss)
    kept = _select(graph, graph.nodes, needed)
    positions = {id(node): index for index, node in enumerate(graph.nodes)}
    kept_positions = [positions[id(node)] for node in kept]
    graph.events = [
        event._replace(position=bisect.bisect_left(kept_positions, event.position)) for event in graph.events
    ]
    graph.nodes = kept
    used = needed | {item.value for item in graph.inputs if item.kind != "constant"}
    graph.inputs = [item for item in graph.inputs if item.value in used]
    graph.constants = {value: tensor for value, tensor in graph.constants.items() if value in used}


def needed_nodes(graph: Graph, nodes: Sequence[Node], results: Sequence[Value]) -> List[Node]:
    """Return the nodes that the results or persistent tensors depend on."""
    return _select(graph, nodes, set(results))


def _select(graph: Graph, nodes: Sequence[Node], needed: Set[Value]) -> List[Node]:
    """Return the nodes that compute the needed values, and add the values those nodes read."""
    storages = {graph.specs[value].storage for value in needed}
    lasting = [item for item in graph.inputs_of("parameter", "buffer", "input") if graph.persists(item)]
    storages |= {graph.specs[item.value].storage for item in lasting}
    kept = []
    for node in reversed(nodes):
        wanted = any(value in needed for value in values_in(node.outputs))
        wanted = wanted or any(graph.specs[value].storage in storages for value in node.mutated)
        if not wanted:
            continue
        kept.append(node)
        for value in node.reads():
            needed.add(value)
            storages.add(graph.specs[value].storage)
    kept.reverse()
    return kept
