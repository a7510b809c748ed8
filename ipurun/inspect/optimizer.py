"""The optimizer of a plan, with its parameter groups and the values PopTorch may change later."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List, Mapping, Sequence

from torch import nn

from ipurun.config.patterns import check_parameters, names_in
from ipurun.errors import Findings, Problem
from ipurun.inspect.targets import check_node

__all__ = ["OWN_KEYS", "check_groups", "check_optimizer", "trainable"]

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
