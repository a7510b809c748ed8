"""`ipurun exec`: an unmodified PopTorch program, with `import poptorch` answered by the emulator."""

from __future__ import annotations

import sys
import traceback
from typing import Any, List

from ipurun.errors import ConfigError

__all__ = ["recorded_program", "run"]


_USAGE = """\
usage: ipurun exec SCRIPT [ARGS ...]
       ipurun exec -m MODULE [ARGS ...]

Runs a PopTorch program as `python SCRIPT` or `python -m MODULE` would, without an IPU and without PopTorch: its
`import poptorch` gets ipurun.emulator. All words after SCRIPT or MODULE belong to the program.

examples
  ipurun exec train.py --epochs 1
  ipurun exec -m pytest tests/
"""


def run(argv: List[str]) -> int:
    """Run a script or a module; its exit code is ours."""
    # The flags of the program follow its name: only those before it are for us.
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    is_module = bool(argv) and argv[0] == "-m"
    program = argv[1:] if is_module else argv
    if not program or (not is_module and program[0].startswith("-")):
        what = "`exec` needs a module after -m" if is_module else "`exec` needs a script or -m MODULE"
        seen = "" if not program else f"the flag {program[0]}"
        raise ConfigError(what, "command line", seen=seen, fix="ipurun exec train.py --epochs 1")
    from ipurun.emulator.exec import run_module, run_script
    from ipurun.emulator.install import find_real_poptorch

    real = find_real_poptorch()
    if real is not None:
        print(f"note: poptorch is ipurun.emulator here, not the one installed at {real}", file=sys.stderr)
    return (run_module if is_module else run_script)(program[0], program[1:])


def recorded_program(path: str, args: List[str]) -> Any:
    """Run a PopTorch program up to its first compiled model, and return what it made (`RecordedProgram`).

    Raises:
        ConfigError: The program failed, or compiles no model.
    """
    from ipurun.emulator.exec import record_script

    try:
        recorded = record_script(path, args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # of the program
        frames = traceback.extract_tb(error.__traceback__)
        raise ConfigError(
            "the program failed before it compiled a model",
            f"{frames[-1].filename}:{frames[-1].lineno}" if frames else path,
            seen=f"{type(error).__name__}: {error}",
            fix=f"ipurun exec {path} shows the traceback; its arguments go after --: ipurun import {path} -- ARGS",
        ) from error
    if recorded.model is None:
        fix = "give a script that calls poptorch.trainingModel(...) and its model"
        raise ConfigError("the program ended without compiling a model", path, fix=fix)
    return recorded
