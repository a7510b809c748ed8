"""Removing operations that nothing returned depends on."""

from __future__ import annotations

import bisect
from typing import List, Sequence, Set

from ipurun.emulator._capture.graph import Graph, Node, Value, values_in

__all__ = ["needed_nodes", "prune"]


def prune(graph: Graph) -> None:
    """Removes, in place, the nodes that reach no output, no gradient, and no tensor that outlives a run."""
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
    """Returns those of the nodes that the results, or a tensor that outlives a run, depend on."""
    return _select(graph, nodes, set(results))


def _select(graph: Graph, nodes: Sequence[Node], needed: Set[Value]) -> List[Node]:
    """Returns the nodes that compute the needed values; adds to those what they need themselves."""
    storages = {graph.specs[value].storage for value in needed}
    storages |= {graph.specs[item.value].storage for item in graph.inputs_of("parameter", "buffer", "input")}
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
