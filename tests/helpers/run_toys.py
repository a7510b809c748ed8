"""Small models, data sets, losses and metrics that tests use as targets."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate


class Net(nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x))))


class Deep(nn.Module):
    """Has parameters at two depths: encoder.0.bias and encoder.1.inner.bias."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential()
        inner.add_module("inner", nn.Linear(8, 3))
        self.encoder = nn.Sequential(nn.Linear(4, 8), inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class NormNet(nn.Module):
    """Has buffers that training changes, and one that it does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x) * self.scale)


class CountingNet(nn.Module):
    """Changes buffers in forward: directly, through a view, and an integer one, which is a constant on an IPU."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("fixed", torch.ones(1))
        self.register_buffer("row", torch.zeros(2))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.row[1:].copy_(x[0, :1])
        self.steps += 1
        x = nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)
        return self.out(x) * self.fixed


class OwnLossNet(nn.Module):
    """Computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        output = self.out(x)
        return output, nn.functional.cross_entropy(output, y)


class NamedNet(nn.Module):
    """Takes and returns mappings, with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
        logits = self.out(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class ExplodingNet(nn.Module):
    """Its output is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * torch.log(-x.abs().sum())


class Points(Dataset):
    """Random points with the class of their largest coordinate; the same for every length."""

    def __init__(self, length: int = 32, offset: int = 0, named: bool = False, jitter: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(7)
        everything = torch.randn(4096, 4, generator=generator)
        self.x = everything[offset : offset + length]
        self.y = self.x[:, :3].argmax(dim=1)
        self.named = named
        self.jitter = jitter
        self.loaded: list = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(int(index))
        x = self.x[index]
        if self.jitter:
            x = x + self.jitter * torch.randn(4)
        return {"features": x, "labels": self.y[index]} if self.named else (x, self.y[index])


class Stream(IterableDataset):
    """The same points as an iterable data set without a length."""

    def __init__(self, length: int = 32) -> None:
        self.points = Points(length)

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.points)):
            yield self.points[index]


class ShuffledStream(IterableDataset):
    """The points in an order that torch's global generator draws, 7 micro-batches of 4 and a half one.

    Args:
        claimed: Its length, if it has one.
    """

    def __init__(self, claimed: Optional[int] = None) -> None:
        self.points = Points(30, jitter=0.1)
        self.claimed = claimed

    def __len__(self) -> int:
        if self.claimed is None:
            raise TypeError("a stream without a length")
        return self.claimed

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self.points)).tolist():
            yield self.points[index]


class EpochPoints(Points):
    """Points that move with each epoch and, at random, with each use."""

    def __init__(self, length: int = 32, shift: float = 100.0) -> None:
        super().__init__(length, jitter=0.1)
        self.shift = shift
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.shift * self.epoch, y


class PlainIterable:
    """An iterable that is not a torch class and has no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Stream())


class Broken(Dataset):
    """Fails at its third sample."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise OSError("the third file is damaged")
        return torch.zeros(4), torch.tensor(0)


def pair(train: int = 32, evaluation: int = 10) -> Tuple[Points, Points]:
    return Points(train), Points(evaluation, offset=1000)


def triple() -> Tuple[Points, Points, Points]:
    return Points(32), Points(8, offset=1000), Points(6, offset=2000)


def mapping(train: int = 32, evaluation: int = 10, named: bool = False) -> Dict[str, Optional[Points]]:
    return {"train": Points(train, named=named), "validation": Points(evaluation, 1000, named), "test": None}


def no_data() -> int:
    return 5


def margin(output: torch.Tensor, target: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    """A custom loss, which needs identity_loss."""
    return (1 - output.gather(1, target.unsqueeze(1)).squeeze(1)).abs() ** power


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A metric that is a plain function."""
    return outputs.max() - outputs.min()


class EveryOther(torch.utils.data.Sampler):
    """Draws every other index."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, len(self.data) // 2 * 2, 2))


class HalfFrozen(Net):
    """A model whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


def doubled(samples: List[Any]) -> Any:
    """A user's collate function."""
    x, y = default_collate(samples)
    return 2 * x, y


class Damaged(Points):
    """Points of which some cannot be read.

    Args:
        bad: Their indices.
    """

    def __init__(self, length: int, offset: int, bad: Tuple[int, ...]) -> None:
        super().__init__(length, offset)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"file {index} is damaged")
        return super().__getitem__(index)


def damaged(bad: List[int], lacks: bool = False) -> Tuple[Dataset, Dataset]:
    """Return 32 points to train on and 11 to evaluate on, of which some cannot be read or are not there at all."""
    good = [index for index in range(11) if index not in bad]
    return Points(32), Subset(Points(11, 1000), good) if lacks else Damaged(11, 1000, tuple(bad))


class DamagedStream(IterableDataset):
    """Points as a stream whose iterator continues after a sample that cannot be read.

    Args:
        points: The points.
        by_position: Whether it can also be read by position.
    """

    def __init__(self, points: Dataset, by_position: bool) -> None:
        self.points = points
        if by_position:
            self.read = self._read

    def __iter__(self) -> Iterator[Any]:
        return map(self.points.__getitem__, range(len(self.points)))

    def _read(self, start: int, stop: int) -> Iterator[Any]:
        for index in range(start, min(stop, len(self.points))):
            yield self.points[index]

    def __len__(self) -> int:
        return len(self.points)


def damaged_streams(
    bad: List[int], by_position: bool = True, lacks: bool = False, of_training: Sequence[int] = ()
) -> Tuple[Any, Any]:
    """Return `damaged` as streams."""
    train = Damaged(32, 0, tuple(of_training))
    return DamagedStream(train, by_position), DamagedStream(damaged(bad, lacks)[1], by_position)


def damaged_generator(bad: List[int]) -> Tuple[Any, Any]:
    """Return `damaged` with a generator to evaluate on."""
    train, points = damaged(bad)
    stream = Stream(11)
    stream.points = points
    return train, stream


class Hanging(Points):
    """Points of which one is never read.

    Args:
        hangs_at: Its index.
    """

    def __init__(self, hangs_at: int) -> None:
        super().__init__(32)
        self.hangs_at = hangs_at

    def __getitem__(self, index: int) -> Any:
        if index == self.hangs_at:
            time.sleep(600)
        return super().__getitem__(index)


class Unreadable(Broken):
    """Fails at every sample but the first."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(2 if index else 0)


class FragileNet(Net):
    """Its output becomes infinite when its weights are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.exp(self.second.weight.abs().max())


class Poisoned(Points):
    """32 points, one of which is infinite the first few times that it is read.

    Args:
        index: Its index.
        times: How often it is infinite.
    """

    def __init__(self, index: int, times: int) -> None:
        super().__init__(32)
        self.index, self.times = index, times

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        if index == self.index and self.times:
            self.times -= 1
            x = torch.full_like(x, float("inf"))
        return x, y


class Countdown(IterableDataset):
    """A plain iterable that knows neither workers nor positions; its samples differ by epoch."""

    def __init__(self, length: int = 40) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.length, 0, -1):
            yield torch.tensor([number / 40, 0.1 * self.epoch, 0.0, 1.0]), torch.tensor(number % 3)


def countdown() -> Any:
    from ipurun.datasets.shards import Shared

    return Shared(Countdown(), length=40)
