"""PopTorch 3.4's Python API on plain CPU torch.

``install()`` makes ``import poptorch`` import this package. docs/explanation/emulator.md and
docs/reference/emulator-coverage.md describe what is executed, what is only recorded, and how it differs from a device.
"""

from __future__ import annotations

import atexit
import os
import sys

from ipurun.emulator import enums, ops, optim, options, poptorch_core, profiling
from ipurun.emulator._capture.structures import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from ipurun.emulator._data.accessor import AsynchronousDataAccessor
from ipurun.emulator._dataloader import DataLoader
from ipurun.emulator._executor.device import ipuHardwareIsAvailable, ipuHardwareVersion
from ipurun.emulator._impl import __version__, createPoptorchError, isRunningOnIpu
from ipurun.emulator._logging import logger, setLogLevel
from ipurun.emulator._poplar_executor import (
    PoplarExecutor,
    inferenceModel,
    load,
    registerPostCompileHook,
    registerPreCompileHook,
    trainingModel,
)
from ipurun.emulator._printing import module_repr, print
from ipurun.emulator._utils import accessAttributes, getIpuTensorId
from ipurun.emulator.autocasting import autocast
from ipurun.emulator.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from ipurun.emulator.install import install
from ipurun.emulator.ops import (
    CPU,
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    MultiConv,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    nearest,
    nop,
    recomputationCheckpoint,
    register_cpu_implementation,
    removeBlocks,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipurun.emulator.options import (
    Attribute,
    BlockId,
    ConfigFileError,
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)
from ipurun.emulator.poptorch_core import (
    Error,
    RecoverableError,
    UnrecoverableError,
    importPoptorchMetadataFromFile,
    poptorchAtExit,
)

__all__ = [
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockId",
    "CPU",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "__version__",
    "accessAttributes",
    "autocast",
    "cond",
    "createPoptorchError",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "install",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorchAtExit",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "register_cpu_implementation",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]

# As PopTorch does at import, for programs that fork after loading the device libraries.
os.environ.setdefault("RDMAV_FORK_SAFE", "1")
atexit.register(poptorchAtExit)

# Models, options and optimizers pickled by ipurun 0.1.0 name the modules that held their classes then.
_PICKLED_IN_0_1_0 = {
    "_annotations": "_ops.annotations",
    "_attributes": "_ops.annotations",
    "_blocks": "_ops.blocks",
    "_cpu_ops": "_ops.custom_ops",
    "_multi_conv": "_ops.annotations",
    "_optim_base": "_optimizer.base",
    "_option_groups": "_options.groups",
    "_strategies": "_options.strategies",
    "_tensor_locations": "_options.groups",
    "_wrapping": "_executor.wrapping",
}
for _old, _new in _PICKLED_IN_0_1_0.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]

_REMOVED = {
    "Compiler": "removed after PopTorch 2.6",
    "IPUScope": "removed in PopTorch 3.1",
}


def __getattr__(name: str) -> object:
    if name in _REMOVED:
        raise AttributeError(f"poptorch.{name} was {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
