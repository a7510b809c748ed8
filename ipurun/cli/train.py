"""`ipurun train`: one run, or with -m a sweep."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Iterator, List

from ipurun.cli.common import Flags, only_json, print_json, split
from ipurun.cli.main import collect_as_usual
from ipurun.distributed.environment import LAUNCH_FOLDER
from ipurun.errors import EXIT_FAILED
from ipurun.module_search import python_command

if TYPE_CHECKING:
    from ipurun.planning.plan import Plan

__all__ = ["run"]


_USAGE = """\
usage: ipurun train +recipe=NAME [key=value ...] [flags]
       ipurun train -m +recipe=NAME key=value,value,... [flags]
       ipurun train resume=RUN_FOLDER

Trains a model that a recipe describes. Each run has a folder below runs/<name>/ with its config, metrics, log and
checkpoints. Ctrl-C saves and stops; a second Ctrl-C stops at once. SIGTERM and SIGHUP save and stop, and so does
max_minutes=N, before a batch system ends the job.

flags
  -m          sweep: run every combination of the comma-separated values, each in a new process
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

    began = _start_of_this_process()
    if LAUNCH_FOLDER in os.environ:
        return _run_instance(argv, rest, flags, began)
    with _ended_by_signals():
        if parse_argv(rest).multirun:
            return _sweep(rest, flags, began)
        return _run(argv, rest, flags, began)


def _run_instance(argv: List[str], rest: List[str], flags: Flags, began: float) -> int:
    """Run one of the processes that ipurun started."""
    from ipurun.distributed.notes import run_instance

    def action() -> bool:
        with _ended_by_signals():
            return bool(_run(argv, rest, flags, began))

    return run_instance(action)


def _run(argv: List[str], rest: List[str], flags: Flags, began: float) -> int:
    with only_json(flags.json):
        from ipurun.interface import train_words

        quiet = flags.quiet or flags.json
        result = train_words(rest, quiet, lambda plan: _begin(plan, argv), began)
    if LAUNCH_FOLDER in os.environ:
        return result.exit_code  # the process that started this one shows the result
    if flags.json:
        print_json(result.to_dict())
    elif flags.quiet:
        from ipurun.log.console import final_line

        print(final_line(result, result.name, str(result.folder)))
    return result.exit_code


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, which batch systems and lost terminals send, act like Ctrl-C.

    Only once: both may come again, from a shell that passes them on, and must not cut the end of a run short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        for other in handlers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    handlers = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in handlers]
    try:
        yield
    finally:
        for number, handler in zip(handlers, before):
            signal.signal(number, handler)


def _start_of_this_process() -> float:
    """Return when this process began, by `time.monotonic`: imports count towards the limit of a batch system."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stream:
            ticks = int(stream.read().rpartition(")")[2].split()[19])  # since the machine was started
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_seconds


def _begin(plan: Plan, argv: List[str]) -> None:
    collect_as_usual()
    _set_environment(plan, argv)


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


def _sweep(argv: List[str], flags: Flags, began: float) -> int:
    from ipurun.config.compose import points

    found = points(argv)
    with only_json(flags.json):
        from ipurun.log.screen import error_screen, make_screen
        from ipurun.sweep.run import final_line, run_sweep, show_result

        screen = make_screen(sys.stdout, quiet=flags.quiet or flags.json)
        errors = error_screen(screen)
        try:
            result = run_sweep(found, argv, screen, errors, began)
        finally:
            screen.close()
        show_result(result, screen)
    if flags.json:
        print_json(result.to_dict())
    elif flags.quiet:
        print(final_line(result))
    if result.interrupted:
        return found.points[0].config.interrupt_exit_code
    return EXIT_FAILED if result.num_failed else 0
