"""Datasets that worker processes can import."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from typing import Any, Iterator, List, Optional

import torch
from torch.utils.data import Dataset, IterableDataset


class Counting(Dataset):
    """Item i is a float tensor filled with i, and the integer i."""

    def __init__(self, length: int, broken_at: Optional[int] = None) -> None:
        self.length = length
        self.broken_at = broken_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.broken_at:
            raise ValueError(f"item {index} is broken")
        if index >= self.length:
            raise IndexError(index)
        return torch.full((2,), float(index)), torch.tensor(index)


class CountingDict(Counting):
    def __getitem__(self, index: int) -> Any:
        data, label = super().__getitem__(index)
        return {"data": data, "label": label}


class CountingNested(Counting):
    def __getitem__(self, index: int) -> Any:
        data, label = super().__getitem__(index)
        return data, (label, label)


class GrowingShapes(Counting):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index + 1)


class ChangingTypes(Counting):
    """Item 0 is a double, the others are floats."""

    def __getitem__(self, index: int) -> Any:
        data, label = super().__getitem__(index)
        return (data.double() if index == 0 else data), label


class ProcessIds(Counting):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(os.getpid())


class StartMethods(Counting):
    """Every item is the index of the start method in its process."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(multiprocessing.get_all_start_methods().index(multiprocessing.get_start_method()))


class Stuck(Counting):
    """Hangs after its second item."""

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            time.sleep(600)
        return super().__getitem__(index)


class CountingIterable(IterableDataset):
    def __init__(self, length: int) -> None:
        self.start = 0
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            yield torch.full((2,), float(self.start + index)), torch.tensor(self.start + index)


class CountingIterableWithLength(CountingIterable):
    def __len__(self) -> int:
        return self.length


def divide_between_workers(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    dataset = info.dataset
    share = math.ceil(dataset.length / info.num_workers)
    dataset.start = share * worker_id
    dataset.length = max(0, min(share, dataset.length - dataset.start))


class Pair:
    """A batch class that needs a custom parser."""

    def __init__(self, data: torch.Tensor, label: torch.Tensor) -> None:
        self.data = data
        self.label = label


def collate_into_pair(items: List[Any]) -> Pair:
    return Pair(torch.stack([data for data, _ in items]), torch.stack([label for _, label in items]))


def labels(batches: Any) -> List[List[int]]:
    """Return the labels of each batch, copied at once because asynchronous batches are overwritten."""
    return [batch[1].tolist() for batch in batches]


def flat(nested: List[List[int]]) -> List[int]:
    return [value for inner in nested for value in inner]


class Epochs(IterableDataset):
    """Three items with the number of the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for item in range(3):
            yield torch.tensor(item), torch.tensor(self.epoch)
