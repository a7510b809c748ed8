"""How a command ends when something is wrong: one block per problem, an exit code, no traceback unless asked for."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Callable, Sequence

from ipurun.errors import EXIT_FAILED, ConfigError, IpurunError, Problem

__all__ = ["explain", "guarded", "show_problems"]

_USERS = ""
_DISTRIBUTIONS = {"hydra": "hydra-core", "yaml": "PyYAML"}  # whose name is not that of the module


def guarded(command: Callable[[], int], argv: Sequence[str]) -> int:
    """Run a command and turn whatever it raises into a message and an exit code."""
    try:
        return command()
    except IpurunError as error:
        show_problems(error, as_json="--json" in argv, debug="--debug" in argv)
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        show_problems(IpurunError(explain(error)), as_json="--json" in argv, debug="--debug" in argv)
        return EXIT_FAILED


def explain(error: Exception) -> Problem:
    """Say whose fault an unexpected error is, by the code that it came through, and what to do about it."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    packages = [_package_of(frame.filename) for frame in frames]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    users = [frame for frame, package in zip(frames, packages) if package == _USERS]
    missing = str(error.name or packages[-1]).partition(".")[0] if isinstance(error, ImportError) else "ipurun"
    if missing != "ipurun" and not users:
        fix = f"{sys.executable} -m pip install {_DISTRIBUTIONS.get(missing, missing)}"
        if isinstance(error, ModuleNotFoundError):
            return Problem(f"the package `{missing}` is not installed", where, what, fix=fix)
        return Problem(f"the package `{missing}` cannot be imported", where, what, fix="repair its installation")
    if users:
        where = f"{users[-1].filename}:{users[-1].lineno}"
        return Problem("code outside ipurun failed", where, what, fix="--debug shows the whole traceback")
    if packages and packages[-1] != "ipurun":
        fix = "--debug shows the whole traceback; `ipurun env` shows the versions in use"
        return Problem(f"the package `{packages[-1]}` failed", where, what, fix=fix)
    return Problem(what, "inside ipurun", fix="run again with --debug and report it with `ipurun env`")


def _package_of(file: str) -> str:
    """The package that a file belongs to: ours, Python's or an installed one by name, "" for any other code."""
    path = os.path.abspath(file)
    for module in ("ipurun", "ipurun.recipes"):
        folder = os.path.dirname(str(getattr(sys.modules.get(module), "__file__", "")))
        if folder and path.startswith(folder + os.sep):
            return "ipurun"
    for folder in ("site-packages", "dist-packages"):
        _before, found, inside = path.partition(f"{os.sep}{folder}{os.sep}")
        if found:
            return inside.partition(os.sep)[0].partition(".")[0]
    return "Python" if path.startswith(os.path.dirname(os.__file__) + os.sep) else _USERS


def show_problems(error: IpurunError, as_json: bool = False, debug: bool = False) -> None:
    """Print problems to standard error, or as JSON to standard output."""
    if debug:
        traceback.print_exc()
    if as_json:
        kind = "config" if isinstance(error, ConfigError) else "run"
        print(json.dumps({"error": kind, "problems": [problem.to_dict() for problem in error.problems]}))
        return
    print("\n\n".join(str(problem) for problem in error.problems), file=sys.stderr)
