"""Data loaders: PopTorch's own, with an order that resumes exactly and full batches for inference."""

from __future__ import annotations

import signal
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.utils.data import default_collate

from ipurun.build.batch import leading_rows, map_tensors
from ipurun.build.data import length_of
from ipurun.build.sampling import EpochOrder, PaddedOrder, Resumable, rows_to_fill
from ipurun.build.targets import arguments_of, check_node, first_parameter, locate, make
from ipurun.config.schema import LoaderConfig
from ipurun.errors import ConfigError, Problem
from ipurun.plan.types import Batch

__all__ = ["EvalLoader", "TrainLoader", "check_loader", "is_stream", "make_collate", "samples_drawn"]

_MODES = {"sync": "Sync", "async": "Async", "async_rebatched": "AsyncRebatched"}


def is_stream(data: Any) -> bool:
    """Whether a data set is read in its own order rather than by index."""
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, torch.utils.data.IterableDataset) or not by_index


class _Stream(torch.utils.data.IterableDataset):
    """Any iterable as the kind of data set that torch reads in order."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _as_data_set(data: Any) -> Any:
    if is_stream(data) and not isinstance(data, torch.utils.data.IterableDataset):
        return _Stream(data)
    return data


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
    length = length_of(_make_sampler(config, data, seed, micro_batch_size))
    return length if length is None or config.sampler else length * micro_batch_size


class TrainLoader:
    """Training batches, epoch after epoch, from any position on.

    Args:
        engine_module: Answers to PopTorch's names.
        options: The training options.
        data: Map-style or iterable data set.
        config: The loader's keys.
        batch: The batch arithmetic.
        seed: Seed of the run.
        collate: Makes a batch of samples.
    """

    def __init__(
        self,
        engine_module: ModuleType,
        options: Any,
        data: Any,
        config: LoaderConfig,
        batch: Batch,
        seed: int,
        collate: Callable[[List[Any]], Any],
    ) -> None:
        self._engine = engine_module
        self._options = options
        self._data = data
        self._config = config
        self._batch = batch
        self._seed = seed
        self._collate = collate
        self._loader: Any = None
        self._epoch = 0
        self._discard = 0

    def start(self, epoch: int = 0, skip_calls: int = 0) -> None:
        """Open the data at a host call of an epoch.

        By index, what lies before is not loaded. A stream has to be read up to there.
        """
        self.close()
        self._epoch = epoch
        named: Dict[str, Any] = {}
        self._discard = skip_calls
        if not is_stream(self._data) and not self._is_distributed():
            sampler = _make_sampler(self._config, self._data, self._seed, self._batch.micro_batch_size)
            calls_to_items = self._micro_batches_per_call()
            if not self._config.batch_sampler:
                calls_to_items *= self._batch.micro_batch_size
            resumable = Resumable(sampler, self._seed, epoch, skip_calls * calls_to_items)
            named["batch_sampler" if self._config.batch_sampler else "sampler"] = resumable
            self._discard = 0
        elif not is_stream(self._data):
            named["shuffle"] = self._config.shuffle
        self._loader = self._open(named)

    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch; of the first one after `start`, what is left of it."""
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(self._epoch)
        self._epoch += 1
        discard, self._discard = self._discard, 0
        for number, batch in enumerate(self._loader):
            if number >= discard:
                yield batch

    def close(self) -> None:
        """End background processes."""
        if self._loader is not None:
            self._loader.terminate()
            self._loader = None

    def _micro_batches_per_call(self) -> int:
        return self._batch.samples_per_call // self._batch.micro_batch_size

    def _is_distributed(self) -> bool:
        """With several processes PopTorch deals out the data set itself."""
        return int(self._options.Distributed.numProcesses) > 1

    def _open(self, named: Dict[str, Any]) -> Any:
        mode = self._config.mode
        if "batch_sampler" not in named:
            named["batch_size"] = self._batch.micro_batch_size
        if mode == "sync":
            # Of its own, so that opening the data does not disturb the global random state.
            named["generator"] = torch.Generator().manual_seed(self._seed)
        else:
            named["async_options"] = {"buffer_size": self._config.buffer_size}
        if self._config.workers:
            named["worker_init_fn"] = _leave_interrupts_to_the_loop
        if self._config.rebatched_worker_size is not None:
            named["rebatched_worker_size"] = self._config.rebatched_worker_size
        try:
            return self._engine.DataLoader(
                self._options,
                _as_data_set(self._data),
                num_workers=self._config.workers,
                drop_last=True,
                mode=getattr(self._engine.DataLoaderMode, _MODES[mode]),
                collate_fn=self._collate,
                **named,
            )
        except (AssertionError, ValueError, self._engine.Error) as error:
            raise ConfigError(
                "`loader`: the data cannot be opened this way", seen=str(error), where=f"mode={mode}", key="loader"
            ) from error


class EvalLoader:
    """Batches of a split for inference, each one full, with the number of rows that are real.

    Args:
        engine_module: Answers to PopTorch's names.
        options: The inference options.
        data: Map-style or iterable data set.
        workers: Worker processes.
        batch: The batch arithmetic of inference.
        collate: Makes a batch of samples.
        max_samples: Use at most so many samples.
    """

    def __init__(
        self,
        engine_module: ModuleType,
        options: Any,
        data: Any,
        workers: int,
        batch: Batch,
        collate: Callable[[List[Any]], Any],
        max_samples: Optional[int] = None,
    ) -> None:
        self._data = data
        self._rows = batch.samples_per_call
        self._micro_batch_size = batch.micro_batch_size
        self._limit = max_samples
        named: Dict[str, Any] = {}
        if not is_stream(data):
            known = len(data)
            self._limit = known if max_samples is None else min(known, max_samples)
            named["sampler"] = PaddedOrder(self._limit, batch.micro_batch_size, self._rows)
        if workers:
            named["worker_init_fn"] = _leave_interrupts_to_the_loop
        self._make = lambda: engine_module.DataLoader(
            options,
            _as_data_set(data),
            batch_size=batch.micro_batch_size,
            num_workers=workers,
            drop_last=not is_stream(data),
            collate_fn=collate,
            generator=torch.Generator().manual_seed(0),
            **named,
        )
        self._loader: Any = None

    @property
    def samples(self) -> Optional[int]:
        """Samples it will give, None for a stream."""
        return None if is_stream(self._data) else self._limit

    def __iter__(self) -> Iterator[Tuple[Any, int]]:
        if self._loader is None:
            self._loader = self._make()
        left = self._limit
        for batch in self._loader:
            rows = leading_rows(batch) or 0
            real = rows if left is None else min(rows, left)
            if rows != self._rows:
                batch = _fill(batch, rows, list(rows_to_fill(rows, self._micro_batch_size, self._rows)))
            yield batch, real
            if left is not None:
                left -= real
                if left == 0:
                    return


def _leave_interrupts_to_the_loop(worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal; a worker that died of it would keep the loop from saving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _fill(batch: Any, rows: int, chosen: List[int]) -> Any:
    return map_tensors(lambda t: t[chosen] if t.dim() and t.shape[0] == rows else t, batch)


def _make_sampler(config: LoaderConfig, data: Any, seed: int, micro_batch_size: int) -> Any:
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
