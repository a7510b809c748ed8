"""Standard output for one document: whatever else is printed meanwhile goes to standard error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, Iterator

__all__ = ["only_json", "print_json"]


@contextlib.contextmanager
def only_json(active: bool) -> Iterator[None]:
    """Keeps standard output clean while models, data sets and native libraries run.

    Args:
        active: Whether ``--json`` was given; otherwise nothing changes.
    """
    if not active:
        yield
        return
    sys.stdout.flush()
    descriptor = _descriptor()
    kept = None if descriptor is None else os.dup(descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if descriptor is not None:
                os.dup2(2, descriptor)
            yield
    finally:
        if descriptor is not None and kept is not None:
            os.dup2(kept, descriptor)
            os.close(kept)


def print_json(document: Any) -> None:
    """Prints the one document of ``--json``."""
    print(json.dumps(document, indent=2, default=str))


def _descriptor() -> Any:
    # Libraries write to descriptor 1 itself. A stream that is not it (a test's) needs no help there.
    try:
        return 1 if sys.stdout.fileno() == 1 else None
    except (OSError, ValueError, AttributeError):
        return None
