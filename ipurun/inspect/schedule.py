"""The learning-rate schedule of a config."""

from __future__ import annotations

from types import ModuleType
from typing import Any, List, Mapping, Optional

import torch

from ipurun.errors import ConfigError, Problem
from ipurun.inspect.locate import locate
from ipurun.inspect.targets import check_node, make
from ipurun.schedules import Schedule, lengths_to_fill

__all__ = ["check_schedule", "make_schedule"]


def check_schedule(node: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """All problems of the schedule that show without an optimizer."""
    if not node:
        return []
    if "_target_" not in node:
        return [
            Problem(
                "`schedule` has no `_target_`",
                fix="schedule=cosine, or schedule._target_=torch.optim.lr_scheduler.StepLR",
                key="schedule",
            )
        ]
    try:
        target = locate(node["_target_"], "schedule._target_", engine_module)
    except ConfigError as error:
        return list(error.problems)
    return check_node(node, "schedule", engine_module, tuple(lengths_to_fill(target, node)), positional=1)


def make_schedule(
    node: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    total_updates: Optional[int],
    engine_module: Optional[ModuleType] = None,
) -> Schedule:
    """The schedule of a run, its length filled in where the config leaves it open.

    Raises:
        ConfigError: The schedule needs the run's length, and a stream has none.
    """
    if not node:
        return Schedule(optimizer)
    target = locate(node["_target_"], "schedule._target_", engine_module)
    lengths = lengths_to_fill(target, node)
    if lengths and total_updates is None:
        raise ConfigError(
            "`schedule` needs the number of weight updates, and the data has no length",
            fix=f"max_steps=1000, or schedule.{lengths[0]}=1000",
            key="schedule",
        )
    filled = dict.fromkeys(lengths, total_updates)
    return Schedule(optimizer, lambda stand_in: make(node, "schedule", stand_in, engine_module=engine_module, **filled))
