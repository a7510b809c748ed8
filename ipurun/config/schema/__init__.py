"""The config as typed, closed dataclasses: the names, types, defaults and meanings of all keys."""

from ipurun.config.schema.device import (
    CacheConfig,
    PipelineConfig,
    ProfileConfig,
    RecomputeConfig,
    TensorLocationConfig,
)
from ipurun.config.schema.option import Key, walk_keys
from ipurun.config.schema.run import (
    AveragingConfig,
    CustomOpsConfig,
    EarlyStoppingConfig,
    InitConfig,
    LoaderConfig,
    LossConfig,
    RunConfig,
    SweepConfig,
    canonical_precision,
)

__all__ = [
    "AveragingConfig",
    "CacheConfig",
    "CustomOpsConfig",
    "EarlyStoppingConfig",
    "InitConfig",
    "Key",
    "LoaderConfig",
    "LossConfig",
    "PipelineConfig",
    "ProfileConfig",
    "RecomputeConfig",
    "RunConfig",
    "SweepConfig",
    "TensorLocationConfig",
    "canonical_precision",
    "walk_keys",
]
