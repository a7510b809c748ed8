"""Divide a dataset between processes, and regroup batches into other sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Sequence

import torch
from torch.utils.data import Dataset, Sampler

from ipurun.emulator._capture import structures

Leaves = List[torch.Tensor]
"""The tensors of one item, in a fixed order."""


@dataclass(frozen=True)
class Partition:
    """A contiguous range of positions.

    Attributes:
        offset: First position.
        length: Number of positions.
        left_over: Shift of the range in every other epoch, so that the last items are used too.
    """

    offset: int
    length: int
    left_over: int


def partition_for(
    length: int, combined_batch_size: int, process_id: int, num_processes: int, *, drop_last: bool
) -> Partition:
    """Divide a dataset between processes.

    Args:
        length: Number of items in the whole dataset.
        combined_batch_size: Items that one call of the model takes.
        process_id: Index of this process.
        num_processes: Number of processes.
        drop_last: Give every process the same number of full batches and drop the rest.

    Raises:
        ZeroDivisionError: With `drop_last`, if there are fewer full batches than processes.
    """
    if drop_last:
        share = combined_batch_size * (length // (combined_batch_size * num_processes))
        return Partition(process_id * share, share, length % share)
    share, longer = divmod(length, num_processes)
    offset = process_id * share + min(process_id, longer)
    return Partition(offset, share + (process_id < longer), 0)


class PartitionedDataset(Dataset):
    """The items of one process.

    Args:
        dataset: The whole dataset, map-style.
        partition: The range that belongs to this process.
    """

    def __init__(self, dataset: Any, partition: Partition) -> None:
        self._dataset = dataset
        self._partition = partition

    def __len__(self) -> int:
        return self._partition.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._partition.length:
            raise IndexError(f"index {index} is outside the {self._partition.length} items of this process")
        return self._dataset[self._partition.offset + index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also looked up while unpickling, before `_dataset` is set
            raise AttributeError(name)
        return getattr(self._dataset, name)


class GlobalShuffleSampler(Sampler):
    """Yields the range of this process from a permutation that all processes share.

    A new permutation is drawn for every epoch.

    Args:
        length: Number of items in the whole dataset.
        partition: The range of this process.
        seed: The same in all processes.
    """

    def __init__(self, length: int, partition: Partition, seed: int) -> None:
        # Does not call the base class constructor: recent torch deprecates its only argument.
        self._length = length
        self._partition = partition
        self._generator = torch.Generator().manual_seed(seed)
        self._epochs = 0

    def __iter__(self) -> Iterator[int]:
        self._epochs += 1
        permutation = torch.randperm(self._length, generator=self._generator)
        offset = self._partition.offset + (self._partition.left_over if self._epochs % 2 else 0)
        return iter(permutation[offset : offset + self._partition.length].tolist())

    def __getstate__(self) -> Dict[str, Any]:
        # Not every torch can pickle a generator; its state can always be pickled.
        return {**self.__dict__, "_generator": self._generator.get_state().tolist()}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._generator = torch.Generator()
        self._generator.set_state(torch.tensor(state["_generator"], dtype=torch.uint8))

    def __len__(self) -> int:
        return self._partition.length


def concatenated(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure along dimension 0; take non-tensors from the first."""
    columns = zip(*(structures.tensors_in(batch) for batch in batches))
    return structures.rebuild(batches[0], iter([torch.cat(column) for column in columns]))


def grouped(batches: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """Join every `size` batches into one; an incomplete last group is kept unless `drop_last`."""
    group: List[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield concatenated(group)
            group = []
    if group and not drop_last:
        yield concatenated(group)


def rebatched(items: Iterable[Leaves], size: int, *, keep_remainder: bool) -> Iterator[Leaves]:
    """Regroup a stream of batches of any size into batches of `size` rows.

    Args:
        items: Batches as lists of tensors that agree in dimension 0.
        size: Rows in each yielded batch.
        keep_remainder: Also yield the rows left at the end, in a shorter batch.
    """
    pending: List[Leaves] = []
    pending_rows = 0
    for item in items:
        start, rows = 0, item[0].shape[0]
        while rows - start + pending_rows >= size:
            stop = start + size - pending_rows
            pending.append([leaf[start:stop] for leaf in item])
            yield _joined(pending)
            pending, pending_rows, start = [], 0, stop
        if start < rows:
            pending.append([leaf[start:] for leaf in item])
            pending_rows += rows - start
    if pending and keep_remainder:
        yield _joined(pending)


def _joined(pieces: List[Leaves]) -> Leaves:
    if len(pieces) == 1:
        return pieces[0]
    return [torch.cat(column) for column in zip(*pieces)]
