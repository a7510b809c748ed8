"""Data loaders: PopTorch's own, with an order that resumes exactly and full batches for inference."""

from __future__ import annotations

import signal
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from ipurun.config.schema import LoaderConfig
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import leading_rows, map_tensors
from ipurun.inspect.data import is_stream
from ipurun.inspect.sampling import PaddedOrder, Resumable, make_sampler, rows_to_fill
from ipurun.planning.plan import BatchSizes

__all__ = ["EvalLoader", "TrainLoader"]

_MODES = {"sync": "Sync", "async": "Async", "async_rebatched": "AsyncRebatched"}


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
        batch: BatchSizes,
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
            sampler = make_sampler(self._config, self._data, self._seed, self._batch.micro_batch_size)
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
        batch: BatchSizes,
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
