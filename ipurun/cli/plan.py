"""`ipurun plan`: everything that would happen, and nothing that happens."""

from __future__ import annotations

from typing import List

from ipurun.cli.flags import split
from ipurun.cli.output import only_json, print_json

__all__ = ["HELP", "run"]

HELP = "Compose, check and show everything that would happen; touch nothing."

_USAGE = """\
usage: ipurun plan +recipe=NAME [key=value ...] [flags]

Shows the devices, the batch equation, the steps, what is rounded or dropped, and the PopTorch calls that a config
stands for. Writes nothing. With -m it shows every point of a sweep.

flags
  --quiet     one line a plan
  --json      one JSON document on standard output (a list with -m)
  --debug     show tracebacks

examples
  ipurun plan +recipe=mnist devices=8
  ipurun plan +recipe=mnist devices=8 device_iterations=32 --json
"""


def run(argv: List[str]) -> int:
    """Show the plan of every point of the command line."""
    flags, rest = split(argv)
    if flags.help:
        print(_USAGE, end="")
        return 0
    from ipurun.config.words import split_words

    words = split_words(rest)
    if words.inquiry:
        from ipurun.config import native

        return native.inquire("plan", words)
    with only_json(flags.json):
        from ipurun.config.compose import points
        from ipurun.sweep.check import planned

        found = points(rest)
        plans = planned(found.points)
    if flags.json:
        from ipurun.log.plan_text import plan_dict

        documents = [plan_dict(plan) for plan in plans]
        print_json(documents if found.multirun else documents[0])
        return 0
    from ipurun.log.format import batch_equation
    from ipurun.log.plan_text import plan_lines

    for number, plan in enumerate(plans):
        if flags.quiet:
            print(f"{plan.name}: {batch_equation(plan.training)}")
            continue
        if number:
            print()
        print("\n".join(plan_lines(plan)))
    return 0
