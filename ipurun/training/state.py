"""Collect the state that a run needs to resume exactly, and restore it."""

from __future__ import annotations

import contextlib
import random
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Iterator, Mapping, Optional

import numpy
import torch
from torch import nn

from ipurun.build import Run
from ipurun.checkpoint import Checkpoint, load
from ipurun.config.schema import AveragingConfig
from ipurun.errors import ConfigError
from ipurun.planning.plan import BatchSizes

__all__ = [
    "Progress",
    "apply_factors",
    "attach_training",
    "collect_state",
    "keeps_torch_optimizer",
    "load_weights",
    "restore",
    "restore_device",
    "restore_random_state",
    "restore_state",
]


@dataclass
class Progress:
    """Progress of a run.

    Args:
        step: Weight updates done.
        call: Host calls done.
        epoch: Whole epochs done.
        position: Host calls done in the current epoch.
        samples: Samples trained on.
        best: Best value of the monitored metric.
        best_step: Weight updates done when it was reached.
        loss: Last mean training loss.
        metrics: Values of the last evaluation.
        evaluated_step: Weight updates done at the last evaluation.
        owes_evaluation: Whether an interrupt prevented a due evaluation.
        samples_per_call: Samples of each host call in `call` and `position`.
        lr_factor: Factor on the learning rate since a rollback lowered it.
        loss_scale_factor: The same for the loss scale.
        stopping_best: Value of the metric of `early_stopping` at its last improvement.
        stopping_last: Its last value.
        stale_evaluations: Evaluations since the last improvement.
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
    lr_factor: float = 1.0
    loss_scale_factor: float = 1.0
    stopping_best: Optional[float] = None
    stopping_last: Optional[float] = None
    stale_evaluations: int = 0

    def recount(self, sizes: BatchSizes) -> bool:
        """Convert the counts to host calls of another size, rounding down; return whether the size differed."""
        before, self.samples_per_call = self.samples_per_call, sizes.samples_per_call
        if before in (0, sizes.samples_per_call):
            return False
        self.position = self.position * before // sizes.samples_per_call
        self.call = self.step // sizes.device_iterations
        return True


def collect_state(run: Run, progress: Progress) -> Dict[str, Any]:
    """Return the whole state of a run as tensors and plain values."""
    if run.training_model.isCompiled():
        run.training_model.copyWeightsToHostIfNeeded()
    loss = run.model_with_loss.loss
    return {
        "model": _plain(run.user_model.state_dict()),
        "loss": _plain(loss.state_dict()) if loss is not None else {},
        "optimizer": _plain(run.optimizer.state_dict()),
        "schedule": run.schedule.state_dict(),
        "progress": asdict(progress),
        "random": _random_state(),
        "device_random": _device_random(run),
        "device_optimizer": _device_optimizer(run),
    }


def restore(run: Run, checkpoint: Checkpoint) -> tuple[Progress, Dict[str, Any]]:
    """Restore weights, optimizer and schedule of a run that has not compiled yet.

    Returns:
        The progress of the run, and the whole state, from which the random states are restored later.

    Raises:
        ConfigError: The checkpoint belongs to another model.
        RunError: It is damaged.
    """
    state = load(checkpoint)
    if run.unfreezes_at(state["progress"]["step"]):
        run.rebuild(state["progress"]["step"])
    restore_state(run, state, str(checkpoint.path))
    return Progress(**state["progress"]), state


def restore_state(run: Run, state: Mapping[str, Any], where: str = "") -> None:
    """Restore weights, optimizer and schedule from a state that `collect_state` returned.

    Args:
        run: The run, not compiled yet.
        state: The state.
        where: The file that it is from.

    Raises:
        ConfigError: It belongs to another model.
    """
    with _must_fit("model", where):
        run.user_model.load_state_dict(state["model"])
    if run.model_with_loss.loss is not None and state["loss"]:
        run.model_with_loss.loss.load_state_dict(state["loss"])
    configured = [
        {key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups
    ]
    if not _is_of_fewer(run, state):
        with _must_fit("optimizer", where):
            run.optimizer.load_state_dict(state["optimizer"])
        for group, values in zip(run.optimizer.param_groups, configured):
            group.update(values)  # the current config wins; the schedule restores its own values
    run.schedule.load_state_dict(state["schedule"])


def apply_factors(run: Run, progress: Progress) -> None:
    """Lower the learning rate and the loss scale of a run that has not compiled yet, as rollbacks asked for."""
    if progress.lr_factor == progress.loss_scale_factor == 1.0:
        return
    run.schedule.scale_lr(progress.lr_factor)
    if progress.loss_scale_factor != 1.0:
        run.optimizer.loss_scaling *= progress.loss_scale_factor
    run.training_model.setOptimizer(run.optimizer)


def restore_device(run: Run, state: Mapping[str, Any]) -> None:
    """Restore the device's random state and the optimizer's values, after the training model has compiled."""
    if _is_of_fewer(run, state) and hasattr(run.optimizer, "set_state_dict"):
        run.optimizer.set_state_dict(_merged(run.optimizer.state_dict(), state["optimizer"]))
        run.training_model.detachFromDevice()
        run.training_model.attachToDevice()  # writes the state, before the values of the present step are sent
    if state["device_random"] is not None:
        run.training_model.rng_state = list(state["device_random"])
    if state.get("device_optimizer") is not None and keeps_torch_optimizer(run):
        optim, saved = run.engine.module.optim, state["device_optimizer"]
        if _is_of_fewer(run, state):
            saved = _merged(optim.read_device_state(run.training_model), saved)
        optim.write_device_state(run.training_model, saved)
    _send_optimizer(run)


def _is_of_fewer(run: Run, state: Mapping[str, Any]) -> bool:
    """Return whether a state was saved before frozen parameters were added to the optimizer."""
    if not any(part.until_step is not None for part in run.plan.frozen):
        return False
    saved = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    return saved != [len(group["params"]) for group in run.optimizer.param_groups]


def _merged(fresh: Mapping[str, Any], saved: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the state of a device with the saved values of everything that it and the saved state have."""
    merged = {}
    for kind in ("ipu_state", "ipu_param"):
        old = saved.get(kind) or {}
        merged[kind] = {name: old.get(name, value) for name, value in (fresh.get(kind) or {}).items()}
    return merged


def attach_training(run: Run) -> None:
    """Attach the compiled training model to its device, and send the optimizer's values.

    The device was detached with the values it had then. PopTorch writes them again when it attaches, as part of the
    optimizer's state, after those that were set in the meantime (a schedule reacts to an evaluation).
    """
    run.training_model.attachToDevice()
    _send_optimizer(run)


def _send_optimizer(run: Run) -> None:
    """Send the optimizer's values to the device, whatever values it has from a state that was loaded or kept."""
    marks = getattr(run.optimizer, "variable_attrs", None)
    if marks is not None and marks.isConstant("lr"):
        return
    # PopTorch sends the host's values only if they differ from those it sent last, so other ones are sent in between.
    groups = run.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for change in (1.0, 0.0):
        for group, rate in zip(groups, rates):
            group["lr"] = rate + change
        run.training_model.setOptimizer(run.optimizer)


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators from the ``random`` part of a state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])


def load_weights(model: nn.Module, checkpoint: Checkpoint, averaging: Optional[AveragingConfig] = None) -> Progress:
    """Load a checkpoint's weights, or their average, into a model, for evaluation and prediction.

    Raises:
        ConfigError: The checkpoint belongs to another model, or has no average.
        RunError: It is damaged.
    """
    state = load(checkpoint)
    weights = state["model"]
    if averaging is not None and averaging.evaluate == "average":
        average = state.get("average")
        if not average:
            raise ConfigError(
                "the checkpoint has no average of the weights",
                where=str(checkpoint.path),
                seen="averaging.evaluate=average",
                fix="averaging.evaluate=raw; averaging.kind=ema or tail adds an average in training",
                key="averaging.evaluate",
            )
        weights = average["model"]
    with _must_fit("model", str(checkpoint.path)):
        model.load_state_dict(weights)
    return Progress(**state["progress"])


@contextlib.contextmanager
def _must_fit(part: str, where: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"the checkpoint does not fit the {part}",
            where=where,
            seen=str(error),
            fix="resume with the config the run was started with",
        ) from error


def _device_random(run: Run) -> Optional[Any]:
    if not run.training_model.isCompiled():
        return None
    state = run.training_model.rng_state
    return None if state is None else [int(word) for word in state]


def keeps_torch_optimizer(run: Run) -> bool:
    """Return whether checkpoints hold the state of a torch.optim class: PopTorch exposes none, the CPU engine does."""
    return run.engine.kind == "cpu" and not hasattr(run.optimizer, "variable_attrs")


def _device_optimizer(run: Run) -> Optional[Any]:
    if not keeps_torch_optimizer(run) or not run.training_model.isCompiled():
        return None
    return _plain(run.engine.module.optim.read_device_state(run.training_model))


def _plain(value: Any) -> Any:
    """Copy tensors without the engine's tensor classes, so that any PyTorch can read them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone().as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def _random_state() -> Dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and PyTorch as plain values."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
