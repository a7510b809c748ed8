"""Recompute values that the backward pass needs instead of keeping them.

What is kept follows the backend's setting `autoRecomputation`: inputs of pipeline stages (Pipeline, the default
of a pipelined model on several IPUs), results of convolutions and matrix products (Standard), all but norms
(NormOnly), nothing (RecomputeAll); tensors passed to `poptorch.recomputationCheckpoint` are always kept.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from typing import Any, Dict, Iterator, List, Set, Tuple

from ipurun.emulator._capture.graph import Graph, Node, Placement, Value, map_values, prune, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._options.strategies import PipelinedExecution, ShardedExecution

_PRODUCTS = names_in("addbmm addmm addmv baddbmm bmm convolution dot mm mv")
_NORMS = names_in("native_batch_norm native_group_norm native_layer_norm")


class Recomputation(enum.IntEnum):
    """The backend's settings of `autoRecomputation`."""

    None_ = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


def recomputation_mode(graph: Graph, options: Any) -> Recomputation:
    """Return the setting from the options, or the default for the strategy."""
    setting = options._Popart.options.get("autoRecomputation")
    if setting is not None:
        return Recomputation(int(setting))
    return Recomputation.Pipeline if _is_pipelined(graph, options) else Recomputation.None_


def stashed_values(graph: Graph, options: Any) -> List[Tuple[Value, Placement]]:
    """Return the values that stages of a pipeline keep until the backward pass returns to them.

    A value that passes between stages is kept where it arrives: the stage that computed it recomputes it. The last
    stage keeps none, as its backward pass follows at once.
    """
    if not graph.grads or not _is_pipelined(graph, options):
        return []
    forward = [node for node in graph.nodes if not node.is_backward]
    last = max(node.placement.stage_id for node in forward)
    made_in: Dict[Value, Placement] = {}
    used_in: Dict[Value, Set[Placement]] = {item.value: set() for item in graph.inputs_of("input")}
    for node in forward:
        of_samples = [value for value in node.reads() if value in used_in]
        for value in of_samples:
            used_in[value].add(node.placement)
        if of_samples or node.is_random:
            for value in node.writes():
                made_in.setdefault(value, node.placement)
                used_in.setdefault(value, set())
    found: Dict[Tuple[Value, int], Placement] = {}
    for value in (value for node in graph.nodes if node.is_backward for value in node.reads() if value in used_in):
        maker = made_in.get(value)
        arrives = [place for place in used_in[value] if maker is None or place.stage_id != maker.stage_id]
        keepers = arrives or ([maker] if maker else [])
        found.update({(value, place.stage_id): place for place in keepers if place.stage_id != last})
    return [(value, place) for (value, _), place in found.items()]


def _is_pipelined(graph: Graph, options: Any) -> bool:
    strategy = options._execution_strategy
    pipelined = isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution)
    return pipelined and len({node.placement.ipu_id for node in graph.nodes}) > 1


def add_recomputation(graph: Graph, mode: Recomputation) -> None:
    """Change the graph in place so that the backward pass recomputes what `mode` does not keep."""
    if mode is Recomputation.None_ or not graph.grads:
        return
    producers = _recomputable(graph, mode)
    again: Dict[Value, Value] = {}
    numbers = itertools.count(max(graph.specs) + 1)
    nodes: List[Node] = [node for node in graph.nodes if not node.is_backward]
    for node in graph.nodes:
        if not node.is_backward:
            continue
        for value in set(node.reads()):
            if value in producers and value not in again:
                _compute_again(graph, value, producers, again, nodes, numbers)
        node.args = map_values(lambda value: again.get(value, value), node.args)
        node.kwargs = map_values(lambda value: again.get(value, value), node.kwargs)
        nodes.append(node)
    graph.nodes = nodes
    prune(graph)


def _recomputable(graph: Graph, mode: Recomputation) -> Dict[Value, Node]:
    """Return the forward values that are not kept, with the nodes that compute them."""
    written = graph.storages_written()
    kept = _kept_values(graph, mode)
    found: Dict[Value, Node] = {}
    for node in graph.nodes:
        reads = set(node.reads())
        touched = {graph.specs[value].storage for value in (*reads, *values_in(node.outputs))}
        if node.is_backward or node.is_random or touched & written or not hasattr(node.op, "_schema"):
            continue
        # An operation does not compute a value that it returns unchanged (as the last one in torch.tensor does).
        found.update({value: node for value in values_in(node.outputs) if value not in kept and value not in reads})
    return found


def _kept_values(graph: Graph, mode: Recomputation) -> Set[Value]:
    forward = [node for node in graph.nodes if not node.is_backward]
    kept = {event.value for event in graph.events if event.kind == "recompute" and event.value is not None}
    if mode is Recomputation.Pipeline:
        stage_of = {value: node.placement.stage_id for node in forward for value in values_in(node.outputs)}
        for node in forward:
            kept.update(v for v in node.reads() if stage_of.get(v, node.placement.stage_id) != node.placement.stage_id)
    elif mode is not Recomputation.RecomputeAll:
        for node in forward:
            keeps = node.name in _PRODUCTS if mode is Recomputation.Standard else node.name not in _NORMS
            if keeps:
                kept.update(values_in(node.outputs))
    return kept


def _compute_again(
    graph: Graph,
    wanted: Value,
    producers: Dict[Value, Node],
    again: Dict[Value, Value],
    nodes: List[Node],
    numbers: Iterator[int],
) -> None:
    """Append copies, with new value numbers, of the nodes that compute a value from kept ones."""
    pending = [wanted]
    while pending:
        value = pending[-1]
        if value in again:
            pending.pop()
            continue
        node = producers[value]
        missing = [read for read in node.reads() if read in producers and read not in again]
        if missing:
            pending.extend(missing)
            continue
        pending.pop()
        for output in values_in(node.outputs):
            fresh = Value(next(numbers))
            graph.specs[fresh] = graph.specs[output]
            if output in graph.varying:
                graph.varying.add(fresh)
            again[output] = fresh
        nodes.append(
            dataclasses.replace(
                node,
                args=map_values(lambda v: again.get(v, v), node.args),
                kwargs=map_values(lambda v: again.get(v, v), node.kwargs),
                outputs=map_values(lambda v: again[v], node.outputs),
                is_backward=True,
                is_recomputed=True,
            )
        )
