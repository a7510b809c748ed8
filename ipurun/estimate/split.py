"""The best split of a model over IPUs: dynamic programming over its cut points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Collection, List, Mapping, Optional, Sequence, Tuple

from ipurun.estimate.costs import proportion_of
from ipurun.estimate.cuts import (
    Cell,
    CutPoint,
    Segment,
    Ties,
    cells_of,
    cut_points,
    segment_memory,
    segments_ending_at,
    ways_to_tie,
)
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import in_flight, share_of
from ipurun.estimate.stages import layout_of_cuts
from ipurun.estimate.types import Settings, StageLayout
from ipurun.inspect.traced_model import TracedModel

__all__ = ["Split", "solve_split"]

_MOST_CUTS = 400
_SHORT = 1.6  # times the even share of the work
_HARDLY_SLOWER = 1.02
# Cutting inside layers has to be worth this much to be preferred to cutting between them.
_WORTH_DEPTH = 0.9


@dataclass(frozen=True)
class Split:
    """A model over the IPUs of a replica.

    Args:
        blocks: (module, IPU) of every block behind the first.
        layout: The same, by operation.
        slowest: Seconds of the slowest IPU for one micro-batch.
        fullest: Bytes of the fullest IPU.
        evenness: Time of an IPU if all had the same work, over that of the slowest.
        leaner: Another one whose fullest IPU holds less and whose slowest is hardly slower: what an update costs beside
            its micro-batches may be less there.
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
        """Module -> the IPU that its block comes back to, for `pipeline.blocks`."""
        first = self._first_blocks()
        return {module: ipu for module, ipu in self.blocks if (module, ipu) not in first}

    def _first_blocks(self) -> List[Tuple[str, int]]:
        ipus = [0, *(ipu for _, ipu in self.blocks)]
        return [block for number, block in enumerate(self.blocks, start=1) if block[1] not in ipus[:number]]


def solve_split(
    profile: TracedModel,
    num_ipus: int,
    settings: Settings,
    machine: Machine,
    *,
    names: Optional[Collection[str]] = None,
    checkpoints: Collection[int] = (),
    room: Optional[float] = None,
) -> Optional[Split]:
    """The split whose slowest IPU is quickest among those that fit.

    Cuts between large modules come first; cuts inside them are taken where they fit better or are clearly quicker.

    Args:
        profile: The model, scaled to the settings' micro-batch.
        num_ipus: IPUs of one replica.
        settings: How it runs.
        machine: On what it runs.
        names: Modules at which a block can begin; None: any.
        checkpoints: Operations whose results are kept where the rest is recomputed.
        room: Bytes that may be taken on each IPU; None: what gives the verdict "fits".

    Returns:
        None where no split keeps within the room.
    """
    if room is None:
        room = machine.memory_bytes * (1 - machine.tight_margin)
    points = cut_points(profile, names)
    best: Optional[Split] = None
    for depth in sorted({point.depth for point in points}) or [0]:
        at_depth: Optional[Split] = None
        for ties in ways_to_tie(profile, [point for point in points if point.depth <= depth]):
            cuts = len(ties.points)
            if cuts + 1 - len(ties.returns) < num_ipus or cuts > (4 if best is None else 1) * _MOST_CUTS:
                continue
            found = _solve(profile, ties, num_ipus, settings, machine, checkpoints, room)
            if found is not None and (at_depth is None or found.slowest < at_depth.slowest):
                at_depth = found
        if at_depth is not None and (best is None or at_depth.slowest < best.slowest * _WORTH_DEPTH):
            best = at_depth
        if best is not None and best.evenness > _WORTH_DEPTH:
            break  # no finer cuts could make the slowest IPU clearly quicker
    return best


def _solve(
    profile: TracedModel,
    ties: Ties,
    num_ipus: int,
    settings: Settings,
    machine: Machine,
    checkpoints: Collection[int],
    room: float,
) -> Optional[Split]:
    shares = [proportion_of(settings, machine, ipu) for ipu in range(num_ipus)]
    # An IPU may have a share of tile memory of its own, which changes the cost of what runs there.
    by_share = {
        share: cells_of(profile, list(ties.points), checkpoints, settings, machine, shares.index(share))
        for share in dict.fromkeys(shares)
    }
    cells = by_share[shares[0]]
    fixed = _fixed_cells(profile, cells, ties, num_ipus, settings, machine)
    again = 2 if settings.recompute == "checkpoints" and settings.training else 1
    work = [again * cell.forward + cell.backward for cell in cells]
    starts = None
    if _could_fit(list(by_share.values()), num_ipus, profile, settings, machine, room):
        # Stages are first taken to be short: whatever is found that way is no worse than what longer ones give.
        short = max(work) + _SHORT * sum(work) / num_ipus
        for longest in (short, math.inf) if short < sum(work) else (math.inf,):
            tables = {
                share: [
                    segments_ending_at(
                        last, [own[cell] for cell in fixed.free], profile, settings, machine, room, longest
                    )
                    for last in range(len(fixed.free) + 1)
                ]
                for share, own in by_share.items()
            }
            on_ipu = [tables[share] for share in shares]
            starts = _partition(on_ipu, fixed, settings, machine, room)
            if starts is not None:
                break
    if starts is None:
        return None
    quickest = _split(profile, ties, fixed, num_ipus, checkpoints, starts, work)
    leaner = _partition(on_ipu, fixed, settings, machine, room, starts[1] * _HARDLY_SLOWER)
    if leaner is None or leaner[0] == starts[0]:
        return quickest
    return replace(quickest, leaner=_split(profile, ties, fixed, num_ipus, checkpoints, leaner, work))


@dataclass(frozen=True)
class _Fixed:
    """What of a model is on IPU 0 whatever the split is, beside its beginning.

    Args:
        free: Numbers of the cells that are left to share out.
        before: For each of them, how many parts came back to IPU 0 before it.
        segment: The parts that come back, as one; None: there are none.
        is_last: Whether the last of them is the last stage.
        stages: Most stages that the model can have with them.
    """

    free: Tuple[int, ...]
    before: Tuple[int, ...]
    segment: Optional[Segment]
    is_last: bool
    stages: int


def _fixed_cells(
    profile: TracedModel, cells: List[Cell], ties: Ties, num_ipus: int, settings: Settings, machine: Machine
) -> _Fixed:
    """Each part that comes back is one cell, as nothing may be cut inside."""
    pinned = [ties.points.index(part.first) + 1 for part in ties.returns]
    free = tuple(number for number in range(len(cells)) if number not in pinned)
    before = tuple(sum(cell < number for cell in pinned) for number in free)
    is_last = bool(ties.returns) and ties.returns[-1].resume is None
    # The IPU that a part interrupts goes on behind it in a stage of its own.
    stages = num_ipus + 2 * len(pinned) - is_last
    if not pinned:
        return _Fixed(free, before, None, False, stages)
    parts = [segments_ending_at(number + 1, cells, profile, settings, machine, 0.0)[0] for number in pinned]
    # Nobody knows yet in which stage a part comes back; the later, the less it keeps.
    at_least = [1 + number for number in range(len(parts))]
    if is_last:
        at_least[-1] = stages - 1
    inside = {op for number in pinned for op in range(cells[number].first, cells[number].end)}
    own = [
        parameter
        for parameter in profile.parameters
        if not inside.isdisjoint(parameter.ops) and min(parameter.ops) >= cells[0].end
    ]
    share = share_of(own, settings)
    every_code = machine.tiles * machine.code_bytes_per_tile
    segment = Segment(
        begin=0,
        forward=sum(part.forward for part in parts),
        backward=sum(part.backward for part in parts),
        again=sum(part.again for part in parts),
        tail=parts[-1].tail if is_last else 0.0,
        fixed=share.weights + share.gradients + share.state,
        received=sum(part.received for part in parts),
        kept=sum(part.kept * in_flight(stage, stages, settings) for part, stage in zip(parts, at_least)),
        run=max(part.run for part in parts),
        peak=max(part.peak for part in parts),
        code=every_code + sum(part.code - every_code for part in parts),
        update=max(part.update for part in parts),
    )
    return _Fixed(free, before, segment, is_last, stages)


def _split(
    profile: TracedModel,
    ties: Ties,
    fixed: _Fixed,
    num_ipus: int,
    checkpoints: Collection[int],
    starts: Tuple[List[int], float, float],
    work: Sequence[float],
) -> Split:
    """A split from the first free cells of its IPUs, the seconds of the slowest and the bytes of the fullest."""
    first_cells = [fixed.free[start] for start in starts[0]]
    begins = [(ties.points[cell - 1], ipu) for ipu, cell in enumerate(first_cells, start=1)]
    for part in ties.returns:
        begins.append((part.first, 0))
        if part.resume is not None:
            cell = ties.points.index(part.resume) + 1
            begins.append((part.resume, sum(first <= cell for first in first_cells)))
    blocks: List[Tuple[CutPoint, int]] = []
    for point, ipu in sorted(set(begins), key=lambda begin: begin[0].op):
        if ipu != (blocks[-1][1] if blocks else 0):
            blocks.append((point, ipu))
    layout = layout_of_cuts(
        profile, [point.op for point, _ in blocks], [0, *(ipu for _, ipu in blocks)], sorted(checkpoints)
    )
    even = sum(work) / num_ipus / starts[1] if starts[1] else 1.0
    return Split(tuple((point.module, ipu) for point, ipu in blocks), layout, starts[1], starts[2], even)


def _could_fit(
    kinds: List[List[Cell]], num_ipus: int, profile: TracedModel, settings: Settings, machine: Machine, room: float
) -> bool:
    """Whether parameters fit all IPUs together, and every cell some IPU by itself."""
    fixed = sum(cell.share.weights + cell.share.gradients + cell.share.state for cell in kinds[0])
    if fixed > 2 * num_ipus * room:
        return False
    return all(
        any(
            segment_memory(segments_ending_at(end, cells, profile, settings, machine, 0.0)[0], 1, machine) <= room
            for cells in kinds
        )
        for end in range(1, len(kinds[0]) + 1)
    )


def _partition(
    tables: List[List[List[Segment]]],
    fixed: _Fixed,
    settings: Settings,
    machine: Machine,
    room: float,
    most_seconds: Optional[float] = None,
) -> Optional[Tuple[List[int], float, float]]:
    """First free cells of IPUs 1, 2, ..., the seconds of the slowest IPU and the bytes of the fullest; None: none fits.

    ``best[j]`` after n rounds is the smallest possible time of the slowest of n stages that hold the first j cells.

    Args:
        tables: For each IPU, the stages that could end before each free cell there.
        fixed: What is not free.
        settings: How it runs.
        machine: On what it runs.
        room: Bytes that may be taken on each IPU.
        most_seconds: Where it is given, the fullest IPU is made as empty as can be, none taking longer than that.
    """
    num_ipus, count = len(tables), len(tables[0]) - 1
    never = float("inf")
    best: List[Tuple[float, float]] = [(0.0, 0.0)] + [(never, never)] * count
    choices: List[List[int]] = []
    directions = 2 if settings.training else 1
    for stage in range(num_ipus):
        now: List[Tuple[float, float]] = [(never, never)] * (count + 1)
        choice = [-1] * (count + 1)
        is_last = stage == num_ipus - 1 and not fixed.is_last
        ends = range(stage + 1, count - (num_ipus - stage - 1) + 1)
        for end in ends if stage < num_ipus - 1 else (count,):
            for segment in tables[stage][end]:
                work = segment.forward + segment.backward + segment.again - (segment.tail if is_last else 0.0)
                if work >= (now[end][0] if most_seconds is None else most_seconds):
                    break  # longer stages only take longer
                before = best[segment.begin]
                if before[0] == never or (stage == 0) != (segment.begin == 0):
                    continue
                returning = fixed.segment if stage == 0 else None
                micro_batches = in_flight(stage + fixed.before[segment.begin], fixed.stages, settings)
                memory = segment_memory(segment, micro_batches, machine, returning)
                received = segment.received
                if returning is not None:
                    work += returning.forward + returning.backward + returning.again - returning.tail
                    received += returning.received
                if memory > room:
                    continue
                seconds = work + directions * received / machine.link_bytes_per_second
                reached = (max(before[0], seconds), max(before[1], memory))
                if most_seconds is not None and reached[0] > most_seconds:
                    continue
                if reached < now[end] if most_seconds is None else reached[::-1] < now[end][::-1]:
                    now[end] = reached
                    choice[end] = segment.begin
        best = now
        choices.append(choice)
    if best[count][0] == never:
        return None
    starts, end = [], count
    for choice in reversed(choices):
        end = choice[end]
        starts.append(end)
    return starts[-2::-1] if num_ipus > 1 else [], best[count][0], best[count][1]
