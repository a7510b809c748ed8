"""Turn graphs into functions as the options want it: in half precision, with stochastic rounding, or with checks.

Floating-point exceptions need an interpreter that inspects every result; it is slower than the generated function.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, map_values, needed_nodes, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._run.half import in_float_storage
from ipurun.emulator._run.kernels import with_quick_kernels
from ipurun.emulator._run.replay import Replay, binding, generate

_COMPARISONS = names_in("eq ge gt le lt ne")
_MAKES_NO_ARITHMETIC = names_in("clone copy copy_ empty empty_like fill fill_ full full_like masked_fill where")


class ReplayMaker(NamedTuple):
    """Makes functions that replay graphs.

    Attributes:
        checks: Whether to raise floating-point exceptions.
        rounds: Whether to round half results stochastically, with numbers from torch's generator.
        as_captured: Whether to run half operations with the kernels of the captured run, to compare with it.
        same_bits: Whether to use only kernels that return the same bits as torch's.
    """

    checks: bool = False
    rounds: bool = False
    as_captured: bool = False
    same_bits: bool = True

    def __call__(
        self, graph: Graph, *, results: Optional[Sequence[Value]] = None, sums: Sequence[Value] = ()
    ) -> Replay:
        """Return a function that runs the graph on its inputs (all but the constants, in graph order).

        Args:
            graph: The captured program.
            results: The values to return, by default the outputs and then the gradients.
            sums: Half values among the results that are sums over micro-batches, to be returned as float32.
        """
        wanted = [*graph.outputs, *graph.grads.values()] if results is None else results
        if not self.as_captured:
            graph, wanted = in_float_storage(graph, wanted, stochastic=self.rounds, sums=sums, one_by_one=self.checks)
            graph = with_quick_kernels(graph, wanted, same_bits=self.same_bits)
        if self.checks or self.as_captured:  # what runs once is not worth compiling
            return Interpreter(graph, wanted, checks=self.checks)
        return generate(graph, results=wanted)


class GraphRunner:
    """Runs a graph; where nobody reads its outputs, without the operations that only they need.

    Args:
        make_replay: Turns a graph into a function that runs it.
        graph: The captured program.
        extra: Values to return after the gradients.
        sums: See `ReplayMaker`.
    """

    def __init__(
        self, make_replay: ReplayMaker, graph: Graph, *, extra: Sequence[Value] = (), sums: Sequence[Value] = ()
    ) -> None:
        self._make_replay = make_replay
        self._graph = graph
        self._extra = list(extra)
        self._sums = list(sums)

    def __call__(
        self, arguments: Sequence[torch.Tensor], *, with_outputs: bool = True
    ) -> Tuple[Tuple[torch.Tensor, ...], Tuple[torch.Tensor, ...]]:
        """Return the outputs, and the gradients with the extra values.

        Args:
            arguments: The graph's inputs, all but the constants, in order.
            with_outputs: False if nobody reads the outputs, which may then be missing.
        """
        if not with_outputs and self._gradients is not None:
            return (), self._gradients(arguments)
        results = self._replay(arguments)
        count = len(self._graph.outputs)
        return results[:count], results[count:]

    @functools.cached_property
    def _replay(self) -> Replay:
        results = [*self._graph.outputs, *self._graph.grads.values(), *self._extra]
        return self._make_replay(self._graph, results=results, sums=self._sums)

    @functools.cached_property
    def _gradients(self) -> Optional[Replay]:
        """The function that computes the gradients alone, None if what it would leave out has other effects.

        Such are random numbers, which others are drawn after, functions of the user, and floating-point exceptions.
        """
        graph = self._graph
        if self._make_replay.checks or self._make_replay.rounds or not graph.grads or self._extra:
            return None
        results = list(graph.grads.values())
        needed = needed_nodes(graph, graph.nodes, results)
        kept = {id(node) for node in needed}
        dropped = [node for node in graph.nodes if id(node) not in kept]
        if not dropped or any(node.is_random or not hasattr(node.op, "_schema") for node in dropped):
            return None
        return self._make_replay(dataclasses.replace(graph, nodes=needed), results=results, sums=self._sums)


def replay_maker(options: Any) -> ReplayMaker:
    """Return what makes the replays of a model with these options."""
    settings = options._Popart.options
    return ReplayMaker(
        checks=bool(settings.get("enableFloatingPointChecks", False)),
        rounds=bool(settings.get("enableStochasticRounding", False)),
    )


class Interpreter:
    """Runs the nodes of a graph one after another.

    Args:
        graph: The graph.
        results: The values to return.
        checks: Whether to raise floating-point exceptions.
    """

    def __init__(self, graph: Graph, results: Sequence[Value], *, checks: bool) -> None:
        self._graph = graph
        self._checks = checks
        self._results = results
        self._arguments = [item.value for item in graph.inputs if item.kind != "constant"]
        self._functions = [binding(node) for node in graph.nodes]
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
        for index, (node, function) in enumerate(zip(self._graph.nodes, self._functions)):
            args = map_values(tensors.__getitem__, node.args)
            kwargs = map_values(tensors.__getitem__, node.kwargs)
            before = _Finiteness(args, kwargs) if self._checks else None
            result = function(*args, **kwargs)
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
