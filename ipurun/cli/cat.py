"""`ipurun cat`: print a recipe, or an option of another group."""

from __future__ import annotations

import json
from typing import List

from ipurun.cli.common import split
from ipurun.config.catalog import find
from ipurun.errors import ConfigError

__all__ = ["run"]


_USAGE = """\
usage: ipurun cat RECIPE
       ipurun cat GROUP/OPTION

Prints the YAML of a recipe, or of an option of any group. --json adds where the file is.

examples
  ipurun cat mnist
  ipurun cat optimizer/adamw
"""


def run(argv: List[str]) -> int:
    """Print one config file."""
    flags, words = split(argv)
    if flags.help:
        print(_USAGE, end="")
        return 0
    if len(words) != 1:
        raise ConfigError("`cat` takes one name", "command line", seen=" ".join(words), fix="ipurun cat mnist")
    entry = find(words[0])
    if flags.json:
        facts = {"group": entry.group, "name": entry.name, "path": str(entry.path), "text": entry.text()}
        print(json.dumps(facts, indent=2))
    else:
        print(entry.text(), end="")
    return 0
