"""Random data in the shapes of a config's `sample`, so that any recipe runs without its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch.utils.data import Dataset

from ipurun.errors import ConfigError, Problem

__all__ = ["Item", "SyntheticData", "parse_sample", "splits"]

_KEYS = ("name", "shape", "dtype", "low", "high")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
_EXAMPLE = "sample: [{shape: [3, 224, 224]}, {shape: [], dtype: int64, high: 1000}]"


@dataclass(frozen=True)
class Item:
    """One tensor of a sample.

    Args:
        shape: Its shape, without the batch dimension.
        dtype: Its type.
        low: Smallest value; floating-point values with `high` are uniform between the two.
        high: For integers, one above the largest value. None: 2 for integers, normally distributed floats.
        name: Its key if samples are mappings.
    """

    shape: Tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = 0
    high: Optional[float] = None
    name: Optional[str] = None

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw a random tensor."""
        if not self.dtype.is_floating_point:
            high = 2 if self.high is None else int(self.high)
            return torch.randint(int(self.low), high, self.shape, generator=generator).to(self.dtype)
        if self.high is None:
            return torch.randn(self.shape, generator=generator).to(self.dtype)
        span = self.high - self.low
        return (torch.rand(self.shape, generator=generator) * span + self.low).to(self.dtype)


class SyntheticData(Dataset):
    """A map-style data set whose samples depend only on their index and the seed."""

    def __init__(self, items: Sequence[Item], length: int, seed: int, notes: Tuple[str, ...] = ()) -> None:
        self.items = tuple(items)
        self.length = length
        self.seed = seed
        self.notes = notes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Union[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        # A large odd factor keeps the streams of neighbouring seeds apart.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        if self.items[0].name is not None:
            return {str(item.name): item.draw(generator) for item in self.items}
        return tuple(item.draw(generator) for item in self.items)


def splits(
    sample: Sequence[Mapping[str, Any]], train_samples: int = 4096, eval_samples: int = 1024, seed: int = 0
) -> Dict[str, SyntheticData]:
    """Return random training and evaluation data.

    Args:
        sample: The items of one sample, inputs first and the target last, as in the config's `sample`:
            mappings with `shape` and optionally `dtype`, `low`, `high`, and `name` if samples are mappings.
        train_samples: Length of the training split.
        eval_samples: Length of the evaluation split.
        seed: Seed of all values.

    Raises:
        ConfigError: If `sample` is empty or malformed, or a length is negative.
    """
    items = parse_sample(sample)
    lengths = {"data.train_samples": train_samples, "data.eval_samples": eval_samples}
    wrong = [
        Problem(f"`{key}` is negative", seen=str(length), key=key) for key, length in lengths.items() if length < 0
    ]
    if wrong:
        raise ConfigError(wrong)
    note = "data: synthetic, so losses and metrics are meaningless"
    return {
        "train": SyntheticData(items, train_samples, seed, notes=(note,)),
        "eval": SyntheticData(items, eval_samples, seed + 1),
    }


def parse_sample(sample: Sequence[Any]) -> List[Item]:
    """Parse a config's `sample`.

    Raises:
        ConfigError: With every problem of the declaration.
    """
    if not sample:
        raise ConfigError(
            "`sample` is not set, so the shapes of synthetic data are unknown",
            fix=f"add to the recipe: {_EXAMPLE}",
            key="sample",
        )
    problems = [problem for index, entry in enumerate(sample) for problem in _item_problems(index, entry)]
    if not problems and len({entry.get("name") is None for entry in sample}) > 1:
        problems = [Problem("`sample` names only some of its items", fix="name all of them, or none", key="sample")]
    if problems:
        raise ConfigError(problems)
    return [
        Item(
            shape=tuple(entry["shape"]),
            dtype=getattr(torch, entry.get("dtype", "float32")),
            low=entry.get("low", 0),
            high=entry.get("high"),
            name=entry.get("name"),
        )
        for entry in sample
    ]


def _item_problems(index: int, entry: Any) -> List[Problem]:
    key = f"sample[{index}]"
    if not isinstance(entry, Mapping) or "shape" not in entry:
        return [Problem(f"`{key}` has no `shape`", seen=str(entry), fix=_EXAMPLE, key="sample")]
    problems = [
        Problem(f"unknown key `{name}` in `{key}`", seen=str(entry), known=", ".join(_KEYS), key="sample")
        for name in entry
        if name not in _KEYS
    ]
    shape = entry["shape"]
    if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) and size > 0 for size in shape):
        problems.append(Problem(f"`{key}.shape` is not a list of positive numbers", seen=str(shape), key="sample"))
    dtype = entry.get("dtype", "float32")
    if dtype not in _DTYPES:
        problems.append(
            Problem(f"`{key}.dtype` is not a tensor type", seen=str(dtype), known=", ".join(_DTYPES), key="sample")
        )
    low, high = entry.get("low", 0), entry.get("high")
    numbers = [value for value in (low, high) if value is not None]
    if not all(isinstance(value, (int, float)) for value in numbers):
        problems.append(Problem(f"`{key}.low` and `high` must be numbers", seen=f"{low!r}, {high!r}", key="sample"))
    elif high is not None and high <= low:
        problems.append(Problem(f"`{key}.high` must be above `low`", seen=f"low {low}, high {high}", key="sample"))
    return problems
