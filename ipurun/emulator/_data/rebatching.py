"""Joining batches along their first dimension, and cutting a stream of them into batches of another size."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Sequence

import torch

from ipurun.emulator._capture import structures

__all__ = ["grouped", "rebatched"]

Leaves = List[torch.Tensor]
"""The tensors of one item, in a fixed order."""


def concatenated(batches: Sequence[Any]) -> Any:
    """Join batches of the same structure along dimension 0; what is not a tensor comes from the first."""
    columns = zip(*(structures.tensors_in(batch) for batch in batches))
    return structures.rebuild(batches[0], iter([torch.cat(column) for column in columns]))


def grouped(batches: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """Join every `size` batches into one; an incomplete last group is kept unless `drop_last`."""
    group: List[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield concatenated(group)
            group = []
    if group and not drop_last:
        yield concatenated(group)


def rebatched(items: Iterable[Leaves], size: int, *, keep_remainder: bool) -> Iterator[Leaves]:
    """Cut a stream of batches, of any sizes, into batches of `size` rows.

    Args:
        items: Batches as lists of tensors that agree in dimension 0.
        size: Rows of each batch that is yielded.
        keep_remainder: Also yield the rows left at the end, in a shorter batch.
    """
    pending: List[Leaves] = []
    pending_rows = 0
    for item in items:
        start, rows = 0, item[0].shape[0]
        while rows - start + pending_rows >= size:
            stop = start + size - pending_rows
            pending.append([leaf[start:stop] for leaf in item])
            yield _joined(pending)
            pending, pending_rows, start = [], 0, stop
        if start < rows:
            pending.append([leaf[start:] for leaf in item])
            pending_rows += rows - start
    if pending and keep_remainder:
        yield _joined(pending)


def _joined(pieces: List[Leaves]) -> Leaves:
    if len(pieces) == 1:
        return pieces[0]
    return [torch.cat(column) for column in zip(*pieces)]
