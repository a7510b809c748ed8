"""The graph of a captured model, for tools that inspect a model without running it on a device.

`capture` runs a model once and returns its operations as a `Graph` of `Node`s over numbered `Value`s. Code that runs
inside the model meanwhile, such as a forward hook, reaches the graph so far through `active_recorder()`.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ipurun.emulator import enums
from ipurun.emulator._capture.capture import Captured, capture
from ipurun.emulator._capture.graph import Graph, Node, Placement, TensorSpec, Value, values_in
from ipurun.emulator._capture.op_kinds import is_supported
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.recorder import current as active_recorder
from ipurun.emulator._capture.repeated import answered_layers
from ipurun.emulator._executor.cache_files import cache_versions
from ipurun.emulator._executor.files import problem_of as export_problem
from ipurun.emulator._ops.blocks import adopt_blocks
from ipurun.emulator._options.strategies import PipelinedExecution, _DefaultStageManager
from ipurun.emulator._options_impl import Placement as StagePlacement
from ipurun.emulator._run.compile import look_up
from ipurun.emulator._run.executable_cache import CacheUse
from ipurun.emulator._run.executable_cache import described as executables_described

__all__ = [
    "BlockRecorder",
    "CacheUse",
    "Captured",
    "Graph",
    "Node",
    "Placement",
    "Recorder",
    "TensorSpec",
    "Value",
    "active_recorder",
    "adopt_blocks",
    "answered_layers",
    "cache_prospect",
    "cache_use",
    "cache_versions",
    "capture",
    "executables_described",
    "export_problem",
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


def cache_use(executor: Any) -> Optional[CacheUse]:
    """Return what the executable cache did for the last compile of an executor, None if it is not compiled."""
    executable = executor._executable
    return None if executable is None else executable.cache_use


def cache_prospect(executor: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> CacheUse:
    """Return what the executable cache would do if an executor were compiled; nothing is compiled or written.

    Args:
        executor: The executor, not compiled.
        args: Positional arguments of one micro-batch.
        kwargs: Named arguments of one micro-batch.
    """
    optimizer = executor._optimizer
    return look_up(
        executor._model,
        executor._parser.on_device(executor._parser.bind(args, kwargs)),
        options=executor.options,
        training=executor._training,
        groups=executor.per_replica_params,
        optimizer="" if optimizer is None else optimizer.constants(),
    )
