"""The command line: maps a command to its module, and imports that module when the command is used.

Only the standard library is imported at first, so that help and errors come at once.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import List, Optional, Sequence

from ipurun.module_search import append_working_folder, drop_working_folder

__all__ = ["COMMANDS", "collect_as_usual", "console", "main"]

COMMANDS = {
    "train": "Train a model from a recipe; any key can be overridden (-m sweeps).",
    "eval": "Evaluate the weights of a run.",
    "predict": "Write a run's predictions for a split of its data.",
    "export": "Write a run's weights as safetensors, for torch and transformers.",
    "plan": "Show what a config would do, without running it.",
    "validate": "Check configs without running them.",
    "report": "Show a run or a sweep as one page: curves, config, time, ranking.",
    "compare": "Compare runs: curves, keys that differ, speed.",
    "runs": "List, show and remove runs: ls, show, rm.",
    "watch": "Serve the pages of runs on this machine, up to date during runs.",
    "bench": "Measure throughput, the data pipeline alone, and numbers of device_iterations.",
    "ls": "List recipes; `ls keys` lists every config key.",
    "cat": "Print a recipe.",
    "cp": "Copy a recipe, YAML and code, into the working folder to edit.",
    "import": "Turn configs, command lines and scripts of other tools into a recipe.",
    "compile": "Compile a config without a device, into the cache or a file.",
    "cache": "See and manage compiled executables: ls, show, why, prune, verify, clear.",
    "selftest": "Compare an engine with another way to compute the same, in small runs.",
    "env": "Show engine, SDK and versions; --doctor checks the machine, --bundle packs a bug report.",
    "exec": "Run a PopTorch program on the CPU engine.",
}
_MODULES = {
    "cache": "ipurun.cli.executables",
    "cat": "ipurun.cli.recipes",
    "compare": "ipurun.cli.runs",
    "compile": "ipurun.cli.executables",
    "cp": "ipurun.cli.recipes",
    "eval": "ipurun.cli.results",
    "export": "ipurun.cli.results",
    "import": "ipurun.cli.import_",
    "predict": "ipurun.cli.results",
    "report": "ipurun.cli.runs",
    "watch": "ipurun.cli.runs",
}
_COMPOSING = ("train", "plan", "validate", "compile")  # their words go through Hydra, so its own flags work there
_WITH_ENGINE = (*_COMPOSING, "bench", "eval", "predict", "export", "selftest", "exec")
_TO_READ = (
    "plan",
    "validate",
    "ls",
    "cat",
    "bench",
    "env",
    "eval",
    "selftest",
    "compare",
    "runs",
)  # their result is what they print
_FAILED, _INTERRUPTED = 1, 130
_USUAL_COLLECTIONS = gc.get_threshold()
_RARE_COLLECTIONS = (100_000, 50, 100)

_USAGE = """\
ipurun trains PyTorch models on Graphcore IPUs, or on a CPU, from declarative config.

usage: ipurun COMMAND [key=value ...] [flags]

commands
{commands}

flags of every command
  --quiet     only errors and the last line
  --json      one JSON document on standard output
  --debug     show tracebacks
  --help      help for the command

Hydra's flags work after a command: -m (sweep), --cfg job --resolve, --info, --config-dir DIR.
Tab completion: eval "$(ipurun -sc install=bash)"  (zsh and fish too)

examples
  ipurun train +recipe=mnist
  ipurun train +recipe=mnist devices=8
  ipurun train -m +recipe=mnist device_iterations=1,8,32
  ipurun plan +recipe=mnist devices=8
"""


def console() -> None:
    """Entry point of the installed command."""
    # Starting makes a million objects that stay, torch's most of all. To look for garbage among them takes 0.3 s.
    gc.set_threshold(*_RARE_COLLECTIONS)
    code = main()
    gc.freeze()  # or Python would look through them once more at its end
    sys.exit(code)


def collect_as_usual() -> None:
    """Let Python look for garbage as often as it usually does, but not among what there is now.

    Nothing changes in a process that is not ipurun's own.
    """
    if gc.get_threshold() == _RARE_COLLECTIONS:
        gc.freeze()
        gc.set_threshold(*_USUAL_COLLECTIONS)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command line.

    Returns:
        The exit code: 0 done, 1 the run failed, 2 the config is wrong, 3 a plan does not fit, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    drop_working_folder()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) went away. Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of the flush: commands report their own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        return int(getattr(interrupt, "exit_code", _INTERRUPTED))  # of errors.Interrupted


def _open_closed_streams() -> None:
    """Point standard streams that were closed (`>&-`) to nowhere: the next open file would take their place."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free
            made = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)


def _dispatch(words: List[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE.format(commands="\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items())), end="")
        return 0
    if words[0] in ("-V", "--version"):
        print("ipurun", import_module("ipurun").__version__)
        return 0
    if words[0] in ("-sc", "--shell-completion"):
        return _complete(words[1:])
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        return _unknown_command(name)
    report = import_module("ipurun.cli.common")
    if name != "exec":  # the program there handles its own output
        report.forgiving_output(needs_reader=name in _TO_READ)
    code = int(report.guarded(lambda: _command(name, rest), name, rest))
    return int(report.check_output(code)) if name in _TO_READ else code


def _complete(words: List[str]) -> int:
    answer = import_module("ipurun.config.completion").answer(words, os.environ.get("COMP_LINE", ""), COMMANDS)
    if answer is None:
        return int(import_module("ipurun.config.hydra_main").complete(words))
    print(answer)
    return 0


def _command(name: str, rest: List[str]) -> int:
    _check_text(rest)
    _check_working_folder()
    if name != "exec":  # a program there has another search path
        append_working_folder()
    if name in _WITH_ENGINE:
        import_module("ipurun.engine").check_environment()
    # Idle OpenMP threads that spin make torch many times slower wherever the machine has other work to do.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if name in _COMPOSING and "--help" not in rest and "-h" not in rest:
        answer = import_module("ipurun.cli.common").answer(name, rest)
        if answer is not None:
            return int(answer)
    if name not in _COMPOSING:
        collect_as_usual()
    module = import_module(_MODULES.get(name, f"ipurun.cli.{name}"))
    run = getattr(module, f"run_{name}", None) or module.run  # some modules have several commands
    return int(run(rest))


def _check_text(words: List[str]) -> None:
    """Refuse bytes that are not UTF-8: Python reads them as lone surrogates, which cannot be written to a file."""
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            from ipurun.errors import ConfigError

            seen = ascii(os.fsencode(word))
            fix = "type it in UTF-8, in a locale such as LANG=C.UTF-8"
            raise ConfigError("a word is not UTF-8 text", "command line", seen, fix=fix) from None


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        from ipurun.errors import ConfigError

        raise ConfigError("the working folder no longer exists", fix="cd to a folder that exists") from None


def _unknown_command(name: str) -> int:
    from ipurun.cli.common import show_problems
    from ipurun.errors import EXIT_CONFIG, ConfigError, nearest

    close = nearest(name, COMMANDS, most=1)
    fix = f"ipurun {close[0]}" if close else "ipurun --help"
    show_problems(ConfigError(f"unknown command `{name}`", "command line", known=", ".join(COMMANDS), fix=fix))
    return EXIT_CONFIG
