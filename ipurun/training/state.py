"""What a run has to remember to go on exactly: gathered for a checkpoint, and put back."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Mapping, Optional

import numpy
import torch
from torch import nn

from ipurun.build import Run
from ipurun.checkpoint import Checkpoint, load
from ipurun.errors import ConfigError
from ipurun.planning.plan import BatchSizes

__all__ = [
    "Progress",
    "gather",
    "load_weights",
    "random_state",
    "restore",
    "restore_device",
    "restore_host_randomness",
    "restore_random_state",
    "seed_everything",
]


@dataclass
class Progress:
    """How far a run has come.

    Args:
        step: Weight updates done.
        call: Host calls done.
        epoch: Whole epochs done.
        position: Host calls done in the current epoch.
        samples: Samples trained on.
        best: Best value of the monitored metric.
        best_step: Weight updates at which it was reached.
        loss: Last mean training loss.
        metrics: Values of the last evaluation.
        evaluated_step: Weight updates at which it was made.
        owes_evaluation: Whether an interrupt kept a due evaluation from being made.
        samples_per_call: Size of the host calls that `call` and `position` count.
    """

    step: int = 0
    call: int = 0
    epoch: int = 0
    position: int = 0
    samples: int = 0
    best: Optional[float] = None
    best_step: Optional[int] = None
    loss: Optional[float] = None
    metrics: Dict[str, float] = field(default_factory=dict)
    evaluated_step: Optional[int] = None
    owes_evaluation: bool = False
    samples_per_call: int = 0

    def recount(self, batch: BatchSizes) -> bool:
        """Go over to host calls of another size, rounding down; tells whether they differed."""
        if self.samples_per_call in (0, batch.samples_per_call):
            self.samples_per_call = batch.samples_per_call
            return False
        self.position = self.position * self.samples_per_call // batch.samples_per_call
        self.call = self.step // batch.device_iterations
        self.samples_per_call = batch.samples_per_call
        return True


def gather(run: Run, progress: Progress) -> Dict[str, Any]:
    """Everything of a run, as tensors and plain values."""
    if run.training_model.isCompiled():
        run.training_model.copyWeightsToHostIfNeeded()
    return {
        "model": _plain(run.user_model.state_dict()),
        "loss": _plain(run.step.loss.state_dict()) if run.step.loss is not None else {},
        "optimizer": _plain(run.optimizer.state_dict()),
        "schedule": run.schedule.state_dict(),
        "progress": asdict(progress),
        "random": random_state(),
        "device_random": _device_random(run),
    }


def restore(run: Run, checkpoint: Checkpoint) -> tuple[Progress, Dict[str, Any]]:
    """Put a checkpoint's weights, optimizer and schedule into a run that has not compiled yet.

    Returns:
        How far the run had come, and the whole state for the random states.

    Raises:
        ConfigError: The checkpoint is of another model.
        RunError: It is damaged.
    """
    state = load(checkpoint)
    _load_model(run.user_model, state, checkpoint)
    if run.step.loss is not None and state["loss"]:
        run.step.loss.load_state_dict(state["loss"])
    _load_optimizer(run, state["optimizer"], checkpoint)
    run.schedule.load_state_dict(state["schedule"])
    return Progress(**state["progress"]), state


def restore_host_randomness(state: Mapping[str, Any]) -> None:
    """Put back the host's random states; the data must be open by now and not yet read from."""
    restore_random_state(state["random"])


def restore_device(run: Run, state: Mapping[str, Any]) -> None:
    """Put back the device's random state and the optimizer's values; the training model has compiled by now."""
    if state["device_random"] is not None:
        run.training_model.rng_state = list(state["device_random"])
    marks = getattr(run.optimizer, "variable_attrs", None)
    if marks is not None and marks.isConstant("lr"):
        return
    # Optimizer state carries the values it was saved with, rounded as the device keeps them. PopTorch sends the host's
    # only when they differ from those it sent last, so something else is sent in between.
    groups = run.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for change in (1.0, 0.0):
        for group, rate in zip(groups, rates):
            group["lr"] = rate + change
        run.training_model.setOptimizer(run.optimizer)


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> Progress:
    """Put a checkpoint's weights into a model, for evaluation and prediction.

    Raises:
        ConfigError: The checkpoint is of another model.
        RunError: It is damaged.
    """
    state = load(checkpoint)
    _load_model(model, state, checkpoint)
    return Progress(**state["progress"])


def _load_model(model: nn.Module, state: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    try:
        model.load_state_dict(state["model"])
    except (RuntimeError, KeyError) as error:
        raise ConfigError(
            "the checkpoint does not fit the model",
            where=str(checkpoint.path),
            seen=str(error),
            fix="resume with the config the run was started with",
        ) from error


def _load_optimizer(run: Run, state: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    fresh = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    try:
        run.optimizer.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(
            "the checkpoint does not fit the optimizer",
            where=str(checkpoint.path),
            seen=str(error),
            fix="resume with the config the run was started with",
        ) from error
    for group, values in zip(run.optimizer.param_groups, fresh):
        group.update(values)  # what the config says now counts; the schedule's own values follow


def _device_random(run: Run) -> Optional[Any]:
    if not run.training_model.isCompiled():
        return None
    state = run.training_model.rng_state
    return None if state is None else [int(word) for word in state]


def _plain(value: Any) -> Any:
    """Copies without the engine's tensor classes, so that any PyTorch can read them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone().as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> Dict[str, Any]:
    """The states of all three generators."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on with states that `random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
