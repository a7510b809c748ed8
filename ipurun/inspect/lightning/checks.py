"""Try the steps of a LightningModule before a run: what they log, what cannot be compiled, and what is taken over."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError, Problem, listing
from ipurun.inspect.facts import Facts, LoggedValue
from ipurun.inspect.lightning.data import LoaderTraits, Splits
from ipurun.inspect.lightning.optimizers import configured_optimizer, optimizer_node
from ipurun.inspect.lightning.steps import KEPT, MARKS, RETURNED, BatchIndex, Steps
from ipurun.inspect.lightning.trainer import TrainerStandIn, hook_notes, hook_problems, is_lightning, overrides

__all__ = ["StepFindings", "adopt", "check_lightning", "evaluating_step", "planned_trainer", "takes_tensor"]

_DEFAULT_OPTIMIZER = {"_target_": "poptorch.optim.SGD", "lr": 0.01}  # conf/optimizer/default.yaml
_TIMED_VALUES = ("lr", "betas", "momentum", "weight_decay")


@dataclass
class StepFindings:
    """Result of a trial of the steps.

    Args:
        problems: Why the model cannot run.
        notes: Remarks for the user.
        logged: Kind of step -> name -> what it logs.
        optimizer: The optimizer that the model configures, as a node.
        has_schedule: Whether it configures a schedule.
        logs_at_epoch_end: Whether hooks for the end of an evaluation may log more.
    """

    problems: List[Problem] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    logged: Dict[str, Dict[str, LoggedValue]] = field(default_factory=dict)
    optimizer: Dict[str, Any] = field(default_factory=dict)
    has_schedule: bool = False
    logs_at_epoch_end: bool = False


class _OneStep(nn.Module):
    """One kind of step as a module, so that it can be tried without memory."""

    def __init__(self, steps: Steps, kind: str) -> None:
        super().__init__()
        self.model = steps.model
        self._steps = steps
        self._kind = kind

    def forward(self, *items: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(self._kind != "training"):
            return self._steps.run(self._kind, items, named)


def check_lightning(model: nn.Module, splits: Mapping[str, Any], config: RunConfig, trials: Any) -> StepFindings:
    """Try the steps of a LightningModule on two samples, and read its optimizer.

    Args:
        model: The model.
        splits: The data by split; streams that may be read.
        config: The run.
        trials: Runs a module on a batch: takes (module, split, data), returns the batch and the output, or None if the
            user's code failed, which compiling will report.
    """
    found = StepFindings(hook_problems(model), list(hook_notes(model)))
    found.problems += _config_problems(config, type(model).__name__)
    trainer = planned_trainer(config, _updates(config, splits), splits)
    _read_optimizer(model, trainer, config, found)
    if found.problems:
        return found
    steps = Steps(model, trainer)
    steps.in_trial = True
    hooks = [f"{begin}{kind}_epoch_end" for kind in ("validation", "test") for begin in ("on_", "")]
    found.logs_at_epoch_end = any(overrides(model, hook) for hook in hooks)
    for kind, split in (("training", "train"), ("validation", "eval"), ("test", "test")):
        if steps.has(kind) and split in splits:
            _try(steps, kind, split, splits, trials, found)
    names = {kind: listing(name for name in values if name not in MARKS) for kind, values in found.logged.items()}
    if any(names.values()):
        found.notes.append("; ".join(f"{kind}_step logs {text}" for kind, text in names.items() if text))
    found.notes += [
        f"a step reads {name} ({place}): a compiled step keeps the value of its start"
        for name, place in trainer.reads.items()
    ]
    if "eval" in splits and not (steps.has("validation") or steps.has("test")):
        found.notes.append(f"{type(model).__name__} has no validation_step: nothing is evaluated")
    return found


def evaluating_step(model: nn.Module, split: Optional[str]) -> Optional[str]:
    """Return the kind of step that evaluates a split, None if the model has none."""
    order = ("test", "validation") if split == "test" else ("validation", "test")
    return next((kind for kind in order if is_lightning(model) and overrides(model, f"{kind}_step")), None)


def planned_trainer(
    config: RunConfig, updates: Optional[int], splits: Optional[Mapping[str, Any]] = None
) -> TrainerStandIn:
    """Return what the model finds as its trainer, for a planned number of weight updates."""
    return TrainerStandIn(
        datamodule=splits.module if isinstance(splits, Splits) else None,
        max_epochs=-1 if config.epochs is None and config.max_steps else config.epochs or 1,
        max_steps=config.max_steps or -1,
        updates=updates or 1,
        accumulation=config.gradient_accumulation or 1,
    )


def takes_tensor(data: Any, collate: Any) -> bool:
    """Return whether the batches of a data set are single tensors."""
    try:
        if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__getitem__"):
            sample = next(iter(copy.deepcopy(data)))
        else:
            sample = data[0]
        return isinstance(collate([sample]), torch.Tensor)
    except Exception:  # loading reports it
        return False


def adopt(
    config: RunConfig, facts: Facts, splits: Mapping[str, Any], given: Optional[Mapping[str, str]]
) -> Tuple[RunConfig, Facts]:
    """Return a config with what was not set taken from the model's optimizer and the data's own loaders.

    An optimizer that was set replaces the model's, of which the facts that are returned know nothing then.

    Args:
        config: The config.
        facts: Hold the optimizer.
        splits: Hold the traits of the loaders.
        given: The keys that were set (`Point.given`).

    Raises:
        ConfigError: A key that was set contradicts the model.
    """
    keys = {key: place for key, place in (given or {}).items() if place}  # others are defaults of every config
    if facts.own_optimizer and "optimizer._target_" in keys:
        note = f"the optimizer is that of the config ({keys['optimizer._target_']}), not that of configure_optimizers"
        facts = replace(facts, own_optimizer={}, has_own_schedule=False, notes=(*facts.notes, note))
    elif facts.own_optimizer:
        typed = {name for name in config.optimizer if any(_is_under(key, f"optimizer.{name}") for key in keys)}
        _check_typed(typed, facts)
        own = {name: value for name, value in config.optimizer.items() if name in typed}
        config = replace(config, optimizer={**facts.own_optimizer, **own})
    traits: Mapping[str, LoaderTraits] = splits.traits if isinstance(splits, Splits) else {}
    if "train" not in traits:
        return config, facts
    size = traits["train"].batch_size
    if "micro_batch_size" not in keys and "global_batch_size" not in keys:
        config = replace(config, micro_batch_size=size)
        other = traits["eval"].batch_size if "eval" in traits else size
        if other != size and "inference.micro_batch_size" not in keys:
            config = replace(config, inference=replace(config.inference, micro_batch_size=other))
    if "loader.shuffle" not in keys and traits["train"].shuffles is not None:
        config = replace(config, loader=replace(config.loader, shuffle=traits["train"].shuffles))
    return config, facts


def _check_typed(typed: Any, facts: Facts) -> None:
    wrong = sorted(typed & {"groups", "no_decay"})
    wrong += sorted(typed & set(_TIMED_VALUES)) if facts.has_own_schedule else []
    if wrong:
        raise ConfigError(
            f"`optimizer.{wrong[0]}` is set, but the optimizer is that of configure_optimizers"
            + (", whose scheduler changes it" if wrong[0] in _TIMED_VALUES else ""),
            fix="set the argument of the model that configure_optimizers reads, such as model.lr=0.001, or replace the "
            "whole optimizer: optimizer=adamw",
            key=f"optimizer.{wrong[0]}",
        )


def _is_under(key: str, prefix: str) -> bool:
    return (key + ".").startswith(prefix + ".")


def _config_problems(config: RunConfig, name: str) -> List[Problem]:
    problems = []
    if config.loss.name is not None:
        problems.append(
            Problem(
                f"`loss.name`: {name} is a LightningModule, whose training_step returns the loss",
                seen=f"loss.name={config.loss.name}",
                fix="loss.name=null",
                key="loss.name",
            )
        )
    if config.metrics:
        problems.append(
            Problem(
                f"`metrics`: {name} is a LightningModule, which logs its values with self.log",
                seen=f"metrics: {', '.join(config.metrics)}",
                fix="metrics={}, and self.log in the steps",
                key="metrics",
            )
        )
    return problems


def _updates(config: RunConfig, splits: Mapping[str, Any]) -> int:
    """Return about how many weight updates a run makes, before its plan is known."""
    if config.max_steps:
        return config.max_steps
    traits = splits.traits.get("train") if isinstance(splits, Splits) else None
    size = traits.batch_size if traits is not None else config.micro_batch_size
    try:
        samples = len(splits["train"])
    except (KeyError, TypeError, NotImplementedError):
        samples = size
    return max(samples // (size * (config.gradient_accumulation or 1)), 1) * (config.epochs or 1)


def _read_optimizer(model: nn.Module, trainer: TrainerStandIn, config: RunConfig, found: StepFindings) -> None:
    try:
        own = configured_optimizer(model, trainer)
        found.optimizer, left_out = optimizer_node(own, model)
    except ConfigError as error:
        if config.optimizer in ({}, _DEFAULT_OPTIMIZER):
            found.problems += error.problems
        return
    found.has_schedule = bool(own.schedulers)
    if left_out:
        found.notes.append(f"configure_optimizers leaves out {listing(left_out)}: not trained")


def _try(steps: Steps, kind: str, split: str, splits: Mapping[str, Any], trials: Any, found: StepFindings) -> None:
    steps.batch_index.uses = {}
    module = _OneStep(steps, kind)
    try:
        tried = trials(module, split, steps)
    except ConfigError as error:
        found.problems += error.problems
        return
    if tried is None:
        return
    found.logged[kind] = dict(steps.logged.get(kind, {}))
    if any(name.startswith(KEPT) for name in tried):
        found.logged[kind].setdefault(KEPT, LoggedValue("outputs kept for the end of the epoch", False, False, "max"))
    if kind in steps.other_numbers:
        found.logged[kind][RETURNED] = LoggedValue(RETURNED, False, False, "mean")
        if set(found.logged[kind]) == {RETURNED}:
            found.notes.append(
                f"{kind}_step returns a number without a gradient, which is not a loss: log it with self.log to see it"
            )
    uses = [use for use in steps.batch_index.uses if use]
    if uses:
        _compare_branches(module, kind, split, steps, trials, uses, found)


def _compare_branches(
    module: nn.Module, kind: str, split: str, steps: Steps, trials: Any, uses: List[str], found: StepFindings
) -> None:
    """Find out whether a decision on `batch_idx` changes what a step computes: only one side of it is compiled."""
    results = []
    before = steps.batch_index
    for outcome in (True, False):
        steps.batch_index = BatchIndex(1)
        steps.batch_index.uses, steps.batch_index.outcome = {}, outcome
        try:
            results.append(trials(module, split, steps))
        except ConfigError:
            results.append(None)
    steps.batch_index = before
    first, second = results
    if first is not None and second is not None and _equal(first, second):
        found.notes.append(
            f"{kind}_step decides by batch_idx ({listing(uses)}) about something that is not computed on the device: "
            "it happens once, when the step is compiled, if at all"
        )
        return
    found.problems.append(
        Problem(
            f"`model`: {kind}_step computes something else depending on batch_idx, but a step is compiled once for all "
            "batches",
            where=uses[0],
            seen="the loss or the logged values differ between the two sides of the decision",
            fix="compute the same for every batch: log on every batch, and let self.log reduce",
            key="model._target_",
        )
    )


def _equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    if set(first) != set(second):
        return False
    pairs: List[Tuple[Any, Any]] = [(first[name], second[name]) for name in first]
    return all(a.shape == b.shape and (a.is_meta or torch.equal(a, b)) for a, b in pairs)
