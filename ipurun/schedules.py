"""Learning-rate schedules: PyTorch's schedulers, and warm-up followed by a curve over the whole run."""

from __future__ import annotations

import collections
import inspect
import math
from typing import Any, Dict, List, Mapping, Optional

import torch
from torch.optim import lr_scheduler

__all__ = ["Schedule", "constant", "cosine", "lengths_to_fill", "linear"]

# Parameters of schedulers that mean the length of the run, filled in from the plan if the config does not set them.
_LENGTHS = ("total_steps", "T_max")
# Values that schedulers may change.
_CHANGING = ("lr", "momentum", "betas", "weight_decay")


def cosine(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, final_factor: float = 0.0
) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then follow half a cosine down to a share of the optimizer's learning rate.

    Args:
        optimizer: Holds the full learning rate.
        total_steps: Weight updates of the whole run, filled in by ipurun.
        warmup_steps: Weight updates of the warm-up.
        final_factor: Share of the learning rate that remains at the end.
    """

    def factor(done: float) -> float:
        return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * done))

    return _after_warmup(optimizer, total_steps, warmup_steps, factor)


def linear(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, final_factor: float = 0.0
) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then fall linearly to a share of the optimizer's learning rate; arguments as for `cosine`."""

    def factor(done: float) -> float:
        return 1 - (1 - final_factor) * done

    return _after_warmup(optimizer, total_steps, warmup_steps, factor)


def constant(optimizer: torch.optim.Optimizer, warmup_steps: int = 0) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then keep the optimizer's learning rate."""
    return _after_warmup(optimizer, warmup_steps + 1, warmup_steps, lambda done: 1.0)


def lengths_to_fill(target: Any, given: Mapping[str, Any]) -> List[str]:
    """Return the parameters of a scheduler that mean the run's length and are not set in the config."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return []
    open_defaults = (inspect.Parameter.empty, None)
    return [
        name
        for name in _LENGTHS
        if name in parameters
        and name not in given
        and parameters[name].default in open_defaults
        and not ("epochs" in given and "steps_per_epoch" in given)
    ]


class Schedule:
    """A scheduler that advances once per weight update without touching the engine's optimizer.

    PyTorch's schedulers replace methods of their optimizer and expect its ``step`` to be called, which PopTorch never
    does. So they get a substitute optimizer with the same groups, and the values they change are copied.

    Args:
        optimizer: The optimizer that the engine reads.
        factory: Makes the scheduler from the substitute; None keeps all values constant.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factory: Optional[Any] = None) -> None:
        self._optimizer = optimizer
        self._substitute = _SubstituteOptimizer(optimizer)
        self._scheduler = None if factory is None else factory(self._substitute)
        # Whether it advances with evaluation results instead of weight updates.
        self.waits_for_metric = isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau)
        self._lr_factor = 1.0
        self._has_stepped = False
        self._copy()

    @property
    def lr(self) -> float:
        """Learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self, updates: int) -> bool:
        """Advance by a number of weight updates, and return whether the optimizer's values changed."""
        if self._scheduler is None or self.waits_for_metric:
            return False
        if not self._has_stepped:
            self._substitute.step()  # schedulers check once that it was called
            self._has_stepped = True
        for _ in range(updates):
            self._scheduler.step()
        return self._copy()

    def report(self, value: float) -> bool:
        """Pass a metric to a schedule that waits for one, and return whether the optimizer's values changed."""
        if self._scheduler is None or not self.waits_for_metric:
            return False
        self._scheduler.step(value)
        return self._copy()

    def scale_lr(self, factor: float) -> None:
        """Multiply all learning rates, now and later, by a factor in place of the one set before."""
        self._lr_factor = factor
        self._copy()

    def state_dict(self) -> Dict[str, Any]:
        """Return the plain values of the state; the scheduler's constructor recreates the rest."""
        if self._scheduler is None:
            return {}
        return {"scheduler": _plain_part(self._scheduler.state_dict()), "groups": self._substitute.values()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if self._scheduler is None or not state:
            return
        self._scheduler.load_state_dict(dict(state["scheduler"]))
        for group, values in zip(self._substitute.param_groups, state["groups"]):
            group.update(values)
        self._copy()

    def _copy(self) -> bool:
        changed = False
        for group, source in zip(self._optimizer.param_groups, self._substitute.param_groups):
            for key in _CHANGING:
                if key not in source or key not in group:
                    continue
                value = source[key] * self._lr_factor if key == "lr" else source[key]
                if group[key] != value:
                    group[key] = value
                    changed = True
        return changed


class _SubstituteOptimizer(torch.optim.Optimizer):
    def __init__(self, original: torch.optim.Optimizer) -> None:
        groups = [
            {**{k: v for k, v in group.items() if k != "params" and _is_plain(v)}, "params": [torch.zeros(1)]}
            for group in original.param_groups
        ]
        super().__init__(groups, {k: v for k, v in original.defaults.items() if _is_plain(v)})

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group unchanged: torch's own method spends a second on importing its compiler."""
        self.param_groups.append({**self.defaults, **param_group})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is nothing to update
        """Do nothing: schedulers expect a call before they advance."""

    def values(self) -> List[Dict[str, Any]]:
        """Return the values that schedulers may change, by group."""
        return [{name: group[name] for name in _CHANGING if name in group} for group in self.param_groups]


def _after_warmup(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int, factor: Any
) -> lr_scheduler.LambdaLR:
    def scale(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return float(factor(min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)))

    return _Curve(optimizer, scale)


class _Curve(lr_scheduler.LambdaLR):
    """A curve of the learning rate that advances at a fraction of torch's cost, which every step would pay."""

    def step(self, epoch: Optional[int] = None) -> None:
        """Advance by one weight update."""
        if epoch is not None or self._step_count < 1:  # also the first call, by the constructor
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        self._last_lr = [rate * curve(self.last_epoch) for rate, curve in zip(self.base_lrs, self.lr_lambdas)]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr):
            group["lr"] = lr


def _plain_part(state: Any) -> Any:
    """Return a scheduler's state, and the states nested in it, without functions and other objects."""
    if isinstance(state, dict) and not isinstance(state, collections.Counter):
        return {key: _plain_part(value) for key, value in state.items() if _is_plain(_plain_part(value))}
    if isinstance(state, list):
        return [_plain_part(value) for value in state]
    return state


def _is_plain(value: Any) -> bool:
    if isinstance(value, collections.Counter):
        return False  # MultiStepLR's milestones, which would be loaded as a plain dict
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
