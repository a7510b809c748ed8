"""Pad and pack sequences of different lengths to one shape: an IPU compiles for one."""

from __future__ import annotations

import bisect
import multiprocessing
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from ipurun.datasets.download import counter

__all__ = ["Pack", "Pad", "PaddingCount", "attention_mask", "packs_of"]

_MOST_WORKERS = 256
_FEW_SAMPLES = 10_000  # are measured without a bar
IGNORED = -100  # label that PyTorch's losses ignore
Lengths = Union[int, Mapping[Any, int]]
Values = Union[int, float, Mapping[Any, Union[int, float]]]


class PaddingCount:
    """Count of padding and of all positions in batches, shared by the processes that collate them."""

    def __init__(self) -> None:
        # Shared memory without a name. Each worker has its own two numbers, so that none waits for another.
        self._numbers = multiprocessing.RawArray("q", 2 * _MOST_WORKERS)

    def add(self, padding: int, positions: int) -> None:
        """Count the positions of a batch."""
        worker = get_worker_info()
        place = 0 if worker is None else 2 * ((worker.id + 1) % _MOST_WORKERS)
        self._numbers[place] += padding
        self._numbers[place + 1] += positions

    @property
    def share(self) -> Optional[float]:
        """The share of padding, None before the first batch."""
        positions = sum(self._numbers[1::2])
        return sum(self._numbers[::2]) / positions if positions else None


class Pad:
    """A collate function that pads every item with at least one dimension along its first one.

    Args:
        length: The length to pad to, or a length by key or index of an item; items without one are not padded.
        value: The padding, or one by key or index (0 for the others), such as -100 for labels.
        truncate: Whether longer items are cut off; else they are an error.
        mask: For samples that are mappings: key of a mask to add, 1 for data and 0 for padding of the first item.
    """

    def __init__(self, length: Lengths, value: Values = 0, truncate: bool = False, mask: Optional[str] = None) -> None:
        self._length = length
        self._value = value
        self._truncate = truncate
        self._mask = mask
        self._count = PaddingCount()

    @property
    def padding_share(self) -> Optional[float]:
        """The share of padding in the batches made so far."""
        return self._count.share

    def __call__(self, samples: List[Any]) -> Any:
        if isinstance(samples[0], Mapping):
            rows = [{key: self._padded(key, item) for key, item in sample.items()} for sample in samples]
            if self._mask is not None:
                for row, sample in zip(rows, samples):
                    first = next(iter(sample))
                    real = min(_size(sample[first]) or 0, len(row[first]))
                    row[self._mask] = (torch.arange(len(row[first])) < real).long()
            return default_collate(rows)
        if self._mask is not None:
            raise ValueError("a mask can be added only to samples that are mappings, by its key")
        if isinstance(samples[0], (tuple, list)):
            return default_collate([tuple(self._padded(place, item) for place, item in enumerate(s)) for s in samples])
        return default_collate([self._padded(0, item) for item in samples])

    def _padded(self, key: Any, item: Any) -> Any:
        length = self._length if isinstance(self._length, int) else _of(self._length, key)
        if length is None or _size(item) is None:
            return item
        # An empty list has no type: as int64 it takes that of the others in the batch.
        tensor = torch.as_tensor(item, dtype=torch.int64 if isinstance(item, (list, tuple)) and not item else None)
        if len(tensor) > length and not self._truncate:
            raise ValueError(
                f"item {key!r} of a sample has a length of {len(tensor)}, more than length={length}; "
                "truncate: true cuts it off"
            )
        tensor = tensor[:length]
        missing = length - len(tensor)
        self._count.add(missing, length)
        value = self._value if isinstance(self._value, (int, float)) else _of(self._value, key) or 0
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)]) if missing else tensor


_FIELDS = ("input_ids", "position_ids", "segment_ids", "labels")


class Pack:
    """A collate function that puts several sequences of tokens into each row of fixed length.

    A sample is a sequence of tokens, or a tuple or mapping that begins with one; ``labels``, the second item of a
    tuple, are one for each token. A loader first replaces the data set by `group`, so that a sample is all that fits a
    row, and a micro-batch counts rows.

    Args:
        length: Tokens of a row.
        value: Padding of tokens.
        truncate: Whether longer sequences are cut off; else they are an error.
        fields: What to return: ``input_ids``; ``position_ids``, from 0 in each sequence; ``segment_ids``, from 1 for
            the first sequence, 0 for padding; ``labels``, those of the samples, else the next token of the same
            sequence, -100 where there is none.
        as_tuple: Whether a batch is a tuple of the fields rather than a mapping.
    """

    def __init__(
        self,
        length: int,
        value: int = 0,
        truncate: bool = False,
        fields: Sequence[str] = _FIELDS,
        as_tuple: bool = False,
    ) -> None:
        unknown = [field for field in fields if field not in _FIELDS]
        if unknown:
            raise ValueError(f"{unknown[0]} is not one of {', '.join(_FIELDS)}")
        self._length = length
        self._value = value
        self._truncate = truncate
        self._fields = tuple(fields)
        self._as_tuple = as_tuple
        self._count = PaddingCount()

    @property
    def padding_share(self) -> Optional[float]:
        """The share of padding in the rows made so far."""
        return self._count.share

    def group(self, data: Any) -> Dataset:
        """Return the data set whose samples are lists of the samples that share a row.

        Raises:
            ValueError: A sequence is too long.
        """
        lengths = _lengths_of(data)
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self._length and not self._truncate:
            raise ValueError(
                f"a sequence has {longest} tokens, more than length={self._length}; truncate: true cuts it off"
            )
        return _Groups(data, np.minimum(lengths, self._length), self._length)

    def __call__(self, samples: List[Sequence[Any]]) -> Any:
        rows = [self._row([_tokens_and_labels(sample) for sample in group]) for group in samples]
        return default_collate([tuple(row.values()) if self._as_tuple else row for row in rows])

    def _row(self, sequences: Sequence[Tuple[torch.Tensor, torch.Tensor]]) -> Dict[str, torch.Tensor]:
        tokens = [part[: self._length] for part, _ in sequences]
        left = self._length - sum(map(len, tokens))
        self._count.add(left, self._length)
        nothing = torch.zeros(left, dtype=torch.int64)
        found = {
            "input_ids": [*tokens, torch.full((left,), self._value)],
            "position_ids": [*(torch.arange(len(part)) for part in tokens), nothing],
            "segment_ids": [*(torch.full((len(part),), number) for number, part in enumerate(tokens, 1)), nothing],
            "labels": [*(labels[: self._length] for _, labels in sequences), torch.full((left,), IGNORED)],
        }
        return {field: torch.cat([part.long() for part in found[field]]) for field in self._fields}


class _Groups(Dataset):
    """Samples in groups that fill a row, so that little of it is padding."""

    def __init__(self, data: Any, lengths: np.ndarray, length: int) -> None:
        self._data = data
        self._indices, self._ends = packs_of(lengths, length)
        used = float(lengths.sum())
        shares = [1 - used / max(rows * length, 1) for rows in (len(self), len(lengths))]
        self.notes = (
            *getattr(data, "notes", ()),
            f"data: {len(lengths):,} sequences packed into {len(self):,} rows of {length}: {shares[0]:.1%} is padding "
            f"(one sequence per row: {shares[1]:.1%})",
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> List[Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = int(self._ends[index - 1]) if index else 0
        return [self._data[int(number)] for number in self._indices[first : int(self._ends[index])]]

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)


def packs_of(lengths: Union[Sequence[int], np.ndarray], length: int) -> Tuple[np.ndarray, np.ndarray]:
    """Divide sequences into rows: the longest first, each into the fullest row that has room for it.

    Returns:
        The numbers of the sequences, row by row, and the end of each row in them.
    """
    rows: List[List[int]] = []
    with_room: Dict[int, List[int]] = {}  # room left -> rows with it
    rooms: List[int] = []  # its keys, in order
    known = np.asarray(lengths, np.int64)
    for number in np.argsort(-known, kind="stable").tolist():
        size = int(known[number])
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[rooms.pop(place)]
        rows[row].append(number)
        if room - size not in with_room:
            bisect.insort(rooms, room - size)
        with_room.setdefault(room - size, []).append(row)
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return np.array([number for row in rows for number in row], np.int64), ends


def attention_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return which positions of packed rows (batch x length) may attend to which: those of the same sequence."""
    same = segment_ids.unsqueeze(-1) == segment_ids.unsqueeze(-2)
    return same & (segment_ids > 0).unsqueeze(-1)


def _lengths_of(data: Any) -> np.ndarray:
    """Return the lengths of all sequences: `data.lengths` if the data has them, else every sample is read once."""
    known = getattr(data, "lengths", None)
    if known is not None:
        return np.asarray(known, np.int64)
    lengths: np.ndarray = np.empty(len(data), np.int64)
    if len(data) <= _FEW_SAMPLES:
        for number in range(len(data)):
            lengths[number] = len(_sequence(data[number]))
        return lengths
    with counter("measuring sequences", len(data), "samples") as advance:
        for number in range(len(data)):
            lengths[number] = len(_sequence(data[number]))
            advance(1)
    return lengths


def _sequence(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return next(iter(sample.values()))
    return sample[0] if isinstance(sample, tuple) else sample


def _tokens_and_labels(sample: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a sample, and a label for each: that of the sample, else the next token.

    Raises:
        ValueError: The labels of the sample are not one for each token.
    """
    tokens = torch.as_tensor(_sequence(sample))
    given = sample.get("labels") if isinstance(sample, Mapping) else None
    if isinstance(sample, tuple) and len(sample) > 1:
        given = sample[1]
    if given is None:
        return tokens, torch.cat([tokens[1:], tokens.new_full((min(1, len(tokens)),), IGNORED)])
    labels = torch.as_tensor(given)
    if labels.shape != tokens.shape:
        shape = "one number" if not labels.dim() else f"a shape of {tuple(labels.shape)}"
        raise ValueError(f"packed sequences need a label for each token; {len(tokens)} tokens have {shape}")
    return tokens, labels


def _size(item: Any) -> Optional[int]:
    """Return the length of an item with at least one dimension, else None."""
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return len(item) if item.ndim else None
    return len(item) if isinstance(item, (list, tuple)) else None


def _of(values: Mapping[Any, Any], key: Any) -> Any:
    return values.get(key, values.get(str(key)))
