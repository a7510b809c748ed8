"""The order of samples: a function of the seed and the epoch alone, so that a resumed run finds its place."""

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
    "Resumable",
    "check_loader",
    "make_collate",
    "rows_to_fill",
    "samples_drawn",
    "seed_of",
    "seeded",
]


def seed_of(seed: int, *parts: int) -> int:
    """One 63-bit seed from several numbers, far apart for neighbouring ones."""
    state = numpy.random.SeedSequence([abs(seed), *parts]).generate_state(2, numpy.uint32)
    return (int(state[0]) << 31) ^ int(state[1])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """All global random states seeded inside, and as they were afterwards."""
    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


class EpochOrder:
    """Indices of a data set: one permutation an epoch, or their natural order.

    Args:
        length: Samples of the data set.
        seed: Seed of the run.
        shuffle: Whether to permute.
        epoch: Sets which permutation comes next; `Resumable` counts it on.
    """

    def __init__(self, length: int, seed: int, shuffle: bool, epoch: int = 0) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        if not self._shuffle:
            return iter(range(self._length))
        generator = torch.Generator().manual_seed(seed_of(self._seed, self._epoch))
        return iter(torch.randperm(self._length, generator=generator).tolist())


class PaddedOrder:
    """Indices in natural order, with repeats at the end until they fill whole host calls.

    What is repeated is the last, partial micro-batch, so that a mean over it stays its own where it fits.

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


def rows_to_fill(rows: int, micro_batch_size: int, wanted: int) -> Iterator[int]:
    """Row numbers 0 to `rows`, then those of the last micro-batch in turn until there are enough."""
    start = rows - (rows % micro_batch_size or min(micro_batch_size, rows))
    return (row if row < rows else start + (row - start) % (rows - start) for row in range(wanted))


class Resumable:
    """A sampler (of samples or of batches) that can begin in the middle of an epoch.

    Each iteration is one epoch, and the next iteration the next epoch, also in another process. Any sampler
    becomes reproducible here: it draws from random states that depend on seed and epoch only.

    Args:
        inner: The sampler itself; its ``set_epoch`` is called where it has one.
        seed: Seed of the run.
        epoch: Epoch of the first iteration.
        skip: Leading items that the first iteration leaves out.
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
        if _length(self._inner) is None:
            return iter(self._inner)  # may be endless, so it cannot be drawn ahead under a seed of its own
        with seeded(seed_of(self._seed, epoch)):
            drawn: List[Any] = list(self._inner)
        return iter(drawn)


def _set_epoch(sampler: Any, epoch: int) -> None:
    for owner in (sampler, getattr(sampler, "sampler", None)):
        if owner is not None and hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
            return


def _length(sampler: Any) -> Optional[int]:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def check_loader(config: LoaderConfig) -> List[Problem]:
    """All problems of the loader that show without the data."""
    problems: List[Problem] = []
    if config.sampler and config.batch_sampler:
        problems.append(Problem("`loader.sampler` and `loader.batch_sampler` exclude each other", key="loader.sampler"))
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
    """The function that makes a batch of samples."""
    if config.collate is None:
        return default_collate
    found: Callable[[List[Any]], Any] = locate(config.collate, "loader.collate")
    return found


def samples_drawn(config: LoaderConfig, data: Any, seed: int, micro_batch_size: int) -> Optional[int]:
    """Samples of one training epoch as the sampler draws them; None for a stream without a length."""
    if is_stream(data) or not (config.sampler or config.batch_sampler):
        return length_of(data)
    length = length_of(make_sampler(config, data, seed, micro_batch_size))
    return length if length is None or config.sampler else length * micro_batch_size


def make_sampler(config: LoaderConfig, data: Any, seed: int, micro_batch_size: int) -> Any:
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


def _filled_in(node: Dict[str, Any], key: str) -> Tuple[int, Tuple[str, ...]]:
    """What ipurun adds to a sampler's arguments: the data (or the order) first, and a batch sampler's sizes."""
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
