"""Samples that cannot be read and are skipped: known to all processes that read data, counted, and reported once."""

from __future__ import annotations

import multiprocessing
from typing import Any, Dict, List, Mapping, Set, Tuple

import numpy
import torch

__all__ = ["SkippedSamples", "SkippingData"]

_LONGEST_ERROR = 300  # bytes


class SkippedSamples:
    """The samples of a run that could not be read, of all splits.

    Args:
        lengths: Samples of each split whose samples can be skipped.
        most: How many different samples may be skipped, in all splits together.
    """

    def __init__(self, lengths: Mapping[str, int], most: int) -> None:
        self.most = most
        self._parts: Dict[str, slice] = {}
        total = 0
        for split, length in lengths.items():
            self._parts[split] = slice(total, total + length)
            total += length
        # Shared memory without a name: nothing is left behind when a process is killed. A byte for each sample needs
        # no lock, which a killed worker could hold forever.
        self._flags = multiprocessing.RawArray("b", total)
        self._changes = multiprocessing.RawValue("q", 0)
        self._text = multiprocessing.RawArray("c", _LONGEST_ERROR)
        self._reported: Dict[str, Set[int]] = {split: set() for split in lengths}
        self._reported_changes = 0

    @property
    def changes(self) -> int:
        """A number that changes whenever a sample is added; quicker than `indices`."""
        return int(self._changes.value)

    @property
    def total(self) -> int:
        """The number of samples, of all splits."""
        return int(numpy.count_nonzero(numpy.frombuffer(self._flags, numpy.int8)))

    @property
    def last_error(self) -> str:
        """The error of the sample added last."""
        return self._text.value.decode("utf-8", "replace")

    def covers(self, split: str) -> bool:
        """Return whether samples of a split are skipped instead of ending the run."""
        return split in self._parts

    def indices(self, split: str) -> Tuple[int, ...]:
        """Return the indices of a split's samples, in order; none for a split whose samples are not skipped."""
        if split not in self._parts:
            return ()
        flags = numpy.frombuffer(self._flags, numpy.int8)[self._parts[split]]
        return tuple(int(index) for index in numpy.flatnonzero(flags))

    def unreported(self) -> Dict[str, List[int]]:
        """Return the samples by split that no earlier call returned."""
        if self.changes == self._reported_changes:
            return {}
        self._reported_changes = self.changes
        found = {}
        for split, known in self._reported.items():
            new = [index for index in self.indices(split) if index not in known]
            known.update(new)
            if new:
                found[split] = new
        return found

    def add(self, split: str, index: int, error: Exception) -> None:
        """Count a sample, unless it was met before.

        Raises:
            RuntimeError: There are too many.
        """
        position = self._parts[split].start + index
        if self._flags[position]:
            return
        text = f"{type(error).__name__}: {error}"
        known = self.total
        if known >= self.most:
            raise RuntimeError(
                f"sample {index} cannot be read ({text}), and {known} others could not be read before "
                f"(loader.max_errors={self.most})"
            ) from error
        self._text.value = text.encode("utf-8", "replace")[: _LONGEST_ERROR - 1]
        self._flags[position] = 1
        self._changes.value += 1


class SkippingData(torch.utils.data.Dataset):
    """A data set with the next readable sample in place of each that cannot be read: the same one in every epoch.

    Args:
        data: The data set.
        split: Its name.
        skipped: Where samples that cannot be read are counted.
    """

    def __init__(self, data: Any, split: str, skipped: SkippedSamples) -> None:
        self._data = data
        self._split = split
        self._skipped = skipped
        if hasattr(data, "set_epoch"):
            self.set_epoch = data.set_epoch

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        for _ in range(len(self._data)):
            try:
                return self._data[index]
            except Exception as error:  # of any kind: the user's code reads the sample
                index = int(index) % len(self._data)
                self._skipped.add(self._split, index, error)
            index = (index + 1) % len(self._data)
        raise RuntimeError(f"no sample of the split `{self._split}` can be read ({self._skipped.last_error})")
