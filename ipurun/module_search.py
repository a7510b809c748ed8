"""Keep installed packages ahead of the working folder, in this process and in those that ipurun starts.

Commands import this before anything that a file in the working folder could shadow: only modules that Python itself has
loaded by then may be imported here.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["append_working_folder", "drop_working_folder", "python_command"]

_OWN_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def drop_working_folder() -> None:
    """Take the working folder off sys.path, where `python -m` or an empty part of PYTHONPATH has put it."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # the command reports it
        return
    own = ("", folder, os.path.realpath(folder))
    sys.path[:] = [entry for entry in sys.path if entry not in own]


def append_working_folder() -> None:
    """Make the user's modules in the working folder importable, after everything installed."""
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        return
    _search_paths_last()
    # Child processes ask the finders of editable installs last again, where a folder called ipurun, such as a clone,
    # would shadow the package.
    found = PathFinder.find_spec("ipurun", [folder])
    if found is not None and folder != _OWN_ROOT and _OWN_ROOT not in sys.path:
        sys.path.append(_OWN_ROOT)
    sys.path.append(folder)


def python_command(entry: str) -> list[str]:
    """Return the command that calls a function in a new Python, with the search path of this one.

    Both -m and -c put the working folder first, which only Python 3.11 and later can prevent.

    Args:
        entry: Dotted path of a function without arguments, such as ``ipurun.cli.main.console``.
    """
    module, _, name = entry.rpartition(".")
    path = [entry for entry in sys.path if entry] + [os.getcwd()] * ("" in sys.path)
    if _OWN_ROOT not in path and PathFinder.find_spec("ipurun", path) is None:  # `drop_working_folder` took it off
        path.append(_OWN_ROOT)
    program = f"import sys; sys.path[:] = {path!r}; from {module} import {name}; {name}()"
    return [sys.executable, "-c", program]


def _search_paths_last() -> None:
    """Ask the finders of editable installs before sys.path, where a folder without __init__.py would win."""
    if PathFinder in sys.meta_path and sys.meta_path[-1] is not PathFinder:
        sys.meta_path.remove(PathFinder)
        sys.meta_path.append(PathFinder)
        sys.meta_path.insert(0, _OwnModules)  # type: ignore[arg-type]


class _OwnModules:
    """Finds the modules of this very package: an editable install may be of another clone than the one that runs."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Return where a module of this package is, None for others."""
        return PathFinder.find_spec(name, path, target) if name.startswith("ipurun.") else None
