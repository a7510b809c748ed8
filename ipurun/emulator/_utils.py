"""Helpers that PopTorch exports for its native layer."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch

from ipurun.emulator._impl import createPoptorchError

__all__ = ["accessAttributes", "combine_batch_tensors_gen", "getIpuTensorId", "keepAttributes"]

_ID_PREFIX = "attr:"
_kept: List[Optional[Dict[str, Any]]] = []


def keepAttributes(attributes: Optional[Dict[str, Any]]) -> str:
    """Store the attributes of a custom op and return their id."""
    _kept.append(attributes)
    return f"{_ID_PREFIX}{len(_kept) - 1:x}"


def accessAttributes(attribute_id_str: str) -> Dict[str, Any]:
    """Return the attributes of a custom op from their id or a JSON object.

    Raises:
        ValueError: The text is neither a known id nor a JSON object.
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError(f"An attribute id must be a str, got {attribute_id_str!r}")
    if attribute_id_str.startswith("{"):
        return dict(json.loads(attribute_id_str))
    if not attribute_id_str.startswith(_ID_PREFIX):
        raise ValueError(f"Invalid attribute id {attribute_id_str!r}: expected an id that begins with {_ID_PREFIX}")
    number = int(attribute_id_str[len(_ID_PREFIX) :], 16)
    if not 0 <= number < len(_kept):
        raise ValueError(f"Invalid attribute id {attribute_id_str!r}: it is unknown")
    return _kept[number] or {}


def getIpuTensorId(x: torch.Tensor) -> int:
    """Return the number of a tensor in the graph being captured.

    Raises:
        Error: No graph is being captured, or the tensor is not part of it.
    """
    from ipurun.emulator._capture.recorder import current

    recorder = current()
    value = None if recorder is None else recorder.value_of(x)
    if value is None:
        raise createPoptorchError("Expected an IPU tensor: the tensor is not part of a graph being captured")
    return int(value)


def combine_batch_tensors_gen(tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the tensors of several batches, each joined in the first dimension with those at the same place.

    Args:
        tensors: The tensors of each batch.
    """
    for parts in zip(*tensors):
        yield torch.cat(parts)
