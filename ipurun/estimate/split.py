"""The best split of a model over IPUs, by dynamic programming over its cut points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.estimate.costs import proportion_of
from ipurun.estimate.cuts import (
    Cell,
    CutOptions,
    CutPoint,
    Segment,
    cells_of,
    cut_options,
    cut_points,
    segment_memory,
    segment_of,
    segments_of,
)
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import in_flight, share_of
from ipurun.estimate.stages import layout_of_cuts
from ipurun.estimate.types import Settings, StageLayout
from ipurun.inspect.traced_model import TracedModel

__all__ = ["Split", "Splitter"]

_MOST_CUTS = 400
_SHORT = 1.6  # times the even share of the work
_HARDLY_SLOWER = 1.02
# Cuts inside layers must shorten the slowest IPU's time to this part to be preferred to cuts between layers.
_WORTH_DEPTH = 0.9


@dataclass(frozen=True)
class Split:
    """A model split over the IPUs of a replica.

    Args:
        blocks: (module, IPU) of every block after the first.
        layout: The same by operation.
        slowest: Seconds of the slowest IPU for one micro-batch.
        fullest: Bytes of the fullest IPU.
        evenness: Time of an IPU if all had the same work, over that of the slowest.
        leaner: A split that is hardly slower and whose fullest IPU holds less; its weight updates may be cheaper.
    """

    blocks: Tuple[Tuple[str, int], ...]
    layout: StageLayout
    slowest: float
    fullest: float
    evenness: float
    leaner: Optional[Split] = None

    @property
    def modules(self) -> Tuple[str, ...]:
        """Modules at which the next IPU begins, for `pipeline.split`."""
        return tuple(module for module, _ in self._first_blocks())

    @property
    def returning(self) -> Mapping[str, int]:
        """Module -> the earlier IPU that its block returns to, for `pipeline.blocks`."""
        first = self._first_blocks()
        return {module: ipu for module, ipu in self.blocks if (module, ipu) not in first}

    def _first_blocks(self) -> List[Tuple[str, int]]:
        ipus = [0, *(ipu for _, ipu in self.blocks)]
        return [block for number, block in enumerate(self.blocks, start=1) if block[1] not in ipus[:number]]


class Splitter:
    """Split a model over the IPUs of a replica, within different limits of memory.

    Args:
        traced: The model, scaled to the settings' micro-batch.
        num_ipus: IPUs of one replica.
        settings: How it runs.
        machine: The device.
        cut_modules: Modules at which a block can begin; None: any.
        checkpoints: Operations whose results are kept while the rest is recomputed.
    """

    def __init__(
        self,
        traced: TracedModel,
        num_ipus: int,
        settings: Settings,
        machine: Machine,
        cut_modules: Optional[Collection[str]] = None,
        checkpoints: Collection[int] = (),
    ) -> None:
        self.traced = traced
        self.num_ipus = num_ipus
        self.settings = settings
        self.machine = machine
        self.checkpoints = checkpoints
        points = cut_points(traced, cut_modules)
        depths = sorted({point.depth for point in points}) or [0]
        self._options = [cut_options(traced, [point for point in points if point.depth <= depth]) for depth in depths]
        self._stages: Dict[CutOptions, _Stages] = {}

    def within(self, limit: Optional[float] = None) -> Optional[Split]:
        """Return the split with the fastest slowest IPU among those that fit; None if none does.

        Cuts between large modules come first; cuts inside them are taken if nothing else fits or they are clearly
        faster.

        Args:
            limit: Bytes that may be used on each IPU, at most those of the verdict "tight"; None: those of "fits".
        """
        if limit is None:
            limit = self.machine.memory_bytes * (1 - self.machine.tight_margin)
        best: Optional[Split] = None
        for options in self._options:
            at_depth: Optional[Split] = None
            for cuts in options:
                count = len(cuts.points)
                if count + 1 - len(cuts.returns) < self.num_ipus or count > (4 if best is None else 1) * _MOST_CUTS:
                    continue
                if cuts not in self._stages:  # costs are the same for every limit
                    self._stages[cuts] = _Stages(self, cuts)
                found = self._stages[cuts].split_within(limit)
                if found is not None and (at_depth is None or found.slowest < at_depth.slowest):
                    at_depth = found
            if at_depth is not None and (best is None or at_depth.slowest < best.slowest * _WORTH_DEPTH):
                best = at_depth
            if best is not None and best.evenness > _WORTH_DEPTH:
                break  # finer cuts cannot make the slowest IPU clearly faster
        return best


class _Stages:
    """The stages that a choice of cut points allows, and their costs."""

    def __init__(self, splitter: Splitter, cuts: CutOptions) -> None:
        traced, settings, machine = splitter.traced, splitter.settings, splitter.machine
        self._splitter, self._cuts = splitter, cuts
        self._shares = [proportion_of(settings, machine, ipu) for ipu in range(splitter.num_ipus)]
        # The share of tile memory may differ by IPU, and changes the cost of operations there.
        self._cells = {
            share: cells_of(traced, cuts.points, splitter.checkpoints, settings, machine, share)
            for share in dict.fromkeys(self._shares)
        }
        cells = self._cells[self._shares[0]]
        self._pinned = _pinned_cells(splitter, cells, cuts)
        self._on_chip = sum(cell.share.on_chip for cell in cells)
        self._largest_cell = max(
            min(segment_memory(segment_of(cell, traced, settings, machine), 1, machine) for cell in same)
            for same in zip(*self._cells.values())
        )
        again = 2 if settings.recompute == "checkpoints" and settings.training else 1
        self._work = [again * cell.forward + cell.backward for cell in cells]
        self._tables: Dict[float, List[List[List[Segment]]]] = {}

    def split_within(self, limit: float) -> Optional[Split]:
        """Return the fastest split within a limit of memory, with a leaner one if there is one."""
        splitter = self._splitter
        if self._on_chip > 2 * splitter.num_ipus * limit or self._largest_cell > limit:
            return None
        # Short stages are tried first: a split found with them is no worse than what longer ones give.
        total = sum(self._work)
        short = max(self._work) + _SHORT * total / splitter.num_ipus
        for longest in (short, math.inf) if short < total else (math.inf,):
            tables = self._tables_up_to(longest)
            starts = _partition(tables, self._pinned, splitter.settings, splitter.machine, limit)
            if starts is not None:
                break
        else:
            return None
        fastest = self._split(starts)
        most_seconds = starts[1] * _HARDLY_SLOWER
        leaner = _partition(tables, self._pinned, splitter.settings, splitter.machine, limit, most_seconds)
        if leaner is None or leaner[0] == starts[0]:
            return fastest
        return replace(fastest, leaner=self._split(leaner))

    def _tables_up_to(self, longest: float) -> List[List[List[Segment]]]:
        """Return for each IPU the stages that could end before each free cell, within the largest limit."""
        if longest not in self._tables:
            traced, settings, machine = self._splitter.traced, self._splitter.settings, self._splitter.machine
            limit, free = (1 + machine.over_margin) * machine.memory_bytes, self._pinned.free
            by_share = {}
            for share, cells in self._cells.items():
                own = [cells[cell] for cell in free]
                by_share[share] = segments_of(own, traced, settings, machine, limit, longest)
            self._tables[longest] = [by_share[share] for share in self._shares]
        return self._tables[longest]

    def _split(self, starts: Tuple[List[int], float, float]) -> Split:
        """Make a split of the first free cells of its IPUs, the slowest seconds and the fullest bytes."""
        splitter, points = self._splitter, self._cuts.points
        first_cells = [self._pinned.free[start] for start in starts[0]]
        begins = [(points[cell - 1], ipu) for ipu, cell in enumerate(first_cells, start=1)]
        for part in self._cuts.returns:
            begins.append((part.first, 0))
            if part.resume is not None:
                cell = points.index(part.resume) + 1
                begins.append((part.resume, sum(first <= cell for first in first_cells)))
        blocks: List[Tuple[CutPoint, int]] = []
        for point, ipu in sorted(set(begins), key=lambda begin: begin[0].op):
            if ipu != (blocks[-1][1] if blocks else 0):
                blocks.append((point, ipu))
        ops, ipus = [point.op for point, _ in blocks], [0, *(ipu for _, ipu in blocks)]
        layout = layout_of_cuts(splitter.traced, ops, ipus, sorted(splitter.checkpoints))
        even = sum(self._work) / splitter.num_ipus / starts[1] if starts[1] else 1.0
        return Split(tuple((point.module, ipu) for point, ipu in blocks), layout, starts[1], starts[2], even)


@dataclass(frozen=True)
class _PinnedCells:
    """Cells that stay on IPU 0 in every split, besides the first.

    Args:
        free: Numbers of all other cells.
        before: For each of them, the number of parts that returned to IPU 0 before it.
        segment: The returning parts as one segment; None: there are none.
        is_last: Whether the last of them is the last stage.
        stages: Most stages that the model can have.
    """

    free: Tuple[int, ...]
    before: Tuple[int, ...]
    segment: Optional[Segment]
    is_last: bool
    stages: int


def _pinned_cells(splitter: Splitter, cells: Sequence[Cell], cuts: CutOptions) -> _PinnedCells:
    """Collect the returning parts; each is one cell, because it cannot be cut."""
    traced, settings, machine = splitter.traced, splitter.settings, splitter.machine
    pinned = [cuts.points.index(part.first) + 1 for part in cuts.returns]
    free = tuple(number for number in range(len(cells)) if number not in pinned)
    before = tuple(sum(cell < number for cell in pinned) for number in free)
    is_last = bool(cuts.returns) and cuts.returns[-1].resume is None
    # The IPU that a returning part interrupts resumes in a separate stage.
    stages = splitter.num_ipus + 2 * len(pinned) - is_last
    if not pinned:
        return _PinnedCells(free, before, None, False, stages)
    parts = [segment_of(cells[number], traced, settings, machine) for number in pinned]
    # The stage in which a part returns is not known yet; the later it is, the less the part keeps.
    at_least = [1 + number for number in range(len(parts))]
    if is_last:
        at_least[-1] = stages - 1
    inside = {op for number in pinned for op in range(cells[number].first, cells[number].end)}
    own = [
        parameter
        for parameter in traced.parameters
        if not inside.isdisjoint(parameter.ops) and min(parameter.ops) >= cells[0].end
    ]
    every_code = machine.tiles * machine.code_bytes_per_tile
    segment = Segment(
        forward=sum(part.forward for part in parts),
        backward=sum(part.backward for part in parts),
        again=sum(part.again for part in parts),
        tail=parts[-1].tail if is_last else 0.0,
        fixed=share_of(own, settings, traced).on_chip,
        received=sum(part.received for part in parts),
        kept=sum(part.kept * in_flight(stage, stages, settings) for part, stage in zip(parts, at_least)),
        peak=max(part.peak for part in parts),
        code=every_code + sum(part.code - every_code for part in parts),
        update=max(part.update for part in parts),
    )
    return _PinnedCells(free, before, segment, is_last, stages)


def _partition(
    tables: List[List[List[Segment]]],
    pinned: _PinnedCells,
    settings: Settings,
    machine: Machine,
    limit: float,
    most_seconds: Optional[float] = None,
) -> Optional[Tuple[List[int], float, float]]:
    """Return the first free cells of IPUs 1, 2, ..., the slowest seconds and the fullest bytes; None if none fits.

    After n rounds, ``best[j]`` is the smallest possible time of the slowest of n stages that hold the first j cells.

    Args:
        tables: For each IPU, the stages that could end before each free cell there.
        pinned: The cells that are not free.
        settings: How it runs.
        machine: The device.
        limit: Bytes that may be used on each IPU.
        most_seconds: If given, minimise the fullest IPU's bytes instead, with no IPU slower than this.
    """
    num_ipus, count = len(tables), len(tables[0]) - 1
    never = float("inf")
    best: List[Tuple[float, float]] = [(0.0, 0.0)] + [(never, never)] * count
    choices: List[List[int]] = []
    directions = 2 if settings.training else 1
    for stage in range(num_ipus):
        now: List[Tuple[float, float]] = [(never, never)] * (count + 1)
        choice = [-1] * (count + 1)
        is_last = stage == num_ipus - 1 and not pinned.is_last
        returning = pinned.segment if stage == 0 else None
        # Micro-batches in flight by first cell, which is one of millions of lookups.
        in_flight_from = [in_flight(stage + parts, pinned.stages, settings) for parts in pinned.before]
        ends = range(stage + 1, count - (num_ipus - stage - 1) + 1)
        for end in ends if stage < num_ipus - 1 else (count,):
            for begin, segment in zip(range(end - 1, -1, -1), tables[stage][end]):
                work = segment.forward + segment.backward + segment.again - (segment.tail if is_last else 0.0)
                if work >= (now[end][0] if most_seconds is None else most_seconds):
                    break  # longer stages only take longer
                before = best[begin]
                if before[0] == never or (stage == 0) != (begin == 0):
                    continue
                memory = segment_memory(segment, in_flight_from[begin], machine, returning)
                received = segment.received
                if returning is not None:
                    work += returning.forward + returning.backward + returning.again - returning.tail
                    received += returning.received
                if memory > limit:
                    continue
                seconds = work + directions * received / machine.link_bytes_per_second
                reached = (max(before[0], seconds), max(before[1], memory))
                if most_seconds is not None and reached[0] > most_seconds:
                    continue
                if reached < now[end] if most_seconds is None else reached[::-1] < now[end][::-1]:
                    now[end] = reached
                    choice[end] = begin
        best = now
        choices.append(choice)
    if best[count][0] == never:
        return None
    starts, end = [], count
    for choice in reversed(choices):
        end = choice[end]
        starts.append(end)
    return starts[-2::-1] if num_ipus > 1 else [], best[count][0], best[count][1]
