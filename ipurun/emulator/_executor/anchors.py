"""Anchored tensors: values inside the graph that a program can read."""

from __future__ import annotations

import functools
from typing import Any, Dict, Iterable, List, Set

import torch

from ipurun.emulator._capture.graph import Graph, Value, values_in
from ipurun.emulator._logging import native_logger
from ipurun.emulator.enums import OutputMode

GRADIENT_PREFIX = "Gradient___"
_UPDATED = "UpdatedVar___"
_MODEL_PREFIX = "model."
_LOSS_SCALE = "finalLossScale"


class Anchors:
    """Finds the tensors of a graph by their long names and keeps the last values of anchored ones.

    Args:
        graph: The captured program.
        requested: The anchors in the options: a list starting with the long name for each short name.
    """

    def __init__(self, graph: Graph, requested: Dict[str, Any]) -> None:
        self._graph = graph
        self._weights = [item.name for item in graph.inputs_of("parameter", "buffer")]
        self._grads = list(graph.grads)
        self.values: Dict[str, torch.Tensor] = {}
        """The last value of each anchored tensor, by its short name."""
        self.in_graph: Dict[str, Value] = {}
        self.of_weights: Dict[str, str] = {}
        for short, entry in requested.items():
            long_name, _, mode, period = entry
            native_logger.debug("Anchor %s %s/%d", long_name, _mode_name(mode), period)
            value = self._values.get(long_name, self._values.get(_without_prefix(long_name)))
            if value is not None:
                self.in_graph[short] = value
            else:
                self.of_weights[short] = long_name

    @functools.cached_property
    def _values(self) -> Dict[str, Value]:
        return _named_values(self._graph)

    def names(self, state: Iterable[str] = ()) -> List[str]:
        """Return all long names that can be anchored, including optimizer state."""
        return [*self._values, *self._weights, *(_UPDATED + name for name in self._grads), *state]

    def read_weights(self, weights: Dict[str, torch.Tensor], state: Dict[str, torch.Tensor]) -> None:
        """Keep the values of anchored weights and optimizer state after a call."""
        for short, long_name in self.of_weights.items():
            name = long_name[len(_UPDATED) :] if long_name.startswith(_UPDATED) else long_name
            for table in (weights, state):
                for candidate in (name, _without_prefix(name)):
                    if candidate in table:
                        self.values[short] = table[candidate].detach().clone()


def name_of(graph: Graph, value: Value) -> str:
    """Return the long name of a value, or a name made from its number."""
    named = {item.name: item.value for item in graph.inputs}
    named.update(_named_values(graph))
    return next((name for name, candidate in named.items() if candidate == value), str(int(value)))


def _mode_name(mode: int) -> str:
    name = OutputMode(mode).name
    return name if name == "Sum" else name.upper()


def _without_prefix(name: str) -> str:
    """Return a name without the "model." that PopTorch adds to the names of a training model."""
    for head in (GRADIENT_PREFIX, _UPDATED, ""):
        if name.startswith(head + _MODEL_PREFIX):
            return head + name[len(head) + len(_MODEL_PREFIX) :]
    return name


def _named_values(graph: Graph) -> Dict[str, Value]:
    named: Dict[str, Value] = {GRADIENT_PREFIX + name: value for name, value in graph.grads.items()}
    for item in graph.inputs_of("seed"):
        named[_LOSS_SCALE] = item.value
    same_name: Dict[str, Set[Value]] = {}
    for node in graph.nodes:
        if not node.is_backward:
            prefix = f"{node.module_path}/" if node.module_path else ""
            for index, value in enumerate(values_in(node.outputs)):
                name = f"{prefix}{node.name}:{index}"
                others = same_name.setdefault(name, set())
                if value not in others:
                    others.add(value)
                    if len(others) > 1:
                        name = f"{prefix}{node.name}__{len(others) - 1}:{index}"
                    named[name] = value
    for item in graph.inputs_of("input"):
        named.setdefault(item.name, item.value)
    return named
