"""A config whose single values make sense, so that planning can go on and find the other problems, too."""

from __future__ import annotations

import copy
from typing import Any

from ipurun.config.checks import check_values
from ipurun.config.keys import all_keys
from ipurun.config.schema import RunConfig
from ipurun.plan.chosen import read
from ipurun.plan.findings import Findings

__all__ = ["sane_config"]


def sane_config(config: RunConfig, found: Findings) -> RunConfig:
    """The config, with stand-ins for words that do not exist and numbers out of range; each is a problem."""
    problems = check_values(config, lambda key: "")
    if not problems:
        return config
    found.problems += problems
    mended = copy.deepcopy(config)
    for path, key in all_keys().items():
        value = read(mended, path)
        if key.choices and value is not None and str(value) not in key.choices:
            _write(mended, path, key.default)
        elif key.minimum is not None and isinstance(value, (int, float)) and value < key.minimum:
            _write(mended, path, key.minimum)
    return mended


def _write(config: RunConfig, path: str, value: Any) -> None:
    group, _, name = path.rpartition(".")
    setattr(read(config, group) if group else config, name, value)
