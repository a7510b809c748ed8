"""Annotations for the compiler: ops that return their tensor unchanged, and attributes for the ops of a scope."""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch.utils._pytree import tree_map

from ipurun.emulator import enums
from ipurun.emulator._capture.recorder import current
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, require_tensor

__all__ = ["Attribute", "clear_attribute", "set_attribute"]


def _mark(tensor: torch.Tensor, kind: str, **info: Any) -> torch.Tensor:
    recorder = active_recorder()
    return tensor if recorder is None else recorder.mark(tensor, kind, **info)


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return its tensor; an op that the compiler never removes."""
    require_tensor(tensor, "nop: the argument")
    return _mark(tensor, "nop")


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss (or a part of it) that backpropagation starts from.

    Args:
        x: The computed loss.
        reduction: "sum", "mean" or "none".

    Returns:
        The reduced loss; a copy of `x` for "none".
    """
    if reduction == "sum":
        loss = x.sum()
    elif reduction == "mean":
        loss = x.mean()
    else:
        assert reduction == "none", f"Unsupported reduction type! Got {reduction!r}"
        loss = x.clone()
    return _mark(loss, "identity_loss", reduction=reduction)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep values between forward and backward where recomputation would drop them.

    Args:
        *tensors: Tensors, or one list or tuple of them.

    Returns:
        The same tensors: one tensor, the container type that was given, or a tuple.

    Raises:
        ValueError: Something given is not a tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        return type(tensors[0])(_checkpoint(tensor) for tensor in tensors[0])
    kept = tuple(_checkpoint(tensor) for tensor in tensors)
    return kept[0] if len(kept) == 1 else kept


def _checkpoint(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"All inputs must be tensors, got {type(tensor)}")
    return _mark(tensor, "recompute")


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Record the share of temporary memory that the op that made `tensor` may use (device only)."""
    require_tensor(tensor, "set_available_memory: the value to set available memory for")
    return _mark(tensor, "available_memory", proportion=available_memory_proportion)


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: enums.MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Matrix product that a device computes in `factor` parts, to need less memory.

    Args:
        lhs: Left matrix, m by n.
        rhs: Right matrix, n by p.
        mode: Dimension that is cut: InputChannels m, ReducingDim n, OutputChannels p, or Disabled.
        factor: Number of parts; must divide that dimension.
        keep_precision: Add the parts in float32 (device only).

    Raises:
        poptorch.Error: In an executor, when `factor` does not divide the dimension.
    """
    assert isinstance(keep_precision, bool), "keep_precision must be a bool"
    assert isinstance(factor, int), "factor must be an int"
    assert isinstance(mode, enums.MatMulSerializationMode), "mode must be a MatMulSerializationMode"
    if active_recorder() is not None:
        _check_serialization(lhs, rhs, mode, factor)
    product = torch.matmul(lhs, rhs)
    return _mark(product, "serialized_matmul", mode=mode.value, factor=factor, keep_precision=keep_precision)


def _check_serialization(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: enums.MatMulSerializationMode, factor: int
) -> None:
    modes = enums.MatMulSerializationMode
    if mode == modes.Disabled:
        return
    size = {
        modes.InputChannels: lhs.shape[-2] if lhs.dim() > 1 else 1,
        modes.ReducingDim: lhs.shape[-1],
        modes.OutputChannels: rhs.shape[-1],
    }[mode]
    if factor <= 0 or size % factor:
        raise createPoptorchError(
            f"Invalid serialisation factor {factor} for serializedMatMul: with mode {mode.name} it must "
            f"be at least 1 and divide {size}, the size of the dimension that is cut."
        )


class NameScope:
    """Context manager that prefixes the names of the ops called inside it.

    Args:
        name: The prefix.
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), "Parameter to NameScope must be a string"
        self.name = name

    def __enter__(self) -> None:
        recorder = active_recorder()
        if recorder is not None:
            recorder.record_event("push_name_scope", name=self.name)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        recorder = active_recorder()
        if recorder is not None:
            recorder.record_event("pop_name_scope")


def _mark_tensors(structure: Any, kind: str, mode: enums.OverlapMode) -> Any:
    recorder = active_recorder()

    def mark(value: Any) -> Any:
        if recorder is None or not isinstance(value, torch.Tensor):
            return value
        # A view, so that the marked tensor differs from the given one.
        return recorder.mark(value.view_as(value), kind, mode=mode.value)

    return tree_map(mark, structure)


def set_overlap_for_input(input_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Ask that the copy of model inputs from the host overlaps computation.

    Args:
        input_tensors: A tensor, or tuples, lists and dicts of tensors; other values are kept.
        mode: How far the copy may overlap.

    Returns:
        The same structure, to be used in place of what was given.
    """
    return _mark_tensors(input_tensors, "overlap_input", mode)


def set_overlap_for_output(output_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Ask that the copy of model outputs to the host overlaps computation.

    Args:
        output_tensors: A tensor, or tuples, lists and dicts of tensors; other values are kept.
        mode: How far the copy may overlap.

    Returns:
        The same structure, to be returned in place of what was given.
    """
    return _mark_tensors(output_tensors, "overlap_output", mode)


class Attribute:
    """Context manager that gives the ops inside it attributes of the backend.

    Args:
        kwargs: For each attribute a dict of its keys and values: ``__outline={"layer": "embedding"}``.
    """

    # What is in force now: {attribute: {key: value}}, shared by nested scopes.
    _attributes: Dict[str, Dict[str, str]] = {}

    def __init__(self, **kwargs: Dict[str, str]) -> None:
        self._attrs = kwargs
        self._saved: Dict[str, Dict[str, str]] = {}

    def __enter__(self) -> None:
        self._saved = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
        in_force = {name: dict(pairs) for name, pairs in self._saved.items()}
        for name, pairs in self._attrs.items():
            in_force.setdefault(name, {}).update(pairs)
        self._put_in_force(in_force)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self._put_in_force(self._saved)

    @staticmethod
    def _put_in_force(attributes: Dict[str, Dict[str, str]]) -> None:
        Attribute._attributes = attributes
        recorder = current()
        if recorder is not None:
            recorder.record_event("attributes", attributes=attributes)


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Give the ops that follow an attribute; programs find it as ``torch.ops.poptorch.set_attribute``."""
    in_force = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
    in_force.setdefault(attribute, {})[key] = value
    Attribute._put_in_force(in_force)


def clear_attribute(attribute: str, key: str) -> None:
    """Take an attribute from the ops that follow; programs find it as ``torch.ops.poptorch.clear_attribute``."""
    in_force = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
    in_force.get(attribute, {}).pop(key, None)
    Attribute._put_in_force({name: pairs for name, pairs in in_force.items() if pairs})
