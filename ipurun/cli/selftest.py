"""`ipurun selftest`: compare an engine with another way to compute the same, in small runs or layer by layer."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any, List, Optional

from ipurun.cli.common import Flags, only_json, print_json, split
from ipurun.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, RunError

__all__ = ["run"]

_USAGE = """\
usage: ipurun selftest [engine=ENGINE] [flags]
       ipurun selftest +recipe=NAME [key=value ...] --layers [flags]

Trains small models on an engine through every path of a run, and compares losses, weights, evaluations and predictions
with the CPU engine; the CPU engine itself is compared with a plain torch loop. Takes a minute or two on a CPU, longer
where models are compiled for a device. If something differs, it writes one file to send with a report.

With --layers it runs one weight update of a config, and compares the output of every layer and the gradient of every
parameter with those of the CPU engine (of the CPU engine: with those of plain torch). It names the first layer that
differs.

Cases that need more IPUs than there are, are skipped. The exit code is 0 if everything else agrees, 1 if something
differs or fails, 2 if the command line is wrong.

flags
  --list             show the cases
  --only NAME[,NAME] run only these cases
  --timeout SECONDS  time limit of each case
  --layers           compare a model layer by layer
  --quiet            only the cases that differ or fail, and the last line
  --json             one JSON document on standard output
  --debug            show tracebacks

examples
  ipurun selftest
  ipurun selftest engine=ipu
  ipurun selftest engine=ipu --only replicated,half
  ipurun selftest +recipe=mnist precision=16 engine=ipu --layers
"""


def run(argv: List[str]) -> int:
    """Run the cases, or compare the layers of a model."""
    flags, words = split(argv, switches=("--list", "--layers"), with_value=("--only", "--timeout"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    if "list" in flags.values:
        _list(flags)
        return 0
    if "layers" in flags.values:
        return _layers(argv, words, flags)
    engine, limit = _engine_of(words), _seconds(flags.values.get("timeout"))
    from ipurun.selftest.cases import chosen

    only = [name for name in str(flags.values.get("only", "")).split(",") if name]
    if sum(word.partition("=")[0] == "--only" for word in argv) > 1:
        raise ConfigError("`--only` is given more than once", "command line", fix="--only NAME,NAME")
    if "only" in flags.values and not only:
        raise ConfigError("`--only` needs the name of a case", "command line", fix="ipurun selftest --list")
    return _cases(argv, engine, chosen(only), limit, flags)


def _list(flags: Flags) -> None:
    from ipurun.selftest.cases import CASES

    if flags.json:
        print_json([{"name": case.name, "what": case.what, "ipus": case.ipus} for case in CASES])
        return
    width = max(len(case.name) for case in CASES)
    for case in CASES:
        print(f"{case.name:<{width}}  {case.what}" + (f" ({case.ipus} IPUs)" if case.ipus > 1 else ""))


def _engine_of(words: List[str]) -> str:
    """Return the engine that the command line names.

    Raises:
        ConfigError: It names none that exists, or has other words.
    """
    from ipurun.config.keys import all_keys

    known = all_keys()["engine"].choices
    engine = "auto"
    for word in words:
        key, equals, engine = word.partition("=")
        if key != "engine":
            fix = shlex.join(["ipurun", "selftest", *words, "--layers"]) if equals else "ipurun selftest --help"
            raise ConfigError(f"`selftest` takes no `{word}`", "command line", known="engine=ENGINE", fix=fix)
        if engine not in known:
            where = f"command line: {word}"
            raise ConfigError(f"`engine` cannot be `{engine}`", where, known=", ".join(known), fix="engine=auto")
    return engine


def _seconds(value: object) -> Optional[float]:
    if value is None:
        return None
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"`--timeout` cannot be `{value}`", "command line", fix="--timeout 600")
    return seconds


def _cases(argv: List[str], engine: str, cases: List[Any], limit: Optional[float], flags: Flags) -> int:
    from ipurun.log.format import columns
    from ipurun.log.screen import make_screen
    from ipurun.selftest.report import (
        document_of,
        reason_lines,
        row,
        style_of,
        summary_line,
        table_head,
        title_lines,
        write_report,
    )
    from ipurun.selftest.supervise import SelfTest, run_cases

    begun = time.monotonic()
    names = [case.name for case in cases]
    with only_json(flags.json):
        screen = make_screen(sys.stdout, flags.json)

        def show_engine(test: SelfTest) -> None:
            if not flags.quiet:
                for line in title_lines(test.engine):
                    screen.line(line)
                for line in table_head(names):
                    screen.line(line, "bold")

        def show_case(name: str) -> None:
            if screen.draws_over:
                screen.live([f"case {names.index(name) + 1} of {len(names)}: {name}"])

        def show_outcome(outcome: Any) -> None:
            if not flags.quiet:
                screen.line(row(outcome, names, columns()), style_of(outcome))

        try:
            test = run_cases(engine, cases, limit, show_engine, show_case, show_outcome)
        except RunError as error:
            raise _with_report(error, write_report(document_of({}, {}, argv, error=str(error)))) from error
        finally:
            screen.close()
        seconds = time.monotonic() - begun
        document = document_of(
            test.engine,
            test.machine,
            argv,
            interrupted=test.interrupted,
            cases=[outcome.to_dict() for outcome in test.outcomes],
        )
        gap = "" if flags.quiet else "\n"
        for outcome in test.wrong:
            screen.line(f"{gap}{outcome.case} {outcome.status}:")
            for line in reason_lines(outcome):
                screen.line(f"  {line}")
        screen.line(gap + summary_line(test.outcomes, len(cases), seconds))
        document["report"] = None
        if test.wrong:
            document["report"] = str(write_report(document))
            screen.line(f"report: {document['report']} (the one file to send)")
    if flags.json:
        print_json(document)
    if test.interrupted:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_FAILED if test.wrong else 0


def _with_report(error: RunError, report: Path) -> RunError:
    fix = f"send {report}, which says where it failed"
    return RunError([*error.problems[:-1], dataclasses.replace(error.problems[-1], fix=fix)])


def _layers(argv: List[str], words: List[str], flags: Flags) -> int:
    unused = sorted(set(flags.values) - {"layers"})
    if unused:
        raise ConfigError(f"`--layers` and `--{unused[0]}` do not go together", "command line", fix="leave out one")
    with only_json(flags.json):
        from ipurun.engine import probe
        from ipurun.log.format import columns
        from ipurun.log.screen import make_screen
        from ipurun.selftest.layers import compare_layers
        from ipurun.selftest.report import document_of, layer_lines, layers_verdict, title_lines, write_report

        try:
            test = compare_layers(words)
        except ConfigError:
            raise
        except Exception as error:
            report = write_report(document_of({}, probe(), argv, error=traceback.format_exc()))
            known = error if isinstance(error, RunError) else RunError(f"{type(error).__name__}: {error}")
            raise _with_report(known, report) from error
        layers = [layer.to_dict() for layer in test.layers]
        verdict = "\n".join(filter(None, (layers_verdict(test), test.settled)))
        document = document_of(
            test.engine, probe(), argv, verdict=verdict, layers=layers, config=test.config, plan=test.plan
        )
        document["report"] = None if test.first_wrong is None else str(write_report(document))
        screen = make_screen(sys.stdout, flags.json)
        if not flags.quiet:
            for line in title_lines(test.engine):
                screen.line(line)
            screen.line("  one step of SGD on one replica, without dropout")
        for line, style in layer_lines(test, columns(), only_wrong=flags.quiet):
            screen.line(line, style)
        screen.line(verdict if flags.quiet else f"\n{verdict}")
        if document["report"]:
            screen.line(f"report: {document['report']} (the one file to send)")
        screen.close()
    if flags.json:
        print_json(document)
    return 0 if test.first_wrong is None else EXIT_FAILED
