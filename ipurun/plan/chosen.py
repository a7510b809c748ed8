"""Which keys somebody set, told by comparison with the schema's defaults."""

from __future__ import annotations

import functools
from typing import Any

from ipurun.config.schema import RunConfig

__all__ = ["is_set", "read"]


def read(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def is_set(config: RunConfig, key: str) -> bool:
    """Whether a key differs from its default: only then does it win over `options` and poptorch.conf."""
    return bool(read(config, key) != read(_defaults(), key))


@functools.lru_cache(maxsize=1)
def _defaults() -> RunConfig:
    return RunConfig()
