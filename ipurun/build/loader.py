"""PopTorch's data loaders, with an order that resumes exactly and full batches for inference."""

from __future__ import annotations

import multiprocessing
import signal
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy
import torch

from ipurun.config.schema import LoaderConfig
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import leading_rows, map_tensors
from ipurun.inspect.data import is_stream
from ipurun.inspect.sampling import PaddedOrder, ResumableSampler, make_sampler, rows_to_fill
from ipurun.planning.plan import BatchSizes

__all__ = ["EvalLoader", "SkippedSamples", "TrainLoader"]

_MODES = {"sync": "Sync", "async": "Async", "async_rebatched": "AsyncRebatched"}
_LONGEST_ERROR = 300  # bytes


class SkippedSamples:
    """The samples that could not be read, known to all processes that read them.

    Args:
        samples: Length of the data set.
        most: How many different samples may be skipped.
    """

    def __init__(self, samples: int, most: int) -> None:
        self._most = most
        # Shared memory without a name: nothing is left behind when a process is killed. A byte for each sample needs
        # no lock, which a killed worker could hold forever.
        self._flags = multiprocessing.RawArray("b", samples)
        self._changes = multiprocessing.RawValue("q", 0)
        self._text = multiprocessing.RawArray("c", _LONGEST_ERROR)

    @property
    def changes(self) -> int:
        """A number that changes whenever a sample is added; quicker than `indices`."""
        return int(self._changes.value)

    @property
    def indices(self) -> Tuple[int, ...]:
        """The indices of the samples, in order."""
        return tuple(int(index) for index in numpy.flatnonzero(numpy.frombuffer(self._flags, numpy.int8)))

    @property
    def last_error(self) -> str:
        """The error of the sample added last."""
        return self._text.value.decode("utf-8", "replace")

    def add(self, index: int, error: Exception) -> None:
        """Count a sample, unless it was met in an earlier epoch.

        Raises:
            RuntimeError: There are too many.
        """
        if self._flags[index]:
            return
        text = f"{type(error).__name__}: {error}"
        known = len(self.indices)
        if known >= self._most:
            raise RuntimeError(
                f"sample {index} cannot be read ({text}), and {known} others could not be read before "
                f"(loader.max_errors={self._most})"
            ) from error
        self._text.value = text.encode("utf-8", "replace")[: _LONGEST_ERROR - 1]
        self._flags[index] = 1
        self._changes.value += 1


class _SkippingData(torch.utils.data.Dataset):
    """A data set with the next readable sample in place of each that cannot be read: the same one in every epoch."""

    def __init__(self, data: Any, skipped: SkippedSamples) -> None:
        self._data = data
        self._skipped = skipped

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        while True:  # ends: each sample that fails is counted, up to a limit
            try:
                return self._data[index]
            except Exception as error:  # of any kind: the user's code reads the sample
                index = int(index) % len(self._data)
                self._skipped.add(index, error)
            index = (index + 1) % len(self._data)


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
    ) -> None:
        self._engine = engine_module
        self._options = options
        self._data = data
        self._config = config
        self._sizes = sizes
        self._seed = seed
        self._collate = collate
        self._skips = config.on_error == "skip" and not is_stream(data)
        self.skipped = SkippedSamples(len(data) if self._skips else 0, config.max_errors)
        self._loader: Any = None
        self._epoch = 0
        self._discard = 0

    def start(self, epoch: int = 0, skip_calls: int = 0) -> None:
        """Open the data at a host call of an epoch.

        Data read by index skips to it; a stream must be read up to it.
        """
        self.close()
        self._epoch = epoch
        named: Dict[str, Any] = {}
        self._discard = skip_calls
        if not is_stream(self._data) and not self._is_distributed():
            sampler = make_sampler(self._config, self._data, self._seed, self._sizes.micro_batch_size)
            calls_to_items = self._micro_batches_per_call()
            if not self._config.batch_sampler:
                calls_to_items *= self._sizes.micro_batch_size
            ordered = ResumableSampler(sampler, self._seed, epoch, skip_calls * calls_to_items)
            named["batch_sampler" if self._config.batch_sampler else "sampler"] = ordered
            self._discard = 0
        elif not is_stream(self._data):
            named["shuffle"] = self._config.shuffle
        self._loader = self._open(named)

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of the next epoch; after `start`, the rest of the current one."""
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

    def _readable_data(self) -> Any:
        if self._skips:
            return _SkippingData(self._data, self.skipped)
        return _as_data_set(self._data)

    def _micro_batches_per_call(self) -> int:
        return self._sizes.samples_per_call // self._sizes.micro_batch_size

    def _is_distributed(self) -> bool:
        """Return whether several processes run, among which PopTorch divides the data set."""
        return int(self._options.Distributed.numProcesses) > 1

    def _open(self, named: Dict[str, Any]) -> Any:
        mode = self._config.mode
        if "batch_sampler" not in named:
            named["batch_size"] = self._sizes.micro_batch_size
        if mode == "sync":
            # A separate generator, so that opening the data does not disturb the global random state.
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
                self._readable_data(),
                num_workers=self._config.workers,
                drop_last=True,
                mode=getattr(self._engine.DataLoaderMode, _MODES[mode]),
                collate_fn=self._collate,
                **named,
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

    Args:
        engine_module: PopTorch, or the emulator.
        options: The inference options.
        data: Map-style or iterable data set.
        workers: Worker processes.
        sizes: The batch sizes of inference.
        collate: Makes a batch of samples.
        max_samples: Largest number of samples to use.
    """

    def __init__(
        self,
        engine_module: ModuleType,
        options: Any,
        data: Any,
        workers: int,
        sizes: BatchSizes,
        collate: Callable[[List[Any]], Any],
        max_samples: Optional[int] = None,
    ) -> None:
        self._rows = sizes.samples_per_call
        self._micro_batch_size = sizes.micro_batch_size
        self._limit = max_samples
        named: Dict[str, Any] = {}
        if not is_stream(data):
            known = len(data)
            self._limit = known if max_samples is None else min(known, max_samples)
            named["sampler"] = PaddedOrder(self._limit, sizes.micro_batch_size, self._rows)
        if workers:
            named["worker_init_fn"] = _leave_interrupts_to_the_loop
        self._make = lambda: engine_module.DataLoader(
            options,
            _as_data_set(data),
            batch_size=sizes.micro_batch_size,
            num_workers=workers,
            drop_last=not is_stream(data),
            collate_fn=collate,
            generator=torch.Generator().manual_seed(0),
            **named,
        )
        self._loader: Any = None

    def __iter__(self) -> Iterator[Tuple[Any, int]]:
        if self._loader is None:
            self._loader = self._make()
        left = self._limit
        for batch in self._loader:
            rows = leading_rows(batch) or 0
            real = rows if left is None else min(rows, left)
            if rows != self._rows:
                batch = _take_rows(batch, rows, list(rows_to_fill(rows, self._micro_batch_size, self._rows)))
            yield batch, real
            if left is not None:
                left -= real
                if left == 0:
                    return


class _Stream(torch.utils.data.IterableDataset):
    """An iterable as torch's iterable data set."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _as_data_set(data: Any) -> Any:
    if is_stream(data) and not isinstance(data, torch.utils.data.IterableDataset):
        return _Stream(data)
    return data


def _leave_interrupts_to_the_loop(worker: int) -> None:
    """Ignore Ctrl-C, which reaches all processes of a terminal: without its workers the loop could not save."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _take_rows(batch: Any, rows: int, chosen: List[int]) -> Any:
    return map_tensors(lambda t: t[chosen] if t.dim() and t.shape[0] == rows else t, batch)
