"""Record when samples are read and batches are made, in whichever process does it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

__all__ = ["ReadingTimes"]


class ReadingTimes:
    """The times of the processes that read a data set, each in a separate file until they are collected."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ipurun-reading-")

    def wrapped(self, data: Any) -> Any:
        """Return a data set that notes when its samples are read."""
        return _TimedSamples(data)

    def collate(self, collate: Callable[[List[Any]], Any]) -> Callable[[List[Any]], Any]:
        """Return a collate function that records the batch it makes."""
        return _TimedCollate(collate, self._folder.name)

    def collect(self) -> List[Dict[str, Any]]:
        """Return the micro-batches so far: pid, begin, collated, end and samples, by `time.perf_counter`."""
        found: List[Dict[str, Any]] = []
        for path in sorted(Path(self._folder.name).glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    found.append({"pid": int(path.stem), **json.loads(line)})
                except ValueError:  # the end of a file that is being written
                    continue
        return found

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()


_reading: Dict[str, Optional[float]] = {"begin": None}  # when this process began to read the current micro-batch


class _TimedSamples(torch.utils.data.Dataset):
    """A data set that notes when the first sample since the last batch was read."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        _note_begin()
        return self._data[index]

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__":  # how torch asks whether a data set reads several samples at once
            read = self._data.__getitems__

            def read_noted(indices: Any) -> Any:
                _note_begin()
                return read(indices)

            return read_noted
        if name == "_data" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._data, name)


def _note_begin() -> None:
    if _reading["begin"] is None:
        _reading["begin"] = time.perf_counter()


class _TimedCollate:
    """Collate function that appends a line for each batch to the file of its process."""

    def __init__(self, collate: Callable[[List[Any]], Any], folder: str) -> None:
        self._collate = collate
        self._folder = folder

    def __call__(self, samples: List[Any]) -> Any:
        begun = time.perf_counter()
        batch = self._collate(samples)
        first, _reading["begin"] = _reading["begin"], None
        line = {"begin": first or begun, "collated": begun, "end": time.perf_counter(), "samples": len(samples)}
        try:
            with open(os.path.join(self._folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:  # the run has ended, or its disk is full: a batch is worth more than its time
            pass
        return batch
