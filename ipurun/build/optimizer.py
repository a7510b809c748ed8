"""The optimizer of a plan, with its parameter groups and the values PopTorch may change later."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List, Sequence

from torch import nn

from ipurun.api.calls import Call, construct, resolve
from ipurun.config.patterns import match_parameters
from ipurun.errors import ConfigError
from ipurun.inspect.optimizer import trainable
from ipurun.planning.plan import ParameterGroup

__all__ = ["make_optimizer"]


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
