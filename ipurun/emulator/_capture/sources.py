"""Find the line of the user's model that called an operation."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Dict, Optional, Sequence, Tuple

import torch

_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# The emulator, and the frames of torch between a function and its dispatch.
_OWN_FILES: Tuple[str, ...] = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep + "contextlib",
    *(_TORCH_FOLDER + name for name in ("_dynamo", "_compile.py", "_ops.py", "overrides.py")),
    os.path.join(_TORCH_FOLDER, "utils", "_python_dispatch.py"),
)
# Matches torch's own files in PopTorch's list of excludes, wherever torch is installed.
_TORCH_EXCLUDE = "site-packages/torch"
_excluded: Dict[Tuple[str, Tuple[str, ...]], bool] = {}


def calling_line(excludes: Sequence[str] = (_TORCH_EXCLUDE,)) -> str:
    """Return `file:line` of the innermost caller that is not excluded, "" if there is none.

    Args:
        excludes: Parts of paths to skip (Options.sourceLocationExcludes); the emulator is always skipped, and so are
            modules that set `__tracebackhide__`, as those between a model and torch do.
    """
    key = tuple(excludes)
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        excluded = _excluded.get((filename, key))
        if excluded is None:
            excluded = _excluded[filename, key] = _is_excluded(filename, key)
        if not excluded and not frame.f_globals.get("__tracebackhide__"):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_excluded(filename: str, excludes: Tuple[str, ...]) -> bool:
    if filename.startswith(("<", *_OWN_FILES)):
        return True
    if _TORCH_EXCLUDE in excludes and filename.startswith(_TORCH_FOLDER):
        return True
    return any(part in filename for part in excludes)
