"""Lines for terminals that are narrower than they are: broken between words, with what follows set in."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Iterable, List

__all__ = ["WIDE", "columns", "fitted"]

WIDE = 120  # columns from which on nothing is changed
_NARROWEST = 60


def columns() -> int:
    """Width of the terminal; a file or a pipe is as wide as it takes."""
    return shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() else WIDE


def fitted(lines: Iterable[str], indent: int) -> List[str]:
    """Lines as they are, or broken where the terminal is too narrow for them.

    Args:
        lines: The lines.
        indent: How far to set in what goes on from a line.
    """
    width = columns()
    if width >= WIDE:
        return list(lines)
    beyond = " " * indent
    return [
        part for line in lines for part in textwrap.wrap(line, max(width, _NARROWEST), subsequent_indent=beyond) or [""]
    ]
