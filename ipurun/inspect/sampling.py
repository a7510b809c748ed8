"""Random seeds, and the order of samples: it depends only on seed and epoch, so that a run can resume exactly."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import random
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy
import torch
from torch.utils.data import Dataset, default_collate

from ipurun.config.schema import LoaderConfig
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.data import is_stream, length_of
from ipurun.inspect.targets import arguments_of, check_node, first_parameter, locate, make

__all__ = [
    "EpochOrder",
    "MarkedIndex",
    "MarkedSamples",
    "PaddedOrder",
    "RandomStates",
    "ResumableSampler",
    "check_loader",
    "grouped",
    "make_collate",
    "make_sampler",
    "rows_to_fill",
    "samples_drawn",
    "seed_everything",
    "seed_of",
    "seeded",
]


_LARGEST_IN_MEMORY = 1 << 24  # indices of an epoch; of more, only some are in memory at a time
_INDICES_AT_ONCE = 1 << 16
_FEISTEL_ROUNDS = 6


def seed_of(seed: int, *parts: int) -> int:
    """Combine several numbers into one 63-bit seed; neighbouring numbers give unrelated seeds."""
    state = numpy.random.SeedSequence([abs(seed), *parts]).generate_state(2, numpy.uint32)
    return (int(state[0]) << 31) ^ int(state[1])


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also looks for accelerators, 200 times as slow


class RandomStates:
    """States of the global generators for code that neither disturbs nor depends on the draws of other code.

    Args:
        seed: Seed of all generators at the first use.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: Optional[Tuple[Any, Any, Any]] = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use these states inside, from where the last use left them, and restore the former ones afterwards."""
        former = _get_states()
        if self._states is None:
            seed_everything(self._seed)
        else:
            _set_states(self._states)
        try:
            yield
        finally:
            self._states = _get_states()
            _set_states(former)


def seeded(seed: int) -> ContextManager[None]:
    """Seed all global generators inside, and restore their states afterwards."""
    return RandomStates(seed).in_use()


def _get_states() -> Tuple[Any, Any, Any]:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def _set_states(states: Tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


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
            positional = 0 if inspect.isclass(locate(config.collate, "loader.collate")) else 1
            node = {"_target_": config.collate, **config.collate_args}
            problems += check_node(node, "loader.collate_args", positional=positional)
        except ConfigError as error:
            problems += error.problems
    elif config.collate_args:
        fix = "loader.collate=ipurun.datasets.collate.Pad"
        problems.append(Problem("`loader.collate_args` needs `loader.collate`", fix=fix, key="loader.collate_args"))
    return problems


def make_collate(config: LoaderConfig) -> Callable[[List[Any]], Any]:
    """Return the function that makes a batch from a list of samples."""
    if config.collate is None:
        return default_collate
    target = locate(config.collate, "loader.collate")
    if not inspect.isclass(target):
        return functools.partial(target, **config.collate_args) if config.collate_args else target
    made: Callable[[List[Any]], Any] = make({"_target_": config.collate, **config.collate_args}, "loader.collate_args")
    return made


def grouped(splits: Mapping[str, Any], config: LoaderConfig) -> Dict[str, Any]:
    """Return the data as the collate function wants to read it: one that packs samples groups them first.

    Raises:
        ConfigError: The data cannot be grouped.
    """
    group = getattr(make_collate(config), "group", None)
    if group is None:
        return dict(splits)
    found = {}
    for name, data in splits.items():
        if is_stream(data):
            raise ConfigError(
                f"`loader.collate={config.collate}` packs data that is read by index",
                seen=f"the split `{name}` is iterable",
                fix="a data set with __getitem__ and __len__, or loader.collate=ipurun.datasets.collate.Pad",
                key="loader.collate",
            )
        try:
            found[name] = group(data)
        except ValueError as error:
            raise ConfigError(
                f"the split `{name}` cannot be packed",
                seen=str(error),
                fix="other loader.collate_args",
                key="loader.collate_args",
            ) from error
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
    """

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return self.starting_at(0)

    def starting_at(self, position: int) -> Iterator[int]:
        """Return the indices from a position on."""
        if not self._shuffle:
            return iter(range(position, self._length))
        seed = seed_of(self._seed, self._epoch)
        if self._length > _LARGEST_IN_MEMORY:
            return _permuted(self._length, seed, position)
        generator = torch.Generator().manual_seed(seed)
        return iter(torch.randperm(self._length, generator=generator).tolist()[position:])


def _permuted(length: int, seed: int, position: int) -> Iterator[int]:
    """Yield a permutation from a position on, without holding it in memory.

    A Feistel network permutes the numbers below a power of four; those that are too large are permuted again until
    they are not, which leaves a permutation of the others.
    """
    half = numpy.uint64(max((length - 1).bit_length() + 1, 2) // 2)
    low = numpy.uint64((1 << int(half)) - 1)
    keys = numpy.random.SeedSequence(seed).generate_state(_FEISTEL_ROUNDS, numpy.uint64)

    def once(numbers: Any) -> Any:
        left, right = numbers >> half, numbers & low
        for key in keys:
            mixed = (right ^ key) * numpy.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> numpy.uint64(29))) * numpy.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> numpy.uint64(32)) & low)
        return (left << half) | right

    for begin in range(position, length, _INDICES_AT_ONCE):
        numbers = once(numpy.arange(begin, min(begin + _INDICES_AT_ONCE, length), dtype=numpy.uint64))
        too_large = numbers >= length
        while too_large.any():
            numbers[too_large] = once(numbers[too_large])
            too_large = numbers >= length
        yield from numbers.tolist()


class PaddedOrder:
    """Indices in their order, with repeats at the end to fill the last host call.

    The last, partial micro-batch is repeated, so that its mean is exact if the repeats come out even.

    Args:
        indices: Indices of the samples.
        micro_batch_size: Samples of one forward pass.
        multiple: Samples of a host call.
    """

    def __init__(self, indices: Sequence[int], micro_batch_size: int, multiple: int) -> None:
        self._indices = indices
        self._micro_batch_size = micro_batch_size
        self._total = -(-len(indices) // multiple) * multiple

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        rows = rows_to_fill(len(self._indices), self._micro_batch_size, self._total)
        return (self._indices[row] for row in rows)


class MarkedIndex(NamedTuple):
    """An index with what the process that loads its sample needs to know.

    Args:
        index: Index of the sample.
        epoch: Epoch in which it is drawn.
        seed: Seed of the random numbers that loading it draws.
    """

    index: Any
    epoch: int
    seed: int


class MarkedSamples(Dataset):
    """A data set read by marked indices: each sample is the same in whichever process, and whatever was read before.

    Args:
        data: The data set. If it has ``set_epoch``, that is called.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._epoch: Optional[int] = None

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, mark: MarkedIndex) -> Any:
        self._prepare(mark)
        return self._data[mark.index]

    def __getitems__(self, marks: List[MarkedIndex]) -> List[Any]:
        load_together = getattr(self._data, "__getitems__", None)
        if load_together is None:
            return [self[mark] for mark in marks]
        samples: List[Any] = []
        for _, of_epoch in itertools.groupby(marks, key=lambda mark: mark.epoch):
            batch = list(of_epoch)
            self._prepare(batch[0])
            samples += load_together([mark.index for mark in batch])
        return samples

    def _prepare(self, mark: MarkedIndex) -> None:
        if mark.epoch != self._epoch and hasattr(self._data, "set_epoch"):
            self._data.set_epoch(mark.epoch)
        self._epoch = mark.epoch
        seed_everything(mark.seed)


class ResumableSampler:
    """A sampler (of samples or of batches) that can start in the middle of an epoch.

    Each iteration is one epoch. Any sampler becomes reproducible, also in another process, because it draws from
    random states that depend only on seed and epoch.

    Args:
        inner: The wrapped sampler. If it has ``set_epoch``, that is called.
        seed: Seed of the run.
        epoch: Epoch of the first iteration.
        skip: Number of leading items that the first iteration skips.
        marks: Whether to draw a `MarkedIndex` for each index.
        draws_batches: Whether items are lists of indices.
    """

    def __init__(
        self,
        inner: Any,
        seed: int,
        epoch: int = 0,
        skip: int = 0,
        *,
        marks: bool = False,
        draws_batches: bool = False,
    ) -> None:
        self._inner = inner
        self._seed = seed
        self._epoch = epoch
        self._skip = skip
        self._marks = marks
        self._draws_batches = draws_batches
        if hasattr(inner, "batch_size"):
            self.batch_size = inner.batch_size

    def __len__(self) -> int:
        return max(len(self._inner) - self._skip, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, skip = self._epoch, self._skip
        self._epoch, self._skip = epoch + 1, 0
        _set_epoch(self._inner, epoch)
        if isinstance(self._inner, EpochOrder):
            items = self._inner.starting_at(skip)
            return self._marked(items, epoch, skip) if self._marks else items
        items = self._items(RandomStates(seed_of(self._seed, epoch)))
        return itertools.islice(self._marked(items, epoch) if self._marks else items, skip, None)

    def _items(self, states: RandomStates) -> Iterator[Any]:
        length = length_of(self._inner)
        if length is None or length > _LARGEST_IN_MEMORY:
            return _one_by_one(self._inner, states)  # may be endless
        with states.in_use():
            drawn: List[Any] = list(self._inner)
        return iter(drawn)

    def _marked(self, items: Iterator[Any], epoch: int, num_marked: int = 0) -> Iterator[Any]:
        first_seed = seed_of(self._seed, epoch, 1)
        for item in items:
            indices = item if self._draws_batches else [item]
            seeds = (_seed_at(first_seed, num_marked + position) for position in range(len(indices)))
            marked = [MarkedIndex(index, epoch, seed) for index, seed in zip(indices, seeds)]
            num_marked += len(marked)
            yield marked if self._draws_batches else marked[0]


def _one_by_one(items: Any, states: RandomStates) -> Iterator[Any]:
    with states.in_use():
        left = iter(items)
    while True:
        with states.in_use():
            try:
                item = next(left)
            except StopIteration:
                return
        yield item


def _seed_at(first: int, position: int) -> int:
    # An odd factor, so that also the low 32 bits, which are all that some generators use, differ everywhere.
    return (first + position * 0x9E3779B97F4A7C15) % 2**63


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
