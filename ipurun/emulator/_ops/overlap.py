"""Marks for inputs and outputs whose transfer a device overlaps with computation."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ipurun.emulator import enums
from ipurun.emulator._ops.recording import active_recorder


def _mark_tensors(structure: Any, kind: str, mode: enums.OverlapMode) -> Any:
    recorder = active_recorder()

    def mark(value: Any) -> Any:
        if recorder is None or not isinstance(value, torch.Tensor):
            return value
        # A view, so that the marked tensor can be told from the one given.
        return recorder.mark(value.view_as(value), kind, mode=mode.value)

    return tree_map(mark, structure)


def set_overlap_for_input(input_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Asks that the copy of model inputs from the host overlaps computation.

    Args:
        input_tensors: A tensor, or tuples, lists and dicts of tensors; other values are kept.
        mode: How far the copy may overlap.

    Returns:
        The same structure, to be used in place of what was given.
    """
    return _mark_tensors(input_tensors, "overlap_input", mode)


def set_overlap_for_output(output_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Asks that the copy of model outputs to the host overlaps computation.

    Args:
        output_tensors: A tensor, or tuples, lists and dicts of tensors; other values are kept.
        mode: How far the copy may overlap.

    Returns:
        The same structure, to be returned in place of what was given.
    """
    return _mark_tensors(output_tensors, "overlap_output", mode)
