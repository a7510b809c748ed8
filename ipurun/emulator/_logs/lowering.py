"""Describe the captured forward pass in the backend's terms: op types, tensor names, placement."""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.dtypes import narrowed
from ipurun.emulator._capture.graph import Event, Graph, Node, Placement, TensorSpec, Value, values_in

# Torch ops that the backend names differently or lowers to several ops.
_BACKEND_TYPES: Dict[str, Tuple[str, ...]] = {
    "_log_softmax": ("LogSoftmax",),
    "_softmax": ("Softmax",),
    "_to_copy": ("Cast",),
    "_unsafe_view": ("Reshape",),
    "addmm": ("MatMul", "Add"),
    "avg_pool2d": ("AveragePool",),
    "baddbmm": ("MatMul", "Add"),
    "bmm": ("MatMul",),
    "cat": ("Concat",),
    "clone": ("Identity",),
    "cond": ("If",),
    "convolution": ("Conv",),
    "dot": ("MatMul",),
    "embedding": ("Gather",),
    "index_select": ("Gather",),
    "max_pool2d_with_indices": ("MaxPool",),
    "mean": ("ReduceMean",),
    "mm": ("MatMul",),
    "mv": ("MatMul",),
    "native_batch_norm": ("BatchNormalization",),
    "native_dropout": ("Dropout",),
    "native_group_norm": ("GroupNormalization",),
    "native_layer_norm": ("GroupNormalization",),
    "nll_loss_forward": ("Nll",),
    "permute": ("Transpose",),
    "prod": ("ReduceProd",),
    "select": ("Slice", "Squeeze"),
    "stack": ("Concat",),
    "sum": ("ReduceSum",),
    "t": ("Transpose",),
    "view": ("Reshape",),
}
_ONE_OP_PER_OUTPUT = {"split": "Slice", "split_with_sizes": "Slice", "unbind": "Slice", "chunk": "Slice"}
_NO_OPS = frozenset(["alias", "detach", "empty", "lift", "lift_fresh", "lift_fresh_copy"])
_OPS_OF_MARKS = {
    "identity_loss": "IdentityLoss",
    "loss": "IdentityLoss",
    "nop": "Nop",
    "recompute": "Checkpoint",
}


class LoweredOp(NamedTuple):
    """One op of the backend.

    Attributes:
        type: The backend's name for the kind of op.
        name: Name of its output, prefixed with modules and name scopes.
        shape: Text of the output's type and shape.
        placement: Where it runs.
        source: Line of the model that called it, "" if unknown.
        attributes: Attributes set where it was called (poptorch.Attribute).
    """

    type: str
    name: str
    shape: str
    placement: Placement
    source: str
    attributes: Dict[str, Dict[str, str]]


def lowered_ops(graph: Graph, module_names: bool = True) -> List[LoweredOp]:
    """Return the forward pass of a captured graph as ops of the backend.

    Args:
        graph: The captured graph.
        module_names: Whether names begin with the path of the module (Options.disableModuleNamescope).
    """
    lowering = _Lowering(graph, module_names)
    pending = sorted(_events(graph), key=lambda event: event.position)
    for position, node in enumerate(graph.nodes):
        if node.is_backward:
            break
        while pending and pending[0].position <= position:
            lowering.note(pending.pop(0))
        lowering.lower(node)
    for event in pending:
        lowering.note(event)
    return lowering.ops


def _events(graph: Graph) -> Iterator[Event]:
    marked = {event.value for event in graph.events if event.kind == "identity_loss"}
    yield from graph.events
    if graph.loss is not None and graph.loss not in marked:
        for position, node in enumerate(graph.nodes):
            if graph.loss in list(values_in(node.outputs)):
                yield Event("loss", position + 1, graph.loss, {})


class _Lowering:
    def __init__(self, graph: Graph, module_names: bool) -> None:
        self.ops: List[LoweredOp] = []
        self._graph = graph
        self._module_names = module_names
        self._scopes: List[str] = []
        self._uses: Dict[str, int] = {}
        self._producer = {value: node for node in graph.nodes for value in values_in(node.outputs)}
        self._multi_conv: Optional[int] = None
        self._attributes: Dict[str, Dict[str, str]] = {}

    def note(self, event: Event) -> None:
        """Process an event between two ops."""
        if event.kind == "push_name_scope":
            self._scopes.append(event.info["name"])
        elif event.kind == "pop_name_scope":
            self._scopes.pop()
        elif event.kind == "attributes":
            self._attributes = event.info["attributes"]
        elif event.kind == "begin_multi_conv":
            self._multi_conv = len(self.ops)
        elif event.kind == "end_multi_conv":
            self._join_convolutions()
        elif event.kind in _OPS_OF_MARKS and event.value in self._producer:
            self._add(_OPS_OF_MARKS[event.kind], self._producer[event.value], event.value)

    def lower(self, node: Node) -> None:
        """Add the ops that a node is lowered to."""
        outputs = list(values_in(node.outputs))
        if node.name in _NO_OPS or not outputs or self._is_part_of_l1(node):
            return
        if node.name in _ONE_OP_PER_OUTPUT:
            for value in outputs:
                self._add(_ONE_OP_PER_OUTPUT[node.name], node, value)
            return
        for backend_type in self._types(node):
            self._add(backend_type, node, outputs[0])

    def _types(self, node: Node) -> Tuple[str, ...]:
        if self._l1_loss_input(node) is not None:
            return ("L1",)
        indices = _assigned_indices(node)
        if indices is None:
            return _types_of(node.name)
        if any(_is_mask(self._graph.specs[index]) for index in values_in(indices)):
            return ("Where",)
        return ("Scatter", "Reshape") if scattered_dimension(self._graph, node) is None else ("ScatterReduce",)

    def _add(self, backend_type: str, node: Node, value: Value) -> None:
        parts = [node.module_path.replace(".", "/")] if self._module_names and node.module_path else []
        name = "/".join([*parts, *self._scopes, f"{backend_type}:0"])
        repeat = self._uses.get(name, 0)
        self._uses[name] = repeat + 1
        shape = _shape_text(self._graph.specs[value])
        name = f"{name}/{repeat}" if repeat else name
        self.ops.append(LoweredOp(backend_type, name, shape, node.placement, node.source, self._attributes))

    def _join_convolutions(self) -> None:
        begin, self._multi_conv = self._multi_conv, None
        inside = self.ops[begin:]
        convolutions = [op for op in inside if op.type == "Conv"]
        others = [op for op in inside if op.type != "Conv"]
        if convolutions:
            first = convolutions[0]
            joined = first._replace(type="MultiConv", name=first.name.replace("Conv:", "MultiConv:"))
            self.ops[begin:] = [*others, joined]

    def _l1_loss_input(self, node: Node) -> Optional[Value]:
        """Return the absolute differences whose reduction is the loss, None for any other node."""
        if node.name not in ("mean", "sum") or self._graph.loss not in list(values_in(node.outputs)):
            return None
        source = next(node.reads(), None)
        before = self._producer.get(source) if source is not None else None
        return source if before is not None and before.name == "abs" else None

    def _is_part_of_l1(self, node: Node) -> bool:
        if node.name != "abs" or self._graph.loss is None:
            return False
        loss = self._producer.get(self._graph.loss)
        return loss is not None and self._l1_loss_input(loss) in tuple(values_in(node.outputs))


def scattered_dimension(graph: Graph, node: Node) -> Optional[int]:
    """Return the dimension whose slices an indexed assignment replaces in one op, None where it goes by element.

    The backend needs exactly one index: a vector of at least two integers.

    Args:
        graph: The captured graph.
        node: Any node of it.
    """
    used = [(dim, index) for dim, index in enumerate(_assigned_indices(node) or ()) if index is not None]
    if len(used) != 1:
        return None
    dim, index = used[0]
    spec = graph.specs[index]
    return dim if len(spec.shape) == 1 and spec.shape[0] != 1 and not _is_mask(spec) else None


def _assigned_indices(node: Node) -> Optional[Sequence[Optional[Value]]]:
    """Return the index of each dimension of ``t[...] = value``, None for any other node."""
    name = node.name.rstrip("_")
    if name == "index_put":
        return list(node.args[1])
    if name == "index_fill" and node.args[1] >= 0:
        return [*[None] * node.args[1], node.args[2]]
    return None


def _is_mask(spec: TensorSpec) -> bool:
    return spec.dtype in (torch.bool, torch.uint8)


def _types_of(name: str) -> Tuple[str, ...]:
    if name in _BACKEND_TYPES:
        return _BACKEND_TYPES[name]
    return ("".join(word.capitalize() for word in name.strip("_").split("_")),)


def _shape_text(spec: TensorSpec) -> str:
    return f"{str(narrowed(spec.dtype)).split('.')[-1]}({', '.join(map(str, spec.shape))})"
