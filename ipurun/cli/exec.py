"""`ipurun exec`: an unmodified PopTorch program, with `import poptorch` answered by the emulator."""

from __future__ import annotations

import sys
from typing import List

from ipurun.errors import ConfigError

__all__ = ["run"]


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
