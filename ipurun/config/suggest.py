"""Names that somebody may have meant."""

from __future__ import annotations

import difflib
from typing import Iterable, List

__all__ = ["listing", "nearest"]


def nearest(word: str, known: Iterable[str], most: int = 3) -> List[str]:
    """The known names closest to a word: by spelling, by last part, or as a part of a longer name.

    Args:
        word: What was typed.
        known: What exists.
        most: How many to give at the most.
    """
    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    found = [by_lower[match] for match in difflib.get_close_matches(word.lower(), by_lower, n=most, cutoff=0.72)]
    last_part = word.lower().rpartition(".")[2]
    same_end = [name for name in names if name.lower().rpartition(".")[2] == last_part]
    by_end = {name.lower().rpartition(".")[2]: name for name in reversed(names)}
    similar_end = [by_end[match] for match in difflib.get_close_matches(last_part, by_end, n=most, cutoff=0.75)]
    inside = [name for name in names if len(last_part) > 3 and last_part in name.lower()]
    return list(dict.fromkeys(found + same_end + similar_end + inside))[:most]


def listing(names: Iterable[str], most: int = 12) -> str:
    """Names in one line, cut where there are too many to read."""
    ordered = list(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
