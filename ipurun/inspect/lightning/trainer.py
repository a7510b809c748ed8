"""Stand-in for the trainer of a LightningModule, and the hooks that an IPU can run."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

from torch import nn

from ipurun.distributed.environment import launched
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.targets import innermost_line

__all__ = [
    "TrainerStandIn",
    "attach_trainer",
    "call_hook",
    "caller",
    "hook_notes",
    "hook_problems",
    "is_lightning",
    "overrides",
    "set_up",
]

_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
# Hooks that change what is trained: name -> what to do instead.
_REFUSED: Dict[str, str] = {
    "backward": "leave it out: PopTorch computes the gradients of what training_step returns",
    "optimizer_step": "leave it out: a warm-up is a scheduler of configure_optimizers, or schedule.warmup_steps",
    "configure_gradient_clipping": "leave it out and set optimizer.max_grad_norm",
    "lr_scheduler_step": "leave it out: a scheduler of torch is stepped as its interval and frequency say",
}
# Hooks that would run between the steps of a compiled program, where Python does not: name -> what to do instead.
_IGNORED: Dict[str, str] = {
    "transfer_batch_to_device": "PopTorch moves batches itself",
    **dict.fromkeys(("optimizer_zero_grad", "on_before_zero_grad"), "gradients are cleared on the device"),
    **dict.fromkeys(
        ("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
        "gradients stay on the device",
    ),
    **dict.fromkeys(
        ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_batch_end")
        + ("on_test_batch_start", "on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end"),
        "steps run on the device without Python; an ipurun callback is called after every host call",
    ),
    **dict.fromkeys(
        ("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start")
        + ("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_test_start", "on_test_end")
        + ("on_test_epoch_start", "on_sanity_check_start", "on_sanity_check_end", "on_predict_start")
        + ("on_predict_end", "on_predict_epoch_start", "on_predict_epoch_end", "teardown", "on_epoch_start")
        + ("on_epoch_end", "on_batch_start", "on_batch_end", "on_pretrain_routine_start", "on_pretrain_routine_end"),
        "use a callback of ipurun (docs/how-to/callbacks.md)",
    ),
    **dict.fromkeys(
        ("training_step_end", "validation_step_end", "test_step_end"),
        "what a step returns needs no reduction: replicas and device iterations are reduced by themselves",
    ),
    **dict.fromkeys(
        ("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad")
        + ("on_test_model_eval", "on_test_model_train", "on_predict_model_eval", "on_predict_model_train"),
        "training and evaluation are two programs, each in its own mode",
    ),
    **dict.fromkeys(("tbptt_split_batch",), "batches are not split: split the sequences in the data set"),
    **dict.fromkeys(("configure_sharded_model",), "rename it to configure_model"),
    **dict.fromkeys(("get_progress_bar_dict", "get_metrics"), "ipurun shows what self.log receives"),
    **dict.fromkeys(("configure_callbacks",), "set callbacks, early_stopping and checkpoint in the config"),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "ipurun export RUN --lightning calls the former"),
}


class TrainerStandIn:
    """The part of a Lightning trainer that a model or its data may ask for.

    Values that change during a run are constants of a compiled step. Reading one there is recorded in `reads`.

    Args:
        max_epochs: Planned epochs; -1 if only steps are planned.
        max_steps: Planned weight updates; -1 if only epochs are planned.
        updates: Weight updates of the whole run, as far as they are known.
        accumulation: Micro-batches of a weight update.
        datamodule: The data module, once it is known.
    """

    def __init__(
        self,
        max_epochs: int = 1,
        max_steps: int = -1,
        updates: int = 1,
        accumulation: int = 1,
        datamodule: Any = None,
    ) -> None:
        self.max_epochs = max_epochs
        self.min_epochs = 1
        self.max_steps = max_steps
        self.estimated_stepping_batches = updates
        self.num_training_batches = max(updates * accumulation // max(max_epochs, 1), 1)
        self.accumulate_grad_batches = accumulation
        self.reads: Dict[str, str] = {}
        self.values: Dict[str, Any] = {"current_epoch": 0, "global_step": 0}
        self.in_step = False
        self.training = True
        self.validating = self.testing = self.predicting = self.sanity_checking = False
        self.logger: Any = IgnoredCalls()
        self.loggers: List[Any] = [self.logger]
        self.callbacks: List[Any] = []
        self.progress_bar_callback = self.checkpoint_callback = self.early_stopping_callback = None
        self.optimizers: List[Any] = []
        self.lr_scheduler_configs: List[Any] = []
        self.callback_metrics: Dict[str, Any] = {}
        self.logged_metrics: Dict[str, Any] = {}
        self.datamodule = datamodule
        self.strategy = StrategyStandIn()
        self.model: Any = None
        self.lightning_module: Any = None
        self.global_rank = self.local_rank = self.node_rank = 0
        self.world_size = self.num_devices = self.num_nodes = 1
        started = launched()  # one of several processes: ipurun shares the data out, the model need not
        self.is_global_zero = started is None or started.rank == 0
        self.fast_dev_run = self.barebones = False
        self.default_root_dir = os.curdir
        self.log_dir = None

    @property
    def current_epoch(self) -> int:
        """The epoch; in a step a constant."""
        return self._read("current_epoch")

    @property
    def global_step(self) -> int:
        """The number of weight updates; in a step a constant."""
        return self._read("global_step")

    def moved_to(self, epoch: int, step: int) -> None:
        """Note where the run is, for hooks: the epoch, counted from 0, and the weight updates that were made."""
        self.values.update(current_epoch=epoch, global_step=step)

    def _read(self, name: str) -> Any:
        if self.in_step:
            self.reads[name] = caller()
        return self.values[name]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`self.trainer.{name}`: ipurun trains without a Lightning trainer and has no such value; pass it to the "
            "model as an argument"
        )


class StrategyStandIn:
    """The part of a strategy that a model may ask for: there is one process, whose values are all there are."""

    optimizers: Sequence[Any] = ()
    _lightning_optimizers: Sequence[Any] = ()
    global_rank = local_rank = 0
    world_size = num_processes = 1
    is_global_zero = True

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return a tensor as it is."""
        return tensor

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return a tensor as it is."""
        return tensor

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return a value as it is."""
        return value

    def barrier(self, name: Any = None) -> None:
        """Return at once."""


class IgnoredCalls:
    """An object whose methods and attributes exist and do nothing, in place of a logger."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def is_lightning(model: Any) -> bool:
    """Return whether a model has the methods of a LightningModule."""
    return callable(getattr(model, "training_step", None)) and callable(getattr(model, "configure_optimizers", None))


def attach_trainer(owner: Any, trainer: TrainerStandIn) -> None:
    """Give a model or its data the stand-in as its trainer."""
    if isinstance(owner, nn.Module):
        trainer.model = trainer.lightning_module = owner
    else:
        trainer.datamodule = owner
    try:
        owner.trainer = trainer
    except AttributeError:  # a read-only property of another library
        object.__setattr__(owner, "_trainer", trainer)
    if type(vars(owner).get("_trainer")) in weakref.ProxyTypes:  # Lightning 1 expects that its caller keeps the trainer
        object.__setattr__(owner, "_trainer", trainer)


def set_up(model: nn.Module) -> None:
    """Call the hooks in which a LightningModule makes its layers, as Lightning does before training.

    Raises:
        ConfigError: One failed.
    """
    attach_trainer(model, TrainerStandIn())
    call_hook(model, "setup", "model", "fit")
    call_hook(model, "configure_model", "model")


def overrides(owner: Any, name: str) -> bool:
    """Return whether a class defines a hook itself, rather than inheriting Lightning's or torch's empty one."""
    function = getattr(type(owner), name, None)
    if function is None or not callable(function):
        return False
    parts = str(getattr(function, "__module__", "") or "").split(".")
    return parts[0] not in _PACKAGES or "demos" in parts  # the models that Lightning shows are models like any other


def call_hook(owner: Any, name: str, key: str, *args: Any) -> Any:
    """Call a hook of the user's, if there is one.

    Raises:
        ConfigError: It failed.
    """
    if not overrides(owner, name):
        return None
    try:
        return getattr(owner, name)(*args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"`{key}`: {type(owner).__name__}.{name} failed",
            where=innermost_line(error),
            seen=f"{type(error).__name__}: {error}",
            fix="--debug shows the whole traceback",
            key=key,
        ) from error


def hook_problems(model: nn.Module) -> List[Problem]:
    """Return why a LightningModule cannot be trained: hooks that change training, or manual optimization."""
    name = type(model).__name__
    problems = [
        Problem(
            f"`model`: {name}.{hook} cannot run on an IPU: training is one compiled program",
            seen=f"{name} overrides {hook}",
            fix=fix,
            key="model._target_",
        )
        for hook, fix in _REFUSED.items()
        if overrides(model, hook)
    ]
    if getattr(model, "automatic_optimization", True) is False:
        problems.append(
            Problem(
                f"`model`: {name} uses manual optimization, which cannot run on an IPU: backward pass and weight "
                "update are parts of one compiled program",
                seen="automatic_optimization = False",
                fix="return the loss from training_step and leave automatic_optimization at True; models with several "
                "optimizers (GANs) can be run as a PopTorch script: ipurun exec script.py",
                key="model._target_",
            )
        )
    return problems


def hook_notes(model: nn.Module) -> Tuple[str, ...]:
    """Return which hooks of a LightningModule are not called, and what to do instead."""
    name = type(model).__name__
    by_advice: Dict[str, List[str]] = {}
    for hook, advice in _IGNORED.items():
        if overrides(model, hook):
            by_advice.setdefault(advice, []).append(hook)
    return tuple(
        f"{name}.{', '.join(hooks)} {'is' if len(hooks) == 1 else 'are'} not called: {advice}"
        for advice, hooks in by_advice.items()
    )


def caller() -> str:
    """Return file and line of the nearest frame that is neither ipurun's, Lightning's nor torch's."""
    frame: Optional[Any] = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")
        if package[0] not in (*_PACKAGES, "torchmetrics") and package[:2] != ["ipurun", "inspect"]:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
