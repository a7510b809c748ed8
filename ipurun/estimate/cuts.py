"""Where a model can be cut, and what any run of operations between two cuts takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Collection, Dict, FrozenSet, List, Optional, Sequence, Set, Tuple

from ipurun.estimate.costs import op_costs, proportion_of
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import ParameterShare, code_bytes, op_bytes, parameter_shares, programs_of
from ipurun.estimate.stages import layout_of_cuts
from ipurun.estimate.types import Settings
from ipurun.inspect.traced_model import TracedModel

__all__ = [
    "Cell",
    "CutPoint",
    "Return",
    "Segment",
    "Ties",
    "cells_of",
    "cut_points",
    "segment_memory",
    "segments_ending_at",
    "ways_to_tie",
]


@dataclass(frozen=True)
class CutPoint:
    """A place where the next IPU can begin: the beginning of a module.

    Args:
        op: First operation behind the cut.
        module: The outermost module that begins there.
    """

    op: int
    module: str

    @property
    def depth(self) -> int:
        """How deep in the model the module lies."""
        return self.module.count(".")


def cut_points(profile: TracedModel, names: Optional[Collection[str]] = None) -> List[CutPoint]:
    """All cut points of a model, in order of running.

    Args:
        profile: The model.
        names: Modules at which a block can begin: those that are called. None: any.
    """
    entered: Dict[str, int] = {}
    begins: Dict[int, List[str]] = {}
    around_last: Tuple[str, ...] = ()
    for op in profile.ops:
        around = _around(op.module)
        for module in around:
            if module not in around_last:
                entered[module] = entered.get(module, 0) + 1
                begins.setdefault(op.index, []).append(module)
        around_last = around
    containers = {outer for module in entered for outer in _around(module)[:-1]}
    points = []
    for index, modules in begins.items():
        # A module that is called twice would begin its block twice.
        usable = [name for name in modules if entered[name] == 1 and (names is None or name in names)]
        before = profile.ops[index - 1] if index else None
        if before is not None and before.parameters and entered.get(before.module, 1) > 1:
            # The name of a layer with several callers does not tell who called it: what has parts of its own may have
            # begun before that call.
            usable = [name for name in usable if name not in containers]
        if usable and index > 0:
            points.append(CutPoint(index, usable[0]))
    return points


def _around(module: str) -> Tuple[str, ...]:
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Cell:
    """The operations between two neighbouring cut points.

    Args:
        first: Its first operation.
        end: The first operation behind it.
        forward: Seconds.
        backward: Seconds.
        saved: Bytes that its backward pass reads.
        share: Its parameters.
        temporary: Bytes of its largest operation.
        code: (signature, programs) of its different operations.
        calls: Programs of all its operations.
        reads: Operations before it whose results it reads.
        runs: Bytes to compute again, between checkpoints: one more entry than it has checkpoints.
        kept: Bytes of its checkpoints.
        tail: Forward seconds behind its last checkpoint; all of them where it has none.
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
    runs: Tuple[int, ...]
    kept: int
    tail: float


def cells_of(
    profile: TracedModel,
    points: List[CutPoint],
    checkpoints: Collection[int],
    settings: Settings,
    machine: Machine,
    ipu: int = 0,
) -> List[Cell]:
    """The cells that cut points make of a model, as they would be on an IPU."""
    starts = [0, *(point.op for point in points)]
    shares = parameter_shares(profile, layout_of_cuts(profile, starts[1:]), settings)
    costs = op_costs(profile, machine, settings, proportion_of(settings, machine, ipu))
    cells = []
    for number, first in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(profile.ops)
        ops = profile.ops[first:end]
        runs, tail = [0], 0.0
        for op in ops:
            if op.index in checkpoints:
                runs.append(0)
                tail = 0.0
            else:
                runs[-1] += op.saved_bytes
                tail += costs[op.index].forward
        cells.append(
            Cell(
                first=first,
                end=end,
                forward=sum(costs[op.index].forward for op in ops),
                backward=sum(costs[op.index].backward for op in ops),
                saved=sum(op.saved_bytes for op in ops),
                share=shares[number],
                temporary=max((op_bytes(profile, op, settings, costs) for op in ops), default=0.0),
                code=frozenset((op.signature, programs_of(op, settings)) for op in ops if op.kind != "view"),
                calls=sum(programs_of(op, settings) for op in ops),
                reads=frozenset(index for op in ops for index in op.inputs if index < first),
                runs=tuple(runs),
                kept=sum(op.output_bytes for op in ops if op.index in checkpoints),
                tail=tail,
            )
        )
    return cells


@dataclass(frozen=True)
class Segment:
    """Neighbouring cells together, as one stage.

    Args:
        begin: Its first cell.
        forward: Seconds.
        backward: Seconds.
        again: Seconds of recomputation, if it is not the last stage.
        tail: The part of `again` that the last stage saves.
        fixed: Bytes of weights, accumulators and optimizer state on chip.
        received: Bytes that come from earlier stages.
        kept: Bytes that one micro-batch leaves behind until its backward pass.
        run: Bytes that are computed again at a time.
        peak: Bytes of its largest operation.
        code: Bytes of code.
        update: Bytes that the weight update needs when activations are gone.
    """

    begin: int
    forward: float
    backward: float
    again: float
    tail: float
    fixed: int
    received: int
    kept: int
    run: int
    peak: float
    code: float
    update: int


def segment_memory(segment: Segment, in_flight: int, machine: Machine, returning: Optional[Segment] = None) -> float:
    """Bytes that a stage takes on its IPU, the fullest tile's excess included.

    Args:
        segment: The stage.
        in_flight: Micro-batches between its forward and its backward pass.
        machine: The device.
        returning: Parts of the model that come back to the same IPU, as one; what they keep is that of all their
            micro-batches.
    """
    stash = segment.kept * in_flight
    stays = segment.fixed + segment.received + segment.code + machine.tile_imbalance_bytes * machine.tiles
    run, peak, update = segment.run, segment.peak, segment.update
    if returning is not None:
        stash += returning.kept
        # Both begin with the code that every program has.
        stays += returning.fixed + returning.received + returning.code - machine.tiles * machine.code_bytes_per_tile
        run, peak, update = max(run, returning.run), max(peak, returning.peak), max(update, returning.update)
    return stays + stash + max(run + peak, update - stash)


def segments_ending_at(
    end: int,
    cells: List[Cell],
    profile: TracedModel,
    settings: Settings,
    machine: Machine,
    limit: float = math.inf,
    longest: float = math.inf,
) -> List[Segment]:
    """All stages that end before a cell, the shortest first, up to a limit of memory and a longest time."""
    found: List[Segment] = []
    external: Set[int] = set()
    code: Set[Tuple[str, int]] = set()
    forward = backward = temporary = tail = 0.0
    fixed = saved = calls = kept = update = received = programs = 0
    run, longest_run, checkpoint_seen = 0, 0, False
    for number in range(end - 1, -1, -1):
        cell = cells[number]
        for index in [index for index in external if cell.first <= index < cell.end]:
            external.discard(index)
            received -= profile.ops[index].output_bytes
        for index in cell.reads - external:
            external.add(index)
            received += profile.ops[index].output_bytes
        forward += cell.forward
        backward += cell.backward
        fixed += cell.share.weights + cell.share.gradients + cell.share.state
        saved += cell.saved
        kept += cell.kept
        calls += cell.calls
        update = max(update, cell.share.update)
        temporary = max(temporary, cell.temporary)
        new = cell.code - code
        code |= new
        programs += sum(count for _, count in new)
        # The part behind a cell's last checkpoint goes on into the cells that were added before it.
        longest_run = max(longest_run, run + cell.runs[-1], *cell.runs)
        run = run + cell.runs[0] if len(cell.runs) == 1 else cell.runs[0]
        if not checkpoint_seen:
            tail += cell.tail
            checkpoint_seen = len(cell.runs) > 1
        recomputes = settings.training and settings.recompute == "checkpoints"
        stays = (kept if recomputes else saved) + received if settings.training else 0
        again, tail_seconds = (forward, tail) if recomputes else (0.0, 0.0)
        segment = Segment(
            begin=number,
            forward=forward,
            backward=backward,
            again=again,
            tail=tail_seconds,
            fixed=fixed,
            received=received,
            kept=stays,
            run=longest_run if recomputes else 0,
            peak=temporary,
            code=code_bytes(programs, calls, machine),
            update=update,
        )
        # All but what is received only grows with a stage.
        if found and segment_memory(segment, 1, machine) - 2 * received > limit:
            break
        if found and forward + backward + again > longest:
            break
        found.append(segment)
    return found


# Uses of a weight that are closer than this part of the model are one place; the first such part is its beginning.
_NEAR = 12
_MOST_RETURNS = 3


@dataclass(frozen=True)
class Return:
    """A part in the middle or at the end of a model that goes back to IPU 0, because it shares a weight.

    Args:
        first: Where it begins.
        resume: Where the model goes on elsewhere; None: it lasts to the end.
    """

    first: CutPoint
    resume: Optional[CutPoint]


@dataclass(frozen=True)
class Ties:
    """One way to have all users of each weight on one IPU.

    Args:
        points: Where the model may then be cut, beginnings and ends of the returning parts included.
        returns: Those parts, in order.
    """

    points: Tuple[CutPoint, ...]
    returns: Tuple[Return, ...] = ()


def ways_to_tie(profile: TracedModel, points: Sequence[CutPoint]) -> List[Ties]:
    """Parts that share weights come back to IPU 0, or all between them stays together."""
    uses = [sorted(parameter.ops) for parameter in profile.parameters if len(parameter.ops) > 1]
    together = Ties(tuple(_outside(points, [(ops[0], ops[-1]) for ops in uses])))
    returning = _returning(uses, len(profile.ops), points)
    return [together] if returning is None else [returning, together]


def _returning(uses: Sequence[List[int]], num_ops: int, points: Sequence[CutPoint]) -> Optional[Ties]:
    near = max(1, num_ops // _NEAR)
    places = [_places(ops, near) for ops in uses]
    apart = [place for several in places if len(several) > 1 for place in several]
    beginning = max((last for _, last in apart if last < near), default=0)
    spans = [place for several in places for place in several] + [(0, beginning)]
    usable = _outside(points, spans)
    returns: List[Return] = []
    for first_use, last_use in sorted(place for place in apart if place[1] > beginning):
        first = next((point for point in reversed(usable) if point.op <= first_use), None)
        resume = next((point for point in usable if point.op > last_use), None)
        if first is None:
            return None  # nothing could be cut off before it
        before = returns[-1] if returns else None
        if before is not None and (before.resume is None or before.resume.op >= first.op):
            returns[-1] = Return(before.first, resume)
        else:
            returns.append(Return(first, resume))
    if not returns or len(returns) > _MOST_RETURNS:
        return None
    return Ties(
        tuple(point for point in usable if not any(_is_inside(point, part) for part in returns)), tuple(returns)
    )


def _places(ops: Sequence[int], near: int) -> List[Tuple[int, int]]:
    """(first, last) use in each place of the model."""
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


def _is_inside(point: CutPoint, part: Return) -> bool:
    return part.first.op < point.op and (part.resume is None or point.op < part.resume.op)
