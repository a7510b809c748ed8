"""Hold the half values of a graph in float32 tensors while it is replayed.

A CPU computes half precision in float32: it converts every operand and every result, or has no half kernel at all. So
all half values of a graph are kept as float32 tensors that contain only numbers of half precision. Each operation then
runs its float32 kernel, and only results that may need it are rounded, in place. Inputs, outputs and gradients of the
graph stay half.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.dtypes import HalfThroughFloat, holds_half, to_nearest_half
from ipurun.emulator._capture.graph import Graph, Node, Placement, TensorSpec, Value, map_values, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._run.rounding import InPlaceRoundings, StochasticInPlace, divisible, round_at_random

# Their results are numbers of half precision if all operands are; so are views.
_EXACT = names_in("""
    _unsafe_view abs amax amin cat clone constant_pad_nd copy embedding empty empty_like empty_strided expand_copy fill
    flip full full_like gather index index_select masked_fill max max_pool2d_with_indices maximum min minimum neg
    new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute_copy relu repeat roll scalar_tensor
    select_backward select_scatter slice_backward slice_scatter sort stack threshold_backward topk tril triu where zero
    zeros zeros_like
""")
# These draw the same random numbers in float32 as in half; the others run on half tensors.
_SAME_DRAWS = names_in("bernoulli bernoulli_ native_dropout")
_PASSES_SUMS_ON = names_in("_to_copy _unsafe_view add clone")
_FLOATS = (torch.float16, torch.float32)
_DEPENDS_ON_STORAGE = names_in("nextafter nextafter_")


def float_specs(graph: Graph) -> Dict[Value, TensorSpec]:
    """Return the specs of a graph with float32 in place of half."""
    return {
        value: spec._replace(dtype=torch.float32) if spec.dtype == torch.float16 else spec
        for value, spec in graph.specs.items()
    }


def in_float_storage(
    graph: Graph,
    results: Sequence[Value],
    *,
    stochastic: bool,
    sums: Sequence[Value] = (),
    one_by_one: bool = False,
) -> Tuple[Graph, List[Value]]:
    """Return a graph that computes the same with float32 tensors in place of half ones, and its results.

    Args:
        graph: The captured program; it is returned unchanged if it has no half values.
        results: The values to return; half ones become half tensors at the end.
        stochastic: Whether to round at random, with numbers from torch's generator, instead of to nearest.
        sums: Half values among the results that are returned as float32 and not rounded.
        one_by_one: Whether to round each result where it is computed, to see which operation overflows.
    """
    if not any(spec.dtype == torch.float16 for spec in graph.specs.values()):
        return graph, list(results)
    if _shares_written_memory(graph):
        nodes = [dataclasses.replace(node, op=_rounding_op(node)) for node in graph.nodes]
        return dataclasses.replace(graph, nodes=nodes) if stochastic else graph, list(results)
    return _Widening(graph, InPlaceRoundings(stochastic), sums, () if one_by_one else results).run(results)


def _shares_written_memory(graph: Graph) -> bool:
    """Whether a tensor that is written can be reached in a way that float32 copies would break."""
    written = graph.storages_written()
    inputs = [graph.specs[item.value] for item in graph.inputs if item.kind != "constant"]
    storages = [spec.storage for spec in inputs if spec.dtype == torch.float16 and spec.storage in written]
    viewed = {graph.specs[value].storage for node in graph.nodes if _reads_storage(node) for value in node.reads()}
    return len(storages) != len(set(storages)) or bool(viewed & written)


def _reads_storage(node: Node) -> bool:
    is_cast = node.name == "view" and any(isinstance(item, torch.dtype) for item in node.args)
    return is_cast or node.name in _DEPENDS_ON_STORAGE


def _is_view(node: Node) -> bool:
    returns = node.op._schema.returns  # type: ignore[attr-defined]  # only called for aten operations
    return any(item.alias_info is not None and not item.alias_info.is_write for item in returns)


def _rounding_op(node: Node) -> Callable[..., Any]:
    """Return the operation on half tensors with stochastic rounding of its results."""
    if not hasattr(node.op, "_schema") or _is_view(node) or node.is_random or _is_exact(node):
        return node.op
    rounded = HalfThroughFloat(float_op(node), round_at_random)
    return lambda *args, **kwargs: (rounded if holds_half((args, kwargs)) else node.op)(*args, **kwargs)


def float_op(node: Node) -> Callable[..., Any]:
    """Return the operation itself, if a node has a replacement that computes it in float32."""
    return getattr(node.op, "widened", node.op)


def _base_name(node: Node) -> str:
    return node.name[:-1] if node.name.endswith("_") else node.name


def _is_exact(node: Node) -> bool:
    """Whether the results are numbers of half precision if all operands are."""
    if node.name == "max_pool2d_with_indices_backward":
        # Where windows do not overlap, a gradient is moved and never added to another one.
        kernel, stride, dilation = node.args[2], node.args[3] or node.args[2], node.args[5]
        reach = [(k - 1) * d + 1 for k, d in zip(_pair(kernel), _pair(dilation))]
        return all(extent <= step for extent, step in zip(reach, _pair(stride)))
    return _base_name(node) in _EXACT


def _pair(sizes: Sequence[int]) -> Sequence[int]:
    return sizes if len(sizes) == 2 else [*sizes, *sizes]


class _Widening:
    """Rewrites a graph.

    Args:
        graph: The graph of half values, which is left unchanged.
        roundings: Makes the roundings of results.
        sums: Results to return as float32, without rounding.
        late: Results that may be rounded at the end, if nothing else reads them.
    """

    def __init__(self, graph: Graph, roundings: InPlaceRoundings, sums: Sequence[Value], late: Sequence[Value]) -> None:
        self._graph = graph
        self._roundings = roundings
        self._half = {value for value, spec in graph.specs.items() if spec.dtype == torch.float16}
        self._specs = float_specs(graph)
        self._sums = set(sums)
        self._unrounded = _only_used_for(graph, self._sums)
        self._written = graph.storages_written()
        self._late = self._only_results(late)
        self._nodes: List[Node] = []
        self._wide: Dict[Value, Value] = {}
        self._numbers = itertools.count(max(graph.specs) + 1)

    def run(self, results: Sequence[Value]) -> Tuple[Graph, List[Value]]:
        """Return the new graph and its results."""
        graph = self._graph
        if self._roundings.stochastic:
            self._add(self._roundings.draw, (), None, "draw")
        inputs = [item.value for item in graph.inputs if item.kind != "constant" and item.value in self._half]
        for value in inputs:
            self._specs[value] = graph.specs[value]
            self._wide[value] = self._add_new(torch.Tensor.float, value, value)
        used = {value for node in graph.nodes for value in node.reads()} | set(results)
        for node in graph.nodes:
            self._rewrite(node, used)
        for value in inputs:
            if graph.specs[value].storage in self._written:
                self._add(torch.Tensor.copy_, (value, self._wide[value]), None, "copy_", mutated=(value,))
        together = self._round_together([value for value in dict.fromkeys(results) if value in self._late])
        narrowed = self._half - self._sums
        new_results = [
            together[value] if value in together else self._narrowed(value) if value in narrowed else self._now(value)
            for value in results
        ]
        constants = {value: _widened(tensor) for value, tensor in graph.constants.items()}
        rewritten = dataclasses.replace(graph, nodes=self._nodes, constants=constants, specs=self._specs)
        return rewritten, new_results

    def _rewrite(self, node: Node, used: Set[Value]) -> None:
        outputs = list(values_in(node.outputs))
        if self._half.isdisjoint([*node.reads(), *outputs]):
            self._nodes.append(self._mapped(node))
        elif not hasattr(node.op, "_schema") or _reads_storage(node) or _draws_by_type(node):
            self._call_on_half(node, outputs)
        elif self._is_cast(node):
            self._cast(node, node.args[0], node.outputs)
        else:
            self._call_on_float(node, [value for value in outputs if value in used])

    def _call_on_float(self, node: Node, results: Iterable[Value]) -> None:
        """Run the float32 kernel and round the results."""
        floats = [value for value in node.reads() if self._graph.specs[value].dtype.is_floating_point]
        is_exact = _is_view(node) or (_is_exact(node) and self._half.issuperset(floats))
        stored = [value for value in node.writes() if self._graph.specs[value].dtype.is_floating_point]
        replace = _with_half_numbers if is_exact and self._half.issuperset(stored) else _with_float_type
        self._nodes.append(
            self._mapped(
                dataclasses.replace(
                    node,
                    op=float_op(node),
                    args=_map_leaves(replace, node.args),
                    kwargs=_map_leaves(replace, node.kwargs),
                )
            )
        )
        for value in () if is_exact else dict.fromkeys([*results, *node.mutated]):
            if value in self._half and value not in self._unrounded and value not in self._late:
                self._round(node, self._now(value))

    def _round(self, node: Node, value: Value) -> None:
        rounding = self._roundings.of_shape(self._specs[value].shape)
        # Named like the operation: with floating-point exceptions, the rounding is where a result overflows.
        self._nodes.append(
            dataclasses.replace(
                node, op=rounding, args=(value,), kwargs={}, outputs=value, mutated=(value,), is_random=False
            )
        )

    def _only_results(self, late: Sequence[Value]) -> Set[Value]:
        """Return the results that nothing else reads, gradients of weights most of all, and what they are views of."""
        nodes = [node for node in self._graph.nodes if hasattr(node.op, "_schema")]
        makers = {value: node for node in nodes for value in values_in(node.outputs)}
        num_readers = Counter(value for node in self._graph.nodes for value in set(node.reads()))
        found: Set[Value] = set()
        for value in set(late) & self._half - self._sums:
            if num_readers[value] or self._graph.specs[value].storage in self._written:
                continue
            chain = [value]
            maker = makers.get(value)
            while maker is not None and _is_view(maker):
                source = maker.args[0]
                is_only_view = maker.outputs == chain[-1] and num_readers[source] == 1 and source not in late
                maker = makers.get(source) if is_only_view else None
                chain.append(source)
            if maker is not None:
                found.update(chain)
        return found

    def _round_together(self, values: Sequence[Value]) -> Dict[Value, Value]:
        """Round some results at once, and return their half values; rounding to nearest is part of the conversion."""
        if not self._roundings.stochastic:
            return {value: self._narrowed(value) for value in values}
        if not values:
            return {}
        made = [self._new_value(value, torch.float16) for value in values]
        shapes = [self._specs[value].shape for value in values]
        numels = [math.prod(shape) for shape in shapes]
        filling = torch.zeros(divisible(sum(numels)) - sum(numels))
        sizes = [*numels, filling.numel()]
        rounding = self._roundings.of_shape((sum(sizes),))
        assert isinstance(rounding, StochasticInPlace)

        def rounded(*tensors: torch.Tensor) -> List[torch.Tensor]:
            flat = rounding.to_half(torch.cat([*(tensor.flatten() for tensor in tensors), filling]))
            return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes)]

        self._add(rounded, tuple(map(self._now, values)), made, "_to_copy")
        return dict(zip(values, made))

    def _cast(self, node: Node, source: Value, target: Value) -> None:
        """Convert between the two types, without copies where nothing is rounded."""
        if source in self._half:
            self._wide[target] = self._now(source)
        elif self._roundings.stochastic or target in self._unrounded:
            self._call_on_float(node, [target])
        else:
            mapped = self._mapped(node)
            self._nodes.append(dataclasses.replace(mapped, op=_through_half, kwargs={}))

    def _call_on_half(self, node: Node, outputs: Sequence[Value]) -> None:
        """Run an operation that needs half tensors: a function of the user, or one that depends on the type."""
        narrow = {value: self._narrowed(value) for value in dict.fromkeys(node.reads()) if value in self._half}
        fresh = {value: self._new_value(value, torch.float16) for value in outputs if value in self._half}
        fresh.update(narrow)
        mapped = self._mapped(node, fresh)
        self._nodes.append(mapped)
        for value in node.mutated:
            if value in narrow:
                self._add(torch.Tensor.copy_, (self._now(value), narrow[value]), None, "copy_", mutated=(value,))
        for value in outputs:
            if value in self._half and value not in narrow:
                self._add(torch.Tensor.float, (fresh[value],), value, "_to_copy")

    def _is_cast(self, node: Node) -> bool:
        """Whether the node only converts between half and float, and nothing changes its tensors afterwards."""
        is_conversion = node.name == "_to_copy" and set(node.kwargs) == {"dtype"}
        if not is_conversion or not isinstance(node.args[0], Value):  # torch converts numbers, too
            return False
        specs = [self._graph.specs[value] for value in (node.args[0], node.outputs)]
        return all(spec.dtype in _FLOATS and spec.storage not in self._written for spec in specs)

    def _mapped(self, node: Node, others: Optional[Dict[Value, Value]] = None) -> Node:
        """Return the node with the values of the new graph."""

        def now(value: Value) -> Value:
            return others[value] if others and value in others else self._now(value)

        return dataclasses.replace(
            node,
            args=map_values(now, node.args),
            kwargs=map_values(now, node.kwargs),
            outputs=map_values(now, node.outputs),
            mutated=tuple(now(value) for value in node.mutated),
        )

    def _now(self, value: Value) -> Value:
        return self._wide.get(value, value)

    def _narrowed(self, value: Value) -> Value:
        return self._add_new(to_nearest_half, self._now(value), value)

    def _add_new(self, op: Callable[..., Any], argument: Value, like: Value) -> Value:
        dtype = torch.float16 if op is to_nearest_half else torch.float32
        made = self._new_value(like, dtype)
        self._add(op, (argument,), made, "_to_copy")
        return made

    def _new_value(self, like: Value, dtype: torch.dtype) -> Value:
        made = Value(next(self._numbers))
        self._specs[made] = self._graph.specs[like]._replace(dtype=dtype)
        return made

    def _add(
        self, op: Callable[..., Any], args: Tuple[Any, ...], outputs: Any, name: str, mutated: Tuple[Value, ...] = ()
    ) -> None:
        self._nodes.append(Node(op, args, {}, outputs, Placement(), name=name, mutated=mutated))


def _only_used_for(graph: Graph, results: Set[Value]) -> Set[Value]:
    """Return the results and the values that are only moved and added up to compute them."""
    users: Dict[Value, List[Node]] = {}
    for node in graph.nodes:
        for value in node.reads():
            users.setdefault(value, []).append(node)
    kept = {value for value in graph.outputs if value not in results}
    found = {value for value in results if value not in users}
    for node in reversed(graph.nodes):
        passes_on = hasattr(node.op, "_schema") and (node.name in _PASSES_SUMS_ON or _is_view(node))
        if passes_on and found.issuperset(node.writes()):
            for value in node.reads():
                if value not in kept and all(found.issuperset(user.writes()) for user in users[value]):
                    found.add(value)
    return found


def _draws_by_type(node: Node) -> bool:
    return node.is_random and node.name not in _SAME_DRAWS


def _through_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _with_float_type(item: Any) -> Any:
    return torch.float32 if item is torch.float16 else item


def _with_half_numbers(item: Any) -> Any:
    """Round a number that an operation stores, such as the one that fills a tensor."""
    if isinstance(item, float):
        return float(torch.tensor(item).half())
    return _with_float_type(item)


def _map_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)([_map_leaves(function, entry) for entry in item])
    if isinstance(item, dict):
        return {name: _map_leaves(function, entry) for name, entry in item.items()}
    return function(item)
