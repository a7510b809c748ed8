"""The user's own code in a run: callbacks receive its events, reach its objects and ask the loop for something."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Tuple

from ipurun.errors import ConfigError, IpurunError, RunError
from ipurun.training.events import EvalEnd, Note, Observer, StepEnd

if TYPE_CHECKING:  # importing the base class of callbacks loads neither torch nor the runner
    from torch import nn

    from ipurun.build import Run
    from ipurun.config.schema import RunConfig
    from ipurun.planning.plan import Plan

__all__ = ["Callback", "CallbackRun", "Callbacks", "make_callbacks"]

_EVENTS = [name for name in vars(Observer) if name.startswith("on_") or name == "flush"]
_PLAIN = (type(None), bool, int, float, str)


class Callback(Observer):
    """Base class for your own code in a run; override the methods you need, such as `on_eval`.

    `run` is there from `on_start` on. Random numbers that a callback draws do not disturb those of training.
    """

    run: CallbackRun

    def state_dict(self) -> Dict[str, Any]:
        """Return what a resumed run needs, as tensors and plain values; it is saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint."""


@dataclass
class _Requests:
    """Requests of callbacks that the loop has not handled yet."""

    stop: str = ""
    save: bool = False
    evaluate: bool = False
    metrics: Dict[str, float] = field(default_factory=dict)


class CallbackRun:
    """Access of a callback to its run, and the requests that it can make.

    Args:
        name: Name of the callback.
        run: The run.
        folder: The run folder.
        requests: Takes what is asked for.
        observer: Shows notes.
    """

    def __init__(self, name: str, run: Run, folder: Path, requests: _Requests, observer: Observer) -> None:
        self._name = name
        self._run = run
        self._requests = requests
        self._observer = observer
        self._plain: Optional[nn.Module] = None
        self.folder = folder

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return self._run.config

    @property
    def plan(self) -> Plan:
        """Its plan: devices, batch sizes, steps."""
        return self._run.plan

    @property
    def data(self) -> Mapping[str, Any]:
        """The data sets by split."""
        return self._run.splits

    @property
    def optimizer(self) -> Any:
        """The optimizer. Call `send_optimizer` after changing it."""
        return self._run.optimizer

    @property
    def model(self) -> nn.Module:
        """The model that is trained, with its present weights, for looking at; they are copied from the device."""
        if self._run.training_model.isCompiled():
            self._run.training_model.copyWeightsToHostIfNeeded()
        return self._run.user_model

    def plain_model(self) -> nn.Module:
        """Return a copy of the model with its present weights: plain torch on the CPU, in evaluation mode and float32.

        It can be called whatever the precision and the pipeline of the run. The copy is made once.
        """
        from ipurun.inspect.model_and_data import make_model_alone

        if self._plain is None:
            self._plain = make_model_alone(self._run.config, self._run.engine)
        self._plain.load_state_dict(self.model.state_dict())
        return self._plain.eval()

    def send_optimizer(self) -> None:
        """Send changed values of the optimizer to the device; the next change by the schedule overwrites its own."""
        self._run.training_model.setOptimizer(self._run.optimizer)

    def stop(self, reason: str) -> None:
        """Ask the run to end after this host call, as if it had come to its planned end."""
        self._requests.stop = f"callback {self._name}: {reason}"

    def save(self) -> None:
        """Ask for a checkpoint after this host call."""
        self._requests.save = True

    def evaluate(self) -> None:
        """Ask for an evaluation after this host call, or after the next one during an evaluation."""
        self._requests.evaluate = True

    def add_metrics(self, values: Mapping[str, float], higher_is_better: bool = True) -> None:
        """Add metrics to the record: from `on_eval` to that of the evaluation, else to the next one of training.

        Args:
            values: Name -> value. `monitor` and `early_stopping.metric` can name those of an evaluation.
            higher_is_better: Their direction.
        """
        self._requests.metrics.update({name: float(value) for name, value in values.items()})
        self._run.eval_metrics.directions.update(dict.fromkeys(values, higher_is_better))

    def note(self, text: str, level: str = "info") -> None:
        """Show a remark on the screen and in the log; level is ``info`` or ``warning``."""
        self._observer.on_note(Note(text, level))


class Callbacks(Observer):
    """The callbacks of a run, notified in order, before all other observers.

    A method that a callback does not override is never called. What a callback raises names it, and ends the run
    or, with ``on_callback_error=continue``, only the callback.

    Args:
        named: Name -> callback.
        run: The run.
        folder: The run folder.
        observer: The other observers.
    """

    def __init__(self, named: Mapping[str, Callback], run: Run, folder: Path, observer: Observer) -> None:
        self._named = dict(named)
        self._were_given = bool(named)
        self._run = run
        self._observer = observer
        self._step = 0
        self.advice: Callable[[], str] = str  # how to continue after an error, once there is a checkpoint
        self.requests = _Requests()
        for name, callback in self._named.items():
            callback.run = CallbackRun(name, run, folder, self.requests, observer)
        self._find_overridden()
        for event in _EVENTS:
            if event not in ("on_step", "on_eval"):  # `after_step` and `after_eval` return what was added
                setattr(self, event, functools.partial(self._notify, event))
        self._initial = self.state()

    def __bool__(self) -> bool:
        # Also after all were dropped: several processes exchange requests, and one may have dropped what others have.
        return self._were_given

    def after_step(self, event: StepEnd) -> StepEnd:
        """Notify callbacks of a host call; return the event with the metrics that they have added."""
        if self._overridden["on_step"]:
            self._step = event.step
            self._notify("on_step", event)
        if not event.logged or not self.requests.metrics:
            return event
        return event._replace(metrics={**event.metrics, **self._taken_metrics()})

    def after_eval(self, event: EvalEnd) -> EvalEnd:
        """Notify callbacks of an evaluation; return the event with the metrics that they have added."""
        self._step = event.step
        before, self.requests.metrics = self.requests.metrics, {}
        self._notify("on_eval", event)
        added, self.requests.metrics = self.requests.metrics, before
        return replace(event, metrics={**event.metrics, **added}) if added else event

    def state(self) -> Dict[str, Any]:
        """Return the states of the callbacks that have one.

        Raises:
            RunError: A state is not plain.
        """
        states: Dict[str, Any] = {}
        for name, callback in list(self._named.items()):
            state = self._guarded(name, "state_dict", _plain_state, callback)
            if state:
                states[name] = state
        return states

    def restore(self, states: Optional[Mapping[str, Any]]) -> None:
        """Take the states of a checkpoint; None: those of the beginning."""
        states = self._initial if states is None else states
        for name, callback in list(self._named.items()):
            if name in states:
                self._guarded(name, "load_state_dict", callback.load_state_dict, copy.deepcopy(states[name]))

    def _find_overridden(self) -> None:
        self._overridden: Dict[str, List[Tuple[str, Callback]]] = {
            event: [
                (name, callback)
                for name, callback in self._named.items()
                if getattr(type(callback), event) is not getattr(Observer, event)
            ]
            for event in _EVENTS
        }

    def _notify(self, event: str, *args: Any) -> None:
        for name, callback in self._overridden[event]:
            self._guarded(name, event, getattr(callback, event), *args)

    def _guarded(self, name: str, method: str, action: Callable[..., Any], *args: Any) -> Any:
        """Call a method of a callback without disturbing the random numbers of training."""
        from ipurun.inspect.sampling import seed_of, seeded

        try:
            with seeded(seed_of(self._run.config.seed, self._step)):
                return action(*args)
        except Exception as error:
            self._report(name, method, error)
            return None

    def _report(self, name: str, method: str, error: Exception) -> None:
        from ipurun.training.failures import where_raised

        seen = error.problems[0].what if isinstance(error, IpurunError) else f"{type(error).__name__}: {error}"
        if self._run.config.on_callback_error == "stop" and method != "on_failure":  # which reports another error
            raise RunError(
                f"the callback `{name}` failed in {method}",
                where=where_raised(error),
                seen=seen,
                fix=f"{self._advice()}on_callback_error=continue continues without it, ~callbacks.{name} removes it",
                key=f"callbacks.{name}",
            ) from error
        del self._named[name]
        self._find_overridden()
        text = f"the callback `{name}` failed in {method} and is not called again: {seen}, at {where_raised(error)}"
        self._observer.on_note(Note(text, level="warning"))

    def _advice(self) -> str:
        text = self.advice()
        return f"{text}; " if text else ""

    def _taken_metrics(self) -> Dict[str, float]:
        taken, self.requests.metrics = self.requests.metrics, {}
        return taken


def make_callbacks(nodes: Mapping[str, Any]) -> Dict[str, Callback]:
    """Make the callbacks of a config.

    Raises:
        ConfigError: A target or its arguments are wrong, or what it returns is not a callback.
    """
    from ipurun.inspect.targets import make

    made = {name: make(node, f"callbacks.{name}") for name, node in nodes.items()}
    for name, callback in made.items():
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"`callbacks.{name}._target_` did not return an ipurun.Callback",
                seen=f"{nodes[name]['_target_']} returned a {type(callback).__name__}",
                fix="derive the class from ipurun.Callback",
                key=f"callbacks.{name}._target_",
            )
    return made


def _plain_state(callback: Callback) -> Dict[str, Any]:
    """Return a copy of a callback's state."""
    state = callback.state_dict()
    _check_plain(state)
    return copy.deepcopy(state)


def _check_plain(value: Any) -> None:
    """Raise TypeError for what a checkpoint, which runs no code when it is read, cannot hold."""
    from torch import Tensor

    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(key)
            _check_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item)
    elif type(value) not in _PLAIN and not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} cannot be saved: use tensors, numbers, text, lists and mappings")
