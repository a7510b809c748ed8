"""What a run tells its observers, as plain frozen data: loggers and the console know nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Mapping, Optional, Sequence, Tuple

__all__ = [
    "CheckpointSaved",
    "CompileEnd",
    "CompileStart",
    "EvalEnd",
    "Note",
    "Observer",
    "Observers",
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
    """Training begins, or goes on after ``start_step`` weight updates."""

    name: str
    folder: str
    start_step: int
    total_steps: Optional[int]
    resumed_from: Optional[str] = None


@dataclass(frozen=True)
class CompileStart:
    """The engine begins to compile for ``mode``: ``training`` or ``inference``."""

    mode: str


@dataclass(frozen=True)
class CompileEnd:
    """The engine has compiled. ``from_cache`` is None where the engine does not tell."""

    mode: str
    seconds: float
    from_cache: Optional[bool] = None


@dataclass(frozen=True)
class StepEnd:
    """One host call is done; numbers cover what happened since the last such event.

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
        data_wait: Share of the time that was spent waiting for data, 0 to 1.
        eta_seconds: Estimated time to the end; None while unknown.
        total_steps: Weight updates of the whole run, None for a stream without an end.
        logged: True where `log_every_steps` asks for a record; the console may show the others as well.
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


@dataclass(frozen=True)
class EvalEnd:
    """An evaluation is done. ``metrics`` holds ``loss`` and every metric declared for evaluation."""

    step: int
    epoch: float
    split: str
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    monitor: Optional[str] = None
    is_best: bool = False


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is on disk."""

    step: int
    path: str
    seconds: float
    is_best: bool = False


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Args:
        status: ``done``, ``interrupted`` or ``failed``.
        step: Weight updates done, those before a resume included.
        epoch: Passes over the data done.
        samples: Samples trained on in this process.
        loss: Last mean training loss.
        metrics: Last evaluation's values.
        monitor: Name of the watched metric.
        best: Its best value.
        best_step: Weight updates at which it was reached.
        samples_per_second: Mean throughput of this process.
        seconds: Wall time by kind: compile, train, data_wait, eval, checkpoint, total.
        checkpoint: Path of the newest checkpoint.
        best_checkpoint: Path of the best one.
        resume_command: What to type to go on.
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

    def to_dict(self) -> Dict[str, object]:
        """The summary as JSON-ready data."""
        plain = dict(vars(self))
        plain["metrics"] = dict(self.metrics)
        plain["seconds"] = dict(self.seconds)
        return plain


class Observer:
    """Base of everything that listens to a run; override what is of interest."""

    def on_start(self, event: RunStart) -> None:
        """Training begins."""

    def on_note(self, event: Note) -> None:
        """There is something to say."""

    def on_compile_start(self, event: CompileStart) -> None:
        """The engine begins to compile."""

    def on_compile_end(self, event: CompileEnd) -> None:
        """The engine has compiled."""

    def on_step(self, event: StepEnd) -> None:
        """A host call is done."""

    def on_eval(self, event: EvalEnd) -> None:
        """An evaluation is done."""

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """A checkpoint is on disk."""

    def on_end(self, event: Summary) -> None:
        """The run is over, also when it was interrupted."""


class Observers(Observer):
    """Several observers as one, told in their order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._all: Tuple[Observer, ...] = tuple(observers)

    def on_start(self, event: RunStart) -> None:
        for observer in self._all:
            observer.on_start(event)

    def on_note(self, event: Note) -> None:
        for observer in self._all:
            observer.on_note(event)

    def on_compile_start(self, event: CompileStart) -> None:
        for observer in self._all:
            observer.on_compile_start(event)

    def on_compile_end(self, event: CompileEnd) -> None:
        for observer in self._all:
            observer.on_compile_end(event)

    def on_step(self, event: StepEnd) -> None:
        for observer in self._all:
            observer.on_step(event)

    def on_eval(self, event: EvalEnd) -> None:
        for observer in self._all:
            observer.on_eval(event)

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        for observer in self._all:
            observer.on_checkpoint(event)

    def on_end(self, event: Summary) -> None:
        for observer in self._all:
            observer.on_end(event)
