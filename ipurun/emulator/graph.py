"""The graph of a captured model, for tools that inspect a model without running it on a device.

`capture` runs a model once and returns its operations as a `Graph` of `Node`s over numbered `Value`s. Code that runs
inside the model meanwhile, such as a forward hook, reaches the graph so far through `active_recorder()`.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from ipurun.emulator import enums
from ipurun.emulator._capture.capture import Captured, capture
from ipurun.emulator._capture.graph import Graph, Node, Placement, TensorSpec, Value, values_in
from ipurun.emulator._capture.op_kinds import is_supported
from ipurun.emulator._capture.recompute import add_recomputation, recomputation_mode
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.recorder import current as active_recorder
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._executor.model_guard import named_tensors
from ipurun.emulator._ops.blocks import adopt_blocks
from ipurun.emulator._options.strategies import PipelinedExecution, _DefaultStageManager
from ipurun.emulator._options_impl import Placement as StagePlacement
from ipurun.emulator._run.executable_cache import file_name

__all__ = [
    "BlockRecorder",
    "Captured",
    "Graph",
    "Node",
    "Placement",
    "Recorder",
    "TensorSpec",
    "Value",
    "active_recorder",
    "adopt_blocks",
    "capture",
    "executable_file_name",
    "is_supported",
    "values_in",
]


class BlockRecorder(PipelinedExecution):
    """An execution strategy that accepts every block and records which IPU each one requests.

    Capturing a model with it finds the model's blocks before anything has decided on their stages.
    """

    def __init__(self) -> None:
        super().__init__(enums.AutoStage.AutoIncrement)
        self.requested_ipus: Dict[str, Optional[int]] = {}
        self._stages_manager = _RecordingStageManager(self.requested_ipus)


class _RecordingStageManager(_DefaultStageManager):
    def __init__(self, requested_ipus: Dict[str, Optional[int]]) -> None:
        super().__init__(enums.AutoStage.AutoIncrement)
        self._requested_ipus = requested_ipus

    def beginStage(self, user_id: Optional[str], ipu_id_from_block: Optional[int]) -> StagePlacement:
        placement = super().beginStage(user_id, ipu_id_from_block)
        self._requested_ipus.setdefault(placement.user_id, ipu_id_from_block)
        return placement


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
