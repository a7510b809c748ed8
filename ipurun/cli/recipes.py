"""`ipurun cat` and `ipurun cp`: print a recipe, or copy one into the working folder to edit it."""

from __future__ import annotations

import json
import sys
from typing import List

from ipurun.cli.common import split
from ipurun.config.catalog import copy_recipe, find
from ipurun.errors import ConfigError, visible

__all__ = ["run_cat", "run_cp"]


_CAT_USAGE = """\
usage: ipurun cat RECIPE
       ipurun cat GROUP/OPTION

Prints the YAML of a recipe, or of an option of any group. --json adds where the file is.

examples
  ipurun cat mnist
  ipurun cat optimizer/adamw
"""
_CP_USAGE = """\
usage: ipurun cp RECIPE [NEW_NAME]

Copies a recipe into the working folder: its YAML to conf/recipe/NEW_NAME.yaml, the options that name
its model and data beside it, its Python code to NEW_NAME/. Nothing is overwritten.
NEW_NAME is my_RECIPE unless given.

example
  ipurun cp mnist my_mnist
  ipurun train +recipe=my_mnist
"""


def run_cat(argv: List[str]) -> int:
    """Print one config file."""
    flags, words = split(argv)
    if flags.help:
        print(_CAT_USAGE, end="")
        return 0
    if len(words) != 1:
        raise ConfigError("`cat` takes one name", "command line", seen=" ".join(words), fix="ipurun cat mnist")
    entry = find(words[0])
    if flags.json:
        facts = {"group": entry.group, "name": entry.name, "path": str(entry.path), "text": entry.text()}
        print(json.dumps(facts, indent=2))
    else:
        print(visible(entry.text()) if sys.stdout.isatty() else entry.text(), end="")
    return 0


def run_cp(argv: List[str]) -> int:
    """Copy one recipe and say what was made."""
    flags, words = split(argv)
    if flags.help:
        print(_CP_USAGE, end="")
        return 0
    if len(words) not in (1, 2):
        raise ConfigError(
            "`cp` takes a recipe and the name of the copy",
            "command line",
            seen=" ".join(words),
            fix="ipurun cp mnist my_mnist",
        )
    made = copy_recipe(*words)
    name = made[0].stem
    if flags.json:
        print(json.dumps({"recipe": name, "made": [str(path) for path in made]}, indent=2))
    elif not flags.quiet:
        for path in made:
            print(f"made  {path}{'/' if path.is_dir() else ''}")
        print(f"run   ipurun train +recipe={name}")
    return 0
