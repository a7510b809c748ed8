"""PopTorch's DataLoader: torch's, with batches large enough for one call of the model."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, Optional, Sequence, Union

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler

from ipurun.emulator import enums
from ipurun.emulator._data.accessor import AsynchronousDataAccessor
from ipurun.emulator._data.partition import GlobalShuffleSampler, PartitionedDataset, grouped, partition_for
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logging import logger
from ipurun.emulator.options import Options

__all__ = ["DataLoader"]


class DataLoader(TorchDataLoader):
    """Loads combined batches: `batch_size` times device iterations, replicas and accumulated micro-batches.

    Args:
        options: The options of the model that will use the data; they are frozen.
        dataset: The dataset.
        batch_size: Samples in one micro-batch, the batch that the model's forward sees.
        shuffle: Whether to shuffle at every epoch.
        num_workers: Worker processes that load data.
        drop_last: Drop the last batch if it is incomplete; unlike in torch, the default is True.
        persistent_workers: Keep the workers between epochs; the default is to do so.
        auto_distributed_partitioning: Divide the dataset between processes.
        mode: Load in this process or prefetch in a background process.
        async_options: Arguments for the AsynchronousDataAccessor of the asynchronous modes.
        rebatched_worker_size: In AsyncRebatched mode, the batch size that workers load.
        batch_sampler: Yields the indices of each micro-batch.
        **kwargs: Other arguments of torch's DataLoader.

    Raises:
        poptorch.Error: An argument cannot be combined with `batch_sampler`.
    """

    def __init__(
        self,
        options: Options,
        dataset: torch.utils.data.Dataset,
        batch_size: int = 1,
        shuffle: bool = None,  # type: ignore[assignment]  # noqa: RUF013 - PopTorch's own signature
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: Optional[bool] = None,
        auto_distributed_partitioning: bool = True,
        mode: enums.DataLoaderMode = enums.DataLoaderMode.Sync,
        async_options: Optional[Dict[str, Any]] = None,
        rebatched_worker_size: Optional[int] = None,
        batch_sampler: Optional[Union[Sampler[Sequence], Iterable[Sequence]]] = None,
        **kwargs: Any,
    ) -> None:
        assert isinstance(options, Options), f"Expected poptorch.Options, got {type(options).__name__}"
        assert "rebatched_size" not in (async_options or {}), (
            "async_options cannot contain rebatched_size: use mode=poptorch.DataLoaderMode.AsyncRebatched"
        )
        options._freeze()
        self._accessor: Optional[AsynchronousDataAccessor] = None
        self._has_batch_sampler = batch_sampler is not None
        self._micro_batches = _micro_batches(options)
        self._drops_last = drop_last
        is_distributed = options.Distributed.numProcesses > 1 and auto_distributed_partitioning
        if batch_sampler is not None:
            _check_batch_sampler(batch_size, shuffle, is_distributed)
            batch_size = getattr(batch_sampler, "batch_size", batch_size)
        self._combined_batch_size = None if batch_size is None else batch_size * self._micro_batches
        if batch_size is not None:
            self._options = options
        rebatches = self._chooses_rebatching(mode, drop_last, rebatched_worker_size)
        self._rebatches = rebatches
        self._keeps_remainder = rebatches and not drop_last

        for_torch: Dict[str, Any] = dict(kwargs, num_workers=num_workers)
        for_torch["persistent_workers"] = num_workers > 0 if persistent_workers is None else persistent_workers
        if isinstance(dataset, IterableDataset):
            _check_iterable(is_distributed, num_workers, kwargs.get("worker_init_fn"))
            for_torch["shuffle"] = bool(shuffle)  # torch refuses True
        else:
            if not drop_last and self._combined_batch_size and batch_sampler is None:
                _warn_of_short_batch(dataset, self._combined_batch_size * options.Distributed.numProcesses)
            if is_distributed:
                dataset = self._partitioned(dataset, options, bool(shuffle), drop_last, for_torch)
            elif batch_sampler is None:
                for_torch["shuffle"] = bool(shuffle)
        if batch_sampler is not None:
            for_torch["batch_sampler"] = batch_sampler
        elif rebatches:
            for_torch.update(batch_size=rebatched_worker_size or self._combined_batch_size, drop_last=False)
        else:
            for_torch.update(batch_size=self._combined_batch_size, drop_last=drop_last)
        super().__init__(dataset, **for_torch)
        if mode != enums.DataLoaderMode.Sync:
            accessor_options = dict(async_options or {})
            if rebatches:
                accessor_options["rebatched_size"] = self._combined_batch_size
            self._accessor = AsynchronousDataAccessor(self, **accessor_options)

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """The number of samples per call of the model; None if items are not batched."""
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options of the model that uses the data."""
        return self._options

    def terminate(self) -> None:
        """Stop the background process of the asynchronous modes."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __len__(self) -> int:
        if not self._rebatches:
            return super().__len__()
        assert self._combined_batch_size is not None
        full, remainder = divmod(len(self._sampled()), self._combined_batch_size)
        return full + (1 if remainder and self._keeps_remainder else 0)

    def __del__(self) -> None:
        if getattr(self, "_accessor", None) is not None:
            self.terminate()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # an accessor is an iterator too
        if self._accessor is not None:
            return iter(self._accessor)
        if self._has_batch_sampler and self._micro_batches > 1:
            return grouped(super().__iter__(), self._micro_batches, drop_last=self._drops_last)
        return super().__iter__()

    def __getstate__(self) -> Dict[str, Any]:
        # For the background process, whose copy of the loader has no accessor and needs no options.
        state = {name: value for name, value in vars(self).items() if name != "_options"}
        return {**state, "_accessor": None, "_iterator": None}

    def _sampled(self) -> Any:
        return self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler

    def _chooses_rebatching(
        self, mode: enums.DataLoaderMode, drop_last: bool, rebatched_worker_size: Optional[int]
    ) -> bool:
        combined = self._combined_batch_size
        if mode == enums.DataLoaderMode.AsyncRebatched:
            assert combined is not None and combined > 1, (
                "AsyncRebatched needs a combined batch size greater than 1: use DataLoaderMode.Async"
            )
            assert rebatched_worker_size is None or rebatched_worker_size <= combined, (
                f"rebatched_worker_size ({rebatched_worker_size}) must not be greater than the combined "
                f"batch size ({combined})"
            )
            return True
        can_be_short = not drop_last and not self._has_batch_sampler and combined not in (None, 1)
        return mode == enums.DataLoaderMode.Async and can_be_short

    def _partitioned(
        self, dataset: Any, options: Options, shuffle: bool, drop_last: bool, for_torch: Dict[str, Any]
    ) -> Any:
        assert self._combined_batch_size is not None, (
            "batch_size=None cannot be used with automatic partitioning between processes"
        )
        partition = partition_for(
            len(dataset),
            self._combined_batch_size,
            options.Distributed.processId,
            options.Distributed.numProcesses,
            drop_last=drop_last,
        )
        if not shuffle:
            return PartitionedDataset(dataset, partition)
        assert options.exists("random_seed"), (
            "Shuffling between several processes needs the same seed in all: set Options.randomSeed"
        )
        for_torch["sampler"] = GlobalShuffleSampler(len(dataset), partition, options.random_seed)
        return dataset


def _micro_batches(options: Options) -> int:
    input_groups = options.replication_factor // options.input_group_size
    return options.device_iterations * input_groups * options.Training.gradient_accumulation


def _check_batch_sampler(batch_size: Optional[int], shuffle: Optional[bool], is_distributed: bool) -> None:
    if batch_size != 1 or shuffle:
        raise createPoptorchError("batch_sampler cannot be combined with batch_size or shuffle: leave those out")
    if is_distributed:
        raise createPoptorchError(
            "batch_sampler cannot be combined with automatic partitioning: pass auto_distributed_partitioning=False"
        )


def _check_iterable(is_distributed: bool, num_workers: int, worker_init_fn: Any) -> None:
    assert not is_distributed, (
        "An iterable dataset cannot be partitioned between processes: pass "
        "auto_distributed_partitioning=False and divide it in the dataset"
    )
    if num_workers > 1 and worker_init_fn is None:
        logger.warning(
            "%d workers load the same iterable dataset: without a worker_init_fn that divides it, items "
            "will be returned more than once.",
            num_workers,
        )


def _warn_of_short_batch(dataset: Any, samples_per_step: int) -> None:
    if len(dataset) % samples_per_step:
        logger.warning(
            "The number of items in the dataset (%d) is not a multiple of the combined batch size times the "
            "number of processes (%d): the last batch will be smaller, which a compiled model rejects.",
            len(dataset),
            samples_per_step,
        )
