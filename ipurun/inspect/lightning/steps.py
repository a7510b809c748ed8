"""The steps of a LightningModule as functions of a batch: what they log becomes an output of the traced step."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import operator
import sys
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn

from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import split_target
from ipurun.inspect.facts import LoggedValue
from ipurun.inspect.lightning.trainer import TrainerStandIn, attach_trainer, caller, is_lightning, overrides

__all__ = [
    "KEPT",
    "LOG",
    "MARKS",
    "METRIC",
    "RETURNED",
    "BatchIndex",
    "Steps",
    "epoch_end_of_outputs",
    "metric_modules",
    "steps_of",
]

LOG = "log:"  # begins the names of outputs that self.log received
METRIC = "metric:"  # begins the names of outputs that a metric object received
KEPT = "kept:"  # begins the names of outputs that the step appended to a list of the model's
RETURNED = "(returned)"  # in place of the name of a list: what the step returned, for the end of the epoch
MARKS = (KEPT, RETURNED)  # among the logged values of a plan: that the step has kept ones, that it returns no loss
_REDUCTIONS = ("mean", "sum", "min", "max")


class BatchIndex(int):
    """The `batch_idx` of a compiled step: one number for all batches, so what it decides is recorded.

    Args:
        outcome: What every comparison with it gives; None: what the number gives.
    """

    outcome: Optional[bool] = None
    uses: Dict[str, None] = {}

    def _derived(self, value: Any) -> Any:
        made = BatchIndex(value)
        made.outcome, made.uses = self.outcome, self.uses
        return made

    def _decide(self, value: bool) -> bool:
        self.uses[caller()] = None
        return value if self.outcome is None else self.outcome

    def __mod__(self, other: Any) -> Any:
        return self._derived(int(self) % int(other))

    def __add__(self, other: Any) -> Any:
        return self._derived(int(self) + int(other))

    def __sub__(self, other: Any) -> Any:
        return self._derived(int(self) - int(other))

    def __floordiv__(self, other: Any) -> Any:
        return self._derived(int(self) // int(other))

    def __eq__(self, other: Any) -> bool:
        return self._decide(int(self) == other)

    def __ne__(self, other: Any) -> bool:
        return self._decide(int(self) != other)

    def __lt__(self, other: Any) -> bool:
        return self._decide(int(self) < other)

    def __le__(self, other: Any) -> bool:
        return self._decide(int(self) <= other)

    def __gt__(self, other: Any) -> bool:
        return self._decide(int(self) > other)

    def __ge__(self, other: Any) -> bool:
        return self._decide(int(self) >= other)

    def __bool__(self) -> bool:
        return self._decide(int(self) != 0)

    def __hash__(self) -> int:
        return hash(int(self))


class HostValue(NamedTuple):
    """The value of a metric object, which the host computes: inside a step it can only be logged."""

    path: str
    key: Optional[str] = None  # of a collection
    by_batch: bool = False  # what `forward` returns: the value of this batch alone
    then: Optional[Callable[[Any], Any]] = None  # what the step does with it: torch.sqrt(value), 100 * value


class _OnHost:
    """Takes the place of a metric's value inside a step: what is computed with it alone is left to the host."""

    def __init__(self, value: HostValue) -> None:
        self.host_value = value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave a function of torch to the host."""
        own = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls))
        return own._later(function, *args, **(kwargs or {}))

    def _later(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if sum(isinstance(value, _OnHost) for value in values) > 1 or any(
            isinstance(value, torch.Tensor) for value in values
        ):
            raise TypeError(f"{self._what()}: it cannot be combined with other tensors or metrics inside the step")
        path, key, by_batch, before = self.host_value

        def then(value: Any) -> Any:
            value = value if before is None else before(value)
            named = {name: value if given is self else given for name, given in kwargs.items()}
            return function(*(value if given is self else given for given in args), **named)

        return _OnHost(HostValue(path, key, by_batch, then))

    def _what(self) -> str:
        path = self.host_value.path
        return f"the value of the metric `{path}` is computed on the host, after the step, where it is logged"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("item", "detach", "cpu", "clone"):
            return lambda: self
        method = getattr(torch.Tensor, name, None)
        if not callable(method) or name in ("backward", "numpy", "tolist"):
            raise AttributeError(f"{self._what()}: it has no `{name}` inside the step")
        return lambda *args, **kwargs: self._later(method, self, *args, **kwargs)

    def __bool__(self) -> bool:
        raise TypeError(f"{self._what()}: no decision inside the step can depend on it")

    def __float__(self) -> float:
        raise TypeError(f"{self._what()}: inside the step it is not a number yet")

    __int__ = __index__ = __float__  # type: ignore[assignment]


def _left_to_host(function: Callable[..., Any], swapped: bool = False) -> Callable[..., Any]:
    return lambda self, *other: self._later(function, *((*other, self) if swapped else (self, *other)))


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(_OnHost, f"__{_name}__", _left_to_host(getattr(operator, _name)))
    setattr(_OnHost, f"__r{_name}__", _left_to_host(getattr(operator, _name), swapped=True))
for _name in ("neg", "abs"):
    setattr(_OnHost, f"__{_name}__", _left_to_host(getattr(operator, _name)))
for _name in ("lt", "le", "gt", "ge"):
    setattr(_OnHost, f"__{_name}__", lambda self, other: bool(self))


def steps_of(model: nn.Module, trainer: Optional[TrainerStandIn] = None, takes_tensor: bool = False) -> Optional[Steps]:
    """Return the steps of a LightningModule, None for other models. Arguments as for `Steps`."""
    return Steps(model, trainer or TrainerStandIn(), takes_tensor) if is_lightning(model) else None


def metric_modules(model: nn.Module) -> Dict[str, nn.Module]:
    """Return the metric objects of a model by name, as torchmetrics makes them; a collection counts as one."""
    found: Dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_metric = all(callable(getattr(module, method, None)) for method in ("update", "compute", "reset"))
        if name and is_metric and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def epoch_end_of_outputs(model: nn.Module, kind: str) -> Optional[Callable[[List[Any]], Any]]:
    """Return the hook of Lightning 1 that gets what the steps of an epoch returned, None if the model has none."""
    return getattr(model, f"{kind}_epoch_end") if overrides(model, f"{kind}_epoch_end") else None


def _reads_outputs(model: nn.Module, kind: str) -> bool:
    """Return whether the hook reads what the steps returned: by convention `_` is not read."""
    hook = epoch_end_of_outputs(model, kind)
    return hook is not None and any(not name.startswith("_") for name in inspect.signature(hook).parameters)


class Steps:
    """Runs one step of a LightningModule on a batch and returns its loss and what it logged, as named tensors.

    Args:
        model: The LightningModule.
        trainer: What it finds as its trainer.
        takes_tensor: Whether a batch is a single tensor, rather than a list of one.
    """

    def __init__(self, model: nn.Module, trainer: TrainerStandIn, takes_tensor: bool = False) -> None:
        self.model = model
        self.trainer = trainer
        self.takes_tensor = takes_tensor
        self.logged: Dict[str, Dict[str, LoggedValue]] = {}  # of each kind of step, when it last ran
        self.batch_index = BatchIndex(1)  # not the first: logging images of the first batch is usual
        self.batch_index.uses = {}
        self.in_trial = False  # with gradients, so that a loss can be told from another number
        self.other_numbers: Set[str] = set()  # kinds of steps that return a number that is not a loss
        attach_trainer(model, trainer)

    def has(self, kind: str) -> bool:
        """Return whether the model defines a step: training, validation, test or predict."""
        name = f"{kind}_step"
        own = getattr(type(self.model), name, None)
        return own is not None and (overrides(self.model, name) or kind == "training")

    def run(self, kind: str, items: Tuple[Any, ...], named: Dict[str, Any], target: Optional[str] = None) -> Any:
        """Run a step.

        Args:
            kind: training, validation, test or predict.
            items: Items of the batch by position.
            named: Items of the batch by name.
            target: The target of a batch, for a prediction by `forward`.

        Returns:
            ``loss`` and the values that were logged, by name; of a prediction what the step returns.
        """
        if kind == "predict" and not self.has("predict"):
            args, kwargs, _ = split_target(items, named, target)
            return self.model(*args, **kwargs)
        batch: Any = named or (items[0] if len(items) == 1 and self.takes_tensor else list(items))
        self.trainer.training = kind == "training"
        self.trainer.validating, self.trainer.testing = kind == "validation", kind == "test"
        recorder = _Recorder(self.model, kind)
        with recorder.installed(), self._in_step(), recorder.lists_kept():
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                if overrides(self.model, hook):
                    batch = getattr(self.model, hook)(batch, 0)
            step = getattr(self.model, f"{kind}_step")
            result = step(*_step_arguments(step, batch, self.batch_index))
        self.logged[kind] = recorder.logged
        if kind == "predict":
            return result
        loss = self._loss(result, kind)
        if _reads_outputs(self.model, kind):
            recorder.keep(
                RETURNED, 0, {"loss": loss["loss"]} if kind == "training" and result is loss["loss"] else result
            )
        return {**loss, **recorder.outputs}

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        self.trainer.in_step = True
        try:
            yield
        finally:
            self.trainer.in_step = False

    def _loss(self, result: Any, kind: str) -> Dict[str, torch.Tensor]:
        if isinstance(result, Mapping) and "loss" in result:
            return {"loss": result["loss"]}
        if isinstance(result, torch.Tensor) and (kind == "training" or self._is_loss(result, kind)):
            return {"loss": result}
        if kind != "training":
            return {}
        seen = "nothing" if result is None else f"a {type(result).__name__} without `loss`"
        raise ConfigError(
            f"`model`: {type(self.model).__name__}.training_step must return a loss",
            seen=f"it returned {seen}",
            fix="return the loss, or a dict with the key loss; a compiled step cannot skip a batch: multiply its loss "
            "with 0 instead",
            key="model._target_",
        )

    def _is_loss(self, result: torch.Tensor, kind: str) -> bool:
        """Return whether a step of evaluation returns a loss: other numbers, such as an accuracy, have no gradient."""
        if result.numel() != 1 or not result.is_floating_point():
            return False
        if self.in_trial and not result.requires_grad:
            self.other_numbers.add(kind)
        return kind not in self.other_numbers


def _step_arguments(step: Callable[..., Any], batch: Any, index: BatchIndex) -> Tuple[Any, ...]:
    """Return the arguments that a step takes: the batch, its number, and the number of the data loader."""
    parameters = list(inspect.signature(step).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return batch, index
    if len(positional) >= 3 and positional[2].default is inspect.Parameter.empty:
        return batch, index, 0
    return (batch, index)[: max(len(positional), 1)]


class _Recorder:
    """Takes the place of self.log, self.log_dict and of the methods of metric objects while a step runs."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self._model = model
        self._kind = kind
        self.outputs: Dict[str, torch.Tensor] = {}
        self.logged: Dict[str, LoggedValue] = {}
        self._metrics = metric_modules(model)
        self._calls: Dict[str, int] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record inside."""
        changed: List[Tuple[Dict[str, Any], str, Any]] = []

        def put(module: Any, name: str, value: Any) -> None:
            own = vars(module)
            changed.append((own, name, own.get(name, _MISSING)))
            own[name] = value

        for module in self._model.modules():
            if module is self._model or is_lightning(module):
                put(module, "log", self.log)
                put(module, "log_dict", self.log_dict)
                put(module, "optimizers", _no_optimizers)
                put(module, "lr_schedulers", _no_optimizers)
        for path, metric in self._metrics.items():
            put(metric, "forward", self._receiver(path, metric, returns=True))
            put(metric, "update", self._receiver(path, metric, returns=False))
            put(metric, "compute", lambda path=path, metric=metric: self._value(path, metric))
            put(metric, "reset", lambda: None)
        for name, module in list(sys.modules.items()):
            if name.startswith("torchmetrics.functional"):
                # They read the values that they check, which a compiled step cannot.
                for check in [check for check in vars(module) if check.endswith("_tensor_validation")]:
                    put(module, check, lambda *args, **kwargs: None)
        try:
            yield
        finally:
            for own, name, before in reversed(changed):
                if before is _MISSING:
                    own.pop(name, None)
                else:
                    own[name] = before

    @contextlib.contextmanager
    def lists_kept(self) -> Iterator[None]:
        """Turn tensors that are appended to lists of the model inside into outputs; the lists remain as they were."""
        lists = {name: value for name, value in vars(self._model).items() if isinstance(value, list)}
        lengths = {name: len(value) for name, value in lists.items()}
        try:
            yield
        finally:
            for name, value in lists.items():
                added = value[lengths[name] :]
                del value[lengths[name] :]
                for number, item in enumerate(added):
                    self.keep(name, number, item)

    def keep(self, name: str, number: int, item: Any) -> None:
        """Turn a tensor, or those of a dict, into outputs that are appended to a list on the host."""
        parts = item if isinstance(item, Mapping) else {"": item}
        for key, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.outputs[f"{KEPT}{name}:{number}:{key}:{part.dim()}"] = part.detach()

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: Optional[bool] = None,
        on_step: Optional[bool] = None,
        on_epoch: Optional[bool] = None,
        reduce_fx: Any = "mean",
        **_: Any,
    ) -> None:
        """Record a value under a name; the arguments of Lightning's method."""
        training = self._kind == "training"
        on_step = training if on_step is None else bool(on_step)
        on_epoch = not training if on_epoch is None else bool(on_epoch)
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.log(f"{name}/{key}", item, prog_bar, logger, on_step, on_epoch, reduce_fx)
            return
        reduction = _reduction(reduce_fx, name)
        host = self._host_value(value)
        if host is not None:
            self.logged[name] = LoggedValue(name, on_step, on_epoch, reduction, *host)
            return
        self.logged[name] = LoggedValue(name, on_step, on_epoch, reduction)
        self.outputs[LOG + name] = _scalar(value, name, self._model)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Record several values."""
        if isinstance(dictionary, _OnHost):
            dictionary = {dictionary.host_value.path: dictionary}
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    def _host_value(self, value: Any) -> Optional[HostValue]:
        if isinstance(value, _OnHost):
            return value.host_value
        for path, metric in self._metrics.items():
            if value is metric:
                return HostValue(path)
            if isinstance(metric, nn.ModuleDict):
                for key, part in metric.items():
                    if part is value:
                        return HostValue(path, str(key))
        return None

    def _value(self, path: str, metric: nn.Module, by_batch: bool = False) -> Any:
        if isinstance(metric, nn.ModuleDict):
            return {str(key): _OnHost(HostValue(path, str(key), by_batch)) for key in list(metric.keys())}
        return _OnHost(HostValue(path, None, by_batch))

    def _receiver(self, path: str, metric: nn.Module, returns: bool) -> Callable[..., Any]:
        def receive(*args: Any, **kwargs: Any) -> Any:
            number = self._calls.get(path, 0)
            self._calls[path] = number + 1
            for key, value in [*enumerate(args), *kwargs.items()]:
                if not isinstance(value, torch.Tensor):
                    raise TypeError(
                        f"the metric `{path}` gets the argument `{key}` of type {type(value).__name__}: in a compiled "
                        "step only tensors reach the host"
                    )
                self.outputs[f"{METRIC}{path}:{number}:{key}"] = value.detach()
            return self._value(path, metric, by_batch=True) if returns else None

        return receive


_MISSING = object()


def _no_optimizers(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "self.optimizers() and self.lr_schedulers() inside a step: a compiled step cannot read what changes while "
        "training; a run reports the learning rate itself, as `lr`"
    )


def _reduction(given: Any, name: str) -> str:
    if callable(given):
        given = getattr(given, "__name__", str(given))
    word = str(given).replace("amin", "min").replace("amax", "max")
    if word not in _REDUCTIONS:
        raise ConfigError(
            f"`model`: self.log({name!r}) asks for the reduction `{given}`",
            where=caller(),
            known=", ".join(_REDUCTIONS),
            fix="reduce_fx='mean', or log what your function needs and reduce it in on_validation_epoch_end",
            key="model._target_",
        )
    return word


def _scalar(value: Any, name: str, model: nn.Module) -> torch.Tensor:
    """Return a logged value as a float32 scalar of the graph, apart from its gradient."""
    if isinstance(value, numbers.Number):
        first = next(model.parameters(), None)
        return torch.tensor(float(value), device=None if first is None else first.device)  # type: ignore[arg-type]
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(
            f"`model`: self.log({name!r}) takes one number",
            where=caller(),
            seen=kind,
            fix="log its mean, or a metric object",
            key="model._target_",
        )
    return value.detach().float().reshape(())
