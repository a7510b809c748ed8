"""The optimizer of a plan, with its parameter groups and the values PopTorch may change later."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List, Mapping, Sequence

from torch import nn

from ipurun.build.perform import construct, resolve
from ipurun.build.targets import check_node
from ipurun.errors import ConfigError, Problem
from ipurun.plan.findings import Findings
from ipurun.plan.patterns import check_parameters, match_parameters, names_in
from ipurun.plan.types import Call, ParameterGroup

__all__ = ["OWN_KEYS", "check_groups", "check_optimizer", "make_optimizer", "trainable"]

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


def make_optimizer(call: Call, groups: Sequence[ParameterGroup], step: nn.Module, engine_module: ModuleType) -> Any:
    """Construct the optimizer.

    Args:
        call: The constructor and its arguments, and what is marked variable or constant, from the plan.
        groups: Parameters with values of their own; a parameter belongs to the first group it fits.
        step: The wrapped model.
        engine_module: Answers to PopTorch's names.

    Raises:
        ConfigError: The optimizer refuses its arguments.
    """
    grouped = _groups(groups, step, engine_module)
    try:
        return construct(call, engine_module, grouped)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"`optimizer`: {call.path} refuses its arguments", seen=f"{type(error).__name__}: {error}", key="optimizer"
        ) from error


def _groups(groups: Sequence[ParameterGroup], step: nn.Module, engine_module: ModuleType) -> List[Dict[str, Any]]:
    left = trainable(step)
    if not left:
        seen = "requires_grad is false everywhere" if any(True for _ in step.parameters()) else "no parameters at all"
        raise ConfigError(
            "the model has no parameter to train", seen=seen, fix="`model._target_`: a module with parameters"
        )
    special: List[Dict[str, Any]] = []
    for group in groups:
        names = [name for pattern in group.match for name in match_parameters(pattern, list(left))]
        parameters = [left.pop(name) for name in dict.fromkeys(names)]
        values = {name: resolve(value, engine_module) for name, value in group.values.items()}
        if parameters:
            special.append({"params": parameters, **values})
    rest: List[Dict[str, Any]] = [{"params": list(left.values())}] if left else []
    return rest + special
