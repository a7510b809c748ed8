"""The ring buffer between an AsynchronousDataAccessor and its worker process, and the layout of its items."""

from __future__ import annotations

import ctypes
import enum
import os
import time
from typing import Any, Callable, List, Optional, Sequence

import torch
import torch.multiprocessing

from ipurun.emulator._capture import structures

_LONGEST_PAUSE_SECONDS = 0.005


class SlotKind(enum.IntEnum):
    """Contents of a ready slot of the ring."""

    DATA = 0
    END_OF_EPOCH = 1
    FAILURE = 2


class ItemLayout:
    """Splits items into tensors and reassembles them.

    Args:
        example: An item. All later ones must have the same structure.

    Raises:
        TypeError: If it is not a tensor, a flat list, tuple or dict of tensors, or an instance of a class with
            a registered parser.
    """

    def __init__(self, example: Any) -> None:
        self._keys: Optional[List[Any]] = None
        self._custom: Any = None
        self._is_tensor = isinstance(example, torch.Tensor)
        if not self._is_tensor and structures.custom_parser_of(example) is not None:
            self._custom = example
        elif isinstance(example, dict):
            self._keys = list(example)
        elif not self._is_tensor and not isinstance(example, (list, tuple)):
            raise TypeError(
                "An AsynchronousDataAccessor takes tensors, lists, tuples and dictionaries of tensors, and "
                f"classes registered with registerCustomArgParser, not {type(example).__name__}"
            )
        self.leaves(example)

    def leaves(self, item: Any) -> List[torch.Tensor]:
        """Return the tensors of an item, in a fixed order.

        Raises:
            TypeError: If the item is nested or its structure differs from the first one.
        """
        if self._is_tensor:
            found: Sequence[Any] = [item]
        elif self._custom is not None:
            found = list(structures.tensors_in(item))
        elif self._keys is not None:
            if set(item) != set(self._keys):
                raise TypeError(f"The keys of an item changed from {self._keys} to {list(item)}")
            found = [item[key] for key in self._keys]
        else:
            found = item
        for leaf in found:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"An AsynchronousDataAccessor takes flat collections of tensors, not {type(leaf).__name__}"
                )
        return list(found)

    def item(self, leaves: List[torch.Tensor]) -> Any:
        """Assemble an item from tensors; sequences become lists."""
        if self._is_tensor:
            return leaves[0]
        if self._custom is not None:
            return structures.rebuild(self._custom, iter(leaves))
        if self._keys is not None:
            return dict(zip(self._keys, leaves))
        return leaves


class Ring:
    """Slots that the worker fills and the accessor empties, with the signals between the two.

    Created by the accessor; the worker adds the tensors, because it is the first to know their shapes.

    Attributes:
        indices_mem: 1 for each slot that is ready to be read.
        buffers: One tensor per leaf of an item, with the slots as first dimension.
        stop: Set to stop the worker.
        epochs_asked: Number of epochs that the accessor has started.
        generation_asked: Incremented by the accessor when it abandons an epoch.
        generation_served: The latest request that the worker has served by discarding older items.
    """

    def __init__(self, context: Any, size: int) -> None:
        self.size = size
        self.indices_mem = context.RawArray(ctypes.c_int, size)
        self.kinds = context.RawArray(ctypes.c_int, size)
        self.rows = context.RawArray(ctypes.c_longlong, size)
        self.stop = context.RawValue(ctypes.c_int, 0)
        self.epochs_asked = context.RawValue(ctypes.c_longlong, 0)
        self.generation_asked = context.RawValue(ctypes.c_longlong, 0)
        self.generation_served = context.RawValue(ctypes.c_longlong, 0)
        self.buffers: List[torch.Tensor] = []

    def allocate(self, leaves: Sequence[torch.Tensor], rows: Optional[int]) -> None:
        """Create the shared tensors for items like `leaves`, with a different number of rows if given."""
        for leaf in leaves:
            shape = tuple(leaf.shape) if rows is None else (rows, *leaf.shape[1:])
            self.buffers.append(_shared_tensor((self.size, *shape), leaf.dtype))

    def write(self, slot: int, leaves: Sequence[torch.Tensor], *, rows_may_differ: bool) -> None:
        """Fill a slot.

        Raises:
            ValueError: If shapes differ from those of the first item.
        """
        if len(leaves) != len(self.buffers):
            raise ValueError(f"Items have {len(self.buffers)} tensors, the new one has {len(leaves)}")
        rows = leaves[0].shape[0] if rows_may_differ else -1
        for buffer, leaf in zip(self.buffers, leaves):
            target = buffer[slot][:rows] if rows_may_differ else buffer[slot]
            if target.shape != leaf.shape:
                raise ValueError(
                    f"Shapes are fixed by the first item: expected {tuple(target.shape)}, got {tuple(leaf.shape)}"
                )
            target.copy_(leaf)
        self.rows[slot] = rows

    def publish(self, slot: int, kind: SlotKind) -> None:
        """Mark a slot as ready to read."""
        self.kinds[slot] = int(kind)
        self.indices_mem[slot] = 1

    def read(self, slot: int) -> List[torch.Tensor]:
        """Return views of a slot's tensors."""
        rows = self.rows[slot]
        return [buffer[slot] if rows < 0 else buffer[slot][:rows] for buffer in self.buffers]

    def release(self, slot: int) -> None:
        """Mark a slot as free to write."""
        self.indices_mem[slot] = 0

    def clear(self) -> None:
        """Discard all slots that are ready."""
        for slot in range(self.size):
            self.indices_mem[slot] = 0


def _shared_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in shared memory, without a name unless torch shares memory by name.

    Torch's own allocation has a name for a moment, and a process that is killed in it leaves the memory behind.
    """
    empty = torch.empty(tuple(shape), dtype=dtype)
    if torch.multiprocessing.get_sharing_strategy() == "file_system" or not empty.numel():
        return empty.share_memory_()
    num_bytes = empty.numel() * empty.element_size()
    descriptor = os.memfd_create("AsynchronousDataAccessor")
    try:
        os.ftruncate(descriptor, num_bytes)
        storage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=dtype).set_(storage, 0, empty.shape)  # type: ignore[call-overload]


def wait_until(condition: Callable[[], bool], pause_seconds: float) -> None:
    """Poll a condition, with pauses that start at `pause_seconds` and grow."""
    longest = max(pause_seconds, _LONGEST_PAUSE_SECONDS)
    while not condition():
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, longest)
