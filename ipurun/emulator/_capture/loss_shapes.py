"""The shape of losses that are a part of the final one.

An `identity_loss` with a reduction that another loss contains is lowered to a reduction of the flattened tensor along
its one long dimension, which leaves a vector of one element where torch has a number. Elementwise operations keep that.
"""

from __future__ import annotations

from typing import List, Set

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, values_in

__all__ = ["give_device_shapes"]

_KEEPS_SHAPE = frozenset(["_to_copy", "alias", "clone", "detach"])


def give_device_shapes(graph: Graph) -> List[int]:
    """Makes outputs vectors of one element that are so on a device, in place; returns which outputs these are."""
    if graph.loss is None:
        return []  # in inference losses are plain reductions
    vectors = _one_element_vectors(graph)
    num_forward = sum(not node.is_backward for node in graph.nodes)
    changed = [index for index, value in enumerate(graph.outputs) if value in vectors]
    for index in changed:
        value = graph.outputs[index]
        producer = next(node for node in graph.nodes if value in values_in(node.outputs))
        vector = Value(max(graph.specs) + 1)
        graph.specs[vector] = graph.specs[value]._replace(shape=(1,))
        if value in graph.varying:
            graph.varying.add(vector)
        view = Node(torch.ops.aten.view.default, (value, [1]), {}, vector, producer.placement, producer.module_path)
        view.name, view.source = "view", producer.source
        graph.nodes.insert(num_forward, view)
        num_forward += 1
        graph.outputs[index] = vector
    return changed


def _one_element_vectors(graph: Graph) -> Set[Value]:
    """Returns the values without dimensions that have one on a device."""
    found = {
        event.value
        for event in graph.events
        if event.kind == "identity_loss" and event.info["reduction"] != "none" and event.value != graph.loss
    }
    for node in graph.nodes:
        if node.is_backward or not _is_elementwise(node) or not found.intersection(node.reads()):
            continue
        found.update(value for value in values_in(node.outputs) if graph.specs[value].shape == ())
    return {value for value in found if value is not None}


def _is_elementwise(node: Node) -> bool:
    return node.name in _KEEPS_SHAPE or torch.Tag.pointwise in getattr(node.op, "tags", ())
