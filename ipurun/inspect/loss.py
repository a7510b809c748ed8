"""What a model hears when it asks whether it is being captured, in the words that libraries of models ask with."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import ModuleType
from typing import Any, Callable, Iterator, List, Optional, TypeVar

import torch
from torch import nn

from ipurun.config.schema import LossConfig
from ipurun.errors import ConfigError, Problem, nearest
from ipurun.inspect.batch_items import pick, split_target, with_loss
from ipurun.inspect.targets import check_arguments, locate

__all__ = ["TracingAnswer", "Loss", "ModelWithLoss", "check_loss", "make_loss"]

_Result = TypeVar("_Result")


class TracingAnswer:
    """The answer of `torch.jit.is_tracing` while forward runs once, to be recorded.

    PopTorch leaves it at False, though its capture is bound by the same rule as torch.jit's: no value may be read
    back. Models of transformers and timm ask before they look into an attention mask for a short cut, or keep a tensor
    for the next call; told True they leave both out, and compute the same. A few take it for a promise of torch.jit's
    own, that sizes are tensors, and fail: they hear PopTorch's answer when they are tried again.
    """

    def __init__(self) -> None:
        self._answer = True
        self._matters = False

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Answer while the model runs."""
        before, was_asked = torch.jit.is_tracing, []

        def reply() -> bool:
            was_asked.append(True)
            return self._answer

        torch.jit.is_tracing = reply
        try:
            yield
        except Exception:
            self._matters = bool(was_asked)
            raise
        finally:
            torch.jit.is_tracing = before

    def attempt(self, capture: Callable[[], _Result]) -> _Result:
        """Run what captures the model, and once more with the other answer if the model asked and then failed.

        Raises:
            Exception: That of the first time, where the model fails both times.
        """
        self._matters = False
        try:
            return capture()
        except Exception:
            if not self._matters:
                raise
            self._answer = not self._answer
            with contextlib.suppress(Exception):
                return capture()
            self._answer = not self._answer
            raise


# PyTorch's losses that PopTorch does not find in a graph by itself: they have to end in identity_loss.
_NEEDS_IDENTITY = frozenset(
    ("huber", "multimargin", "multilabelmargin", "multilabelsoftmargin", "gaussiannll", "tripletmarginwithdistance")
)
_ALSO_LOSSES = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")


class Loss:
    """A loss as a function of output and target.

    Args:
        function: Takes (output, target).
        reduction: Reduction that `identity_loss` applies; None for losses that PopTorch knows by itself.
        identity_loss: The engine's function that marks a tensor as the loss.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], torch.Tensor],
        reduction: Optional[str] = None,
        identity_loss: Optional[Callable[..., torch.Tensor]] = None,
    ) -> None:
        self.function = function
        self.reduction = reduction
        self.identity_loss = identity_loss

    def __call__(self, output: Any, target: Any) -> torch.Tensor:
        value = self.function(output, target)
        if self.reduction is None or self.identity_loss is None:
            return value
        return self.identity_loss(value, reduction=self.reduction)


class ModelWithLoss(nn.Module):
    """A model and its loss as one module, as PopTorch wants it.

    Parameter names of the user's model are those of ``step.model``; nothing else here has parameters,
    unless the loss itself is a module that has.

    Args:
        model: The user's model.
        loss: The loss to put behind it; None for a model that returns its own.
        config: Which items are target, output and loss.
        returns_output: Whether the output comes back beside the loss.
        identity_loss: The engine's function that marks a tensor as the loss, for training: a model's own loss may
            be made of several, and PopTorch wants to be told that their sum is the one that counts.
        answer: What the model hears when it asks whether it is captured; shared by the steps of one model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Optional[Loss],
        config: LossConfig,
        returns_output: bool,
        identity_loss: Optional[Callable[..., torch.Tensor]] = None,
        answer: Optional[TracingAnswer] = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.answer = answer or TracingAnswer()
        self.loss = loss.function if loss is not None and isinstance(loss.function, nn.Module) else None
        self._apply_loss = loss
        self._target = config.target
        self._output = config.output
        self._returns_output = returns_output
        self._reduction = config.reduction
        self._identity_loss = identity_loss

    def forward(self, *items: Any, **named: Any) -> Any:
        """The loss of one micro-batch, or (output, loss)."""
        if self._apply_loss is None:
            with self.answer.given():
                output = self.model(*items, **named)
            return self._own_loss(output)
        args, kwargs, target = split_target(items, named, self._target)
        with self.answer.given():
            output = self.model(*args, **kwargs)
        loss = self._apply_loss(pick(output, self._output), target)
        return (output, loss) if self._returns_output else loss

    def _own_loss(self, output: Any) -> Any:
        if self._identity_loss is None:
            return output if self._returns_output else pick(output, self._output, loss=True)
        loss = self._identity_loss(pick(output, self._output, loss=True), reduction=self._reduction)
        return with_loss(output, self._output, loss) if self._returns_output else loss


def check_loss(config: LossConfig, engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """All problems of the loss that show without a model."""
    if config.name is None:
        if config.args:
            return [Problem("`loss.args` are set but no loss is", fix="loss.name=CrossEntropyLoss", key="loss.args")]
        return []
    try:
        target = _find(config.name, engine_module)
    except ConfigError as error:
        return list(error.problems)
    if not callable(target):
        return [Problem(f"`loss.name`: {config.name} is not callable", key="loss.name")]
    return check_arguments(target, config.args, "loss.args", positional=0 if inspect.isclass(target) else 2)


def make_loss(config: LossConfig, engine_module: ModuleType) -> Optional[Loss]:
    """The loss of a config, None where the model returns its own."""
    if config.name is None:
        return None
    target = _find(config.name, engine_module)
    is_class = inspect.isclass(target)
    function = target(**config.args) if is_class else functools.partial(target, **config.args)
    if _is_known_to_poptorch(target):
        return Loss(function)
    return Loss(function, config.reduction, engine_module.identity_loss)


def _is_known_to_poptorch(target: Any) -> bool:
    if getattr(target, "__module__", "") not in ("torch.nn.modules.loss", "torch.nn.functional"):
        return False
    return target.__name__.lower().replace("_", "").replace("loss", "") not in _NEEDS_IDENTITY


def _find(name: str, engine_module: Optional[ModuleType]) -> Any:
    if "." in name:
        return locate(name, "loss.name", engine_module)
    classes = {word: getattr(nn, word) for word in dir(nn) if word.endswith("Loss")}
    functions = {
        word: getattr(nn.functional, word)
        for word in dir(nn.functional)
        if word.endswith("_loss") or word in _ALSO_LOSSES
    }
    known = {**functions, **classes}
    if name in known:
        return known[name]
    close = nearest(name, known)
    raise ConfigError(
        f"`loss.name`: PyTorch has no loss `{name}`",
        known=", ".join(close or sorted(known)),
        fix=f"loss.name={close[0]}" if close else "loss.name=module.my_loss for one of your own",
        key="loss.name",
    )
