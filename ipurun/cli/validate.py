"""`ipurun validate`: check configs, as far as that is possible without running them."""

from __future__ import annotations

import sys
from typing import List

from ipurun.cli.common import only_json, print_json, split
from ipurun.errors import ConfigError
from ipurun.log.style import has_colour, paint

__all__ = ["run"]


_USAGE = """\
usage: ipurun validate +recipe=NAME [key=value ...] [flags]
       ipurun validate NAME [NAME ...] [key=value ...] [flags]

Checks keys, types and values, imports the model and the data, and does the arithmetic of a run. Several recipes, or
-m with several values, are checked one by one. The exit code is 0 if all are valid and 2 otherwise.

flags
  --quiet     only errors and the last line
  --json      one JSON document on standard output
  --debug     show tracebacks

examples
  ipurun validate +recipe=mnist devices=8
  ipurun validate mnist fashion_mnist
  ipurun validate -m '+recipe=glob(*)'
"""


def run(argv: List[str]) -> int:
    """Check every config of the command line."""
    flags, rest = split(argv)
    if flags.help:
        print(_USAGE, end="")
        return 0
    with only_json(flags.json):
        from ipurun.interface import check_words

        checked = [result for line in _lines(rest) for result in check_words(line)]
    problems = [problem for _, found in checked for problem in found]
    if flags.json:
        configs = [
            {"config": label, "ok": not found, "problems": [problem.to_dict() for problem in found]}
            for label, found in checked
        ]
        print_json({"ok": not problems, "configs": configs})
        return ConfigError.exit_code if problems else 0
    for label, found in checked:
        if not flags.quiet:
            verdict = paint("not ok", "error", has_colour(sys.stdout)) if found else "ok"
            print(f"{label}: {verdict}", flush=True)
    if problems:
        raise ConfigError(problems)
    if flags.quiet:
        print("ok")
    return 0


def _lines(argv: List[str]) -> List[List[str]]:
    """Return a command line for each recipe that is given by its bare name, else the line as it is."""
    from ipurun.config.argv import parse_argv

    names = [word for word in parse_argv(argv).overrides if "=" not in word and not word.startswith("~")]
    others = [word for word in argv if word not in names]
    return [[f"+recipe={name}", *others] for name in names] or [argv]
