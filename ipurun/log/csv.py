"""CSV logger: metrics.csv with one value per row, so that all splits and metrics fit the same columns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Mapping, Union

from ipurun.files import write_atomically
from ipurun.log.jsonl import eval_record, step_record
from ipurun.training.events import EvalEnd, Observer, RolledBack, RunStart, StepEnd, Summary

__all__ = ["CsvLogger"]

_COLUMNS = ("step", "epoch", "split", "name", "value")
_NOT_VALUES = {"step", "epoch", "split", "call", "samples", "seconds", "is_best"}


class CsvLogger(Observer):
    """Writes ``metrics.csv`` in the run folder, with the columns step, epoch, split, name, value.

    Args:
        folder: The run folder; a resumed run continues its file, without the steps that it repeats.
    """

    takes_steps_late = True

    def __init__(self, folder: Union[str, Path]) -> None:
        self._path = Path(folder) / "metrics.csv"
        self._open()

    def on_start(self, event: RunStart) -> None:
        if event.resumed_from:
            self._drop_after(event.start_step)

    def on_rollback(self, event: RolledBack) -> None:
        self._drop_after(event.step)

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            self._write(step_record(event))

    def on_eval(self, event: EvalEnd) -> None:
        self._write(eval_record(event))

    def on_end(self, event: Summary) -> None:
        self._stream.close()

    def _open(self) -> None:
        is_new = not self._path.exists()
        self._stream = self._path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._stream)
        if is_new:
            self._writer.writerow(_COLUMNS)

    def _drop_after(self, step: int) -> None:
        """Drop the rows of steps that are about to be repeated."""
        self._stream.close()
        with self._path.open(encoding="utf-8", errors="replace", newline="") as stream:
            header, *rows = stream.read().splitlines(keepends=True)
        numbers = (row.partition(",")[0] for row in rows)
        kept = [row for row, number in zip(rows, numbers) if number.isdigit() and int(number) <= step]
        write_atomically(self._path, header + "".join(kept))
        self._open()

    def _write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name not in _NOT_VALUES and not isinstance(value, (list, tuple)):  # a matrix fits no cell
                self._writer.writerow((record["step"], record["epoch"], record["split"], name, value))
