"""Make up for what is slow in torch on a CPU: the memory allocator's defaults, and kernels that a quicker one replaces.

A replacement returns the same bits as the operation, so that it can be used anywhere.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from typing import Any, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node

# Parameters of glibc's mallopt, and the largest values that all its versions take.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _HEAP_BYTES = 2**30, 32 * 2**20
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
# Channels that a vectorised kernel computes side by side; the number of elements below which a copy costs too much.
_MOST_CHANNELS, _LEAST_CHANNELS = 128, 16
_LEAST_ELEMENTS = 4096


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> bool:
    """Let the process keep the memory that a step frees for the next step; return whether that was possible.

    By default, glibc returns the large tensors of a step to the system, and every step pays for the page faults of
    getting them again: up to a quarter of its time. What the user set in the environment stays.
    """
    if any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def with_quick_kernels(graph: Graph) -> Graph:
    """Return the graph with quicker functions in place of some operations; their results are the same bits."""
    if not any(node.op in _QUICKER for node in graph.nodes):
        return graph
    return dataclasses.replace(graph, nodes=[_quick(node) for node in graph.nodes])


def _quick(node: Node) -> Node:
    return dataclasses.replace(node, op=_QUICKER[node.op]) if node.op in _QUICKER else node


def _max_pool2d(image: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Pool with the kernel for channels that lie next to each other: it is vectorised, the other one guesses branches.

    Images and channels are independent, so any number of them can take the place of the channels.
    """
    pool = torch.ops.aten.max_pool2d_with_indices.default
    width = _channels_at_once(image)
    if not width:
        return pool(image, *args, **kwargs)
    together = image.view(-1, width, *image.shape[2:]).contiguous(memory_format=torch.channels_last)
    values, indices = pool(together, *args, **kwargs)
    shape = (*image.shape[:2], *values.shape[2:])
    return values.contiguous().view(shape), indices.contiguous().view(shape)


def _channels_at_once(image: torch.Tensor) -> int:
    """Return how many images and channels to put next to each other, 0 if that is not worth it."""
    if image.dim() != 4 or image.numel() < _LEAST_ELEMENTS or not image.is_contiguous():
        return 0
    planes = image.shape[0] * image.shape[1]
    return next((n for n in range(min(_MOST_CHANNELS, planes), _LEAST_CHANNELS - 1, -1) if planes % n == 0), 0)


_QUICKER = {torch.ops.aten.max_pool2d_with_indices.default: _max_pool2d}
