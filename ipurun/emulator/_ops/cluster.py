"""Point-cloud ops: farthest point sampling and nearest neighbours."""

from __future__ import annotations

import math
from typing import Any, List, Optional, Sequence, Union

import torch

from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, call_recorded, one_tensor, require_tensor

Batch = Optional[Union[List[int], torch.Tensor]]


def fps(src: torch.Tensor, ptr: List[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """Samples points that lie far from each other, in each cloud of a batch.

    Args:
        src: Points, [number of points, ...].
        ptr: Where clouds begin and end: cloud i is `src[ptr[i] : ptr[i + 1]]`.
        ratio: Share of a cloud's points that is sampled (rounded up).
        random_start: Begin with a random point rather than the first.

    Returns:
        Indices of the sampled points in `src`, cloud by cloud.

    Raises:
        poptorch.Error: An argument of a wrong type.
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
    """Find for each point of `x` the nearest point of `y` in the same cloud.

    Args:
        x: Points, [n, features] or [n].
        y: Points, [m, features] or [m].
        batch_x: Cloud of each point of `x`, in ascending order; None for a single cloud.
        batch_y: Cloud of each point of `y`.

    Returns:
        For each point of `x` an index into `y`.

    Raises:
        poptorch.Error: An argument of a wrong type, or batches of different types.
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
