"""The whole config as typed, closed dataclasses: what a key is called, what it takes, what it means."""

from ipurun.config.schema.device import (
    CacheConfig,
    InferenceConfig,
    MemoryConfig,
    OutputConfig,
    PipelineConfig,
    ProfileConfig,
    RecomputeConfig,
    ReplicationConfig,
    TensorLocationConfig,
)
from ipurun.config.schema.machine import MachineConfig
from ipurun.config.schema.option import Key, node, option, walk_keys
from ipurun.config.schema.run import (
    CheckpointConfig,
    CustomOpsConfig,
    DebugConfig,
    EvalConfig,
    LoaderConfig,
    LossConfig,
    RunConfig,
    SweepConfig,
)

__all__ = [
    "CacheConfig",
    "CheckpointConfig",
    "CustomOpsConfig",
    "DebugConfig",
    "EvalConfig",
    "InferenceConfig",
    "Key",
    "LoaderConfig",
    "LossConfig",
    "MachineConfig",
    "MemoryConfig",
    "OutputConfig",
    "PipelineConfig",
    "ProfileConfig",
    "RecomputeConfig",
    "ReplicationConfig",
    "RunConfig",
    "SweepConfig",
    "TensorLocationConfig",
    "node",
    "option",
    "walk_keys",
]
