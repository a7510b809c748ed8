"""`ipurun exec`: an unmodified PopTorch program, with `import poptorch` answered by the emulator."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, Dict, List, Tuple

from ipurun.distributed.environment import LAUNCH_FOLDER, launched
from ipurun.distributed.notes import begin_instance
from ipurun.errors import EXIT_INTERRUPTED, ConfigError, RunError
from ipurun.module_search import python_command

__all__ = ["recorded_program", "run"]

_NUMBERS = {"--instances": "instances", "--replicas": "replicas", "--ipus-per-replica": "ipus"}


_USAGE = """\
usage: ipurun exec [flags] SCRIPT [ARGS ...]
       ipurun exec [flags] -m MODULE [ARGS ...]

Runs a PopTorch program as `python SCRIPT` or `python -m MODULE` would, without an IPU and without PopTorch: its
`import poptorch` gets ipurun.emulator. All words after SCRIPT or MODULE belong to the program.

flags, for programs that use PopDist
  --instances N         start N processes, as poprun does: `import popdist` answers from this
  --replicas N          replicas of all processes (default: one each)
  --ipus-per-replica N  IPUs of a replica (default: 1)

examples
  ipurun exec train.py --epochs 1
  ipurun exec --instances 2 --replicas 4 train.py
  ipurun exec -m pytest tests/
"""


def run(argv: List[str]) -> int:
    """Run a script or a module; its exit code is ours."""
    # The flags of the program follow its name: only those before it are for us.
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    numbers, argv = _numbers(argv)
    is_module = bool(argv) and argv[0] == "-m"
    program = argv[1:] if is_module else argv
    if not program or (not is_module and program[0].startswith("-")):
        what = "`exec` needs a module after -m" if is_module else "`exec` needs a script or -m MODULE"
        seen = "" if not program else f"the flag {program[0]}"
        raise ConfigError(what, "command line", seen=seen, fix="ipurun exec train.py --epochs 1")
    if LAUNCH_FOLDER in os.environ:
        return _run_instance(program, is_module)
    if numbers:
        return _launch(argv, **_checked(numbers))
    return _run_program(program, is_module)


def _run_program(program: List[str], is_module: bool) -> int:
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


def _numbers(argv: List[str]) -> Tuple[Dict[str, int], List[str]]:
    """Return the flags before the program with their values, and the rest."""
    numbers: Dict[str, int] = {}
    while argv and argv[0].partition("=")[0] in _NUMBERS:
        flag, equals, value = argv[0].partition("=")
        argv = argv[1:]
        if not equals:
            value, argv = (argv[0], argv[1:]) if argv else ("", [])
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(
                f"`{flag}` takes a number", "command line", seen=f"{flag} {value}".strip(), fix=f"{flag} 2"
            )
        numbers[_NUMBERS[flag]] = int(value)
    return numbers, argv


def _checked(numbers: Dict[str, int]) -> Dict[str, int]:
    instances = numbers.get("instances", 1)
    replicas = numbers.get("replicas", instances)
    if replicas % instances:
        below, above = replicas // instances * instances, -(-replicas // instances) * instances
        raise ConfigError(
            f"{replicas} replicas cannot be divided among {instances} instances",
            "command line",
            seen=f"--instances {instances} --replicas {replicas}",
            fix=" or ".join(f"--replicas {number}" for number in (below, above) if number),
        )
    return {"instances": instances, "replicas": replicas, "ipus": numbers.get("ipus", 1)}


def _launch(argv: List[str], instances: int, replicas: int, ipus: int) -> int:
    """Start the processes of a program, and wait for their end."""
    variables = {
        "POPDIST_NUM_TOTAL_REPLICAS": str(replicas),
        "POPDIST_NUM_LOCAL_REPLICAS": str(replicas // instances),
        "POPDIST_NUM_IPUS_PER_REPLICA": str(ipus),
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    }
    if instances == 1:
        os.environ.update({**variables, "POPDIST_REPLICA_INDEX_OFFSET": "0", "POPDIST_LOCAL_INSTANCE_INDEX": "0"})
        is_module = argv[0] == "-m"
        return _run_program(argv[1:] if is_module else argv, is_module)
    from ipurun.distributed.launch import run_torchrun

    command = [*python_command("ipurun.cli.main.console"), "exec", *argv]
    outcome = run_torchrun(command, instances, environment=variables)
    if outcome.is_interrupted:
        return EXIT_INTERRUPTED
    if outcome.failure is None:
        return 0
    program = argv[1] if argv[0] == "-m" else argv[0]
    raise RunError(outcome.failure.what, program, fix="see what it wrote above; the other instances were ended")


def _run_instance(program: List[str], is_module: bool) -> int:
    """Run the program as one of several processes, with the variables that poprun and its mpirun set."""
    started = launched()
    begin_instance(has_log=False)
    if started is None:
        return _run_program(program, is_module)
    local = os.environ["POPDIST_NUM_LOCAL_REPLICAS"]
    os.environ.update(
        {
            "POPDIST_REPLICA_INDEX_OFFSET": str(started.rank * int(local)),
            "POPDIST_LOCAL_INSTANCE_INDEX": str(started.rank),
            "OMPI_COMM_WORLD_RANK": str(started.rank),
            "OMPI_COMM_WORLD_SIZE": str(started.count),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(started.rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(started.count),
        }
    )
    del os.environ[LAUNCH_FOLDER]  # not for what the program starts
    return _run_program(program, is_module)
