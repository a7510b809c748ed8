"""The loss of a config, and the module that runs a model together with its loss."""

from __future__ import annotations

import contextlib
import functools
import inspect
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import torch
from torch import nn
from torch.nn import functional

from ipurun.config.schema import LossConfig
from ipurun.errors import ConfigError, Problem, nearest
from ipurun.inspect.batch_items import pick, split_target, with_loss
from ipurun.inspect.lightning.steps import Steps
from ipurun.inspect.model import drops_layers
from ipurun.inspect.precision import HalfWeights
from ipurun.inspect.targets import check_arguments, check_named, locate

__all__ = ["Loss", "ModelWithLoss", "check_loss", "make_loss"]

# PyTorch's losses that PopTorch does not recognise in a graph: they must end in identity_loss.
_NEEDS_IDENTITY = frozenset(
    ("huber", "multimargin", "multilabelmargin", "multilabelsoftmargin", "gaussiannll", "tripletmarginwithdistance")
)
_ALSO_LOSSES = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div")
_Result = TypeVar("_Result")


class Loss:
    """A loss as a function of output and target.

    Args:
        function: Takes (output, target).
        reduction: Reduction that `identity_loss` applies, None for losses that PopTorch recognises.
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


class SmoothedCrossEntropy(nn.CrossEntropyLoss):
    """Cross-entropy with label smoothing from operations that PopTorch has: its own ignores the argument.

    Arguments as for torch's class, whose results it has.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of scores and classes, or of scores and probabilities."""
        log_shares = functional.log_softmax(input, dim=1)
        smooth = -log_shares.mean(dim=1)
        if target.is_floating_point():
            return self._mix(self._reduced(-(target * log_shares).sum(dim=1)), self._reduced(smooth))
        exact = functional.nll_loss(log_shares, target, ignore_index=self.ignore_index, reduction=self.reduction)
        counted = (target != self.ignore_index).to(smooth.dtype)
        if self.reduction != "mean":
            return self._mix(exact, self._reduced(smooth * counted))
        return self._mix(exact, (smooth * counted).sum() / counted.sum())

    def _mix(self, exact: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
        return (1 - self.label_smoothing) * exact + self.label_smoothing * smooth

    def _reduced(self, values: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()


class TracingFlag:
    """Make `torch.jit.is_tracing()` return True while a model is captured.

    PopTorch leaves it at False, though its capture has the same rule as torch.jit's: no value may be read back. Models
    of transformers and timm check it before they look for a short cut in an attention mask or keep a tensor for the
    next call. When it is True they skip both and compute the same. A few also expect sizes to be tensors, as in
    torch.jit, and fail: `retry` captures those with PopTorch's own value.

    Speech models of transformers also compare one random number with their `layerdrop` before each layer, even if it is
    0. Which layers run is compiled in, so that number is 1 here: no layer is dropped.

    Args:
        model: The model.
    """

    def __init__(self, model: Optional[nn.Module] = None) -> None:
        self._value = True
        self._was_read = False
        self._drops_layers = model is not None and drops_layers(model)

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Replace `torch.jit.is_tracing` while the model runs."""
        before, reads = torch.jit.is_tracing, []

        def is_tracing() -> bool:
            reads.append(True)
            return self._value

        torch.jit.is_tracing = is_tracing
        rand = torch.rand
        if self._drops_layers:
            torch.rand = lambda *size, **kwargs: rand(*size, **kwargs) if any(size) else 1.0  # type: ignore[assignment]
        try:
            yield
        except Exception:
            self._was_read = bool(reads)
            raise
        finally:
            torch.jit.is_tracing = before
            torch.rand = rand

    def retry(self, capture: Callable[[], _Result]) -> _Result:
        """Run a capture, and run it again with the other value if the model read the flag and then failed.

        Raises:
            Exception: That of the first capture, if both fail.
        """
        self._was_read = False
        try:
            return capture()
        except Exception:
            if not self._was_read:
                raise
            self._value = not self._value
            with contextlib.suppress(Exception):
                return capture()
            self._value = not self._value
            raise


class ModelWithLoss(nn.Module):
    """A model and its loss as one module, as PopTorch expects.

    The user's model is the submodule ``model``. Only a loss that is a module can add further parameters.

    Args:
        model: The user's model.
        loss: The loss to apply to its output, None for a model that returns its own.
        config: Which items are target, output and loss.
        returns_output: Whether to return the output as well as the loss.
        identity_loss: The engine's function that marks a tensor as the loss, for training: a model's own loss may
            combine several, and PopTorch must know which tensor to differentiate.
        tracing_flag: Shared by all wrappers of one model.
        half_weights: Whether operations read float32 weights in half precision (``precision=16.32``).
        steps: The steps of a LightningModule, one of which runs in place of `forward`.
        step: Which one: training, validation, test or predict.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Optional[Loss],
        config: LossConfig,
        returns_output: bool,
        identity_loss: Optional[Callable[..., torch.Tensor]] = None,
        tracing_flag: Optional[TracingFlag] = None,
        half_weights: bool = False,
        steps: Optional[Steps] = None,
        step: str = "training",
    ) -> None:
        super().__init__()
        self.model = model
        self.step = step
        self._steps = steps
        self.tracing_flag = tracing_flag or TracingFlag(model)
        self.loss = loss.function if loss is not None and isinstance(loss.function, nn.Module) else None
        self._apply_loss = loss
        self._target = config.target
        self._output = config.output
        self._returns_output = returns_output
        self._reduction = config.reduction
        self._identity_loss = identity_loss
        self._half_weights = half_weights

    def forward(self, *items: Any, **named: Any) -> Any:
        """Return the loss of one micro-batch, or (output, loss)."""
        with HalfWeights(self) if self._half_weights else contextlib.nullcontext():
            return self._run(items, named)

    def _run(self, items: Tuple[Any, ...], named: Dict[str, Any]) -> Any:
        if self._steps is not None:
            with self.tracing_flag.set():
                output = self._steps.run(self.step, items, named, self._target)
            return output if self.step == "predict" else self._own_loss(output)
        if self._apply_loss is None:
            with self.tracing_flag.set():
                output = self.model(*items, **named)
            return self._own_loss(output)
        args, kwargs, target = split_target(items, named, self._target)
        with self.tracing_flag.set():
            output = self.model(*args, **kwargs)
        loss = self._apply_loss(pick(output, self._output), target)
        return (output, loss) if self._returns_output else loss

    def _own_loss(self, output: Any) -> Any:
        if self._identity_loss is None:
            return output if self._returns_output else pick(output, self._output, loss=True)
        loss = self._identity_loss(pick(output, self._output, loss=True), reduction=self._reduction)
        return with_loss(output, self._output, loss) if self._returns_output else loss


def check_loss(config: LossConfig, engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """Return the problems of the loss that can be found without a model."""
    if config.name is None:
        if config.args:
            return [
                Problem("`loss.args` is set but `loss.name` is not", fix="loss.name=CrossEntropyLoss", key="loss.args")
            ]
        return []
    try:
        target = _find(config.name, engine_module)
    except ConfigError as error:
        return list(error.problems)
    if not callable(target):
        fix = "loss.name=CrossEntropyLoss, or module.my_loss for your own loss"
        return [Problem(f"`loss.name`: {config.name} is not callable", fix=fix, key="loss.name")]
    positional = 0 if inspect.isclass(target) else 2
    named = check_named(config.args, "loss.args")
    return named or check_arguments(target, config.args, "loss.args", positional=positional)


def make_loss(config: LossConfig, engine_module: ModuleType) -> Optional[Loss]:
    """Make the loss of a config, None if the model returns its own."""
    if config.name is None:
        return None
    target = _find(config.name, engine_module)
    if target in (nn.CrossEntropyLoss, functional.cross_entropy) and config.args.get("label_smoothing"):
        return Loss(SmoothedCrossEntropy(**config.args), "none", engine_module.identity_loss)
    function = target(**config.args) if inspect.isclass(target) else functools.partial(target, **config.args)
    if _poptorch_recognises(target):
        return Loss(function)
    return Loss(function, config.reduction, engine_module.identity_loss)


def _poptorch_recognises(target: Any) -> bool:
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
        fix=f"loss.name={close[0]}" if close else "loss.name=module.my_loss for your own loss",
        key="loss.name",
    )
