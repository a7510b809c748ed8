"""Slices whose start is known at run time only: dynamic_slice and dynamic_update."""

from __future__ import annotations

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, require_int, require_tensor

_START_TYPES = (torch.int16, torch.int32, torch.int64)


def _positions(start: torch.Tensor, size: int, step: int, length: int) -> torch.Tensor:
    """Return the positions of a slice; one that would leave the dimension is moved inside it.

    A compile may run on values that are not those of the run, so it must not fail because of them.
    """
    first = start.reshape(1).to(torch.int64).clamp(0, max(length - size, 0))
    return first + torch.arange(0, size, step, device=start.device)


def _check_size(size: int) -> None:
    if size == 0:
        raise createPoptorchError("The start and end of a slice must be different.")
    if size < 0:
        raise createPoptorchError(
            f"Taking a slice of a tensor with the end less than the start is not supported (size {size})."
        )


def _type_on_device(dtype: torch.dtype) -> torch.dtype:
    return {torch.int64: torch.int32, torch.float64: torch.float32}.get(dtype, dtype)


def _check_start(op: str, start: torch.Tensor) -> None:
    require_tensor(start, f"{op}: the slice start")
    if start.dtype not in _START_TYPES:
        raise createPoptorchError(f"{op}: the slice start must be an integer tensor, got {start.dtype}.")


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return `tensor[start : start + size : step]` along `dim`, `start` being a run-time value.

    Args:
        tensor: What is sliced.
        dim: Dimension to slice along.
        start: Integer tensor of one element.
        size: Length of the range.
        step: Distance between the elements taken.

    Raises:
        poptorch.Error: A wrong type; in an executor also a size or step below 1, or a size that does not
            divide the dimension.
    """
    require_tensor(tensor, "dynamic_slice: the input")
    require_int(dim, "dynamic_slice: Dimension")
    _check_start("dynamic_slice", start)
    require_int(size, "dynamic_slice: Size")
    require_int(step, "dynamic_slice: Step")
    if active_recorder() is None:
        first = int(start)
        return torch.ops.aten.slice(tensor, dim, first, first + size, step)
    _check_size(size)
    if step < 1:
        raise createPoptorchError(f"Taking a slice of a tensor needs a step of at least 1, got {step}.")
    length = tensor.shape[dim]
    if length % size:
        raise createPoptorchError(
            f"The size of the slice ({size}) must be a factor of the slicing dimension ({length})."
        )
    return torch.index_select(tensor, dim, _positions(start, size, step, length))


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """Return a copy of `input` with `src` written at `[start, start + size)` along `dim`.

    Args:
        input: What is copied; not changed.
        src: What is written, of the same type and rank.
        dim: Dimension to write along.
        start: Integer tensor of one element, a run-time value.
        size: Length of `src` along `dim`.

    Raises:
        poptorch.Error: A wrong type or rank; in an executor also a size below 1.
    """
    require_tensor(input, "dynamic_update: the input")
    require_tensor(src, "dynamic_update: the source")
    require_int(dim, "dynamic_update: Dimension")
    _check_start("dynamic_update", start)
    require_int(size, "dynamic_update: Size")
    if input.dim() != src.dim():
        raise createPoptorchError(
            f"input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        )
    types = [_type_on_device(tensor.dtype) for tensor in (input, src)]
    if types[0] != types[1]:
        raise createPoptorchError(f"input and src tensor must have same dtype. ({types[0]} vs {types[1]})")
    if active_recorder() is None:
        first = int(start)
        updated = input.clone()
        torch.ops.aten.slice(updated, dim, first, first + size, 1).copy_(src)
        return updated
    _check_size(size)
    shape = [1] * input.dim()
    shape[dim] = size
    positions = _positions(start, size, 1, input.shape[dim]).reshape(shape).expand(src.shape)
    return input.scatter(dim, positions, src.to(input.dtype))
