"""PopTorch's data loaders, with an order that resumes exactly and full batches for inference."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import time
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch.utils.data import IterableDataset, IterDataPipe, TensorDataset, default_collate

from ipurun.build.reading_times import ReadingTimes
from ipurun.build.skipped import SkippedSamples, WithoutMarks, skipping
from ipurun.build.workers import (
    AnonymousBatches,
    DeadWorkerError,
    LoaderTimeoutError,
    WaitLimit,
    WholeBatch,
    WorkerSetup,
    children_unwatched,
    closed_queues_ignored,
    deaths,
    kill,
    signals_held,
    start_fork_server,
    started_by,
)
from ipurun.config.schema import LoaderConfig
from ipurun.distributed.team import ALONE, Team
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import leading_rows, map_tensors
from ipurun.inspect.data import is_read_by_position, is_stream, length_of
from ipurun.inspect.sampling import (
    MarkedSamples,
    PaddedOrder,
    RandomStates,
    ResumableSampler,
    make_sampler,
    rows_to_fill,
    seed_everything,
    seed_of,
)
from ipurun.planning.plan import BatchSizes

__all__ = ["EvalLoader", "TrainLoader"]

_SECONDS_TO_DIE = 0.5
_SECONDS_TO_START = 60.0  # of a process that imports torch and the data set
_MODES = {"sync": "Sync", "async": "Async", "async_rebatched": "AsyncRebatched"}


class _WholeBatches(torch.utils.data.Dataset):
    """Tensors in memory, from which torch's loader reads whole batches: the same values as sample by sample."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]

    def __getitems__(self, indices: List[int]) -> WholeBatch:
        rows = torch.tensor(indices)
        return WholeBatch(tensor.index_select(0, rows) for tensor in self._data.tensors)


def _in_whole_batches(data: Any, collate: Callable[[List[Any]], Any], workers: int) -> Any:
    """Return data that can be read in whole batches in this process as such, other data as it is."""
    reads_tensors = getattr(type(data), "__getitem__", None) is TensorDataset.__getitem__
    is_plain = not hasattr(data, "__getitems__") and collate is default_collate and not workers
    return _WholeBatches(data) if reads_tensors and is_plain else data


class TrainLoader:
    """Training batches, epoch by epoch, from any position.

    Args:
        engine_module: PopTorch, or the emulator.
        options: The training options.
        data: Map-style or iterable data set.
        config: The loader's keys.
        sizes: The batch sizes of training.
        seed: Seed of the run.
        collate: Makes a batch of samples.
        skipped: Where samples that cannot be read are counted; None: they raise an error.
        times: Records when samples are read; None: nothing does.
        sampler: That of the data's own loader, which one of the config replaces.
    """

    def __init__(
        self,
        engine_module: ModuleType,
        options: Any,
        data: Any,
        config: LoaderConfig,
        sizes: BatchSizes,
        seed: int,
        collate: Callable[[List[Any]], Any],
        skipped: Optional[SkippedSamples] = None,
        times: Optional[ReadingTimes] = None,
        sampler: Any = None,
    ) -> None:
        self._sampler = sampler
        self._engine = engine_module
        self._options = options
        self._data = data
        self._config = config
        self._sizes = sizes
        self._seed = seed
        self._times = times
        self._counts = collate
        self._collate = collate if times is None else times.collate(collate)
        self._skipped = skipped
        self._loader: Any = None
        self._batches: Optional[Iterator[Any]] = None
        self._epoch = 0
        self._discard = 0
        self._processes = _Processes(config, is_asynchronous=config.mode != "sync")
        self._share = _Share.of_process(options, sizes.distinct_replicas * sizes.micro_batch_size)

    @property
    def padding_share(self) -> Optional[float]:
        """The share of padding in the batches so far, where the collate function counts it."""
        return getattr(self._counts, "padding_share", None)

    @property
    def uses_processes(self) -> bool:
        """Whether other processes read the data."""
        return self._config.workers > 0 or self._config.mode != "sync"

    def start(self, epoch: int = 0, skip_calls: int = 0) -> None:
        """Open the data at a host call of an epoch.

        Data read by index skips to it; a stream must be read up to it.
        """
        self.close()
        self._epoch = epoch
        self._discard = skip_calls
        data = self._data if self._skipped is None else skipping(self._data, "train", self._skipped, marks=False)
        if self._times is not None and not is_stream(data):
            data = self._times.wrapped(data)
        named: Dict[str, Any] = {} if self._share.count == 1 else {"auto_distributed_partitioning": False}
        if isinstance(data, IterDataPipe) and self._share.count == 1:
            pass  # torch divides it among workers, which it can do only if it is not wrapped
        elif is_read_by_position(data):
            skipped = skip_calls * self._sizes.samples_per_call
            data = _Parts(data, self._part(), epoch, skipped, seed=self._seed, shuffle=self._config.shuffle)
            self._discard = 0
        elif is_stream(data):
            length = None if self._config.workers else length_of(data)
            data = _Stream(data, self._seed, epoch, length, self._part(), self._config.shuffle)
        else:
            is_batched = bool(self._config.batch_sampler)
            whole = _in_whole_batches(data, self._collate, 0) if self._loads_here() else data
            # Random numbers drawn here would depend on which other samples this process reads.
            marks = not self._loads_here() or (self._share.count > 1 and whole is data)
            micro_batch_size = 1 if is_batched else self._sizes.micro_batch_size
            items_per_call = self._micro_batches_per_call() * micro_batch_size
            sampler = ResumableSampler(
                make_sampler(self._config, data, self._seed, self._sizes.micro_batch_size, self._sampler),
                self._seed,
                epoch,
                skip_calls * items_per_call * self._share.count,
                marks=marks,
                draws_batches=is_batched,
            )
            share = replace(self._share, width=self._sizes.distinct_replicas * micro_batch_size)
            named["batch_sampler" if is_batched else "sampler"] = sampler if share.count == 1 else share.of(sampler)
            self._discard = 0
            data = MarkedSamples(data) if marks else whole
        self._loader = self._open(data, named)

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; after `start`, the rest of the current one."""
        if not self._is_ready_for_next_epoch():
            self.start(self._epoch)
        epoch = self._epoch if self._config.shuffle or not is_stream(self._data) else 0
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        reading = self._reading(RandomStates(seed_of(self._seed, epoch)))
        self._epoch += 1
        discard, self._discard = self._discard, 0
        with reading():
            self._batches = batches = self._processes.batches(self._loader)
        for number in itertools.count():
            with reading():
                batch = next(batches, None)
            if batch is None:
                self._batches = None
                return
            if number >= discard:
                yield batch

    def _is_ready_for_next_epoch(self) -> bool:
        """Return whether the next epoch is the one that the loader will read.

        PopTorch's background process begins it early, but only if the last one was read to its end. If not, it
        begins an epoch once more, which would be the one after the next if it was early.
        """
        if self._config.mode == "sync" or self._batches is None:
            return True
        return next(self._batches, None) is None

    def _loads_here(self) -> bool:
        return self._config.mode == "sync" and not self._config.workers

    def _reading(self, states: RandomStates) -> Callable[[], ContextManager[None]]:
        """Give a stream that is read in this process its own random states: a resumed run reads it again."""
        return states.in_use if is_stream(self._data) and self._loads_here() else contextlib.nullcontext

    def close(self) -> None:
        """End background processes."""
        if self._loader is not None:
            if self._config.mode == "sync" and self._batches is not None:
                self._processes.close()  # torch would wait for a worker that hangs
            self._loader.terminate()
            self._loader = self._batches = None
        self._processes.close()

    def _part(self) -> _Part:
        """Return the part of a stream that this process reads, and in pieces of which size."""
        rows = self._sizes.samples_per_call
        piece = self._config.rebatched_worker_size if self._config.mode == "async_rebatched" else None
        return _Part(rows, piece or rows, self._share, drops_last=True)

    def _micro_batches_per_call(self) -> int:
        return self._sizes.samples_per_call // self._sizes.micro_batch_size

    def _open(self, data: Any, named: Dict[str, Any]) -> Any:
        mode = self._config.mode
        if "batch_sampler" not in named:
            named["batch_size"] = self._sizes.micro_batch_size
        if mode == "sync":
            # A separate generator, so that opening the data does not disturb the global random state.
            named["generator"] = torch.Generator().manual_seed(self._seed)
        else:
            named["async_options"] = {"buffer_size": self._config.buffer_size}
        named.update(self._processes.arguments)
        if self._config.rebatched_worker_size is not None:
            named["rebatched_worker_size"] = self._config.rebatched_worker_size
        try:
            return self._processes.opened(
                lambda: self._engine.DataLoader(
                    self._options,
                    data,
                    num_workers=self._config.workers,
                    drop_last=True,
                    mode=getattr(self._engine.DataLoaderMode, _MODES[mode]),
                    collate_fn=AnonymousBatches(self._collate),
                    **named,
                )
            )
        except (AssertionError, ValueError, self._engine.Error) as error:
            raise ConfigError(
                "`loader`: PopTorch cannot load the data with these settings",
                seen=str(error),
                where=f"mode={mode}",
                key="loader",
            ) from error


class EvalLoader:
    """Full batches of a split for inference, each with its number of rows that are not padding.

    A sample that cannot be read is left out, if samples are skipped: the batches are those of the data without it.

    Args:
        engine_module: PopTorch, or the emulator.
        options: The inference options.
        split: Name of the split.
        data: Map-style or iterable data set.
        config: The loader's keys.
        sizes: The batch sizes of inference.
        collate: Makes a batch of samples.
        max_samples: Largest number of samples to use.
        skipped: Where samples that cannot be read are counted; None: they raise an error.
        team: The processes that share the split.
    """

    def __init__(
        self,
        engine_module: ModuleType,
        options: Any,
        split: str,
        data: Any,
        config: LoaderConfig,
        sizes: BatchSizes,
        collate: Callable[[List[Any]], Any],
        max_samples: Optional[int] = None,
        skipped: Optional[SkippedSamples] = None,
        team: Team = ALONE,
    ) -> None:
        self._engine = engine_module
        self._options = options
        self._split = split
        self._data = data if skipped is None else skipping(data, split, skipped, marks=True, limit=max_samples)
        self._workers = config.workers
        self._rows = sizes.samples_per_call
        self._micro_batch_size = sizes.micro_batch_size
        self._collate = collate if skipped is None or not is_stream(data) else WithoutMarks(collate)
        self._limit = max_samples
        if not is_stream(data):
            known = len(data)
            self._limit = known if max_samples is None else min(known, max_samples)
        elif is_read_by_position(data):
            self._limit = min((limit for limit in (length_of(data), max_samples) if limit is not None), default=None)
        self._skipped = skipped
        self._team = team
        self._agreed: Set[int] = set()  # samples that one of several processes could not read, as all know
        self._share = _Share(team.rank, team.count, self._rows)
        self._processes = _Processes(config, is_asynchronous=False)
        self._loader: Any = None
        self._order: Optional[Sequence[int]] = None  # of the open loader
        self._is_reading = False

    @property
    def uses_processes(self) -> bool:
        """Whether other processes read the data."""
        return self._workers > 0

    @property
    def most_samples(self) -> Optional[int]:
        """The number of samples that are used, with those that cannot be read; None for a stream without a limit."""
        return self._limit

    @property
    def left_out(self) -> Tuple[int, ...]:
        """The indices of the samples that could not be read, among those that are used."""
        if self._skipped is None:
            return ()
        indices = self._skipped.indices(self._split)
        return indices if self._limit is None else tuple(index for index in indices if index < self._limit)

    @property
    def samples(self) -> Optional[int]:
        """The number of samples, None for a stream without a limit."""
        return self._limit

    def __iter__(self) -> Iterator[Tuple[Any, int]]:
        """Yield the batches of this process: as many as each other process has, some of them without samples."""
        if is_stream(self._data):
            yield from self._calls(None) if self._share.count == 1 else self._shared_stream()
            return
        done, width = 0, self._rows * self._share.count
        while True:
            order = self._readable()
            if not order:
                raise RuntimeError(f"no sample of the split `{self._split}` can be read")
            for batch, real in self._own_calls(order[done:]):
                samples = order[done : done + width]  # of all processes
                if not self._all_read(samples):
                    self.close()  # and read on without the samples that could not be read
                    break
                yield batch, real
                done += len(samples)
            if done >= len(order):
                return

    def close(self) -> None:
        """End the worker processes; the next iteration starts new ones."""
        if self._is_reading:  # torch would wait for a worker that hangs
            self._processes.close()
        self._loader = self._order = None
        self._is_reading = False
        self._processes.close()

    def _own_calls(self, order: Sequence[int]) -> Iterator[Tuple[Any, int]]:
        """Yield this process's rows of the host calls of all processes."""
        process, count, rows = self._share.process, self._share.count, self._rows
        if count == 1:
            yield from self._calls(order)
            return
        firsts = range(process * rows, -(-len(order) // (count * rows)) * count * rows, count * rows)
        reals = [min(max(len(order) - first, 0), rows) for first in firsts]
        own: List[int] = []
        for first, real in zip(firsts, reals):
            # One without samples runs the first sample of the data, which does not count.
            filled = rows_to_fill(real or rows, self._micro_batch_size, rows)
            own += [order[first + row if real else 0] for row in filled]
        for (batch, _), real in zip(self._calls(own), reals):
            yield batch, real

    def _shared_stream(self) -> Iterator[Tuple[Any, int]]:
        """Yield every batch of a stream whose turn it is; all processes read the whole stream."""
        own: Optional[Tuple[Any, int]] = None
        for number, (batch, real) in enumerate(self._calls(None)):
            turn = number % self._share.count
            if turn == 0 or turn == self._share.process:
                own = batch, real if turn == self._share.process else 0
            if turn == self._share.count - 1 and own is not None:
                yield own
                own = None
        if own is not None:
            yield own

    def _readable(self) -> Sequence[int]:
        """Return the indices of all samples that no one has failed to read so far."""
        assert self._limit is not None
        left_out = set(self.left_out) if self._team.is_alone else self._agreed
        return [index for index in range(self._limit) if index not in left_out] if left_out else range(self._limit)

    def _all_read(self, indices: Sequence[int]) -> bool:
        """Return whether all samples of a host call could be read, in all processes: they decide together."""
        if self._skipped is None:
            return True
        if not self._team.is_alone:
            # A worker may have failed to read a later sample in the meantime: only what was exchanged counts.
            self._agreed.update(*self._team.exchanged(self.left_out))
            return self._agreed.isdisjoint(indices)
        left_out = self.left_out if self._skipped.changes else ()
        return not left_out or set(left_out).isdisjoint(indices)

    def _calls(self, order: Optional[Sequence[int]]) -> Iterator[Tuple[Any, int]]:
        """Yield the batches of some samples, or of a stream."""
        if self._loader is None or order != self._order:
            self.close()
            self._loader, self._order = self._make(order), order
        left = self._limit if order is None else len(order)
        self._is_reading = True
        for batch in self._processes.batches(self._loader):
            rows = leading_rows(batch) or 0
            if not rows and self._skipped is not None:
                continue  # no sample of this batch can be read
            real = rows if left is None else min(rows, left)
            if rows != self._rows:
                batch = _take_rows(batch, rows, list(rows_to_fill(rows, self._micro_batch_size, self._rows)))
            yield batch, real
            if left is not None:
                left -= real
                if left == 0:
                    break
        self._is_reading = False

    def _make(self, order: Optional[Sequence[int]]) -> Any:
        data, named = self._data, {}
        if order is not None:
            named["sampler"] = PaddedOrder(order, self._micro_batch_size, self._rows)
            data = _in_whole_batches(data, self._collate, self._workers)
        else:
            data = _read_in_order(data, self._rows)
        return self._engine.DataLoader(
            self._options,
            data,
            batch_size=self._micro_batch_size,
            num_workers=self._workers,
            drop_last=order is not None,
            collate_fn=AnonymousBatches(self._collate),
            generator=torch.Generator().manual_seed(0),
            auto_distributed_partitioning=False,
            **self._processes.arguments,
            **named,
        )


class _Processes:
    """The processes of one loader: started so that signals leave them alone, limited in time, and ended with it.

    Args:
        config: The loader's keys.
        is_asynchronous: Whether PopTorch's accessor reads the data in a separate process.
    """

    def __init__(self, config: LoaderConfig, is_asynchronous: bool) -> None:
        self._timeout_seconds = config.timeout_seconds
        self._is_asynchronous = is_asynchronous
        self.arguments: Dict[str, Any] = {}  # of the loader
        if config.workers or is_asynchronous:
            self.arguments["worker_init_fn"] = WorkerSetup()
        self._limit = WaitLimit(config.timeout_seconds if self.arguments else None)
        self._others: List[Any] = multiprocessing.active_children()
        self._started: List[Any] = []

    def opened(self, make: Callable[[], Any]) -> Any:
        """Make the loader; an asynchronous one starts its process now."""
        if not self._is_asynchronous:
            return make()
        start_fork_server()
        self._others = multiprocessing.active_children()
        with self._explained(), self._limit.waiting(self._others, _SECONDS_TO_START):
            loader = make()
        self._started = started_by(self._others)
        return loader

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch.

        Raises:
            LoaderTimeoutError: No batch came in time.
            DeadWorkerError: A process has died.
        """
        if not self.arguments:  # no processes
            yield from loader
            return
        with self._explained(), self._limit.waiting(self._others):
            iterator = self._begun(loader)
        while True:
            with self._explained(), self._limit.waiting(self._others):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End what the loader has not ended itself."""
        self._limit.close()
        kill(self._started)
        self._started = []

    def _begun(self, loader: Any) -> Iterator[Any]:
        if self._is_asynchronous or self._started:
            return iter(loader)
        self._others = multiprocessing.active_children()
        with signals_held(), children_unwatched(), closed_queues_ignored():
            iterator = iter(loader)
        self._started = started_by(self._others)
        return iterator

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            found = deaths(self._started)
            if not found and isinstance(error, (OSError, EOFError)):
                time.sleep(_SECONDS_TO_DIE)  # the connection to a process ends a moment before the process
                found = deaths(self._started)
            if not self._limit.is_exceeded and found:
                raise DeadWorkerError(found) from error
            if not self._limit.is_exceeded:
                raise
            raise LoaderTimeoutError(f"no batch in {self._timeout_seconds:g} s") from error


class _Iterable(IterableDataset):
    """An iterable as torch's iterable data set."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class _Stream(_Iterable):
    """A stream whose epochs depend only on their number and the seed, in whichever process they are read.

    Args:
        items: The iterable. If it has ``set_epoch``, that is called.
        seed: Seed of the run.
        epoch: Epoch of the first iteration.
        length: Number of samples of an epoch, at which one that is longer ends; None: all there are.
        part: How it is divided among processes.
        shuffle: Whether epochs differ; else each is the first one again.
    """

    def __init__(
        self, items: Any, seed: int, epoch: int, length: Optional[int], part: _Part, shuffle: bool = True
    ) -> None:
        super().__init__(items)
        self._shuffle = shuffle
        self._part = part
        self._seed = seed
        self._epoch = epoch
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch if self._shuffle else 0, self._epoch + 1
        if hasattr(self._items, "set_epoch"):
            self._items.set_epoch(epoch)
        worker = torch.utils.data.get_worker_info()
        seed_everything(seed_of(self._seed, epoch, *([] if worker is None else [worker.id])))
        samples = itertools.islice(super().__iter__(), self._length)
        return samples if self._part.share.count == 1 else self._part.share.taken_from(samples)


def _read_in_order(data: Any, rows: int) -> Any:
    """Return the data of an evaluation: a stream that is read by position is divided among workers."""
    if is_read_by_position(data):
        return _Parts(data, _Part(rows, rows, _Share(0, 1, rows), drops_last=False))
    return data if isinstance(data, IterableDataset) else _Iterable(data)


@dataclass(frozen=True)
class _Share:
    """The samples of one of several processes: every process in turn has those of its replicas.

    The host calls of all processes together then have the samples that one process with all replicas would have.

    Args:
        process: Number of this process.
        count: Number of processes.
        width: Samples, or micro-batches, of its replicas in one accumulation step.
    """

    process: int
    count: int
    width: int

    @classmethod
    def of_process(cls, options: Any, width: int) -> _Share:
        """Return the share of this process."""
        return cls(int(options.Distributed.processId), int(options.Distributed.numProcesses), width)

    def taken_from(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield this process's share of some items, without a last step that is not complete."""
        while True:
            step = list(itertools.islice(items, self.width * self.count))
            if len(step) < self.width * self.count:
                return
            yield from step[self.process * self.width : (self.process + 1) * self.width]

    def of(self, sampler: Any) -> _SharedSampler:
        """Return a sampler that draws this process's share of what another one draws."""
        return _SharedSampler(sampler, self)


class _SharedSampler:
    def __init__(self, sampler: Any, share: _Share) -> None:
        self._sampler = sampler
        self._share = share
        if hasattr(sampler, "batch_size"):
            self.batch_size = sampler.batch_size

    def __len__(self) -> int:
        return len(self._sampler) // (self._share.width * self._share.count) * self._share.width

    def __iter__(self) -> Iterator[Any]:
        return self._share.taken_from(iter(self._sampler))


@dataclass(frozen=True)
class _Part:
    """How a stream is divided: among processes, and within each among workers by their batches.

    Args:
        rows: Samples of a host call of one process.
        piece: Samples that a worker reads at a time, which become a batch of torch's data loader.
        share: The samples of this process.
        drops_last: Whether samples that do not fill a host call of all processes are left out.
    """

    rows: int
    piece: int
    share: _Share
    drops_last: bool

    def samples(self, length: Optional[int]) -> Optional[int]:
        """Return how many of the samples of an epoch this process reads; None: until they end."""
        if length is None or not self.drops_last:
            return length
        return length // (self.rows * self.share.count) * self.rows

    def ranges(self, first: int, last: int) -> Iterator[Tuple[int, int]]:
        """Yield the positions in the whole stream of a range of this process's samples."""
        share = self.share
        while first < last:
            step, row = divmod(first, share.width)
            size = last - first if share.count == 1 else min(share.width - row, last - first)
            begin = (step * share.count + share.process) * share.width + row
            yield begin, begin + size
            first += size


class _Parts(IterableDataset):
    """The part of a stream that a worker reads.

    torch takes one batch of each worker in turn, so the order of the samples is that of the stream, for any number of
    workers, and a resumed run begins where the next host call does.

    Args:
        data: A stream with ``read(start, stop)``. If it has ``set_epoch``, that is called.
        part: How it is divided.
        epoch: Epoch of the first iteration; None: epochs are not counted.
        start: Samples of this process that the first iteration skips.
        seed: Seed of the run.
        shuffle: Whether epochs differ; else each is the first one again.
    """

    def __init__(
        self,
        data: Any,
        part: _Part,
        epoch: Optional[int] = None,
        start: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self._shuffle = shuffle
        self._data = data
        self._part = part
        self._epoch = epoch
        self._start = start
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        worker = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if self._epoch is not None:
            epoch, self._epoch = self._epoch if self._shuffle else 0, self._epoch + 1
            if hasattr(self._data, "set_epoch"):
                self._data.set_epoch(epoch)
            seed_everything(seed_of(self._seed, epoch, *([] if worker is None else [worker.id])))
        return self._samples(start + number * self._part.piece, workers * self._part.piece)

    def _samples(self, first: int, step: int) -> Iterator[Any]:
        last = self._part.samples(length_of(self._data))
        while last is None or first < last:
            stop = first + self._part.piece if last is None else min(first + self._part.piece, last)
            given = 0
            for begin, end in self._part.ranges(first, stop):
                for sample in self._data.read(begin, end):
                    given += 1
                    yield sample
            if given < stop - first:
                return  # the stream has ended
            first += step


def _take_rows(batch: Any, rows: int, chosen: List[int]) -> Any:
    return map_tensors(lambda t: t[chosen] if t.dim() and t.shape[0] == rows else t, batch)
