"""Module names and patterns of a config, matched with the modules of the model."""

from __future__ import annotations

import fnmatch
from typing import List, Optional, Sequence

from ipurun.config.suggest import listing, nearest
from ipurun.plan.findings import Findings

__all__ = ["find_module", "match_modules"]


def find_module(name: str, key: str, known: Sequence[str], found: Findings) -> Optional[str]:
    """The module that a name means (``layer1.0``, or ``layer1/0``); None, and a problem, when there is none."""
    dotted = name.replace("/", ".").strip(".")
    if dotted in known and dotted:
        return dotted
    _unmatched(name, key, known, found)
    return None


def match_modules(pattern: str, key: str, known: Sequence[str], found: Findings) -> List[str]:
    """Modules whose name fits a name or a pattern (``encoder.*.attention``); none is a problem."""
    dotted = pattern.replace("/", ".")
    names = [name for name in known if name and fnmatch.fnmatchcase(name, dotted)]
    if not names:
        _unmatched(pattern, key, known, found)
    return names


def _unmatched(name: str, key: str, known: Sequence[str], found: Findings) -> None:
    names = [module for module in known if module]
    close = nearest(name, names)
    top = [module for module in names if "." not in module]
    found.problem(
        f"`{key}` names `{name}`, and the model has no such module",
        known=listing(close or top or names),
        fix=f"`{close[0]}` instead of `{name}`" if close else "one of the names above",
    )
