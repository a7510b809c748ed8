"""The graph of a captured model, for tools that inspect a model without running it on a device.

`capture` runs a model once and returns its operations as a `Graph` of `Node`s over numbered `Value`s. Code that runs
inside the model meanwhile, such as a forward hook, reaches the graph so far through `active_recorder()`.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from ipurun.emulator._capture.capture import Captured, capture
from ipurun.emulator._capture.graph import Graph, Node, Placement, TensorSpec, Value, values_in
from ipurun.emulator._capture.op_kinds import is_supported
from ipurun.emulator._capture.recompute import add_recomputation, recomputation_mode
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.recorder import current as active_recorder
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._executor.model_guard import named_tensors
from ipurun.emulator._options_impl import IStageManager
from ipurun.emulator._run.executable_cache import file_name

__all__ = [
    "Captured",
    "Graph",
    "IStageManager",
    "Node",
    "Placement",
    "Recorder",
    "TensorSpec",
    "Value",
    "active_recorder",
    "capture",
    "executable_file_name",
    "is_supported",
    "values_in",
]


def executable_file_name(
    model: torch.nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], options: Any, training: bool
) -> str:
    """Return the name of the cache file that compiling a model for these arguments would read or write.

    Args:
        model: The model that an executor wraps.
        args: Positional arguments of one micro-batch.
        kwargs: Named arguments of one micro-batch.
        options: Options of the executor.
        training: Whether the executor trains the model.

    Raises:
        Error: The model does what a graph cannot hold, or training finds no loss.
    """
    parameters, buffers = named_tensors(model)
    options._execution_strategy.onStartTracing()
    graph = capture(
        lambda: model(*args, **kwargs),
        parameters=parameters,
        buffers=buffers,
        inputs=list(tensors_in((args, kwargs))),
        training=training,
        options=options,
        modules=dict(model.named_modules()),
    ).graph
    add_recomputation(graph, recomputation_mode(graph, options))
    return file_name(graph, options)
