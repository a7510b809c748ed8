"""Names and patterns of modules and parameters, matched the same way everywhere."""

from __future__ import annotations

import difflib
import fnmatch
from typing import Iterable, List, Sequence

from ipurun.errors import Problem

__all__ = ["matching", "unmatched"]


def matching(pattern: str, names: Iterable[str]) -> List[str]:
    """Names that a pattern means: itself, or by ``*``, ``?`` and ``[...]``."""
    return [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]


def unmatched(key: str, pattern: str, names: Sequence[str], kind: str) -> Problem:
    """The problem of a pattern that matches nothing, with the nearest names."""
    nearest = difflib.get_close_matches(pattern, names, n=5, cutoff=0.5)
    return Problem(
        f"`{key}`: no {kind} of the model is called `{pattern}`",
        known=", ".join(nearest or list(names)[:12]),
        fix="`*` stands for any part of a name" if "*" not in pattern else "",
        key=key,
    )
