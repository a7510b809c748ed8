"""The best split of a model over IPUs: dynamic programming over its cut points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Collection, List, Optional, Sequence, Tuple

from ipurun.planner.costs import proportion_of
from ipurun.planner.cuts import Cell, CutPoint, Segment, cells_of, cut_points, segment_memory, segments_ending_at
from ipurun.planner.hardware import Machine
from ipurun.planner.memory import in_flight
from ipurun.planner.stages import layout_of_cuts
from ipurun.planner.types import Layout, ModelProfile, Settings

__all__ = ["Split", "solve_split", "tied_head"]

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
    layout: Layout
    slowest: float
    fullest: float
    evenness: float
    leaner: Optional[Split] = None

    @property
    def modules(self) -> Tuple[str, ...]:
        """Modules at which the next IPU begins, for `pipeline.split`; without a head that goes back to IPU 0."""
        return tuple(module for module, ipu in self.blocks if ipu)

    @property
    def head(self) -> Optional[str]:
        """Module whose block goes back to IPU 0, if one does."""
        return next((module for module, ipu in self.blocks if not ipu), None)


def tied_head(profile: ModelProfile, points: Sequence[CutPoint]) -> Optional[CutPoint]:
    """Where a head begins that shares a weight with the model's beginning: both have to be on one IPU."""
    # Used at both ends and nowhere between.
    early, late = len(profile.ops) // 3, 2 * len(profile.ops) // 3
    first_uses = [
        min(op for op in ops if op >= late)
        for ops in _users(profile)
        if ops[0] < early and ops[-1] >= late and not any(early <= op < late for op in ops)
    ]
    before = [point for point in points if first_uses and early <= point.op <= min(first_uses)]
    return before[-1] if before else None


def _users(profile: ModelProfile) -> List[List[int]]:
    return [sorted(parameter.ops) for parameter in profile.parameters if len(parameter.ops) > 1]


def _allowed(profile: ModelProfile, points: Sequence[CutPoint], head: Optional[CutPoint]) -> List[CutPoint]:
    """Cut points that leave all users of a parameter on one IPU, given where the head goes back to IPU 0."""
    forbidden: List[Tuple[int, int]] = []
    for ops in _users(profile):
        if head is not None and ops[0] < head.op <= ops[-1]:
            # The beginning stays on IPU 0 until its last use of what the head shares with it.
            forbidden.append((0, max(op for op in ops if op < head.op)))
            forbidden.append((head.op, ops[-1]))
        else:
            forbidden.append((ops[0], ops[-1]))
    return [
        point
        for point in points
        if (head is None or point.op <= head.op) and not any(first < point.op <= last for first, last in forbidden)
    ]


def solve_split(
    profile: ModelProfile,
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
        usable = [point for point in points if point.depth <= depth]
        head = tied_head(profile, usable) if num_ipus > 1 else None
        usable = _allowed(profile, usable, head)
        if best is not None and len(usable) > _MOST_CUTS:
            break
        if len(usable) + 1 - (head is not None) < num_ipus or len(usable) > 4 * _MOST_CUTS:
            continue
        found = _solve(profile, usable, head, num_ipus, settings, machine, checkpoints, room)
        if found is not None and (best is None or found.slowest < best.slowest * _WORTH_DEPTH):
            best = found
        if best is not None and best.evenness > _WORTH_DEPTH:
            break  # no finer cuts could make the slowest IPU clearly quicker
    return best


def _solve(
    profile: ModelProfile,
    points: List[CutPoint],
    head: Optional[CutPoint],
    num_ipus: int,
    settings: Settings,
    machine: Machine,
    checkpoints: Collection[int],
    room: float,
) -> Optional[Split]:
    shares = [proportion_of(settings, machine, ipu) for ipu in range(num_ipus)]
    # An IPU may have a share of tile memory of its own, which changes the cost of what runs there.
    by_share = {
        share: cells_of(profile, points, checkpoints, settings, machine, shares.index(share))
        for share in dict.fromkeys(shares)
    }
    cells = by_share[shares[0]]
    end = len(cells) if head is None else points.index(head) + 1
    # A parameter that both ends share is counted in both of their cells: the head's own comes in without it.
    behind = _head_segment(cells, end, profile, settings, machine) if head is not None else None
    stages = num_ipus + (head is not None)
    again = 2 if settings.recompute == "checkpoints" and settings.training else 1
    work = [again * cell.forward + cell.backward for cell in cells]
    starts = None
    if _could_fit(list(by_share.values()), num_ipus, profile, settings, machine, room):
        # Stages are first taken to be short: whatever is found that way is no worse than what longer ones give.
        short = max(work) + _SHORT * sum(work) / num_ipus
        for longest in (short, math.inf) if short < sum(work) else (math.inf,):
            tables = {
                share: [
                    segments_ending_at(last, own[:end], profile, settings, machine, room, longest)
                    for last in range(end + 1)
                ]
                for share, own in by_share.items()
            }
            on_ipu = [tables[share] for share in shares]
            starts = _partition(on_ipu, stages, behind, settings, machine, room)
            if starts is not None:
                break
    if starts is None:
        return None
    quickest = _split(profile, points, head, num_ipus, checkpoints, starts, work)
    leaner = _partition(on_ipu, stages, behind, settings, machine, room, starts[1] * _HARDLY_SLOWER)
    if leaner is None or leaner[0] == starts[0]:
        return quickest
    return replace(quickest, leaner=_split(profile, points, head, num_ipus, checkpoints, leaner, work))


def _split(
    profile: ModelProfile,
    points: List[CutPoint],
    head: Optional[CutPoint],
    num_ipus: int,
    checkpoints: Collection[int],
    starts: Tuple[List[int], float, float],
    work: Sequence[float],
) -> Split:
    """A split from the first cells of its IPUs, the seconds of the slowest and the bytes of the fullest."""
    cuts = [points[start - 1] for start in starts[0]]
    blocks = [(point.module, ipu) for ipu, point in enumerate(cuts, start=1)]
    ipus = list(range(num_ipus))
    if head is not None:
        cuts.append(head)
        blocks.append((head.module, 0))
        ipus.append(0)
    layout = layout_of_cuts(profile, [point.op for point in cuts], ipus, sorted(checkpoints))
    even = sum(work) / num_ipus / starts[1] if starts[1] else 1.0
    return Split(tuple(blocks), layout, starts[1], starts[2], even)


def _could_fit(
    kinds: List[List[Cell]], num_ipus: int, profile: ModelProfile, settings: Settings, machine: Machine, room: float
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


def _head_segment(cells: List[Cell], end: int, profile: ModelProfile, settings: Settings, machine: Machine) -> Segment:
    tables = segments_ending_at(len(cells), cells, profile, settings, machine)
    segment = next(segment for segment in tables if segment.begin == end)
    shared = cells[end].share
    twice = shared.weights + shared.gradients + shared.state
    return Segment(**{**vars(segment), "fixed": max(0, segment.fixed - twice)})


def _partition(
    tables: List[List[List[Segment]]],
    stages: int,
    head: Optional[Segment],
    settings: Settings,
    machine: Machine,
    room: float,
    most_seconds: Optional[float] = None,
) -> Optional[Tuple[List[int], float, float]]:
    """First cells of IPUs 1, 2, ..., the seconds of the slowest IPU and the bytes of the fullest; None: none fits.

    ``best[j]`` after n rounds is the smallest possible time of the slowest of n stages that hold the first j cells.

    Args:
        tables: For each IPU, the stages that could end before each cell there.
        stages: Stages in all.
        head: The last stage, where it comes back to IPU 0.
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
        micro_batches = in_flight(stage, stages, settings)
        now: List[Tuple[float, float]] = [(never, never)] * (count + 1)
        choice = [-1] * (count + 1)
        is_last = stage == stages - 1
        ends = range(stage + 1, count - (num_ipus - stage - 1) + 1)
        for end in ends if stage < num_ipus - 1 else (count,):
            for segment in tables[stage][end]:
                work = segment.forward + segment.backward + segment.again - (segment.tail if is_last else 0.0)
                if work >= (now[end][0] if most_seconds is None else most_seconds):
                    break  # longer stages only take longer
                before = best[segment.begin]
                if before[0] == never or (stage == 0) != (segment.begin == 0):
                    continue
                behind = head if stage == 0 else None
                memory = segment_memory(segment, micro_batches, machine, behind)
                received = segment.received
                if behind is not None:
                    work += behind.forward + behind.backward + behind.again - behind.tail
                    received += behind.received
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
