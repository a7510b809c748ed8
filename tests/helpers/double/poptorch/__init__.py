"""A small double of Graphcore's package, for tests of the runner against an engine that is not the emulator.

It shares no code with the emulator. What it copies from PopTorch is what the Python layer does to a model and to its
caller: it is a separate module object; blocks do nothing outside a trace; options are frozen once used; while the
model is traced its parameters are replaced by tensors on the device, whose types follow torch's inference; weights
and the optimizer's values live on the device and reach the host only when copied; a device serves one executor at a
time. The numbers come from plain torch, one micro-batch after the other. `DOUBLE_IPUS` sets how many IPUs there are.
"""

from __future__ import annotations

from typing import Any

import torch

from . import enums, ops, optim, options, poptorch_core
from ._dataloader import DataLoader
from ._poplar_executor import PoplarExecutor
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    MatMulSerializationMode,
    MeanReductionStrategy,
    OutputMode,
    OverlapMode,
    ReductionType,
    SyncPattern,
)
from .ops import (
    BeginBlock,
    Block,
    BlockFunction,
    identity_loss,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .options import Options, PipelinedExecution, ShardedExecution, Stage, TensorLocationSettings
from .poptorch_core import Error, RecoverableError, UnrecoverableError

__version__ = "3.4.0"
__all__ = [name for name in dir() if not name.startswith("_")]


def trainingModel(model: torch.nn.Module, options: Any = None, optimizer: Any = None) -> PoplarExecutor:
    return PoplarExecutor(model, options, optimizer, training=True)


def inferenceModel(model: torch.nn.Module, options: Any = None) -> PoplarExecutor:
    return PoplarExecutor(model, options, None, training=False)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    return num_ipus <= poptorch_core.num_ipus()


def ipuHardwareVersion() -> int:
    return 2
