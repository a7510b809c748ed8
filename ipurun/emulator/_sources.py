"""Finding the line of the user's model that called an operation."""

from __future__ import annotations

import os
import sys
from typing import Dict, Tuple

import torch

__all__ = ["calling_line"]

_LIBRARY_FOLDERS: Tuple[str, ...] = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "contextlib",
)
_is_library: Dict[str, bool] = {}


def calling_line() -> str:
    """Returns `file:line` of the innermost caller outside torch and this package, "" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        library = _is_library.get(filename)
        if library is None:
            library = filename.startswith(_LIBRARY_FOLDERS) or filename.startswith("<")
            _is_library[filename] = library
        if not library:
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
