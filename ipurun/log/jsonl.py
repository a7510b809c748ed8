"""JSON lines logger: metrics.jsonl, which every run writes."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

from ipurun.files import write_atomically
from ipurun.training.events import EvalEnd, Observer, RolledBack, RunStart, StepEnd, Summary

__all__ = ["JsonlLogger", "eval_record", "records_of", "step_record"]


_LONGEST_WAIT_SECONDS = 0.2


class JsonlLogger(Observer):
    """Appends training and evaluation metrics to a file.

    Args:
        path: The file; a resumed run appends to it.
    """

    takes_steps_late = True

    def __init__(self, path: Union[str, Path]) -> None:
        self._path = Path(path)
        self._stream = self._open()
        self._waiting: List[Tuple[StepEnd, float]] = []  # with the time of each
        self._written = 0.0  # when steps were last written

    def on_start(self, event: RunStart) -> None:
        if event.resumed_from:
            self._drop_after(event.start_step)

    def on_rollback(self, event: RolledBack) -> None:
        self._drop_after(event.step)

    def on_step(self, event: StepEnd) -> None:
        # Many short steps are written together: one at a time they would cost more than all else between two steps.
        if event.logged:
            now = time.time()
            self._waiting.append((event, now))
            if now - self._written >= _LONGEST_WAIT_SECONDS:
                self.flush()
                self._written = now

    def on_eval(self, event: EvalEnd) -> None:
        self.flush()
        self._write([(eval_record(event), time.time())])

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._write([(step_record(event), when) for event, when in waiting])

    def on_end(self, event: Summary) -> None:
        self.flush()
        self._stream.close()

    def _drop_after(self, step: int) -> None:
        """Drop the records of steps that are about to be repeated: they must not be recorded twice."""
        self.flush()
        self._stream.close()
        _drop_after(self._path, step)
        self._stream = self._open()

    def _open(self) -> IO[str]:
        return self._path.open("a", encoding="utf-8")

    def _write(self, records: Sequence[Tuple[Mapping[str, Any], float]]) -> None:
        self._stream.writelines(json.dumps({**record, "time": round(when, 3)}) + "\n" for record, when in records)
        self._stream.flush()


def step_record(event: StepEnd) -> Dict[str, Any]:
    """Return a host call as flat data."""
    return {
        "split": "train",
        "step": event.step,
        "call": event.call,
        "epoch": round(event.epoch, 6),
        "samples": event.samples,
        "loss": _finite(event.loss),
        "lr": event.lr,
        **{name: _finite(value) for name, value in event.metrics.items()},
        "samples_per_second": round(event.samples_per_second, 3),
        "call_seconds": round(event.call_seconds, 6),
        "data_wait": round(event.data_wait, 4),
    }


def eval_record(event: EvalEnd) -> Dict[str, Any]:
    """Return an evaluation as flat data."""
    return {
        "split": event.split,
        "step": event.step,
        "epoch": round(event.epoch, 6),
        "samples": event.samples,
        **{name: _finite(value) for name, value in event.metrics.items()},
        **event.matrices,
        "seconds": round(event.seconds, 6),
        "is_best": event.is_best,
    }


def records_of(path: Path) -> Iterator[Dict[str, Any]]:
    """Yield the records of a file; truncated and damaged lines are left out."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                if isinstance(record["step"], int) and isinstance(record["split"], str):
                    yield record


def _drop_after(path: Path, step: int) -> None:
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records_of(path) if record["step"] <= step))


def _finite(value: float) -> Any:
    # NaN and infinity are not JSON: many readers would refuse the whole file.
    return value if math.isfinite(value) else str(value)
