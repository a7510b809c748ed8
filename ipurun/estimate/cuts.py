"""Places where a model can be cut, and the cost of the stages between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Collection, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

from ipurun.estimate.costs import op_costs
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import (
    ParameterShare,
    code_bytes,
    op_bytes,
    parameter_shares,
    programs_of,
    uneven_bytes,
)
from ipurun.estimate.stages import layout_of_cuts, with_parents
from ipurun.estimate.types import Settings
from ipurun.inspect.traced_model import TracedModel

__all__ = [
    "Cell",
    "CutOptions",
    "CutPoint",
    "Segment",
    "cells_of",
    "cut_options",
    "cut_points",
    "segment_memory",
    "segment_of",
    "segments_of",
]


# Uses of a weight less than 1/12 of the model apart count as one place; the first 1/12 is the model's beginning.
_NEAR = 12
_MOST_RETURNS = 3


@dataclass(frozen=True)
class CutPoint:
    """The beginning of a module, where the next IPU can take over.

    Args:
        op: First operation after the cut.
        module: The outermost module that begins there.
    """

    op: int
    module: str

    @property
    def depth(self) -> int:
        """Nesting depth of the module."""
        return self.module.count(".")


def cut_points(traced: TracedModel, cut_modules: Optional[Collection[str]] = None) -> List[CutPoint]:
    """Return all cut points of a model, in the order in which they run.

    Args:
        traced: The model.
        cut_modules: Modules at which a block can begin: those that are called. None: any.
    """
    entered: Dict[str, int] = {}
    begins: Dict[int, List[str]] = {}
    around_last: List[str] = []
    for op in traced.ops:
        around = with_parents(op.module)
        for module in around:
            if module not in around_last:
                entered[module] = entered.get(module, 0) + 1
                begins.setdefault(op.index, []).append(module)
        around_last = around
    containers = {outer for module in entered for outer in with_parents(module)[:-1]}
    points = []
    for index, modules in begins.items():
        # A module that is called twice would begin its block twice.
        usable = [name for name in modules if entered[name] == 1 and (cut_modules is None or name in cut_modules)]
        before = traced.ops[index - 1] if index else None
        if before is not None and before.parameters and entered.get(before.module, 1) > 1:
            # The caller of a layer that is called several times is unknown: a module with submodules may have begun
            # before that call.
            usable = [name for name in usable if name not in containers]
        if usable and index > 0:
            points.append(CutPoint(index, usable[0]))
    return points


@dataclass(frozen=True)
class _ReturningPart:
    """A part of a model that runs on IPU 0 again, because it shares a weight with the beginning.

    Args:
        first: Where it begins.
        resume: Where other IPUs take over again; None: it is the end of the model.
    """

    first: CutPoint
    resume: Optional[CutPoint]


@dataclass(frozen=True)
class CutOptions:
    """Cut points that keep all uses of each weight on one IPU.

    Args:
        points: Where the model may be cut, including the beginnings and ends of returning parts.
        returns: Parts that run on IPU 0 again, in order.
    """

    points: Tuple[CutPoint, ...]
    returns: Tuple[_ReturningPart, ...] = ()


def cut_options(traced: TracedModel, points: Sequence[CutPoint]) -> List[CutOptions]:
    """Return the ways to handle shared weights: their users return to IPU 0, or nothing is cut between them."""
    uses = [sorted(parameter.ops) for parameter in traced.parameters if len(parameter.ops) > 1]
    together = CutOptions(tuple(_outside(points, [(ops[0], ops[-1]) for ops in uses])))
    returning = _returning(uses, len(traced.ops), points)
    return [together] if returning is None else [returning, together]


def _returning(uses: Sequence[List[int]], num_ops: int, points: Sequence[CutPoint]) -> Optional[CutOptions]:
    near = max(1, num_ops // _NEAR)
    places = [_places(ops, near) for ops in uses]
    apart = [place for several in places if len(several) > 1 for place in several]
    beginning = max((last for _, last in apart if last < near), default=0)
    spans = [place for several in places for place in several] + [(0, beginning)]
    usable = _outside(points, spans)
    returns: List[_ReturningPart] = []
    for first_use, last_use in sorted(place for place in apart if place[1] > beginning):
        first = next((point for point in reversed(usable) if point.op <= first_use), None)
        resume = next((point for point in usable if point.op > last_use), None)
        if first is None:
            return None  # nothing could be cut off before it
        before = returns[-1] if returns else None
        if before is not None and (before.resume is None or before.resume.op >= first.op):
            returns[-1] = _ReturningPart(before.first, resume)
        else:
            returns.append(_ReturningPart(first, resume))
    if not returns or len(returns) > _MOST_RETURNS:
        return None
    kept = [point for point in usable if not any(_is_inside(point, part) for part in returns)]
    return CutOptions(tuple(kept), tuple(returns))


def _places(ops: Sequence[int], near: int) -> List[Tuple[int, int]]:
    """Return (first, last) use in each place of the model."""
    places = [(ops[0], ops[0])]
    for op in ops[1:]:
        first, last = places[-1]
        if op - last <= near:
            places[-1] = (first, op)
        else:
            places.append((op, op))
    return places


def _outside(points: Sequence[CutPoint], spans: Sequence[Tuple[int, int]]) -> List[CutPoint]:
    return [point for point in points if not any(first < point.op <= last for first, last in spans)]


def _is_inside(point: CutPoint, part: _ReturningPart) -> bool:
    return part.first.op < point.op and (part.resume is None or point.op < part.resume.op)


@dataclass(frozen=True)
class Cell:
    """The operations between two neighbouring cut points.

    Args:
        first: Its first operation.
        end: The first operation after it.
        forward: Seconds.
        backward: Seconds.
        saved: Bytes that its backward pass reads.
        share: Its parameters.
        temporary: Bytes of its largest operation, without what waits beside it.
        code: (signature, programs) of its distinct operations.
        calls: Programs of all its operations.
        reads: Operations before it whose results it reads.
        runs: (bytes to recompute, most bytes at once) between checkpoints: one more entry than it has checkpoints.
        kept: Bytes of its checkpoints.
        tail: Forward seconds after its last checkpoint; all of them if it has none.
    """

    first: int
    end: int
    forward: float
    backward: float
    saved: int
    share: ParameterShare
    temporary: float
    code: FrozenSet[Tuple[str, int]]
    calls: int
    reads: FrozenSet[int]
    runs: Tuple[Tuple[int, float], ...]
    kept: int
    tail: float


def cells_of(
    traced: TracedModel,
    points: Sequence[CutPoint],
    checkpoints: Collection[int],
    settings: Settings,
    machine: Machine,
    proportion: float,
) -> List[Cell]:
    """Return the cells between cut points, on an IPU with this share of tile memory for temporaries."""
    starts = [0, *(point.op for point in points)]
    shares = parameter_shares(traced, layout_of_cuts(traced, starts[1:]), settings)
    costs = op_costs(traced, machine, settings, proportion)
    cells = []
    for number, first in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(traced.ops)
        ops = traced.ops[first:end]
        runs, tail, since, most = [], 0.0, 0, 0.0
        needs = [op_bytes(traced, op, settings, costs) for op in ops]
        for op, need in zip(ops, needs):
            if op.index in checkpoints:
                runs.append((since, max(most, since + need)))
                tail, since, most = 0.0, 0, 0.0
            else:
                since += op.saved_bytes
                most = max(most, since + need)
                tail += costs[op.index].forward
        runs.append((since, most))
        cells.append(
            Cell(
                first=first,
                end=end,
                forward=sum(costs[op.index].forward for op in ops),
                backward=sum(costs[op.index].backward for op in ops),
                saved=sum(op.saved_bytes for op in ops),
                share=shares[number],
                temporary=max(needs, default=0.0),
                code=frozenset((op.signature, programs_of(op, settings)) for op in ops if op.kind != "view"),
                calls=sum(programs_of(op, settings) for op in ops),
                reads=frozenset(index for op in ops for index in op.inputs if index < first),
                runs=tuple(runs),
                kept=sum(op.output_bytes for op in ops if op.index in checkpoints),
                tail=tail,
            )
        )
    return cells


@dataclass  # not frozen: a million of them are made in a search
class Segment:
    """Neighbouring cells as one stage.

    Args:
        forward: Seconds.
        backward: Seconds.
        again: Seconds of recomputation, if it is not the last stage.
        tail: The part of `again` that the last stage saves.
        fixed: Bytes of weights, accumulators and optimizer state on chip.
        received: Bytes that come from earlier stages.
        kept: Bytes that one micro-batch keeps until its backward pass.
        peak: Most bytes that an operation needs, together with what was recomputed before it.
        code: Bytes of code.
        update: Bytes that the weight update needs once activations are freed.
    """

    forward: float
    backward: float
    again: float
    tail: float
    fixed: int
    received: int
    kept: int
    peak: float
    code: float
    update: int


def segment_memory(segment: Segment, in_flight: int, machine: Machine, returning: Optional[Segment] = None) -> float:
    """Return the bytes of a stage on its IPU, including the imbalance of tiles.

    Args:
        segment: The stage.
        in_flight: Micro-batches between its forward and its backward pass.
        machine: The device.
        returning: Parts of the model that run on the same IPU again, as one segment; its `kept` covers all
            micro-batches in flight.
    """
    stash = segment.kept * in_flight
    code, stays = segment.code, float(segment.fixed + segment.received)
    peak, update = segment.peak, segment.update
    if returning is None:  # nearly always
        waiting = update - stash
        return stays + stash + code + uneven_bytes(code, machine) + (peak if peak > waiting else waiting)
    stash += returning.kept
    # Both include the code that every program has.
    code += returning.code - machine.tiles * machine.code_bytes_per_tile
    stays += returning.fixed + returning.received + code + uneven_bytes(code, machine)
    return stays + stash + max(peak, returning.peak, max(update, returning.update) - stash)


def segments_of(
    cells: List[Cell],
    traced: TracedModel,
    settings: Settings,
    machine: Machine,
    limit: float = math.inf,
    longest: float = math.inf,
) -> List[List[Segment]]:
    """Return for each cell, and for the end, all stages that end before it, shortest first.

    Where the cells before one are like those before an earlier one, in equal layers, their stages are the same.

    Args:
        cells: The cells.
        traced: The model.
        settings: How it runs.
        machine: The device.
        limit: Bytes beyond which a stage is not tried.
        longest: Seconds beyond which a stage is not tried.
    """
    kinds: Dict[Tuple[object, ...], int] = {}
    alike = [kinds.setdefault(_kind_of(cell), len(kinds)) for cell in cells]
    tables: List[List[Segment]] = []
    ends: Dict[int, List[int]] = {}
    for end in range(len(cells) + 1):
        same = ends.setdefault(alike[end - 1] if end else -1, [])
        equal = next((before for before in same if _ends_alike(alike, before, end, len(tables[before]))), None)
        if equal is None:
            same.append(end)
            tables.append(_segments_ending_at(end, cells, traced, settings, machine, limit, longest))
        else:
            tables.append(tables[equal])
    return tables


def _kind_of(cell: Cell) -> Tuple[object, ...]:
    """Return what stages depend on; results of operations far before a cell, such as a mask, are the same for all."""
    near = 4 * (cell.end - cell.first) + 64
    reads = frozenset(cell.first - index if cell.first - index < near else -index for index in cell.reads)
    share = (cell.share.on_chip, cell.share.update)
    costs = (cell.forward, cell.backward, cell.temporary, cell.tail, cell.saved, cell.kept, cell.calls, cell.runs)
    return cell.end - cell.first, share, costs, cell.code, reads


def _ends_alike(alike: Sequence[int], before: int, end: int, tried: int) -> bool:
    """Return whether the cells that decided on the stages before one cell are also before another."""
    # One more cell was looked at, and was too much; at the beginning of the model there is none.
    return tried < before and alike[before - tried - 1 : before] == alike[end - tried - 1 : end]


def _segments_ending_at(
    end: int,
    cells: List[Cell],
    traced: TracedModel,
    settings: Settings,
    machine: Machine,
    limit: float = math.inf,
    longest: float = math.inf,
) -> List[Segment]:
    """Return all stages that end before a cell, shortest first, up to a limit of memory and a longest time."""
    found: List[Segment] = []
    external: Set[int] = set()
    code: Set[Tuple[str, int]] = set()
    forward = backward = temporary = tail = 0.0
    fixed = saved = calls = kept = update = received = programs = 0
    most = longest_run = 0.0
    checkpoint_seen = False
    recomputes = settings.training and settings.recompute == "checkpoints"
    for number in range(end - 1, -1, -1):
        cell = cells[number]
        for index in [index for index in external if cell.first <= index < cell.end]:
            external.discard(index)
            received -= traced.ops[index].output_bytes
        for index in cell.reads - external:
            external.add(index)
            received += traced.ops[index].output_bytes
        forward += cell.forward
        backward += cell.backward
        fixed += cell.share.on_chip
        saved += cell.saved
        kept += cell.kept
        calls += cell.calls
        update = max(update, cell.share.update)
        temporary = max(temporary, cell.temporary)
        new = cell.code - code
        if new:
            code |= new
            programs += sum(count for _, count in new)
        # The part after a cell's last checkpoint continues in the cells added before it.
        before, needed = cell.runs[-1]
        most = max(needed, before + most)
        longest_run = max(longest_run, most)
        if len(cell.runs) > 1:
            longest_run = max(longest_run, *(needed for _, needed in cell.runs))
            most = cell.runs[0][1]
        if not checkpoint_seen:
            tail += cell.tail
            checkpoint_seen = len(cell.runs) > 1
        stays = (kept if recomputes else saved) + received if settings.training else 0
        again, tail_seconds = (forward, tail) if recomputes else (0.0, 0.0)
        segment = Segment(
            forward=forward,
            backward=backward,
            again=again,
            tail=tail_seconds,
            fixed=fixed,
            received=received,
            kept=stays,
            peak=longest_run if recomputes else temporary,
            code=code_bytes(programs, calls, machine),
            update=update,
        )
        # Longer stages take more of everything except received bytes.
        if found and segment_memory(segment, 1, machine) - 2 * received > limit:
            break
        if found and forward + backward + again > longest:
            break
        found.append(segment)
    return found


def segment_of(cell: Cell, traced: TracedModel, settings: Settings, machine: Machine) -> Segment:
    """Return a stage that has one cell."""
    return _segments_ending_at(1, [cell], traced, settings, machine)[0]
