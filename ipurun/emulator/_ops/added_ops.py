"""Ops that PopTorch adds to torch: dynamic slices, point clouds and CTC decoding."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

from ipurun.emulator._capture.dtypes import narrowed
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, call_recorded, one_tensor, require_int, require_tensor

Batch = Optional[Union[List[int], torch.Tensor]]
Prefix = Tuple[int, ...]
_START_TYPES = (torch.int16, torch.int32, torch.int64)


def _positions(start: torch.Tensor, size: int, step: int, length: int) -> torch.Tensor:
    """Return the positions of a slice, shifted to lie inside the dimension.

    A compile may see values that never occur at run time, so it must not fail on them.
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


def _check_start(op: str, start: torch.Tensor) -> None:
    require_tensor(start, f"{op}: the slice start")
    if start.dtype not in _START_TYPES:
        raise createPoptorchError(f"{op}: the slice start must be an integer tensor, got {start.dtype}.")


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Return `tensor[start : start + size : step]` along `dim`, where `start` is a run-time value.

    Args:
        tensor: The tensor to slice.
        dim: Dimension to slice along.
        start: Integer tensor with one element.
        size: Length of the range.
        step: Distance between selected elements.

    Raises:
        poptorch.Error: An argument has the wrong type; in an executor also if size or step is below 1, or the
            size does not divide the dimension.
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
        input: The tensor to copy; not changed.
        src: The tensor to write, of the same type and rank.
        dim: Dimension to write along.
        start: Integer tensor with one element, a run-time value.
        size: Length of `src` along `dim`.

    Raises:
        poptorch.Error: An argument has the wrong type or rank; in an executor also if the size is below 1.
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
    types = [narrowed(tensor.dtype) for tensor in (input, src)]
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


def fps(src: torch.Tensor, ptr: List[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """Sample points that are far from each other, in each cloud of a batch.

    Args:
        src: Points, [number of points, ...].
        ptr: Boundaries of the clouds: cloud i is `src[ptr[i] : ptr[i + 1]]`.
        ratio: Proportion of points to sample in each cloud (rounded up).
        random_start: Start from a random point instead of the first.

    Returns:
        Indices of the sampled points in `src`, cloud by cloud.

    Raises:
        poptorch.Error: An argument has the wrong type.
    """
    require_tensor(src, "fps: src")
    if not isinstance(ptr, (list, tuple)) or not all(isinstance(border, int) for border in ptr):
        raise createPoptorchError(f"fps: ptr must be a list of ints. {type(ptr)} is not supported.")
    if not isinstance(ratio, float):
        raise createPoptorchError(f"fps: ratio must be a float. {type(ratio)} is not supported.")
    if not isinstance(random_start, bool):
        raise createPoptorchError(f"fps: random_start must be a bool. {type(random_start)} is not supported.")
    borders = list(ptr)

    def sample(points: torch.Tensor) -> torch.Tensor:
        clouds = zip(borders[:-1], borders[1:])
        picked = [_farthest(points[begin:end], ratio, random_start) + begin for begin, end in clouds]
        return torch.cat(picked)

    recorder = active_recorder()
    return sample(src) if recorder is None else one_tensor(call_recorded(recorder, sample, [src], name="fps"))


def _farthest(points: torch.Tensor, ratio: float, random_start: bool) -> torch.Tensor:
    flat = points.detach().reshape(points.shape[0], -1)
    count = math.ceil(flat.shape[0] * ratio)
    first = int(torch.randint(flat.shape[0], ())) if random_start else 0
    chosen = [first]
    distance = (flat - flat[first]).square().sum(1)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (flat - flat[chosen[-1]]).square().sum(1))
    return torch.tensor(chosen[:count])


def nearest(x: torch.Tensor, y: torch.Tensor, batch_x: Batch = None, batch_y: Batch = None) -> torch.Tensor:
    """Find the nearest point of `y` in the same cloud for each point of `x`.

    Args:
        x: Points, [n, features] or [n].
        y: Points, [m, features] or [m].
        batch_x: Cloud of each point of `x`, in ascending order; None for a single cloud.
        batch_y: Cloud of each point of `y`.

    Returns:
        An index into `y` for each point of `x`.

    Raises:
        poptorch.Error: An argument has the wrong type, or the batches have different types.
    """
    require_tensor(x, "nearest: x")
    require_tensor(y, "nearest: y")
    for name, batch in (("batch_x", batch_x), ("batch_y", batch_y)):
        if batch is not None and not _is_batch(batch):
            raise createPoptorchError(f"nearest: {name} must be a list of ints or a torch.tensor, got {type(batch)}.")
    if batch_x is not None and batch_y is not None and isinstance(batch_x, list) != isinstance(batch_y, list):
        raise createPoptorchError("nearest: batch_x and batch_y must be of the same type.")

    arguments = [x, y, _as_tensor(batch_x, x.shape[0]), _as_tensor(batch_y, y.shape[0])]
    recorder = active_recorder()
    return (
        _nearest(*arguments)
        if recorder is None
        else one_tensor(call_recorded(recorder, _nearest, arguments, name="nearest"))
    )


def _is_batch(batch: Any) -> bool:
    if isinstance(batch, torch.Tensor):
        return True
    return isinstance(batch, list) and all(isinstance(cloud, int) for cloud in batch)


def _as_tensor(batch: Batch, size: int) -> torch.Tensor:
    if isinstance(batch, torch.Tensor):
        return batch
    values: Sequence[int] = [0] * size if batch is None else batch
    return torch.tensor(values, dtype=torch.int32)


def _nearest(x: torch.Tensor, y: torch.Tensor, batch_x: torch.Tensor, batch_y: torch.Tensor) -> torch.Tensor:
    points = x.detach().reshape(x.shape[0], -1).to(torch.float32)
    targets = y.detach().reshape(y.shape[0], -1).to(torch.float32)
    distance = (points[:, None, :] - targets[None, :, :]).square().sum(-1)
    distance = distance.masked_fill(batch_x[:, None] != batch_y[None, :], float("inf"))
    return distance.argmin(1)


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> List[torch.Tensor]:
    """Find the most likely label sequences of CTC outputs.

    Args:
        probs: Log-probabilities, [input length, batch, classes].
        lengths: Valid steps of each sample, [batch].
        blank: Class that means "no label".
        beam_width: Prefixes kept at each step.
        top_paths: Sequences returned per sample.

    Returns:
        Log-probabilities [batch, top_paths], lengths [batch, top_paths] and labels [batch, top_paths, input
        length], padded with `blank`. Outside an executor, zeros of these shapes, as in PopTorch.

    Raises:
        poptorch.Error: `probs` is not a three-dimensional tensor, or `lengths` is not a tensor.
    """
    require_tensor(probs, "ctc_beam_search_decoder: probs")
    require_tensor(lengths, "ctc_beam_search_decoder: lengths")
    if probs.dim() != 3:
        raise createPoptorchError(
            f"ctc_beam_search_decoder: probs must have 3 dimensions [input length, batch, classes], got {probs.dim()}."
        )
    recorder = active_recorder()
    if recorder is None:
        steps, batch, _ = probs.shape
        return [
            torch.zeros(batch, top_paths),
            torch.zeros(batch, top_paths, dtype=torch.int32),
            torch.zeros(batch, top_paths, steps, dtype=torch.int32),
        ]

    def decode(values: torch.Tensor, valid_steps: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        return _decode_batch(values, valid_steps, blank, beam_width, top_paths)

    return list(call_recorded(recorder, decode, [probs, lengths], name="ctc_beam_search_decoder"))


def _decode_batch(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> Tuple[torch.Tensor, ...]:
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), float("-inf"), dtype=torch.float32)
    path_lengths = torch.zeros(batch, top_paths, dtype=torch.int32)
    paths = torch.full((batch, top_paths, steps), blank, dtype=torch.int32)
    for sample in range(batch):
        valid = probs[: int(lengths[sample]), sample].to(torch.float32)
        for rank, (score, prefix) in enumerate(_search(valid, blank, beam_width)[:top_paths]):
            scores[sample, rank] = score
            path_lengths[sample, rank] = len(prefix)
            paths[sample, rank, : len(prefix)] = torch.tensor(prefix, dtype=torch.int32)
    return scores.to(probs.dtype), path_lengths, paths


def _search(probs: torch.Tensor, blank: int, beam_width: int) -> List[Tuple[float, Prefix]]:
    """Return the label sequences left after all steps, best first, with their log-probabilities.

    A prefix has two scores, for alignments that end in a blank and for those that end in its last label:
    repeating the last label extends the prefix only after a blank.
    """
    prefixes: List[Prefix] = [()]
    ends_blank = torch.zeros(1)
    ends_label = torch.full((1,), float("-inf"))
    num_classes = probs.shape[1]

    for step in probs:
        total = torch.logaddexp(ends_blank, ends_label)
        # The empty prefix has no last label: use the blank, as its label score is -inf anyway.
        last = torch.tensor([prefix[-1] if prefix else blank for prefix in prefixes])
        rows = torch.arange(len(prefixes))

        longer = total[:, None] + step[None, :]
        longer[rows, last] = ends_blank + step[last]
        longer[:, blank] = float("-inf")
        stay_blank = total + step[blank]
        stay_label = ends_label + step[last]

        index: Dict[Prefix, int] = {prefix: row for row, prefix in enumerate(prefixes)}
        for row, prefix in enumerate(prefixes):
            parent = index.get(prefix[:-1]) if prefix else None
            if parent is not None:
                stay_label[row] = torch.logaddexp(stay_label[row], longer[parent, prefix[-1]])
                longer[parent, prefix[-1]] = float("-inf")

        candidates = torch.cat([torch.logaddexp(stay_blank, stay_label), longer.flatten()])
        best = [place for place in _best(candidates, beam_width) if candidates[place] > float("-inf")]
        kept: List[Tuple[Prefix, float, float]] = []
        for place in best:
            if place < len(prefixes):
                kept.append((prefixes[place], float(stay_blank[place]), float(stay_label[place])))
            else:
                row, label = divmod(place - len(prefixes), num_classes)
                kept.append((prefixes[row] + (label,), float("-inf"), float(longer[row, label])))
        prefixes = [prefix for prefix, _, _ in kept]
        ends_blank = torch.tensor([score for _, score, _ in kept])
        ends_label = torch.tensor([score for _, _, score in kept])

    total = torch.logaddexp(ends_blank, ends_label)
    return [(float(total[place]), prefixes[place]) for place in _best(total, len(prefixes))]


def _best(scores: torch.Tensor, count: int) -> List[int]:
    return torch.topk(scores, min(count, scores.numel())).indices.tolist()
