"""Prefetch a dataset in a background process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import weakref
from multiprocessing.connection import wait
from typing import Any, List, Mapping, Optional, Tuple

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader as TorchDataLoader

from ipurun.emulator import enums
from ipurun.emulator._data.ring import ItemLayout, Ring, SlotKind, wait_until
from ipurun.emulator._data.worker import WorkerSettings, worker_main
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logging import logger

# Start method of the process, and how torch shares memory with it (None: its default).
_STRATEGIES: Mapping[enums.SharingStrategy, Tuple[str, Optional[str]]] = {
    enums.SharingStrategy.SharedMemory: ("spawn", None),
    enums.SharingStrategy.FileSystem: ("spawn", "file_system"),
    enums.SharingStrategy.Fork: ("fork", None),
    enums.SharingStrategy.ForkServer: ("forkserver", None),
}
_SECONDS_TO_FINISH = 2.0
_SECONDS_TO_CLEAN_UP = 5.0


class AsynchronousDataAccessor:
    """Iterates over a dataset or data loader that a background process prefetches.

    Tensors are views of shared memory, valid until the next item is fetched: clone them to keep them longer.
    Lists and tuples are returned as lists.

    Args:
        dataset: The dataset or data loader.
        buffer_size: Number of items to prefetch.
        miss_sleep_time_in_ms: Polling interval while the next item is not ready.
        load_indefinitely: Prefetch the next epoch while the end of this one is in use.
        early_preload: Start reading before iteration begins.
        sharing_strategy: How the process is started and shares memory.
        rebatched_size: Regroup the items into batches of this many rows.

    Raises:
        poptorch.Error: If the loader is asynchronous already, or the process fails to start.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: enums.SharingStrategy = enums.SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        self._worker: Optional[_Worker] = None
        assert rebatched_size is None or rebatched_size > 1, (
            f"rebatched_size must be greater than 1, got {rebatched_size}"
        )
        assert buffer_size > 0, f"buffer_size must be at least 1, got {buffer_size}"
        _check_loader(dataset, rebatched_size)
        self._dataset = dataset
        self._rebatched_size = rebatched_size
        start_method, torch_strategy = _STRATEGIES[sharing_strategy]
        settings = WorkerSettings(
            pause_seconds=miss_sleep_time_in_ms / 1000,
            load_indefinitely=load_indefinitely,
            early_preload=early_preload,
            rebatched_size=rebatched_size,
            keep_remainder=getattr(dataset, "_keeps_remainder", False),
            sharing_strategy=torch_strategy,
            seed=torch.initial_seed(),
            start_method=torch.multiprocessing.get_start_method(allow_none=True),
        )
        self._worker = _Worker(dataset, buffer_size, settings, start_method)
        _running.add(self)

    def terminate(self) -> None:
        """Stop the background process; items can no longer be fetched."""
        if self._worker is not None:
            self._worker.terminate()
            self._worker = None

    def __del__(self) -> None:
        if getattr(self, "_worker", None) is not None:
            self.terminate()

    def __len__(self) -> int:
        if self._rebatched_size is None or not isinstance(self._dataset, TorchDataLoader):
            return len(self._dataset)
        if getattr(self._dataset, "_rebatches", False):
            return len(self._dataset)
        return len(self._dataset) * (self._dataset.batch_size or 1) // self._rebatched_size

    def __iter__(self) -> AsynchronousDataAccessor:
        self._running_worker().begin_epoch()
        return self

    def __next__(self) -> Any:
        return self._running_worker().next_item()

    def _running_worker(self) -> _Worker:
        assert self._worker is not None, "The AsynchronousDataAccessor was terminated"
        return self._worker


def _is_shadowed(folder: str) -> bool:
    """Whether a folder has files with the names of modules that were loaded from elsewhere.

    The fork server imports with its working folder first on the path, whatever the path of the program is.
    """
    loaded = [sys.modules.get(entry.partition(".")[0]) for entry in os.listdir(folder)]
    files = [str(getattr(module, "__file__", None)) for module in loaded if module is not None]
    return any(not file.startswith(os.path.join(folder, "")) for file in files)


class _Worker:
    """The accessor's end of the background process."""

    def __init__(self, dataset: Any, buffer_size: int, settings: WorkerSettings, start_method: str) -> None:
        context = torch.multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            # Later workers then start at once instead of importing torch again.
            context.set_forkserver_preload([] if _is_shadowed(os.getcwd()) else ["__main__", "ipurun.emulator"])
        self._pause_seconds = settings.pause_seconds
        self._data_buffers = Ring(context, buffer_size)
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=worker_main,
            args=(dataset, self._data_buffers, sender, settings),
            name="AsynchronousDataAccessor",
            daemon=False,  # a daemon could not start the workers of a data loader
        )
        self._owner = os.getpid()
        self._process.start()
        try:
            sender.close()
            logger.debug("AsynchronousDataAccessor worker process: %d", self._process.pid)
            self._layout = self._receive_layout(receiver)
        except BaseException:  # also Ctrl-C: at exit, Python would wait for the worker forever
            self.terminate()
            raise
        self._slot = 0
        self._held: Optional[int] = None
        self._consumed = 0
        self._in_epoch = False
        self._epoch_is_over = False
        self._failed = False

    def _receive_layout(self, receiver: Any) -> ItemLayout:
        try:
            wait([receiver, self._process.sentinel])
            message = receiver.recv() if receiver.poll() else None
        except EOFError:
            message = None
        finally:
            receiver.close()
        if message is None:
            raise createPoptorchError(
                "AsynchronousDataAccessor worker thread failed to start (the reason is printed above)"
            )
        layout, self._data_buffers.buffers = message
        return layout

    def begin_epoch(self) -> None:
        """Go to the start of the next epoch, or of this one if it was abandoned midway."""
        ring = self._data_buffers
        self._let_go()
        is_at_end = ring.indices_mem[self._slot] and ring.kinds[self._slot] == SlotKind.END_OF_EPOCH
        if self._in_epoch and self._consumed and is_at_end:
            with contextlib.suppress(StopIteration):
                self.next_item()  # all items were read, so that the process continues with the next epoch
        if self._in_epoch and self._consumed:
            asked = ring.generation_asked.value + 1
            ring.generation_asked.value = asked
            self._wait(lambda: ring.generation_served.value == asked)
            self._slot = 0
        elif not self._in_epoch:
            ring.epochs_asked.value += 1
        self._in_epoch, self._epoch_is_over, self._consumed = True, False, 0

    def next_item(self) -> Any:
        """Return the next item; raise StopIteration at the end of the epoch."""
        if self._epoch_is_over:
            raise StopIteration
        if not self._in_epoch:
            self.begin_epoch()
        self._let_go()
        ring = self._data_buffers
        self._wait(lambda: bool(ring.indices_mem[self._slot]))
        slot, kind = self._slot, ring.kinds[self._slot]
        self._held = slot
        self._slot = (slot + 1) % ring.size
        if kind == SlotKind.DATA:
            self._consumed += 1
            return self._layout.item(ring.read(slot))
        self._let_go()
        if kind == SlotKind.FAILURE:
            self._failed = True
            self._raise_failure()
        self._in_epoch, self._epoch_is_over = False, True
        raise StopIteration

    def terminate(self) -> None:
        """Ask the process to stop, terminate it, then kill it; do nothing in a forked copy of the program."""
        if os.getpid() != self._owner:
            return
        self._data_buffers.stop.value = 1
        if self._ends_within(_SECONDS_TO_FINISH):
            return
        self._process.terminate()
        if not self._ends_within(_SECONDS_TO_CLEAN_UP):
            self._process.kill()
            self._process.join()

    def _ends_within(self, seconds: float) -> bool:
        # Not join(seconds): the process that torch starts to share memory inherits the pipe that join polls.
        deadline = time.monotonic() + seconds
        wait_until(lambda: not self._process.is_alive() or time.monotonic() > deadline, self._pause_seconds)
        return not self._process.is_alive()

    def _let_go(self) -> None:
        if self._held is not None:
            self._data_buffers.release(self._held)
            self._held = None

    def _wait(self, condition: Any) -> None:
        if self._failed:
            self._raise_failure()
        wait_until(lambda: condition() or not self._process.is_alive(), self._pause_seconds)
        if not condition():
            self._raise_failure()

    def _raise_failure(self) -> None:
        code = self._process.exitcode
        if code is not None and code < 0:
            raise AssertionError(
                f"The worker process {self._process.pid} of the AsynchronousDataAccessor has failed: it was killed by "
                f"{signal.Signals(-code).name}"
            )
        raise AssertionError(
            "The worker process of the AsynchronousDataAccessor has failed (the reason is printed above)"
        )


def _check_loader(dataset: Any, rebatched_size: Optional[int]) -> None:
    if not isinstance(dataset, TorchDataLoader):
        return
    if getattr(dataset, "_accessor", None) is not None:
        raise createPoptorchError(
            "The DataLoader already uses an AsynchronousDataAccessor internally: create it with "
            "mode=poptorch.DataLoaderMode.Sync to wrap it in another one"
        )
    combined = getattr(dataset, "combinedBatchSize", None)
    full_batches_only = dataset.drop_last or getattr(dataset, "_has_batch_sampler", False)
    assert full_batches_only or combined in (None, 1) or rebatched_size is not None, (
        "The last batch may be smaller, which an AsynchronousDataAccessor cannot return: use "
        "drop_last=True or rebatched_size"
    )


_running: weakref.WeakSet[AsynchronousDataAccessor] = weakref.WeakSet()


@atexit.register
def _terminate_all() -> None:
    """Stop the workers before multiprocessing waits for them at exit."""
    still_running: List[AsynchronousDataAccessor] = list(_running)
    for accessor in still_running:
        accessor.terminate()
