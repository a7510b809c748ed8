"""Events of a run as plain frozen data: the only link between a run and its loggers and console."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

__all__ = [
    "CheckpointSaved",
    "CompileEnd",
    "CompileStart",
    "DeviceWait",
    "EvalEnd",
    "EvalProgress",
    "Note",
    "Observer",
    "Observers",
    "RolledBack",
    "RunFailed",
    "RunStart",
    "StepEnd",
    "Summary",
]


@dataclass(frozen=True)
class Note:
    """A remark for the user. ``level`` is ``info`` or ``warning``."""

    text: str
    level: str = "info"


@dataclass(frozen=True)
class RunStart:
    """Training starts, or resumes after ``start_step`` weight updates."""

    name: str
    folder: str
    start_step: int
    total_steps: Optional[int]
    resumed_from: Optional[str] = None


@dataclass(frozen=True)
class CompileStart:
    """The engine starts to compile for ``mode``: ``training`` or ``inference``."""

    mode: str


@dataclass(frozen=True)
class CompileEnd:
    """The engine has compiled, or loaded an executable.

    Args:
        mode: ``training`` or ``inference``.
        seconds: How long it took.
        cache: What the executable cache did: ``hit``, ``miss`` (stored), ``uncached`` (not stored), ``off``,
            ``precompiled`` where a file took its place, or "" where that is unknown.
        saved_seconds: How much longer the first compilation took than this hit; None if unknown.
        why: Why nothing was stored, why a stored executable was compiled again, or the precompiled file.
    """

    mode: str
    seconds: float
    cache: str = ""
    saved_seconds: Optional[float] = None
    why: str = ""


@dataclass(frozen=True)
class DeviceWait:
    """The run waits for IPUs that others use, for at most ``seconds_left`` more."""

    seconds_left: float


class StepEnd(NamedTuple):
    """A host call is done; the values cover the time since the last such event.

    Args:
        step: Weight updates done so far.
        call: Host calls done so far.
        epoch: Passes over the data done so far, with fraction; for a stream, whole passes.
        samples: Samples trained on so far.
        loss: Mean loss.
        lr: Learning rate of the first parameter group during the call.
        metrics: Values of the metrics declared with ``on: [train]``.
        samples_per_second: Throughput without compile, evaluation and checkpoint time.
        call_seconds: Mean duration of a host call.
        data_wait: Share of the time spent waiting for data, 0 to 1.
        eta_seconds: Estimated time to the end; None while unknown.
        total_steps: Weight updates of the whole run, None for a stream without an end.
        logged: Whether `log_every_steps` asks for a record; the console may show the others as well.
        checkpoint: Path of the newest checkpoint, if any.
    """

    step: int
    call: int
    epoch: float
    samples: int
    loss: float
    lr: float
    metrics: Mapping[str, float]
    samples_per_second: float
    call_seconds: float
    data_wait: float
    eta_seconds: Optional[float]
    total_steps: Optional[int]
    logged: bool = True
    checkpoint: Optional[str] = None


class EvalProgress(NamedTuple):
    """A host call of an evaluation is done. ``total_samples`` is None for a stream."""

    split: str
    samples: int
    total_samples: Optional[int]


@dataclass(frozen=True)
class EvalEnd:
    """An evaluation is done. ``metrics`` holds ``loss`` and every metric declared for evaluation.

    ``matrices`` holds what is a table rather than a number, such as a confusion matrix, by rows.
    """

    step: int
    epoch: float
    split: str
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    monitor: Optional[str] = None
    is_best: bool = False
    matrices: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on disk."""

    step: int
    path: str
    seconds: float
    is_best: bool = False


@dataclass(frozen=True)
class RolledBack:
    """A run returned to an earlier step and is about to repeat the steps after it.

    ``checkpoint`` is None if the run returned to its beginning.
    """

    step: int
    checkpoint: Optional[str]
    reason: str


@dataclass(frozen=True)
class RunFailed:
    """A run ended with an error after ``step`` weight updates, or was stopped at once: there is no summary."""

    step: int
    reason: str


@dataclass(frozen=True)
class Summary:
    """Result of a run.

    Args:
        status: ``done``, ``interrupted`` or ``failed``.
        step: Weight updates done, including those before a resume.
        epoch: Passes over the data done.
        samples: Samples trained on in this process.
        loss: Last mean training loss.
        metrics: Values of the last evaluation.
        monitor: Name of the monitored metric.
        best: Its best value.
        best_step: Weight updates done when it was reached.
        samples_per_second: Mean throughput of this process.
        seconds: Wall time by kind: compile, train, data_wait, eval, checkpoint, recovery, averaging, total; and
            checkpoint_write, which passes in the background.
        checkpoint: Path of the newest checkpoint.
        best_checkpoint: Path of the best one.
        resume_command: The command that resumes the run.
        rollbacks: How often the run returned to an earlier step.
        skipped_samples: Indices of the training samples that could not be read.
        skipped_eval_samples: The same for the other splits, by split; only those that were evaluated.
        stop_reason: Why the run ended before its planned end: early stopping, or what a callback gave.
        padding_share: Share of padding in the batches, where the collate function counts it.
        cache: What the executable cache did, by mode: its ``state``, and ``saved_seconds`` or ``why`` where known.
    """

    status: str
    step: int
    epoch: float
    samples: int
    loss: Optional[float] = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    monitor: Optional[str] = None
    best: Optional[float] = None
    best_step: Optional[int] = None
    samples_per_second: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    checkpoint: Optional[str] = None
    best_checkpoint: Optional[str] = None
    resume_command: str = ""
    rollbacks: int = 0
    skipped_samples: Tuple[int, ...] = ()
    skipped_eval_samples: Mapping[str, Tuple[int, ...]] = field(default_factory=dict)
    stop_reason: str = ""
    padding_share: Optional[float] = None
    cache: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def to_dict(self) -> Dict[str, object]:
        """Return the summary as JSON-ready data."""
        plain = dict(vars(self))
        plain["metrics"] = dict(self.metrics)
        plain["seconds"] = dict(self.seconds)
        plain["cache"] = {mode: dict(use) for mode, use in self.cache.items()}
        return plain


class Observer:
    """Base class for observers of a run; override the methods you need."""

    takes_steps_late = False  # whether `on_step` may be called some tenths of a second after short host calls

    def on_start(self, event: RunStart) -> None:
        """Handle the start of training."""

    def on_note(self, event: Note) -> None:
        """Handle a remark for the user."""

    def on_compile_start(self, event: CompileStart) -> None:
        """Handle the start of a compilation."""

    def on_compile_end(self, event: CompileEnd) -> None:
        """Handle the end of a compilation."""

    def on_device_wait(self, event: DeviceWait) -> None:
        """Handle a moment of a wait for IPUs."""

    def on_step(self, event: StepEnd) -> None:
        """Handle the end of a host call."""

    def on_eval_progress(self, event: EvalProgress) -> None:
        """Handle the end of a host call of an evaluation."""

    def on_eval(self, event: EvalEnd) -> None:
        """Handle the end of an evaluation."""

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """Handle a saved checkpoint."""

    def flush(self) -> None:
        """Write what is still in memory: a checkpoint is about to be saved, or the run has failed."""

    def on_rollback(self, event: RolledBack) -> None:
        """Handle the return to an earlier step."""

    def on_end(self, event: Summary) -> None:
        """Handle the end of the run, even if it was interrupted."""

    def on_failure(self, event: RunFailed) -> None:
        """Handle an error that ends the run; `on_end` does not follow."""


def _nothing() -> None:
    pass


class Observers(Observer):
    """Several observers as one, notified in order.

    `before_others` is called before all events but `on_step`: the loop reports steps that wait to be reported.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._all: Tuple[Observer, ...] = tuple(observers)
        self.before_others: Callable[[], None] = _nothing
        self.compiled: Dict[str, CompileEnd] = {}  # the last compilation of each mode
        self.takes_steps_late = all(
            observer.takes_steps_late or type(observer).on_step is Observer.on_step for observer in self._all
        )

    def on_start(self, event: RunStart) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_start(event)

    def on_note(self, event: Note) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_note(event)

    def on_compile_start(self, event: CompileStart) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_compile_start(event)

    def on_compile_end(self, event: CompileEnd) -> None:
        self.before_others()
        self.compiled[event.mode] = event
        for observer in self._all:
            observer.on_compile_end(event)

    def on_device_wait(self, event: DeviceWait) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_device_wait(event)

    def on_step(self, event: StepEnd) -> None:
        for observer in self._all:
            observer.on_step(event)

    def on_eval_progress(self, event: EvalProgress) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_eval_progress(event)

    def on_eval(self, event: EvalEnd) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_eval(event)

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_checkpoint(event)

    def flush(self) -> None:
        self.before_others()
        with contextlib.ExitStack() as every:  # also those after one that fails
            for observer in reversed(self._all):
                every.callback(observer.flush)

    def on_rollback(self, event: RolledBack) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_rollback(event)

    def on_end(self, event: Summary) -> None:
        self.before_others()
        for observer in self._all:
            observer.on_end(event)

    def on_failure(self, event: RunFailed) -> None:
        for observer in self._all:
            with contextlib.suppress(Exception):  # the failure came first
                observer.on_failure(event)
