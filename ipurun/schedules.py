"""Learning-rate schedules: PyTorch's schedulers, and warm-up followed by a curve over the whole run."""

from __future__ import annotations

import collections
import inspect
import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import torch
from torch.optim import lr_scheduler

from ipurun.errors import ConfigError

__all__ = [
    "Schedule",
    "TimedScheduler",
    "constant",
    "cosine",
    "lengths_to_fill",
    "linear",
    "polynomial",
    "warm_restarts",
]

# Parameters of schedulers that mean the length of the run, filled in from the plan if the config does not set them.
_LENGTHS = ("total_steps", "T_max")
# Values that schedulers may change.
_CHANGING = ("lr", "momentum", "betas", "weight_decay")
# What a scheduler derives from the length of the run: that of the present config holds, also after a resume.
_FROM_LENGTH = (*_LENGTHS, "_schedule_phases")
_TABULATED = 256  # values of a curve that are computed at a time


def cosine(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    final_factor: float = 0.0,
    warmup_share: float = 0.0,
) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then follow half a cosine down to a share of the optimizer's learning rate.

    Args:
        optimizer: Holds the full learning rate.
        total_steps: Weight updates of the whole run, filled in by ipurun.
        warmup_steps: Weight updates of the warm-up.
        final_factor: Share of the learning rate that remains at the end.
        warmup_share: Share of the run that is warm-up, in place of `warmup_steps`.
    """

    def factor(done: float) -> float:
        return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * done))

    return _after_warmup(optimizer, total_steps, _warmup(total_steps, warmup_steps, warmup_share), factor)


def linear(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    final_factor: float = 0.0,
    warmup_share: float = 0.0,
) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then fall linearly to a share of the optimizer's learning rate; arguments as for `cosine`."""

    def factor(done: float) -> float:
        return 1 - (1 - final_factor) * done

    return _after_warmup(optimizer, total_steps, _warmup(total_steps, warmup_steps, warmup_share), factor)


def constant(optimizer: torch.optim.Optimizer, warmup_steps: int = 0) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then keep the optimizer's learning rate."""
    return _after_warmup(optimizer, warmup_steps + 1, warmup_steps, lambda done: 1.0)


def polynomial(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    power: float = 2.0,
    final_factor: float = 0.0,
    warmup_share: float = 0.0,
) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then fall by a power of the share of the run that is left.

    Args:
        optimizer: Holds the full learning rate.
        total_steps: Weight updates of the whole run, filled in by ipurun.
        warmup_steps: Weight updates of the warm-up.
        power: 1 is a straight line; above 1, most of the fall comes first.
        final_factor: Share of the learning rate that remains at the end.
        warmup_share: Share of the run that is warm-up, in place of `warmup_steps`.
    """

    def factor(done: float) -> float:
        return final_factor + (1 - final_factor) * (1 - done) ** power

    return _after_warmup(optimizer, total_steps, _warmup(total_steps, warmup_steps, warmup_share), factor)


def warm_restarts(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    cycles: int = 4,
    cycle_growth: float = 1.0,
    final_factor: float = 0.0,
    warmup_share: float = 0.0,
) -> lr_scheduler.LambdaLR:
    """Warm up linearly, then follow several half cosines, each from the full learning rate.

    Args:
        optimizer: Holds the full learning rate.
        total_steps: Weight updates of the whole run, filled in by ipurun.
        warmup_steps: Weight updates of the warm-up.
        cycles: Number of half cosines.
        cycle_growth: Length of each cycle, relative to the one before.
        final_factor: Share of the learning rate that remains at the end of each.
        warmup_share: Share of the run that is warm-up, in place of `warmup_steps`.
    """
    if cycles < 1 or cycle_growth <= 0:
        raise ValueError("cycles must be 1 or more, and cycle_growth above 0")
    lengths = [cycle_growth**number for number in range(cycles)]

    def factor(done: float) -> float:
        position = done * sum(lengths)
        for length in lengths[:-1]:
            if position < length * (1 - 1e-9):  # a restart falls on a step, whatever the rounding
                break
            position -= length
        else:
            length = lengths[-1]
        share = min(max(position / length, 0.0), 1.0)
        return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * share))

    return _after_warmup(optimizer, total_steps, _warmup(total_steps, warmup_steps, warmup_share), factor)


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


class TimedScheduler(NamedTuple):
    """A scheduler and when it is stepped.

    Args:
        scheduler: A scheduler of torch.
        interval: step (weight updates) or epoch.
        frequency: Number of epochs between two steps of it, or of batches, which are counted from zero in each epoch.
        monitor: Metric that it waits for; None: the run's.
        batches: Batches of a weight update, for the frequency.
    """

    scheduler: Any
    interval: str = "step"
    frequency: int = 1
    monitor: Optional[str] = None
    batches: int = 1

    @property
    def waits_for_metric(self) -> bool:
        """Whether it advances with evaluation results."""
        return isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)


class Schedule:
    """A scheduler that advances once per weight update without touching the engine's optimizer.

    PyTorch's schedulers replace methods of their optimizer and expect its ``step`` to be called, which PopTorch never
    does. So they get a substitute optimizer with the same groups, and the values they change are copied.

    Args:
        optimizer: The optimizer that the engine reads.
        factory: Makes the scheduler from the substitute; None keeps all values constant.
        whole: An optimizer with all groups that are trained at some time; None: the same one.
        places: Of those, the groups that `optimizer` has; None: all.
        own: The optimizer that the model's code made with its schedulers, whose groups are those of `whole`.
        schedulers: Its schedulers, in place of a factory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factory: Optional[Any] = None,
        whole: Optional[torch.optim.Optimizer] = None,
        places: Optional[Sequence[int]] = None,
        own: Optional[torch.optim.Optimizer] = None,
        schedulers: Sequence[TimedScheduler] = (),
    ) -> None:
        self._optimizer = optimizer
        self._substitute = own or _SubstituteOptimizer(optimizer if whole is None else whole)
        groups = self._substitute.param_groups
        if own is not None:  # those without anything to train are not groups of the engine's optimizer
            groups = [group for group in groups if any(p.requires_grad for p in group["params"])]
        sources = groups if places is None else [groups[place] for place in places]
        self._parts = list(schedulers) if factory is None else [TimedScheduler(factory(self._substitute))]
        self._by_update = [part for part in self._parts if part.interval == "step" and not part.waits_for_metric]
        # Whether it advances with evaluation results instead of weight updates.
        self.waits_for_metric = any(part.waits_for_metric for part in self._parts)
        only = self._parts[0].scheduler if len(self._parts) == 1 else None
        self._curve = only if isinstance(only, _Curve) else None
        changing = _CHANGING[:1] if self._curve is not None else _CHANGING
        self._followed = [
            (source, [key for key in changing if key in source and key in group])
            for group, source in zip(optimizer.param_groups, sources)
        ]
        self._lr_factor = 1.0
        self._of_epoch = 0  # weight updates
        self._epochs = 0
        # Schedulers check that their optimizer made a step, which torch counts in one of these.
        self._substitute._opt_called = True  # type: ignore[attr-defined]
        self._substitute._step_count = 1  # type: ignore[attr-defined]
        self._copy()

    @property
    def lr(self) -> float:
        """Learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self, updates: int) -> bool:
        """Advance by a number of weight updates, and return whether the optimizer's values changed."""
        if not self._by_update:
            return False
        if self._curve is not None:
            self._curve.advance(updates)
            return self._copy()
        for _ in range(updates):
            self._of_epoch += 1
            for part in self._by_update:
                if self._of_epoch * part.batches % part.frequency == 0:
                    part.scheduler.step()
        return self._copy()

    def end_epoch(self) -> bool:
        """Advance what advances by epochs, and return whether the optimizer's values changed."""
        self._epochs += 1
        self._of_epoch = 0
        due = [
            part
            for part in self._parts
            if part.interval == "epoch" and not part.waits_for_metric and self._epochs % part.frequency == 0
        ]
        for part in due:
            part.scheduler.step()
        return bool(due) and self._copy()

    def report(self, value: Optional[float], metrics: Mapping[str, float] = {}) -> bool:
        """Pass metrics to what waits for one, and return whether the optimizer's values changed.

        Args:
            value: The run's monitored metric, None if the evaluation has none.
            metrics: All metrics of the evaluation.
        """
        for part in self._parts:
            found = value if part.monitor is None else metrics.get(part.monitor, value)
            if part.waits_for_metric and found is not None:
                part.scheduler.step(found)
        return self.waits_for_metric and self._copy()

    def scale_lr(self, factor: float) -> None:
        """Multiply all learning rates, now and later, by a factor in place of the one set before."""
        self._lr_factor = factor
        self._copy()

    def state_dict(self) -> Dict[str, Any]:
        """Return the plain values of the state; the scheduler's constructor recreates the rest."""
        if not self._parts:
            return {}
        first, *others = (_plain_part(part.scheduler.state_dict()) for part in self._parts)
        return {
            "scheduler": first,
            "others": others,
            "of_epoch": self._of_epoch,
            "epochs": self._epochs,
            "groups": [
                {name: _plain_part(group[name]) for name in _CHANGING if name in group}
                for group in self._substitute.param_groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if not self._parts or not state:
            return
        for part, own in zip(self._parts, [state["scheduler"], *state.get("others", ())]):
            part.scheduler.load_state_dict(_without_lengths(own))
        self._of_epoch, self._epochs = state.get("of_epoch", 0), state.get("epochs", 0)
        for group, values in zip(self._substitute.param_groups, state["groups"]):
            group.update(values)
        self._copy()

    def _copy(self) -> bool:
        changed = False
        for group, (source, keys) in zip(self._optimizer.param_groups, self._followed):
            for key in keys:
                value = _plain_part(source[key] * self._lr_factor if key == "lr" else source[key])
                if group[key] != value:
                    self._check_variable(key)
                    group[key] = value
                    changed = True
        return changed

    def _check_variable(self, name: str) -> None:
        """Refuse to change a value that the engine compiles in.

        Raises:
            ConfigError: It is a constant of the compiled program.
        """
        marks = getattr(self._optimizer, "variable_attrs", None)
        if name == "lr" or (not marks.isConstant(name) if marks is not None else name != "betas"):
            return
        raise ConfigError(
            f"`schedule` changes `{name}`, which PopTorch compiles in as a constant",
            fix=f"optimizer.variable=[{name}]" if marks is not None else "optimizer._target_=poptorch.optim.AdamW",
            key="schedule",
        )


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


def _warmup(total_steps: int, steps: int, share: float) -> int:
    """Return the weight updates of a warm-up, which is given as a number or as a share of the run."""
    if not share:
        return steps
    if not 0 < share < 1:
        raise ValueError(f"warmup_share is a share of the run between 0 and 1, not {share}")
    return math.ceil(total_steps * share)


def _after_warmup(
    optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int, factor: Any
) -> lr_scheduler.LambdaLR:
    def scale(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return float(factor(min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)))

    return _Curve(optimizer, _tabulated(scale))


def _tabulated(curve: Callable[[int], float]) -> Callable[[int], float]:
    """Return a curve that computes its values many at a time: one at a time, every step would find the caches cold."""
    first, values = 0, [curve(0)]

    def value(step: int) -> float:
        nonlocal first, values
        if not 0 <= step - first < len(values):
            first, values = step, [curve(number) for number in range(step, step + _TABULATED)]
        return values[step - first]

    return value


class _Curve(lr_scheduler.LambdaLR):
    """A curve of the learning rate that advances at a fraction of torch's cost, which every step would pay."""

    def step(self, epoch: Optional[int] = None) -> None:
        """Advance by one weight update."""
        if epoch is not None or self._step_count < 1:  # also the first call, by the constructor
            super().step(epoch)
        else:
            self.advance(1)

    def advance(self, updates: int) -> None:
        """Advance by a number of weight updates."""
        self._step_count += updates
        self.last_epoch += updates
        self._last_lr = [rate * curve(self.last_epoch) for rate, curve in zip(self.base_lrs, self.lr_lambdas)]
        for group, lr in zip(self.optimizer.param_groups, self._last_lr):
            group["lr"] = lr


def _without_lengths(state: Any) -> Any:
    """Return a scheduler's state, and the states nested in it, without what follows from the length of the run."""
    if isinstance(state, dict):
        return {key: _without_lengths(value) for key, value in state.items() if key not in _FROM_LENGTH}
    return [_without_lengths(value) for value in state] if isinstance(state, list) else state


def _plain_part(state: Any) -> Any:
    """Return a scheduler's state, and the states nested in it, without functions and other objects.

    Numbers of numpy, which schedulers that compute with it return, become Python's: checkpoints load no others.
    """
    if isinstance(state, dict) and not isinstance(state, collections.Counter):
        return {key: _plain_part(value) for key, value in state.items() if _is_plain(_plain_part(value))}
    if isinstance(state, list):
        return [_plain_part(value) for value in state]
    return state.item() if type(state).__module__ == "numpy" and not getattr(state, "shape", (1,)) else state


def _is_plain(value: Any) -> bool:
    if isinstance(value, collections.Counter):
        return False  # MultiStepLR's milestones, which would be loaded as a plain dict
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
