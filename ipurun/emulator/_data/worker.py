"""The worker process of an AsynchronousDataAccessor: reads the dataset and fills the ring buffer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, Iterator, List, Optional

import torch
import torch.multiprocessing  # sends tensors through pipes as shared memory

from ipurun.emulator._data.partition import rebatched
from ipurun.emulator._data.ring import ItemLayout, Ring, SlotKind, wait_until

_SECONDS_TO_STOP_AFTER_PARENT = 5.0


@dataclass(frozen=True)
class WorkerSettings:
    """How the worker prefetches.

    Attributes:
        pause_seconds: Polling interval while the ring is full.
        load_indefinitely: Begin the next epoch before the accessor requests it.
        early_preload: Fill the ring before the accessor requests the first epoch.
        rebatched_size: Rows in each regrouped item, None to leave items unchanged.
        keep_remainder: With `rebatched_size`, also return the rows left at the end of an epoch.
        sharing_strategy: Torch's strategy for sharing memory, None for its default.
        seed: Seed of torch's random numbers in the worker.
        start_method: Start method of a data loader's own workers, None for the platform's default.
    """

    pause_seconds: float
    load_indefinitely: bool
    early_preload: bool
    rebatched_size: Optional[int]
    keep_remainder: bool
    sharing_strategy: Optional[str]
    seed: int
    start_method: Optional[str]


class _Interrupted(Exception):
    """Raised when the accessor requests a stop or a restart of the epoch."""


def worker_main(dataset: Any, ring: Ring, connection: Any, settings: WorkerSettings) -> None:
    """Run the worker until the accessor stops it or its process ends.

    Args:
        dataset: A dataset or a data loader.
        ring: The ring to fill.
        connection: Receives the layout and the shared tensors after the first item is read, None on failure.
        settings: How to prefetch.
    """
    # Ctrl-C reaches the whole process group: the accessor's process decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # The worker must not compete with the model for cores, and threads do not survive a fork.
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    # Python passes on the start method of this process; the data loader's workers must start as in the main process.
    multiprocessing.set_start_method(settings.start_method, force=True)
    if settings.sharing_strategy is not None:
        torch.multiprocessing.set_sharing_strategy(settings.sharing_strategy)
    threading.Thread(target=_stop_with_parent, args=(ring,), daemon=True).start()
    feeder = _Feeder(dataset, ring, settings)
    try:
        first: Any = (feeder.load_first(), ring.buffers)
    except Exception:
        traceback.print_exc()
        first = None
    try:
        connection.send(first)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or _is_abandoned():
            return
        raise
    if first is not None:
        feeder.run()


def _is_abandoned() -> bool:
    """Return whether the data is no longer wanted: the accessor's process has ended, or is about to."""
    parent = multiprocessing.parent_process()
    return parent is None or bool(wait([parent.sentinel], _SECONDS_TO_STOP_AFTER_PARENT))


def _exit_on_signal(number: int, frame: Optional[FrameType]) -> None:
    raise SystemExit(128 + number)


def _stop_with_parent(ring: Ring) -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    ring.stop.value = 1
    # A dataset that hangs would keep the worker alive forever.
    time.sleep(_SECONDS_TO_STOP_AFTER_PARENT)
    os._exit(1)


class _Feeder:
    def __init__(self, dataset: Any, ring: Ring, settings: WorkerSettings) -> None:
        self._dataset = dataset
        self._ring = ring
        self._settings = settings
        self._layout: Optional[ItemLayout] = None
        self._types: List[torch.dtype] = []
        self._items: Iterator[List[torch.Tensor]] = iter(())
        self._epoch = 1
        self._slot = 0
        self._generation = 0

    def load_first(self) -> ItemLayout:
        """Read the first item, which determines all shapes, and put it in the ring."""
        self._items = self._one_epoch()
        first = next(self._items, None)
        if first is None or self._layout is None:
            raise ValueError("The dataset is empty")
        self._ring.allocate(first, self._settings.rebatched_size)
        self._put(first)
        return self._layout

    def run(self) -> None:
        """Fill the ring, epoch after epoch."""
        while not self._ring.stop.value:
            try:
                self._fill()
            except _Interrupted:
                self._restart()
            except Exception:
                traceback.print_exc()
                self._fail()
                return

    def _fill(self) -> None:
        while True:
            self._wait(self._may_load)
            leaves = next(self._items, None)
            self._wait(self._slot_is_free)
            if leaves is not None:
                self._put(leaves)
                continue
            self._publish(SlotKind.END_OF_EPOCH)
            self._epoch += 1
            self._wait(self._may_load)
            self._items = self._one_epoch()

    def _restart(self) -> None:
        ring = self._ring
        if ring.stop.value:
            return
        asked = ring.generation_asked.value
        self._items = self._one_epoch()
        self._epoch = ring.epochs_asked.value
        self._slot = 0
        ring.clear()
        self._generation = asked
        ring.generation_served.value = asked

    def _fail(self) -> None:
        try:
            self._wait(self._slot_is_free)
        except _Interrupted:
            if self._ring.stop.value:
                return
            self._slot = 0
            self._ring.clear()
        self._publish(SlotKind.FAILURE)
        self._ring.generation_served.value = self._ring.generation_asked.value

    def _may_load(self) -> bool:
        asked = self._ring.epochs_asked.value
        if self._epoch <= asked:
            return True
        if self._epoch == 1:
            return self._settings.early_preload
        return self._settings.load_indefinitely and self._epoch == asked + 1

    def _slot_is_free(self) -> bool:
        return not self._ring.indices_mem[self._slot]

    def _wait(self, condition: Any) -> None:
        wait_until(lambda: self._interrupted() or condition(), self._settings.pause_seconds)
        if self._interrupted():
            raise _Interrupted

    def _interrupted(self) -> bool:
        return bool(self._ring.stop.value) or self._ring.generation_asked.value != self._generation

    def _put(self, leaves: List[torch.Tensor]) -> None:
        self._ring.write(self._slot, leaves, rows_may_differ=self._settings.rebatched_size is not None)
        self._publish(SlotKind.DATA)

    def _publish(self, kind: SlotKind) -> None:
        self._ring.publish(self._slot, kind)
        self._slot = (self._slot + 1) % self._ring.size

    def _one_epoch(self) -> Iterator[List[torch.Tensor]]:
        size = self._settings.rebatched_size
        if size is None:
            return self._leaves()
        return rebatched(self._leaves(), size, keep_remainder=self._settings.keep_remainder)

    def _leaves(self) -> Iterator[List[torch.Tensor]]:
        for item in _iterate(self._dataset):
            if self._layout is None:
                self._layout = ItemLayout(item)
                self._types = [leaf.dtype for leaf in self._layout.leaves(item)]
            # PopTorch copies every item into tensors like those of the first one, which converts other types.
            leaves = self._layout.leaves(item)
            yield [leaf.to(dtype) for leaf, dtype in zip(leaves, self._types)] + leaves[len(self._types) :]


def _iterate(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, "__iter__") or not hasattr(dataset, "__len__"):
        yield from dataset
        return
    for index in range(len(dataset)):
        yield dataset[index]
