"""Samples that cannot be read and are skipped: known to all processes that read data, counted, and reported once."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import numpy
import torch

from ipurun.distributed.team import Team
from ipurun.inspect.data import is_read_by_position, is_stream, length_of

__all__ = ["SkippedSamples", "WithoutMarks", "skipping"]

_LONGEST_ERROR = 300  # bytes
_MOST_OF_STREAM = 100_000  # samples of a stream that one process can skip
LEFT_OUT = object()  # in place of a sample that an evaluation leaves out


class SkippedSamples:
    """The samples of a run that could not be read, of all splits.

    Args:
        splits: The data of each split whose samples can be skipped.
        most: How many different samples may be skipped, in all splits together.
        workers: Processes that read a split at the same time.
    """

    def __init__(self, splits: Mapping[str, Any], most: int, workers: int = 0) -> None:
        self.most = most
        # Shared memory without a name: nothing is left behind when a process is killed. No two processes write to the
        # same place, so there is no lock, which a killed worker could hold forever.
        self._found: Dict[str, Any] = {
            split: _FoundInStream(min(most, _MOST_OF_STREAM), max(workers, 1)) if is_stream(data) else _Found(len(data))
            for split, data in splits.items()
        }
        self._changes = multiprocessing.RawValue("q", 0)
        self._text = multiprocessing.RawArray("c", _LONGEST_ERROR)
        self._reported: Dict[str, Set[int]] = {split: set() for split in splits}
        self._reported_changes = 0

    @property
    def changes(self) -> int:
        """A number that changes whenever a sample is added; quicker than `indices`."""
        return int(self._changes.value)

    @property
    def total(self) -> int:
        """The number of samples, of all splits."""
        return sum(found.count for found in self._found.values())

    @property
    def last_error(self) -> str:
        """The error of the sample added last."""
        return self._text.value.decode("utf-8", "replace")

    def covers(self, split: str) -> bool:
        """Return whether samples of a split are skipped instead of ending the run."""
        return split in self._found

    def indices(self, split: str) -> Tuple[int, ...]:
        """Return the indices of a split's samples, in order; none for a split whose samples are not skipped."""
        return self._found[split].indices if split in self._found else ()

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

    def share(self, team: Team) -> Dict[str, List[int]]:
        """Return the samples by split that no process of a run has reported yet; all must call it together.

        Raises:
            RuntimeError: The processes together could not read too many.
        """
        found: Dict[str, Set[int]] = {}
        for new, error in team.exchanged((self.unreported(), self.last_error)):
            for split, indices in new.items():
                found.setdefault(split, set()).update(indices)
                self._set_error(error)
        for split, numbers in found.items():
            self._reported[split].update(numbers)
            for index in numbers:
                self._found[split].note(index)
        if self.total > self.most:
            raise RuntimeError(
                f"{self.total} samples cannot be read (the last one: {self.last_error}; loader.max_errors={self.most})"
            )
        return {split: sorted(numbers) for split, numbers in found.items()}

    def add(self, split: str, index: int, error: Exception) -> None:
        """Count a sample, unless it was met before.

        Raises:
            RuntimeError: There are too many.
        """
        if self._found[split].has(index):
            return
        text = f"{type(error).__name__}: {error}"
        known = self.total
        if known >= self.most or not self._found[split].has_space:
            raise RuntimeError(
                f"sample {index} cannot be read ({text}), and {known} others could not be read before "
                f"(loader.max_errors={self.most})"
            ) from error
        self._set_error(text)
        self._found[split].add(index)
        self._changes.value += 1

    def _set_error(self, text: str) -> None:
        self._text.value = text.encode("utf-8", "replace")[: _LONGEST_ERROR - 1]


class _Found:
    """Samples of data that is read by index: a byte for each sample."""

    has_space = True

    def __init__(self, length: int) -> None:
        self._flags = multiprocessing.RawArray("b", length)

    @property
    def count(self) -> int:
        return int(numpy.count_nonzero(numpy.frombuffer(self._flags, numpy.int8)))

    @property
    def indices(self) -> Tuple[int, ...]:
        return tuple(int(index) for index in numpy.flatnonzero(numpy.frombuffer(self._flags, numpy.int8)))

    def has(self, index: int) -> bool:
        return bool(self._flags[index])

    def add(self, index: int) -> None:
        self._flags[index] = 1

    note = add


class _FoundInStream:
    """Samples of a stream, whose length may be unknown: a list of each process that reads it."""

    def __init__(self, most: int, processes: int) -> None:
        self._most = most
        self._noted: Set[int] = set()
        self._lists = multiprocessing.RawArray("q", most * processes)  # one more than the index; 0: free

    @property
    def count(self) -> int:
        return len(self.indices)

    @property
    def indices(self) -> Tuple[int, ...]:
        listed = numpy.unique(numpy.frombuffer(self._lists, numpy.int64))
        return tuple(sorted({int(value) - 1 for value in listed if value} | self._noted))

    @property
    def has_space(self) -> bool:
        return not self._own()[-1]

    def has(self, index: int) -> bool:
        return index + 1 in self._own()

    def add(self, index: int) -> None:
        own = self._own()
        own[int(numpy.count_nonzero(own))] = index + 1

    def note(self, index: int) -> None:
        """Add a sample that another process of the run could not read."""
        self._noted.add(index)

    def _own(self) -> numpy.ndarray:
        worker = torch.utils.data.get_worker_info()
        first = 0 if worker is None else worker.id * self._most
        return numpy.frombuffer(self._lists, numpy.int64)[first : first + self._most]


def skipping(data: Any, split: str, skipped: SkippedSamples, marks: bool, limit: Optional[int] = None) -> Any:
    """Return a data set of which samples that cannot be read are skipped.

    Args:
        data: The data set.
        split: Its name.
        skipped: Where samples that cannot be read are counted.
        marks: For streams: whether `LEFT_OUT` takes the place of such a sample, instead of the next one.
        limit: For streams: how many samples are read, with those that cannot be; None: all.
    """
    if not is_stream(data):
        return SkippingData(data, split, skipped)
    kind = _SkippingReads if is_read_by_position(data) else _SkippingStream
    return kind(data, split, skipped, marks, limit)


class WithoutMarks:
    """Collate samples without those that are left out; an empty batch if none is left.

    Args:
        collate: Makes a batch of samples.
    """

    def __init__(self, collate: Callable[[List[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: List[Any]) -> Any:
        kept = [sample for sample in samples if sample is not LEFT_OUT]
        return self._collate(kept) if kept else []


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


class _SkippingStream(torch.utils.data.IterableDataset):
    """An iterable without the samples that cannot be read; see `skipping`.

    Its iterator must be one that can be asked for the next sample after an error. That of a generator function cannot.
    """

    def __init__(self, data: Any, split: str, skipped: SkippedSamples, marks: bool, limit: Optional[int]) -> None:
        self._data = data
        self._split = split
        self._skipped = skipped
        self._marks = marks
        self._limit = limit
        if hasattr(data, "set_epoch"):
            self.set_epoch = data.set_epoch

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._samples(), self._limit)

    def _samples(self) -> Iterator[Any]:
        iterator, position = iter(self._data), 0
        failed: Optional[Exception] = None
        while True:
            try:
                sample = next(iterator)
            except StopIteration:
                if failed is not None and position != length_of(self._data):
                    raise RuntimeError(
                        f"sample {position - 1} of the split `{self._split}` cannot be skipped, because the iterator "
                        f"ended with its error ({type(failed).__name__}: {failed}): give the data set "
                        "`read(start, stop)` or make it readable by index"
                    ) from failed
                return
            except Exception as error:  # of any kind: the user's code reads the sample
                self._skipped.add(self._split, position, error)
                failed, position = error, position + 1
                if self._marks:
                    yield LEFT_OUT
                continue
            failed, position = None, position + 1
            yield sample


class _SkippingReads(_SkippingStream):
    """A stream that is read by position; see `skipping`. Every position has a sample, or a mark."""

    def __iter__(self) -> Iterator[Any]:
        length = length_of(self._data)
        return self.read(0, 2**62 if length is None else length)

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the samples from one position to another."""
        stop = stop if self._limit is None else min(stop, self._limit)
        while start < stop:
            given = 0
            try:
                for sample in self._data.read(start, stop):
                    given += 1
                    yield sample
                return
            except Exception as error:  # of any kind: the user's code reads the sample
                start += given
                self._skipped.add(self._split, start, error)
            yield LEFT_OUT if self._marks else self._next_readable(start)
            start += 1

    def _next_readable(self, position: int) -> Any:
        """Return the first sample after a position that can be read, from the beginning on after the end."""
        for first in (position + 1, 0):
            while first != position:
                try:
                    for sample in self._data.read(first, first + 1):
                        return sample
                    break  # the end of the stream
                except Exception as error:
                    self._skipped.add(self._split, first, error)
                first += 1
        raise RuntimeError(f"no sample of the split `{self._split}` can be read ({self._skipped.last_error})")
