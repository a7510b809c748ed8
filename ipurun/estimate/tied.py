"""Weights that several parts of a model share: all that use one have to be on one IPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

from ipurun.estimate.cuts import CutPoint
from ipurun.inspect.traced_model import ModelProfile

__all__ = ["Return", "Ties", "ways_to_tie"]

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


def ways_to_tie(profile: ModelProfile, points: Sequence[CutPoint]) -> List[Ties]:
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
