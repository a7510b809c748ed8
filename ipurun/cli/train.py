"""`ipurun train`: one run, or with -m a sweep."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, List

from ipurun.cli.common import Flags, only_json, print_json, split
from ipurun.errors import EXIT_FAILED, EXIT_INTERRUPTED
from ipurun.module_search import python_command

if TYPE_CHECKING:
    from ipurun.planning.plan import Plan

__all__ = ["run"]


_USAGE = """\
usage: ipurun train +recipe=NAME [key=value ...] [flags]
       ipurun train -m +recipe=NAME key=value,value,... [flags]
       ipurun train resume=RUN_FOLDER

Trains a model that a recipe describes. Each run has a folder below runs/<name>/ with its config, metrics, log and
checkpoints. Ctrl-C saves and stops; a second Ctrl-C stops at once.

flags
  -m          sweep: run every combination of the comma-separated values, each in a process of its own
  --quiet     only errors and the last line
  --json      one JSON document on standard output
  --debug     show tracebacks
Hydra's --cfg job --resolve and --info show the composed config instead of running it.

examples
  ipurun train +recipe=mnist
  ipurun train +recipe=mnist devices=8 device_iterations=32
  ipurun train +recipe=mnist resume=auto
  ipurun train -m +recipe=mnist optimizer.lr=0.01,0.1
"""


def run(argv: List[str]) -> int:
    """Train what the command line describes."""
    flags, rest = split(argv)
    if flags.help:
        print(_USAGE, end="")
        return 0
    from ipurun.config.argv import parse_argv

    if parse_argv(rest).multirun:
        return _sweep(rest, flags)
    with only_json(flags.json):
        from ipurun.interface import train_words

        quiet = flags.quiet or flags.json
        result = train_words(rest, quiet, set_environment=lambda plan: _set_environment(plan, argv))
    if flags.json:
        print_json(result.to_dict())
    elif flags.quiet:
        from ipurun.log.console import final_line

        print(final_line(result, result.name, str(result.folder)))
    return EXIT_INTERRUPTED if result.status == "interrupted" else 0


def _set_environment(plan: Plan, argv: List[str]) -> None:
    """Set the variables that the plan needs before the engine is imported.

    A plan needs the engine, so it is imported already. The emulator reads its variables when they are used; Graphcore's
    libraries read some when they are loaded, so there the command starts over with them set.
    """
    missing = {name: value for name, value in plan.environment.items() if os.environ.get(name) != value}
    if not missing:
        return
    os.environ.update(missing)
    if plan.engine != "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [*python_command("ipurun.cli.main.console"), "train", *argv])


def _sweep(argv: List[str], flags: Flags) -> int:
    from ipurun.config.compose import points

    found = points(argv)
    with only_json(flags.json):
        from ipurun.log.screen import PlainScreen, make_screen
        from ipurun.sweep.run import final_line, run_sweep, show_result

        screen = make_screen(sys.stdout, quiet=flags.quiet or flags.json)
        errors = PlainScreen(sys.stderr)
        # Batch systems end a job with SIGTERM: the sweep then ends as with Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            result = run_sweep(found, argv, screen, errors)
        finally:
            screen.close()
        show_result(result, screen)
    if flags.json:
        print_json(result.to_dict())
    elif flags.quiet:
        print(final_line(result))
    if result.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if result.num_failed else 0
