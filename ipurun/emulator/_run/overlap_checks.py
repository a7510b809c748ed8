"""The rules of overlapped IO, checked on a captured forward pass."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence

import torch

from ipurun.emulator import enums
from ipurun.emulator._capture.graph import Event, Graph, Node, Value, values_in
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._impl import createNativeError
from ipurun.emulator._options.strategies import PipelinedExecution, ShardedExecution


def check_overlap(recorder: Recorder, returned: Iterable[torch.Tensor], input_names: Sequence[str] = ()) -> None:
    """Raises poptorch.Error where an overlap was asked for that a device cannot do.

    Args:
        recorder: The recorder, after forward and before the graph is pruned.
        returned: The tensors that forward returned.
        input_names: Names of the model's tensor inputs, for messages.
    """
    graph = recorder.graph
    inputs = _overlapping(graph, "overlap_input")
    outputs = _overlapping(graph, "overlap_output")
    if not inputs and not outputs:
        return
    # The ops that made the marked tensors: each reads the tensor that was given to set_overlap_*.
    marked_by: Dict[Value, Node] = {value: node for node in graph.nodes for value in values_in(node.outputs)}
    for event in inputs:
        _check_input(graph, _source(marked_by, event), input_names)
    returned_values = [recorder.value_of(tensor) for tensor in returned]
    for event in outputs:
        _check_output(returned_values, event, _source(marked_by, event))
    _check_options(recorder.options)


def _overlapping(graph: Graph, kind: str) -> List[Event]:
    none = enums.OverlapMode.NoOverlap.value
    return [event for event in graph.events if event.kind == kind and event.info["mode"] != none]


def _source(marked_by: Dict[Value, Node], event: Event) -> Value:
    assert event.value is not None
    return next(marked_by[event.value].reads())


def _check_input(graph: Graph, source: Value, names: Sequence[str]) -> None:
    values = [item.value for item in graph.inputs_of("input")]
    if source not in values:
        raise createNativeError(
            "poptorch.set_overlap_for_input applied on a node which is not a tensor input to the model."
        )
    index = values.index(source)
    name = names[index] if index < len(names) else f"number {index}"
    if sum(source in node.reads() for node in graph.nodes) > 1:
        raise createNativeError(
            "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case "
            f"for input {name} to the model."
        )


def _check_output(returned: Sequence[Value], event: Event, source: Value) -> None:
    if returned.count(event.value) + returned.count(source) > 1:
        raise createNativeError(
            "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please check "
            "all returned tensors including those nested in tuples/lists."
        )
    if event.value not in returned:
        raise createNativeError(
            "poptorch.set_overlap_for_output applied on a node which is not a tensor output to the model."
        )


def _check_options(options: Any) -> None:
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        raise createNativeError(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using only one IPU, "
            "please switch to poptorch.ShardedExecution."
        )
    if not options.TensorLocations.exists("numIOTiles"):
        raise createNativeError(
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    mode = enums.OutputMode(options.output_mode)
    if mode not in (enums.OutputMode.All, enums.OutputMode.Sum):
        raise createNativeError(
            f"Overlapped IO needs the output mode All or Sum, got {mode.name} (poptorch.Options().outputMode)."
        )
