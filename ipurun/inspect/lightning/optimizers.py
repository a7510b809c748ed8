"""`configure_optimizers` of a LightningModule as the optimizer node of a config, and its schedulers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ipurun.errors import ConfigError
from ipurun.inspect.lightning.trainer import TrainerStandIn, attach_trainer
from ipurun.inspect.targets import innermost_line
from ipurun.schedules import TimedScheduler

__all__ = ["ConfiguredOptimizer", "configured_optimizer", "optimizer_node"]

_KEY = "model._target_"
# Class of torch -> its values that poptorch.optim has, with the defaults of both.
_VALUES: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"momentum": 0, "dampening": 0, "nesterov": False, "weight_decay": 0},
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0, "amsgrad": False},
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01, "amsgrad": False},
    "RMSprop": {"alpha": 0.99, "eps": 1e-08, "momentum": 0, "centered": False, "weight_decay": 0},
}
_BY_GROUP = ("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha")
_CYCLED = ("momentum", "betas")
_FORMS = "an optimizer, [optimizer], ([optimizer], [scheduler]) or {optimizer: ..., lr_scheduler: ...}"


@dataclass(frozen=True)
class ConfiguredOptimizer:
    """Parsed result of `configure_optimizers`.

    Args:
        optimizer: The optimizer of torch.
        schedulers: Its schedulers, and when each is stepped.
    """

    optimizer: torch.optim.Optimizer
    schedulers: Tuple[TimedScheduler, ...]


def configured_optimizer(model: nn.Module, trainer: TrainerStandIn) -> ConfiguredOptimizer:
    """Call `configure_optimizers` and read what it returns.

    Raises:
        ConfigError: It failed, or returns something that cannot run on an IPU.
    """
    attach_trainer(model, trainer)
    try:
        made = model.configure_optimizers()  # type: ignore[operator]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"`model`: {type(model).__name__}.configure_optimizers failed",
            where=innermost_line(error),
            seen=f"{type(error).__name__}: {error}",
            fix="optimizer=adamw replaces it, or --debug shows the whole traceback",
            key=_KEY,
        ) from error
    optimizers, schedulers = _parts(made)
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        several = len(optimizers) > 1
        raise ConfigError(
            f"`model`: {type(model).__name__}.configure_optimizers "
            + ("returns several optimizers, but a program on an IPU has one" if several else "returns no optimizer"),
            seen=", ".join(type(item).__name__ for item in optimizers) or str(made),
            known=_FORMS,
            fix="one optimizer with several parameter groups; models that need several (GANs) can be run as a PopTorch "
            "script: ipurun exec script.py"
            if several
            else "return an optimizer, or set optimizer=adamw",
            key=_KEY,
        )
    return ConfiguredOptimizer(optimizers[0], tuple(_timed(item, trainer) for item in schedulers))


def optimizer_node(own: ConfiguredOptimizer, model: nn.Module) -> Tuple[Dict[str, Any], Tuple[str, ...]]:
    """Return an optimizer of torch as an optimizer node, and the parameters that it does not train.

    Raises:
        ConfigError: It uses an argument that PopTorch does not have.
    """
    optimizer = own.optimizer
    kind = type(optimizer)
    name = kind.__name__
    is_torch = kind.__module__.startswith("torch.optim")
    target = f"poptorch.optim.{name}" if is_torch and name in _VALUES else f"{kind.__module__}.{kind.__qualname__}"
    if is_torch and name not in _VALUES:
        target = f"torch.optim.{name}"
    if optimizer.defaults.get("maximize"):
        raise ConfigError(
            f"`model`: torch.optim.{name}(maximize=True) has no counterpart in PopTorch",
            fix="return the negative loss",
            key=_KEY,
        )
    named = {id(parameter): path for path, parameter in model.named_parameters()}
    trained = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    moves = _moves_momentum(own.schedulers)
    node: Dict[str, Any] = {"_target_": target, **_values(trained[0] if trained else {}, name, moves)}
    groups = []
    for group in trained[1:]:
        values = {key: value for key, value in _values(group, name, moves).items() if key in _BY_GROUP}
        groups.append(
            {"match": [named[id(p)] for p in group["params"] if p.requires_grad and id(p) in named], **values}
        )
    if groups:
        node["groups"] = groups
    covered: Set[int] = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = tuple(path for key, path in named.items() if key not in covered)
    return node, left_out


def _values(group: Mapping[str, Any], name: str, moves_momentum: bool) -> Dict[str, Any]:
    """Return the values of a group to pass to PopTorch, which makes what is passed variable."""
    values: Dict[str, Any] = {"lr": float(group.get("initial_lr", group.get("lr", 0.01)))}
    for key, default in _VALUES.get(name, {}).items():
        value = group.get(key, default)
        value = tuple(value) if isinstance(value, list) else value
        if value != default or key == "weight_decay" or (moves_momentum and key in _CYCLED):
            values[key] = list(value) if isinstance(value, tuple) else value
    return values


def _moves_momentum(schedulers: Sequence[TimedScheduler]) -> bool:
    return any(getattr(part.scheduler, "cycle_momentum", False) for part in schedulers)


def _parts(made: Any) -> Tuple[List[Any], List[Any]]:
    """Return the optimizers and the schedulers of all forms that Lightning takes."""
    if made is None:
        return [], []
    if isinstance(made, torch.optim.Optimizer):
        return [made], []
    if isinstance(made, Mapping):
        scheduler = made.get("lr_scheduler")
        return [made.get("optimizer")], [] if scheduler is None else [scheduler]
    if isinstance(made, (list, tuple)):
        is_pair = len(made) == 2 and all(isinstance(item, (list, tuple)) for item in made)
        if is_pair:
            return list(made[0]), list(made[1])
        optimizers, schedulers = [], []
        for item in made:
            own, more = _parts(item) if isinstance(item, Mapping) else ([item], [])
            optimizers += own
            schedulers += more
        return optimizers, schedulers
    return [made], []


def _timed(given: Any, trainer: TrainerStandIn) -> TimedScheduler:
    config: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    interval: str = str(config.get("interval", "epoch"))
    frequency = config.get("frequency", 1)
    monitor: Optional[str] = config.get("monitor")
    if interval not in ("step", "epoch") or not isinstance(frequency, int) or frequency < 1:
        raise ConfigError(
            "`model`: configure_optimizers returns a scheduler that cannot be timed",
            seen=f"interval={interval}, frequency={frequency}",
            known="interval: step or epoch; frequency: a whole number of at least 1",
            key=_KEY,
        )
    return TimedScheduler(config["scheduler"], interval, frequency, monitor, trainer.accumulate_grad_batches)
