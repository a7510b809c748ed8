"""A config whose single values make sense, so that planning can go on and find the other problems, too."""

from __future__ import annotations

from ipurun.config.checks import check_values, without_misfits
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings

__all__ = ["sane_config"]


def sane_config(config: RunConfig, found: Findings) -> RunConfig:
    """The config, with stand-ins for words that do not exist and numbers out of range; each is a problem."""
    problems = check_values(config, lambda key: "")
    if not problems:
        return config
    found.problems += problems
    return without_misfits(config)
