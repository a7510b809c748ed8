"""The optimizer and the learning-rate schedule of a config, checked; the schedule is made here too."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from torch import nn

from ipurun.config.patterns import check_parameters, names_in
from ipurun.errors import ConfigError, Findings, Problem
from ipurun.inspect.targets import check_node, locate, make
from ipurun.schedules import Schedule, lengths_to_fill

__all__ = ["OWN_KEYS", "check_groups", "check_optimizer", "check_schedule", "make_schedule", "trainable"]

# Keys of the optimizer's node that are ipurun's and no arguments of its class.
OWN_KEYS = ("variable", "constant", "groups")


def trainable(step: nn.Module) -> Dict[str, nn.Parameter]:
    """Parameters by the names they have in the user's model (``model.`` is the wrapper's)."""
    return {
        name[len("model.") :] if name.startswith("model.") else name: parameter
        for name, parameter in step.named_parameters()
        if parameter.requires_grad
    }


def check_optimizer(node: Mapping[str, Any], engine_module: ModuleType) -> List[Problem]:
    """All problems of the optimizer that show without the model."""
    if "_target_" not in node:
        return []
    own = {key: value for key, value in node.items() if key not in OWN_KEYS}
    return check_node(own, "optimizer", engine_module, positional=1)


def check_groups(node: Mapping[str, Any], parameter_names: Sequence[str]) -> List[Problem]:
    """Problems of `optimizer.groups` that only the model shows: every pattern must match a parameter."""
    found = Findings()
    for number, group in enumerate(node.get("groups") or ()):
        key = f"optimizer.groups.{number}"
        for pattern in names_in(group.get("match"), key, found, "parameter") if isinstance(group, Mapping) else ():
            check_parameters(pattern, key, parameter_names, found)
    return found.problems


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
