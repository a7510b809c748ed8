"""A graph as plain data: JSON that names operations of torch, and from which no code is run.

Constants, source lines and names of modules are not stored: whoever loads a graph provides them.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch

from ipurun.emulator._capture.capture import Captured
from ipurun.emulator._capture.dtypes import layers_of, with_layers
from ipurun.emulator._capture.forward_trace import ForwardTrace
from ipurun.emulator._capture.graph import Event, Graph, GraphInput, Node, Placement, TensorSpec, Value, values_in

_OP_NAME = re.compile(r"aten::(\w+)(?:\.(\w+))?", re.ASCII)
_FLAGS = ("is_backward", "grad_enabled", "is_random")


class NotStorableError(Exception):
    """A graph holds what data cannot describe, or data does not describe a graph."""


def to_data(captured: Captured) -> Dict[str, Any]:
    """Return a graph that was captured, before recomputation, as data for JSON.

    Raises:
        NotStorableError: It calls functions of the user, or an argument has no description.
    """
    numbers = [int(value) for value in captured.output_values]
    return {**graph_to_data(captured.graph, captured.output_values), "output_values": numbers}


def graph_to_data(graph: Graph, others: Sequence[Value] = ()) -> Dict[str, Any]:
    """Return a graph as data for JSON; `others` are values to describe beside those that it uses.

    Raises:
        NotStorableError: It calls functions of the user, or an argument has no description.
    """
    if graph.has_own_gradients:
        raise NotStorableError("the backward pass calls functions or hooks of the model")
    ops, placements = _Table(), _Table()
    nodes = [
        [
            ops.index(_op_data(node)),
            _encode(node.args),
            {name: _encode(item) for name, item in node.kwargs.items()},
            _encode(node.outputs),
            placements.index(list(node.placement)),
            node.position,
            sum(1 << bit for bit, flag in enumerate(_FLAGS) if getattr(node, flag)),
            [int(value) for value in node.mutated],
            node.name,
        ]
        for node in graph.nodes
    ]
    used = {item.value for item in graph.inputs} | set(others) | set(values_in(graph.outputs))
    used |= {value for node in graph.nodes for value in (*node.reads(), *node.writes())} | set(graph.grads.values())
    used |= {event.value for event in graph.events if event.value is not None}
    if graph.loss is not None:
        used.add(graph.loss)
    return {
        "ops": ops.rows,
        "placements": placements.rows,
        "nodes": nodes,
        "inputs": [[item.kind, item.name, int(item.value)] for item in graph.inputs],
        "outputs": [int(value) for value in graph.outputs],
        "specs": [
            [int(value), list(spec.shape), dtype_name(spec.dtype), spec.storage]
            for value, spec in graph.specs.items()
            if value in used
        ],
        "loss": None if graph.loss is None else int(graph.loss),
        "grads": {name: int(value) for name, value in graph.grads.items()},
        "events": [
            [event.kind, event.position, None if event.value is None else int(event.value), _encode(event.info)]
            for event in graph.events
        ],
        "varying": sorted(int(value) for value in graph.varying if value in used),
    }


def from_data(data: Dict[str, Any], trace: ForwardTrace) -> Captured:
    """Return the graph that `to_data` described.

    Args:
        data: The description.
        trace: The trace of the same forward pass.

    Raises:
        NotStorableError: The data does not describe a graph of this forward pass.
    """
    with only_storable():
        graph = graph_from_data(data, trace.constants, trace.module_paths, trace.sources)
        return Captured(graph, trace.returned, [Value(number) for number in data["output_values"]], ([], {}))


@contextlib.contextmanager
def only_storable() -> Iterator[None]:
    """Raise NotStorableError for what data of another form raises."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NotStorableError(f"{type(error).__name__}: {error}") from error


def graph_from_data(
    data: Dict[str, Any],
    constants: Mapping[Value, torch.Tensor],
    module_paths: Sequence[str] = (),
    sources: Sequence[str] = (),
) -> Graph:
    """Return the graph that `graph_to_data` described; data of another form raises what reading it raises.

    Args:
        data: The description.
        constants: The constants of the graph.
        module_paths: The module that called each operation of the forward pass; none: they are not known.
        sources: The line that called each, likewise.
    """
    ops = [_op_from(row) for row in data["ops"]]
    placements = [Placement(*row) for row in data["placements"]]
    nodes = []
    for op, args, kwargs, outputs, placement, position, flags, mutated, name in data["nodes"]:
        if not all(keyword.isidentifier() for keyword in kwargs):
            raise ValueError("an argument has no valid name")  # it becomes a part of generated code
        node = Node(
            op=ops[op],
            args=tuple(_decode(item) for item in args["t"]),
            kwargs={keyword: _decode(item) for keyword, item in kwargs.items()},
            outputs=_decode(outputs),
            placement=placements[placement],
            module_path=module_paths[position] if position >= 0 and module_paths else "",
            source=sources[position] if position >= 0 and sources else "",
            mutated=tuple(Value(number) for number in mutated),
            name=str(name),
            position=int(position),
        )
        for bit, flag in enumerate(_FLAGS):
            setattr(node, flag, bool(flags >> bit & 1))
        nodes.append(node)
    inputs = [GraphInput(str(kind), str(name), Value(value)) for kind, name, value in data["inputs"]]
    return Graph(
        nodes=nodes,
        inputs=inputs,
        constants={item.value: constants[item.value] for item in inputs if item.kind == "constant"},
        outputs=[Value(number) for number in data["outputs"]],
        specs={
            Value(value): TensorSpec(tuple(int(size) for size in shape), dtype_of(dtype), int(storage))
            for value, shape, dtype, storage in data["specs"]
        },
        loss=None if data["loss"] is None else Value(data["loss"]),
        grads={str(name): Value(value) for name, value in data["grads"].items()},
        events=[
            Event(str(kind), int(position), None if value is None else Value(value), _decode(info))
            for kind, position, value, info in data["events"]
        ],
        varying={Value(number) for number in data["varying"]},
    )


class _Table:
    """Rows without repetition."""

    def __init__(self) -> None:
        self.rows: List[Any] = []
        self._numbers: Dict[str, int] = {}

    def index(self, row: Any) -> int:
        """Return the number of a row, which is added if it is new."""
        text = repr(row)
        if text not in self._numbers:
            self._numbers[text] = len(self.rows)
            self.rows.append(row)
        return self._numbers[text]


def _op_data(node: Node) -> List[Any]:
    layers, op = layers_of(node.op)
    if not isinstance(op, torch._ops.OpOverload) or node.bodies:
        raise NotStorableError(f"the model calls {node.name}, which is a Python function")
    schema = op._schema
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)
    if _OP_NAME.fullmatch(name) is None:
        raise NotStorableError(f"the model calls {name}, which is not one of torch's operations")
    return [name, *layers]


def _op_from(row: Sequence[str]) -> Any:
    found = _OP_NAME.fullmatch(row[0])
    if found is None:
        raise ValueError(f"{row[0]!r} is not one of torch's operations")
    op = getattr(getattr(torch.ops.aten, found[1]), found[2] or "default")
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"{row[0]!r} is not one of torch's operations")
    return with_layers(row[1:], op)


def _encode(item: Any) -> Any:
    if isinstance(item, Value):
        return {"v": int(item)}
    if item is None or isinstance(item, (bool, int, str)):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"f": repr(item)}
    if isinstance(item, Placement):
        return {"p": list(item)}
    if isinstance(item, tuple):
        return {"t": [_encode(part) for part in item]}
    if isinstance(item, list):
        return [_encode(part) for part in item]
    if isinstance(item, dict) and all(isinstance(key, str) for key in item):
        return {"o": {key: _encode(part) for key, part in item.items()}}
    for tag, kind in _NAMED:
        if isinstance(item, kind):
            return {tag: str(item).split(".")[-1]}
    raise NotStorableError(f"an argument of type {type(item).__name__} has no description")


# Values of torch that have a name.
_NAMED: Tuple[Tuple[str, type], ...] = (
    ("d", torch.dtype),
    ("e", torch.device),
    ("l", torch.layout),
    ("m", torch.memory_format),
)


def _decode(item: Any) -> Any:
    if isinstance(item, list):
        return [_decode(part) for part in item]
    if not isinstance(item, dict):
        return item
    ((tag, content),) = item.items()
    if tag == "v":
        return Value(content)
    if tag == "t":
        return tuple(_decode(part) for part in content)
    if tag == "d":
        return dtype_of(content)
    if tag == "f":
        return float(content)
    if tag == "o":
        return {str(key): _decode(part) for key, part in content.items()}
    if tag == "p":
        return Placement(*content)
    if tag == "e":
        return torch.device(content)
    kind = dict(_NAMED)[tag]
    found = getattr(torch, content)
    if not isinstance(found, kind):
        raise ValueError(f"{content!r} is not a {kind.__name__}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type of tensors, such as float32."""
    return str(dtype).split(".")[-1]


def dtype_of(name: str) -> torch.dtype:
    """Return the type with a name.

    Raises:
        ValueError: There is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a type of tensors")
    return found
