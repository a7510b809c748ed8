"""How a command ends when something is wrong: one block per problem, an exit code, no traceback unless asked for."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Callable, Sequence

from ipurun.errors import EXIT_FAILED, ConfigError, IpurunError, Problem

__all__ = ["guarded", "show_problems"]


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
        # A fault of ours, or of a library below us: the user still gets one block first.
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        show_problems(
            IpurunError(Problem(what, "inside ipurun", fix="run again with --debug and report it with `ipurun env`")),
            as_json="--json" in argv,
            debug="--debug" in argv,
        )
        return EXIT_FAILED


def show_problems(error: IpurunError, as_json: bool = False, debug: bool = False) -> None:
    """Print problems to standard error, or as JSON to standard output."""
    if debug:
        traceback.print_exc()
    if as_json:
        kind = "config" if isinstance(error, ConfigError) else "run"
        print(json.dumps({"error": kind, "problems": [problem.to_dict() for problem in error.problems]}))
        return
    print("\n\n".join(str(problem) for problem in error.problems), file=sys.stderr)
