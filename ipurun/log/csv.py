"""CSV logger: metrics.csv with one value per row, so that all splits and metrics fit the same columns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Mapping, Union

from ipurun.log.jsonl import eval_record, step_record
from ipurun.training.events import EvalEnd, Observer, StepEnd, Summary

__all__ = ["CsvLogger"]

_COLUMNS = ("step", "epoch", "split", "name", "value")
_NOT_VALUES = {"step", "epoch", "split", "call", "samples", "seconds", "is_best"}


class CsvLogger(Observer):
    """Writes ``metrics.csv`` in the run folder, with the columns step, epoch, split, name, value.

    Args:
        folder: The run folder; a resumed run appends to the same file.
    """

    takes_steps_late = True

    def __init__(self, folder: Union[str, Path]) -> None:
        path = Path(folder) / "metrics.csv"
        is_new = not path.exists()
        self._stream = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._stream)
        if is_new:
            self._writer.writerow(_COLUMNS)

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            self._write(step_record(event))

    def on_eval(self, event: EvalEnd) -> None:
        self._write(eval_record(event))

    def on_end(self, event: Summary) -> None:
        self._stream.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name not in _NOT_VALUES and not isinstance(value, (list, tuple)):  # a matrix fits no cell
                self._writer.writerow((record["step"], record["epoch"], record["split"], name, value))
