"""Random seeds, and the order of samples: it depends only on seed and epoch, so that a run can resume exactly."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy
import torch
from torch.utils.data import default_collate

from ipurun.config.schema import LoaderConfig
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.data import is_stream, length_of
from ipurun.inspect.targets import arguments_of, check_node, first_parameter, locate, make

__all__ = [
    "EpochOrder",
    "PaddedOrder",
    "ResumableSampler",
    "check_loader",
    "make_collate",
    "make_sampler",
    "rows_to_fill",
    "samples_drawn",
    "seed_everything",
    "seed_of",
    "seeded",
]


def seed_of(seed: int, *parts: int) -> int:
    """Combine several numbers into one 63-bit seed; neighbouring numbers give unrelated seeds."""
    state = numpy.random.SeedSequence([abs(seed), *parts]).generate_state(2, numpy.uint32)
    return (int(state[0]) << 31) ^ int(state[1])


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all global generators inside, and restore their states afterwards."""
    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def check_loader(config: LoaderConfig) -> List[Problem]:
    """Return the problems of the loader that can be found without the data."""
    problems: List[Problem] = []
    if config.sampler and config.batch_sampler:
        problems.append(Problem("`loader.sampler` and `loader.batch_sampler` cannot both be set", key="loader.sampler"))
    for key, node in (("loader.sampler", config.sampler), ("loader.batch_sampler", config.batch_sampler)):
        if not node:
            continue
        if "_target_" not in node:
            problems.append(Problem(f"`{key}` has no `_target_`", fix=f"{key}._target_=module.Sampler", key=key))
            continue
        try:
            positional, given = _filled_in(node, key)
            problems += check_node(node, key, positional=positional, given=given)
        except ConfigError as error:
            problems += error.problems
    if config.collate is not None:
        try:
            locate(config.collate, "loader.collate")
        except ConfigError as error:
            problems += error.problems
    return problems


def make_collate(config: LoaderConfig) -> Callable[[List[Any]], Any]:
    """Return the function that makes a batch from a list of samples."""
    if config.collate is None:
        return default_collate
    found: Callable[[List[Any]], Any] = locate(config.collate, "loader.collate")
    return found


def make_sampler(config: LoaderConfig, data: Any, seed: int, micro_batch_size: int) -> Any:
    """Make the sampler or batch sampler of a config, by default an `EpochOrder`."""
    order = EpochOrder(len(data), seed, config.shuffle)
    node, key = config.sampler, "loader.sampler"
    if config.batch_sampler:
        node, key = config.batch_sampler, "loader.batch_sampler"
    if not node:
        return order
    positional, given = _filled_in(node, key)
    values: Dict[str, Any] = {"batch_size": micro_batch_size, "drop_last": True}
    first: List[Any] = []
    if positional:
        first = [order if first_parameter(locate(node["_target_"], key)) == "sampler" else data]
    return make(node, key, *first, **{name: values[name] for name in given})


def samples_drawn(config: LoaderConfig, data: Any, seed: int, micro_batch_size: int) -> Optional[int]:
    """Return how many samples one training epoch draws, None for a stream without a length."""
    if is_stream(data) or not (config.sampler or config.batch_sampler):
        return length_of(data)
    length = length_of(make_sampler(config, data, seed, micro_batch_size))
    return length if length is None or config.sampler else length * micro_batch_size


class EpochOrder:
    """Indices of a data set: one permutation per epoch, or their natural order.

    Args:
        length: Samples of the data set.
        seed: Seed of the run.
        shuffle: Whether to permute.
        epoch: Epoch of the next iteration; `ResumableSampler` advances it.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, epoch: int = 0) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(range(self._length))
        generator = torch.Generator().manual_seed(seed_of(self._seed, self._epoch))
        return iter(torch.randperm(self._length, generator=generator).tolist())


class PaddedOrder:
    """Indices in natural order, with repeats at the end to fill the last host call.

    The last, partial micro-batch is repeated, so that a mean over it does not change if it fits in whole.

    Args:
        length: Samples of the data set.
        micro_batch_size: Samples of one forward pass.
        multiple: Samples of a host call.
    """

    def __init__(self, length: int, micro_batch_size: int, multiple: int) -> None:
        self._length = length
        self._micro_batch_size = micro_batch_size
        self._total = -(-length // multiple) * multiple

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        return rows_to_fill(self._length, self._micro_batch_size, self._total)


class ResumableSampler:
    """A sampler (of samples or of batches) that can start in the middle of an epoch.

    Each iteration is one epoch. Any sampler becomes reproducible, also in another process, because it draws from
    random states that depend only on seed and epoch.

    Args:
        inner: The wrapped sampler. If it has ``set_epoch``, that is called.
        seed: Seed of the run.
        epoch: Epoch of the first iteration.
        skip: Number of leading items that the first iteration skips.
    """

    def __init__(self, inner: Any, seed: int, epoch: int = 0, skip: int = 0) -> None:
        self._inner = inner
        self._seed = seed
        self._epoch = epoch
        self._skip = skip
        if hasattr(inner, "batch_size"):
            self.batch_size = inner.batch_size

    def __len__(self) -> int:
        return max(len(self._inner) - self._skip, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, skip = self._epoch, self._skip
        self._epoch, self._skip = epoch + 1, 0
        _set_epoch(self._inner, epoch)
        return itertools.islice(self._items(epoch), skip, None)

    def _items(self, epoch: int) -> Iterator[Any]:
        if length_of(self._inner) is None:
            return iter(self._inner)  # may be endless, so it cannot be drawn in advance under a seed
        with seeded(seed_of(self._seed, epoch)):
            drawn: List[Any] = list(self._inner)
        return iter(drawn)


def rows_to_fill(rows: int, micro_batch_size: int, wanted: int) -> Iterator[int]:
    """Yield row numbers 0 to `rows`, then those of the last micro-batch in turn, `wanted` in total."""
    start = rows - (rows % micro_batch_size or min(micro_batch_size, rows))
    return (row if row < rows else start + (row - start) % (rows - start) for row in range(wanted))


def _set_epoch(sampler: Any, epoch: int) -> None:
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if owner is not None and hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
            return


def _filled_in(node: Dict[str, Any], key: str) -> Tuple[int, Tuple[str, ...]]:
    """Return how many positional and which named arguments ipurun adds: data or order, and a batch sampler's sizes."""
    target = locate(node["_target_"], f"{key}._target_")
    arguments = arguments_of(node)
    first = first_parameter(target)
    positional = 1 if first is not None and first not in arguments and not node.get("_args_") else 0
    given: Tuple[str, ...] = ()
    if key == "loader.batch_sampler":
        known = check_node({"_target_": node["_target_"], "_partial_": True, "batch_size": 1, "drop_last": True}, key)
        refused = {problem.key for problem in known}
        given = tuple(
            name for name in ("batch_size", "drop_last") if name not in arguments and f"{key}.{name}" not in refused
        )
    return positional, given
