"""Check the optimizer and the learning-rate schedule of a config, and make the schedule."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from ipurun.config.patterns import check_parameters, names_in
from ipurun.errors import ConfigError, Findings, Problem
from ipurun.inspect.targets import check_node, first_parameter, locate, make
from ipurun.schedules import Schedule, lengths_to_fill

__all__ = ["check_groups", "check_optimizer", "check_schedule", "make_schedule"]

# Keys of the optimizer's node that ipurun reads and does not pass to its class.
_OWN_KEYS = ("variable", "constant", "groups", "no_decay")
# The argument of schedulers that combine others.
_PARTS = "schedulers"


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


def check_schedule(
    node: Mapping[str, Any], engine_module: Optional[ModuleType] = None, key: str = "schedule"
) -> List[Problem]:
    """Return the problems of the schedule that can be found without an optimizer."""
    if not node:
        return []
    if not isinstance(node, Mapping) or "_target_" not in node:
        return [
            Problem(
                f"`{key}` has no `_target_`",
                fix=f"schedule=cosine, or {key}._target_=torch.optim.lr_scheduler.StepLR",
                key=key,
            )
        ]
    try:
        target = locate(node["_target_"], f"{key}._target_", engine_module)
    except ConfigError as error:
        return list(error.problems)
    own, parts = _without_parts(node)
    given = (*lengths_to_fill(target, node), *((_PARTS,) if parts else ()))
    problems = check_node(own, key, engine_module, given, positional=_takes_optimizer(target))
    for number, part in enumerate(parts):
        problems += check_schedule(part, engine_module, f"{key}.{_PARTS}.{number}")
    return problems


def make_schedule(
    node: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    total_updates: Optional[int],
    engine_module: Optional[ModuleType] = None,
    whole: Optional[torch.optim.Optimizer] = None,
    places: Optional[Sequence[int]] = None,
) -> Schedule:
    """Make the schedule of a run; its length is filled in if the config does not set it. Arguments as for `Schedule`.

    Raises:
        ConfigError: The schedule needs the length of the run, but the data has no length, or it changes a constant.
    """
    if not node:
        return Schedule(optimizer, whole=whole, places=places)
    return Schedule(
        optimizer,
        lambda substitute: _make_scheduler(node, "schedule", substitute, total_updates, engine_module),
        whole,
        places,
    )


def _make_scheduler(
    node: Mapping[str, Any],
    key: str,
    optimizer: torch.optim.Optimizer,
    updates: Optional[int],
    engine_module: Optional[ModuleType],
) -> Any:
    """Make a scheduler and, before it, those that it consists of."""
    target = locate(node["_target_"], f"{key}._target_", engine_module)
    lengths = lengths_to_fill(target, node)
    if lengths and updates is None:
        raise ConfigError(
            f"`{key}` needs the number of weight updates, but the data has no length",
            fix=f"max_steps=1000, or {key}.{lengths[0]}=1000",
            key=key,
        )
    filled: Dict[str, Any] = dict.fromkeys(lengths, updates)
    own, parts = _without_parts(node)
    if parts:
        filled[_PARTS] = [
            _make_scheduler(part, f"{key}.{_PARTS}.{number}", optimizer, length, engine_module)
            for number, (part, length) in enumerate(zip(parts, _part_lengths(node, len(parts), updates)))
        ]
    leading = (optimizer,) if _takes_optimizer(target) else ()
    return make(own, key, *leading, engine_module=engine_module, **filled)


def _without_parts(node: Mapping[str, Any]) -> Tuple[Dict[str, Any], Sequence[Any]]:
    """Return a node without the schedulers that it combines, and those."""
    parts = node.get(_PARTS)
    if not isinstance(parts, (list, tuple)):
        return dict(node), ()
    return {name: value for name, value in node.items() if name != _PARTS}, parts


def _takes_optimizer(target: Any) -> bool:
    return first_parameter(target) != _PARTS  # ChainedScheduler takes only its parts


def _part_lengths(node: Mapping[str, Any], parts: int, updates: Optional[int]) -> List[Optional[int]]:
    """Return the weight updates of each part: those between milestones, or all where the parts act together."""
    milestones = node.get("milestones")
    if not isinstance(milestones, (list, tuple)) or len(milestones) != parts - 1:
        return [updates] * parts
    begins: List[int] = [0, *milestones]
    lengths: List[Optional[int]] = [end - begin for begin, end in zip(begins, milestones)]
    return [*lengths, None if updates is None else max(updates - begins[-1], 1)]
