"""Round float32 tensors to numbers of half precision, to nearest or up or down at random.

That takes several passes over a tensor, so a large one is rounded part by part: a part stays in the cache from one pass
to the next, and all parts use the same memory for half numbers. The rows of a part share most of their random numbers,
which stay in the cache as well.
"""

from __future__ import annotations

import math
from typing import Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

# Elements of a part: with its half numbers, and random numbers if it takes some, it fits into the second-level cache of
# current CPUs.
_PART_TO_NEAREST = 2**18
_PART_AT_RANDOM = 2**16
_ROW = 2**13
# Half has 13 bits of mantissa less than float32.
_DROPPED_BITS = 13
_SUBNORMAL_STEP = 2.0**-24  # between the numbers of half that are subnormal
_KEPT_BITS = torch.tensor(-(2**_DROPPED_BITS), dtype=torch.int32)
_NOISE_BITS = torch.tensor(2**_DROPPED_BITS - 1, dtype=torch.int32)
_BLOCK = 2**13  # random numbers that are drawn from the generator at once
# Roundings share random numbers and begin to read them at different places, each at the start of a cache line; so do
# the rows of a part.
_ALIGNMENT = 16
_NUM_PLACES = 512
_SPREAD = 309  # odd: all places are used before one is used again
_ROW_STEP = 165 * _ALIGNMENT  # odd multiple: columns of a matrix get other numbers in the next row
_MARGIN = _NUM_PLACES * _ALIGNMENT  # random numbers beyond those of a part


class Grid(NamedTuple):
    """How the elements of a tensor are cut: into parts, and each part into rows."""

    parts: int
    rows: int
    columns: int

    @property
    def span(self) -> int:
        """Return how many random numbers a part takes."""
        return (self.rows - 1) * _ROW_STEP + self.columns

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut."""
        return self.parts == self.rows == 1

    def cut(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts of a tensor without gaps, in the order of its memory."""
        if self.parts == 1:
            return (tensor.as_strided(self[1:], (self.columns, 1)),)
        return tensor.as_strided(self, (self.rows * self.columns, self.columns, 1)).unbind()


def grid_of(count: int) -> Grid:
    """Return parts and rows of equal length; a count that cannot be divided so is one row."""
    for parts in _few_divisors(count, _PART_AT_RANDOM):
        for rows in _few_divisors(count // parts, _ROW):
            return Grid(parts, rows, count // parts // rows)
    return Grid(1, 1, count)


def divisible(count: int) -> int:
    """Return the least count from this one on for which `grid_of` certainly finds parts and rows."""
    return count if count <= _ROW else math.ceil(count / _ROW) * _ROW


def _few_divisors(count: int, most: int) -> List[int]:
    """Return the divisors of a count that leave at most so many elements, as far as they are near the least."""
    least = max(1, math.ceil(count / most))
    return [number for number in range(least, 2 * least + 1) if count % number == 0]


def round_to_nearest(destination: torch.Tensor, result: torch.Tensor) -> None:
    """Store a result, rounded to nearest."""
    destination.copy_(result)


def round_up_or_down(values: torch.Tensor, noise: torch.Tensor, subnormal: torch.Tensor) -> torch.Tensor:
    """Change float32 values in place such that conversion to half gives one of their neighbours, the same on average.

    The noise is added below the last bit that half precision has, and may carry into it; then those bits are cleared.
    What is subnormal in half has fewer bits: the conversion, which rounds to nearest, decides with the second noise.
    That is too small to change anything else, and numbers of half precision do not change either, but for the sign of
    zeros. Nothing here becomes subnormal in float32: CPUs take forty times as long to compute with such numbers.

    Args:
        values: Any float32 tensor.
        noise: Random numbers of the same shape.
        subnormal: Others, independent of them.
    """
    values.view(torch.int32).add_(noise).bitwise_and_(_KEPT_BITS)
    return values.add_(subnormal)


class _Noise:
    """Random numbers for `round_up_or_down`, of which every part of a rounding takes a window at another place."""

    def __init__(self) -> None:
        self._size = _MARGIN
        self._num_windows = 0
        self._integers = torch.empty(0, dtype=torch.int32)
        self._floats = torch.empty(0)

    def reserve(self, grid: Grid) -> None:
        """Make sure that the next `draw` makes enough numbers for such a tensor."""
        self._size = max(self._size, grid.span + _MARGIN)

    def rewind(self) -> None:
        """Begin again with the first window."""
        self._num_windows = 0

    def next_places(self) -> Tuple[int, int]:
        """Return where the next window begins in the two kinds of random numbers."""
        self._num_windows += 1
        return self._place(self._num_windows), self._place(self._num_windows + _NUM_PLACES // 2)

    def _place(self, number: int) -> int:
        return number * _SPREAD % _NUM_PLACES * _ALIGNMENT

    def window(
        self, places: Tuple[int, int], shape: Sequence[int], strides: Sequence[int]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return random numbers of both kinds, from two places on."""
        return (
            self._integers.as_strided(shape, strides, places[0]),
            self._floats.as_strided(shape, strides, places[1]),
        )

    def draw(self) -> None:
        """Draw new numbers from torch's generator.

        A block of them is drawn. Each further block is the exclusive or of that block and itself shifted, another
        distance for each: any two numbers are independent, at a tenth of the time.
        """
        if self._size > self._integers.numel():
            self._integers = torch.empty(self._size, dtype=torch.int32)
            self._floats = torch.empty(self._size)
        noise = self._integers
        size = min(_BLOCK, noise.numel())
        words = torch.empty((size + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        drawn = words.view(torch.int16)[:size].to(torch.int32).bitwise_and_(_NOISE_BITS)
        noise[:size].copy_(drawn)
        twice = torch.cat([drawn, drawn])
        for distance, block in enumerate(noise[size:].split(size), start=1):
            shift = distance % size
            torch.bitwise_xor(drawn[: block.numel()], twice[shift : shift + block.numel()], out=block)
        # A bit less than half a step at most: more, added to the smallest normal numbers, would be rounded to half of
        # one.
        factor = _SUBNORMAL_STEP * (2.0**-_DROPPED_BITS - 2.0 ** -(2 * _DROPPED_BITS - 2))
        self._floats.copy_(noise).sub_((2**_DROPPED_BITS - 1) / 2).mul_(factor)


class StochasticRounding:
    """Rounds up or down at random such that the expected value is unchanged.

    Args:
        counts: The numbers of elements of the tensors to round.
    """

    def __init__(self, counts: Iterable[int]) -> None:
        self._grids = {count: grid_of(count) for count in counts}
        self._noise = _Noise()
        for grid in self._grids.values():
            self._noise.reserve(grid)
        self._is_drawn = False

    def renew(self) -> None:
        """Draw new random numbers at the next rounding, from torch's generator, for all that follow."""
        self._is_drawn = False

    def __call__(self, destination: torch.Tensor, result: torch.Tensor) -> None:
        """Store `result` in `destination`, rounded at random if that is half precision."""
        if destination.dtype == torch.float16:
            if not self._is_drawn:
                self._noise.draw()
                self._noise.rewind()
                self._is_drawn = True
            result = result.float().clone(memory_format=torch.contiguous_format)
            for part in self._grids[result.numel()].cut(result):
                window = self._noise.window(self._noise.next_places(), part.shape, (_ROW_STEP, 1))
                round_up_or_down(part, *window)
        destination.copy_(result)


def round_at_random(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor rounded up or down at random to half precision, with new random numbers."""
    rounding = StochasticRounding([tensor.numel()])
    half = torch.empty_like(tensor, dtype=torch.float16)
    rounding(half, tensor)
    return half


class InPlaceRoundings:
    """Functions that round the results of a graph in place, and the memory that they use one after another.

    Args:
        stochastic: Whether to round at random instead of to nearest.
    """

    def __init__(self, stochastic: bool) -> None:
        self.stochastic = stochastic
        self.noise = _Noise()
        self._size = 0
        self._half: Optional[torch.Tensor] = None

    def of_shape(self, shape: Iterable[int]) -> Union[NearestInPlace, StochasticInPlace]:
        """Return a function that rounds a tensor of this shape in place; none may be called before the last is made."""
        count = math.prod(shape)
        if not self.stochastic:
            self._size = max(self._size, min(count, _PART_TO_NEAREST))
            return NearestInPlace(self)
        grid = grid_of(count)
        self._size = max(self._size, count // grid.parts)
        self.noise.reserve(grid)
        return StochasticInPlace(self, grid, [self.noise.next_places() for _ in range(grid.parts)])

    def draw(self) -> None:
        """Draw the random numbers of a run."""
        self.noise.draw()

    def half(self, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """Return memory for the half numbers of a part."""
        if self._half is None:
            self._half = torch.empty(self._size, dtype=torch.float16)
        return self._half.as_strided(shape, strides, 0)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory without gaps, in whatever order."""
    return torch.empty_like(tensor).stride() == tensor.stride()


class NearestInPlace:
    """Rounds float32 tensors of one shape and layout to the nearest numbers of half precision."""

    def __init__(self, shared: InPlaceRoundings) -> None:
        self._shared = shared
        self._halves: List[torch.Tensor] = []
        self._is_dense = True

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._halves:
            self._prepare(tensor)
        if len(self._halves) == 1:
            return tensor.copy_(self._halves[0].copy_(tensor))
        dense = tensor if self._is_dense else tensor.contiguous()
        for part, half in zip(dense.as_strided((dense.numel(),), (1,)).split(_PART_TO_NEAREST), self._halves):
            part.copy_(half.copy_(part))
        return tensor if self._is_dense else tensor.copy_(dense)

    def _prepare(self, tensor: torch.Tensor) -> None:
        self._is_dense = _is_dense(tensor)
        if tensor.numel() <= _PART_TO_NEAREST:
            self._halves = [self._shared.half(tensor.shape, torch.empty_like(tensor).stride())]
        else:
            starts = range(0, tensor.numel(), _PART_TO_NEAREST)
            sizes = [min(_PART_TO_NEAREST, tensor.numel() - start) for start in starts]
            self._halves = [self._shared.half((size,), (1,)) for size in sizes]


class _Lane(NamedTuple):
    """The memory and the random numbers for one part of a tensor."""

    half: torch.Tensor
    noise: torch.Tensor
    subnormal: torch.Tensor


class StochasticInPlace:
    """Rounds float32 tensors of one shape and layout up or down at random.

    Args:
        shared: Shared memory, and the random numbers of a run.
        grid: How the tensors are cut.
        places: For each part, where to begin in the two kinds of random numbers.
    """

    def __init__(self, shared: InPlaceRoundings, grid: Grid, places: Sequence[Tuple[int, int]]) -> None:
        self._shared = shared
        self._grid = grid
        self._places = places
        self._lanes: List[_Lane] = []
        self._is_dense = True

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._lanes:
            self._prepare(tensor)
        if self._grid.is_whole:
            half, noise, subnormal = self._lanes[0]
            return tensor.copy_(half.copy_(round_up_or_down(tensor, noise, subnormal)))
        dense = tensor if self._is_dense else tensor.contiguous()
        for part, (half, noise, subnormal) in zip(self._grid.cut(dense), self._lanes):
            part.copy_(half.copy_(round_up_or_down(part, noise, subnormal)))
        return tensor if self._is_dense else tensor.copy_(dense)

    def to_half(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a rounded vector in half precision; the vector itself is overwritten."""
        if not self._lanes:
            self._prepare(self._grid.cut(vector)[0])
        result = torch.empty_like(vector, dtype=torch.float16)
        for target, part, lane in zip(self._grid.cut(result), self._grid.cut(vector), self._lanes):
            target.copy_(round_up_or_down(part, lane.noise, lane.subnormal))
        return result

    def _prepare(self, tensor: torch.Tensor) -> None:
        self._is_dense = _is_dense(tensor)
        shape, strides = self._grid[1:], (self._grid.columns, 1)
        noise_strides: Sequence[int] = (_ROW_STEP, 1)
        if self._grid.is_whole:
            shape, strides = tensor.shape, torch.empty_like(tensor).stride()
            noise_strides = strides
        half = self._shared.half(shape, strides)
        window = self._shared.noise.window
        self._lanes = [_Lane(half, *window(places, shape, noise_strides)) for places in self._places]


ROUNDINGS = (NearestInPlace, StochasticInPlace)
