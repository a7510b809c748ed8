"""Code shared by loggers for experiment trackers: the stored config, the remote run, failing loggers."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import yaml
from omegaconf import OmegaConf

from ipurun.errors import ConfigError
from ipurun.files import write_atomically
from ipurun.log.jsonl import records_of
from ipurun.training.events import (
    CheckpointSaved,
    CompileEnd,
    CompileStart,
    DeviceWait,
    EvalEnd,
    EvalProgress,
    Note,
    Observer,
    RolledBack,
    RunFailed,
    RunStart,
    StepEnd,
    Summary,
)

__all__ = ["DroppedIfFailing", "Record", "Tracker", "chosen_keys", "missing_package", "step_values", "stored_config"]

_LONGEST_WAIT_SECONDS = 2.0
# What a killed client may not have written or sent. Generous: a record that arrives twice does less harm than a gap.
_MOST_LOST_BYTES = 64 * 1024
_MOST_LOST_SECONDS = 60.0
_NOT_VALUES = {"split", "step", "call", "epoch", "samples", "call_seconds", "seconds", "is_best", "time"}


class Record(NamedTuple):
    """Values of a step for a tracker; ``when`` in seconds since 1970."""

    split: str
    step: int
    values: Mapping[str, float]
    matrices: Mapping[str, Sequence[Sequence[float]]]
    when: float


class Tracker(Observer):
    """A logger for a service that keeps a run over resumes but cannot forget steps.

    A run that resumes or rolls back repeats steps. Records of them that the service already has are not sent again,
    unless their loss differs, as after a rollback to a lower learning rate: both attempts are then shown. Records from
    before the checkpoint that the service may lack, because the process was killed or the logger dropped, are sent from
    ``metrics.jsonl``. ``NAME_run.json`` in the run folder has the id of the run in the service, and the last step of
    each split that it is known to have.

    Args:
        folder: The run folder.
        name: Name of the service.
    """

    is_written_at_once = True  # whether the service has what `send` was given when that returns

    def __init__(self, folder: Union[str, Path], name: str) -> None:
        self.folder = Path(folder)
        self._file = self.folder / f"{name}_run.json"
        self._id: Optional[str] = None
        self._sent: Dict[str, int] = {}
        self._confirmed: Dict[str, int] = {}
        self._earlier: Dict[Tuple[str, int], float] = {}  # losses of the steps that are about to be repeated
        self._waiting: List[Record] = []
        self._sent_at = 0.0
        self._sent_bytes = 0  # at least
        self._unconfirmed: Deque[Tuple[float, int, Dict[str, int]]] = deque()  # when, `_sent_bytes` and `_sent` then

    def open_run(self, event: RunStart, known: Optional[str]) -> str:
        """Start a run in the service, or continue the one with a known id; return its id."""
        raise NotImplementedError

    def send(self, records: Sequence[Record]) -> None:
        """Send records, in order."""
        raise NotImplementedError

    def close_run(self, status: str) -> None:
        """End the run in the service, if one was started; the status is that of a summary, or ``failed``."""
        raise NotImplementedError

    def on_end(self, event: Summary) -> None:
        self.flush()
        self.close_run(event.status)

    def on_failure(self, event: RunFailed) -> None:
        self.close_run("failed")

    def on_start(self, event: RunStart) -> None:
        known = _read(self._file)
        self._id = self.open_run(event, known.get("id"))
        if self._id == known.get("id"):
            self._confirmed = dict(known.get("sent", {}))
            self._sent = dict(self._confirmed)
        self._store()
        if event.resumed_from:
            self._note_repeats(event.start_step)
            self._waiting = [record for record in self._recorded() if record.step <= event.start_step]
            self._waiting = [record for record in self._waiting if record.step > self._sent.get(record.split, 0)]
            self.flush()

    def on_rollback(self, event: RolledBack) -> None:
        self.flush()
        self._note_repeats(event.step)

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            self._add("train", event.step, step_values(event))
            # Many short steps are sent together: a service is slower than they are.
            if time.monotonic() - self._sent_at >= _LONGEST_WAIT_SECONDS:
                self.flush()

    def on_eval(self, event: EvalEnd) -> None:
        self._add(event.split, event.step, event.metrics, event.matrices)
        self.flush()

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.send(waiting)
            for record in waiting:
                self._sent[record.split] = max(record.step, self._sent.get(record.split, 0))
            if self.is_written_at_once:
                self.confirm()
            else:
                self._confirm_earlier(waiting)
        self._sent_at = time.monotonic()

    def confirm(self) -> None:
        """Record that the service has all that was sent, also if this process is killed now."""
        self._confirmed = dict(self._sent)
        self._store()

    def _confirm_earlier(self, sent: Sequence[Record]) -> None:
        """Record that the service has what was sent so long ago, and before so much else, that it must be written."""
        now = time.monotonic()
        self._sent_bytes += sum(len(name) + len(str(value)) for record in sent for name, value in record.values.items())
        self._unconfirmed.append((now, self._sent_bytes, dict(self._sent)))
        before = self._confirmed
        while (
            self._unconfirmed[0][0] <= now - _MOST_LOST_SECONDS
            and self._unconfirmed[0][1] <= self._sent_bytes - _MOST_LOST_BYTES
        ):
            self._confirmed = self._unconfirmed.popleft()[2]
        if self._confirmed is not before:
            self._store()

    def _add(
        self,
        split: str,
        step: int,
        values: Mapping[str, float],
        matrices: Mapping[str, Sequence[Sequence[float]]] = {},  # never changed
    ) -> None:
        loss = values.get("loss", math.nan)
        if step > self._sent.get(split, 0) or not _same(self._earlier.get((split, step), loss), loss):
            self._waiting.append(Record(split, step, values, matrices, time.time()))

    def _note_repeats(self, step: int) -> None:
        # The file still has the repeated steps: trackers are notified before the logger that drops them from it.
        self._earlier = {
            (record.split, record.step): record.values["loss"]
            for record in self._recorded()
            if record.step > step and "loss" in record.values
        }

    def _recorded(self) -> Iterator[Record]:
        """Yield the records of ``metrics.jsonl``."""
        for record in records_of(self.folder / "metrics.jsonl"):
            values = {name: value for name, value in record.items() if name not in _NOT_VALUES}
            matrices = {name: value for name, value in values.items() if isinstance(value, list)}
            numbers = {name: float(value) for name, value in values.items() if name not in matrices}
            yield Record(record["split"], record["step"], numbers, matrices, float(record.get("time", time.time())))

    def _store(self) -> None:
        write_atomically(self._file, json.dumps({"id": self._id, "sent": self._confirmed}) + "\n")


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def _read(file: Path) -> Dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class DroppedIfFailing(Observer):
    """A logger that is dropped with a warning when it fails: training does not depend on it.

    A tracker that was dropped still ends its run in the service when training ends, if it can: until then the failure
    may have passed, and a second attempt at once could make training wait again.

    Args:
        name: Its name in the config.
        logger: The logger.
        warn: Shows a warning to the user.
    """

    def __init__(self, name: str, logger: Observer, warn: Callable[[str], None]) -> None:
        self._name = name
        self._logger: Optional[Observer] = logger
        self._dropped: Optional[Tracker] = None
        self._warn = warn
        self.takes_steps_late = logger.takes_steps_late

    def on_start(self, event: RunStart) -> None:
        self._pass_on("on_start", event)

    def on_note(self, event: Note) -> None:
        self._pass_on("on_note", event)

    def on_compile_start(self, event: CompileStart) -> None:
        self._pass_on("on_compile_start", event)

    def on_compile_end(self, event: CompileEnd) -> None:
        self._pass_on("on_compile_end", event)

    def on_step(self, event: StepEnd) -> None:
        self._pass_on("on_step", event)

    def on_device_wait(self, event: DeviceWait) -> None:
        self._pass_on("on_device_wait", event)

    def on_eval_progress(self, event: EvalProgress) -> None:
        self._pass_on("on_eval_progress", event)

    def on_eval(self, event: EvalEnd) -> None:
        self._pass_on("on_eval", event)

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self._pass_on("on_checkpoint", event)

    def flush(self) -> None:
        self._pass_on("flush")

    def on_rollback(self, event: RolledBack) -> None:
        self._pass_on("on_rollback", event)

    def on_end(self, event: Summary) -> None:
        self._pass_on("on_end", event)
        self._close_dropped(event.status)

    def on_failure(self, event: RunFailed) -> None:
        self._pass_on("on_failure", event)
        self._close_dropped("failed")

    def _close_dropped(self, status: str) -> None:
        tracker, self._dropped = self._dropped, None
        if tracker is not None:
            with contextlib.suppress(Exception):  # of any kind; the user knows that the logger failed
                tracker.close_run(status)

    def _pass_on(self, method: str, *event: Any) -> None:
        if self._logger is None:
            return
        try:
            getattr(self._logger, method)(*event)
        except Exception as error:  # of any kind: it comes from a library, a network or the user's code
            if isinstance(self._logger, Tracker):
                self._dropped = self._logger
            self._logger = None
            self._warn(f"`logger.{self._name}` failed in {method} and is dropped: {type(error).__name__}: {error}")


def stored_config(folder: Path) -> Dict[str, Any]:
    """Return the config of a run as its folder has it: secrets are masked, or interpolations that stay text."""
    stored = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
    return {str(key): value for key, value in stored.items()} if isinstance(stored, dict) else {}


def chosen_keys(folder: Path) -> Dict[str, Any]:
    """Return the keys that were typed or written in YAML and have a single value: what tells runs apart."""
    flat = dict(_leaves(stored_config(folder)))
    try:
        origins = yaml.safe_load((folder / "origins.yaml").read_text(encoding="utf-8")) or {}
    except FileNotFoundError:  # a run folder of the first edition
        origins = flat
    return {key: value for key, value in flat.items() if key in origins and isinstance(value, (bool, int, float, str))}


def _leaves(value: Any, path: str = "") -> Iterator[Tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def step_values(event: StepEnd) -> Dict[str, float]:
    """Return the values of a host call that trackers plot."""
    return {
        "loss": event.loss,
        "lr": event.lr,
        "samples_per_second": event.samples_per_second,
        "data_wait": event.data_wait,
        **event.metrics,
    }


def missing_package(logger: str, error: ImportError) -> ConfigError:
    """Return the error for a logger whose package is not installed."""
    return ConfigError(
        f"`logger.{logger}` needs a package that is not installed",
        seen=str(error),
        fix=f"pip install 'ipurun[{logger}]', or remove the logger",
        key=f"logger.{logger}",
    )
