"""Check the optimizer and the learning-rate schedule of a config, and make the schedule."""

from __future__ import annotations

from types import ModuleType
from typing import Any, List, Mapping, Optional, Sequence

import torch

from ipurun.config.patterns import check_parameters, names_in
from ipurun.errors import ConfigError, Findings, Problem
from ipurun.inspect.targets import check_node, locate, make
from ipurun.schedules import Schedule, lengths_to_fill

__all__ = ["check_groups", "check_optimizer", "check_schedule", "make_schedule"]

# Keys of the optimizer's node that ipurun reads and does not pass to its class.
_OWN_KEYS = ("variable", "constant", "groups")


def check_optimizer(node: Mapping[str, Any], engine_module: ModuleType) -> List[Problem]:
    """Return the problems of the optimizer that can be found without the model."""
    if "_target_" not in node:
        return []
    own = {key: value for key, value in node.items() if key not in _OWN_KEYS}
    return check_node(own, "optimizer", engine_module, positional=1)


def check_groups(node: Mapping[str, Any], parameter_names: Sequence[str]) -> List[Problem]:
    """Return the problems of `optimizer.groups` with a model: every pattern must match a parameter."""
    found = Findings()
    groups = node.get("groups")
    for number, group in enumerate(groups if isinstance(groups, (list, tuple)) else ()):  # the plan refuses others
        key = f"optimizer.groups.{number}"
        for pattern in names_in(group.get("match"), key, found, "parameter") if isinstance(group, Mapping) else ():
            check_parameters(pattern, key, parameter_names, found)
    return found.problems


def check_schedule(node: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """Return the problems of the schedule that can be found without an optimizer."""
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
    """Make the schedule of a run; its length is filled in if the config does not set it.

    Raises:
        ConfigError: The schedule needs the length of the run, but the data has no length.
    """
    if not node:
        return Schedule(optimizer)
    target = locate(node["_target_"], "schedule._target_", engine_module)
    lengths = lengths_to_fill(target, node)
    if lengths and total_updates is None:
        raise ConfigError(
            "`schedule` needs the number of weight updates, but the data has no length",
            fix=f"max_steps=1000, or schedule.{lengths[0]}=1000",
            key="schedule",
        )
    filled = dict.fromkeys(lengths, total_updates)
    return Schedule(
        optimizer, lambda substitute: make(node, "schedule", substitute, engine_module=engine_module, **filled)
    )
