"""Replay a graph node by node, for modes that inspect every result.

This is slower than the generated function, and used only with floating-point exceptions or stochastic rounding, and to
measure operations.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.dtypes import HalfThroughFloat, StochasticRounding, holds_half
from ipurun.emulator._capture.graph import Graph, Node, Value, map_values, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._impl import createNativeError

_COMPARISONS = names_in("eq ge gt le lt ne")
_MAKES_NO_ARITHMETIC = names_in("clone copy copy_ empty empty_like fill fill_ full full_like masked_fill where")


def interpreter_for(options: Any) -> Optional[Callable[..., Callable[[Sequence[torch.Tensor]], Tuple[Any, ...]]]]:
    """Return a function that makes an interpreter of a graph, None if the options turn on neither mode."""
    settings = options._Popart.options
    checks = bool(settings.get("enableFloatingPointChecks", False))
    rounds = bool(settings.get("enableStochasticRounding", False))
    if not checks and not rounds:
        return None

    def make(graph: Graph, results: Optional[Sequence[Value]] = None) -> Callable[..., Tuple[Any, ...]]:
        wanted = [*graph.outputs, *graph.grads.values()] if results is None else list(results)
        return _Interpreter(graph, wanted, _ops(graph, rounds), checks=checks)

    return make


def timing_interpreter(
    graph: Graph, timed: Callable[[int, Callable[..., Any]], Callable[..., Any]], *, rounds: bool
) -> Callable[[Sequence[torch.Tensor]], Tuple[Any, ...]]:
    """Return an interpreter of a graph whose operations are wrapped.

    Args:
        graph: The captured program.
        timed: Returns what to run instead of an operation: ``timed(index, op)``.
        rounds: Whether results are rounded stochastically.
    """
    ops = [timed(index, op) for index, op in enumerate(_ops(graph, rounds))]
    return _Interpreter(graph, [*graph.outputs, *graph.grads.values()], ops, checks=False)


def _ops(graph: Graph, rounds: bool) -> List[Callable[..., Any]]:
    return [_rounding_op(node) if rounds else node.op for node in graph.nodes]


class _Interpreter:
    """Runs the nodes of a graph one after another."""

    def __init__(self, graph: Graph, results: List[Value], ops: List[Callable[..., Any]], *, checks: bool) -> None:
        self._graph = graph
        self._results = results
        self._checks = checks
        self._arguments = [item.value for item in graph.inputs if item.kind != "constant"]
        self._steps = list(zip(graph.nodes, ops))
        self._last_use: Dict[int, List[Value]] = {}
        seen = set(results)
        for index in range(len(graph.nodes) - 1, -1, -1):
            node = graph.nodes[index]
            for value in (*node.reads(), *values_in(node.outputs)):
                if value not in seen:
                    seen.add(value)
                    self._last_use.setdefault(index, []).append(value)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Tuple[Any, ...]:
        tensors: Dict[Value, Any] = dict(zip(self._arguments, inputs))
        written = self._graph.storages_written()
        for value, tensor in self._graph.constants.items():
            tensors[value] = tensor.clone() if self._graph.specs[value].storage in written else tensor
        for index, (node, op) in enumerate(self._steps):
            args = map_values(tensors.__getitem__, node.args)
            kwargs = map_values(tensors.__getitem__, node.kwargs)
            before = _Finiteness(args, kwargs) if self._checks else None
            result = op(*args, **kwargs)
            if before is not None:
                before.check(node, result)
            _store(node.outputs, result, tensors)
            for value in self._last_use.get(index, ()):
                tensors.pop(value, None)
        return tuple(tensors[value] for value in self._results)


def _store(outputs: Any, result: Any, tensors: Dict[Value, Any]) -> None:
    if isinstance(outputs, Value):
        tensors[outputs] = result
    elif isinstance(outputs, (list, tuple)):
        for output, item in zip(outputs, result):
            _store(output, item, tensors)


class _Finiteness:
    """Tracks whether the arguments of an operation are finite, to find the operation that produced a bad value."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        tensors = _floats((args, kwargs))
        self.has_nan = any(bool(t.isnan().any()) for t in tensors)
        self.has_infinity = any(bool(t.isinf().any()) for t in tensors)
        self.has_infinite_number = any(
            isinstance(number, float) and number in (float("inf"), float("-inf")) for number in _leaves(args)
        )

    def check(self, node: Node, result: Any) -> None:
        """Raise if the operation caused a floating-point exception."""
        if node.name in _MAKES_NO_ARITHMETIC:
            return
        if node.name in _COMPARISONS and self.has_nan:
            self._fail(node, "a comparison with NaN")
        for tensor in _floats(result):
            if not self.has_nan and bool(tensor.isnan().any()):
                self._fail(node, "an invalid operation (such as inf - inf, 0 * inf, 0 / 0 or a complex result)")
            finite = not (self.has_nan or self.has_infinity or self.has_infinite_number)
            if finite and bool(tensor.isinf().any()):
                self._fail(node, "an overflow or a division by zero")

    @staticmethod
    def _fail(node: Node, what: str) -> None:
        where = f" at {node.source}" if node.source else ""
        raise createNativeError(
            f"Floating point exception: {what} in {node.name}{where}.", "poplar_application_runtime_error"
        )


def _leaves(structure: Any) -> List[Any]:
    if isinstance(structure, (list, tuple)):
        return [leaf for item in structure for leaf in _leaves(item)]
    if isinstance(structure, dict):
        return [leaf for item in structure.values() for leaf in _leaves(item)]
    return [structure]


def _floats(structure: Any) -> List[torch.Tensor]:
    return [t for t in _leaves(structure) if isinstance(t, torch.Tensor) and t.is_floating_point()]


class StreamRounding(StochasticRounding):
    """Stochastic rounding with torch's generator, which is seeded for every run; updates follow the last run."""

    def __init__(self) -> None:
        self._generator = torch.default_generator

    def to_half(self, tensor: torch.Tensor) -> torch.Tensor:
        rounded = torch.empty_like(tensor, dtype=torch.float16)
        self(rounded, tensor)
        return rounded


def _rounding_op(node: Node) -> Callable[..., Any]:
    """Return the operation with stochastic rounding of half results; views stay views."""
    schema = getattr(node.op, "_schema", None)
    if schema is None:
        return node.op
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    if is_view or node.is_random or node.name in _MAKES_NO_ARITHMETIC:
        return node.op
    rounded = HalfThroughFloat(getattr(node.op, "widened", node.op), StreamRounding().to_half)

    def run(*args: Any, **kwargs: Any) -> Any:
        return rounded(*args, **kwargs) if holds_half((args, kwargs)) else node.op(*args, **kwargs)

    return run
