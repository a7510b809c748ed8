"""`ipurun ls`: recipes, groups and config keys."""

from __future__ import annotations

import fnmatch
import json
import shutil
import sys
import textwrap
from typing import Callable, Dict, List, Sequence, Tuple

from ipurun.cli.common import Flags, split
from ipurun.config.catalog import ConfigFile, groups, recipes
from ipurun.config.schema import Key, RunConfig, walk_keys
from ipurun.errors import ConfigError, nearest
from ipurun.log.style import has_colour, paint

__all__ = ["run"]


_USAGE = """\
usage: ipurun ls [recipes]
       ipurun ls groups [GROUP]
       ipurun ls keys [PATTERN]

Lists the recipes (built-in, and yours below ./conf/recipe), the options of every config group, or every
config key with its type, default and meaning. PATTERN is part of a key; * and ? are wildcards.

examples
  ipurun ls
  ipurun ls groups optimizer
  ipurun ls keys batch
  ipurun ls keys 'loader.*'
"""


def run(argv: List[str]) -> int:
    """List what was asked for."""
    flags, words = split(argv)
    if flags.help:
        print(_USAGE, end="")
        return 0
    what, rest = (words[0], words[1:]) if words else ("recipes", [])
    most = {"recipes": 0, "groups": 1, "keys": 1}
    if what not in most:
        close = nearest(what, most, most=1)
        fix = f"ipurun ls {close[0]}" if close else "ipurun ls --help"
        raise ConfigError(f"cannot list `{what}`", "command line", known=", ".join(most), fix=fix)
    if len(rest) > most[what]:
        seen = " ".join(rest)
        raise ConfigError(f"too many words for `ls {what}`", "command line", seen=seen, fix="ipurun ls --help")
    listers: Dict[str, Callable[[Flags, Sequence[str]], None]] = {
        "recipes": _list_recipes,
        "groups": _list_groups,
        "keys": _list_keys,
    }
    listers[what](flags, rest)
    return 0


def _list_recipes(flags: Flags, rest: Sequence[str]) -> None:
    found = recipes()
    if flags.json:
        print(json.dumps([_entry_facts(entry) for entry in found], indent=2))
    elif flags.quiet:
        print("\n".join(entry.name for entry in found))
    else:
        _print_table([(entry.name + _mark(entry), entry.summary) for entry in found])
        hint = "ipurun train +recipe=NAME runs one, ipurun cat NAME prints it, ipurun cp NAME copies it to edit."
        print("\n" + textwrap.fill(hint, _width(), subsequent_indent="  "))


def _list_groups(flags: Flags, rest: Sequence[str]) -> None:
    found = groups()
    if rest:
        if rest[0] not in found:
            close = nearest(rest[0], found, most=1)
            fix = f"ipurun ls groups {close[0]}" if close else ""
            raise ConfigError(f"unknown group `{rest[0]}`", "command line", known=", ".join(found), fix=fix)
        found = {rest[0]: found[rest[0]]}
    if flags.json:
        facts = {name: [_entry_facts(entry) for entry in entries] for name, entries in found.items()}
        print(json.dumps(facts, indent=2))
    else:
        rows = [(f"{name}={entry.name}{_mark(entry)}", entry.summary) for name in found for entry in found[name]]
        _print_table(rows)


def _list_keys(flags: Flags, rest: Sequence[str]) -> None:
    every = list(walk_keys(RunConfig))
    found = [key for key in every if not rest or _matches(key, rest[0])]
    if not found:
        close = nearest(rest[0], [key.path for key in every])
        fix = f"ipurun ls keys {close[0]}" if close else "ipurun ls keys"
        raise ConfigError(f"no key matches `{rest[0]}`", "command line", known=", ".join(close), fix=fix)
    if flags.json:
        print(json.dumps([_key_facts(key) for key in found], indent=2))
    elif flags.quiet:
        print("\n".join(key.path for key in found))
    else:
        for key in found:
            shown = f"{key.path}={key.default_text}  ({key.type_name})"
            if sys.stdout.isatty():
                shown = textwrap.fill(shown, _width(), subsequent_indent="  ", break_on_hyphens=False)
            print(shown.replace(key.path, paint(key.path, "label", has_colour(sys.stdout)), 1))
            print(textwrap.indent(textwrap.fill(key.help, _width() - 4), "    "))


def _matches(key: Key, pattern: str) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(key.path, pattern)
    return pattern in key.path


def _entry_facts(entry: ConfigFile) -> Dict[str, object]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "path": str(entry.path),
        "built_in": entry.built_in,
    }


def _key_facts(key: Key) -> Dict[str, object]:
    return {"key": key.path, "type": key.type_name, "default": key.default, "help": key.help}


def _mark(entry: ConfigFile) -> str:
    return "" if entry.built_in else " (yours)"


def _print_table(rows: Sequence[Tuple[str, str]]) -> None:
    first = max(len(left) for left, _ in rows)
    colour = has_colour(sys.stdout)
    for left, right in rows:
        if _width() - first < 32:  # too narrow for a second column
            print(paint(left, "label", colour), *textwrap.wrap(right, _width() - 4), sep="\n    ")
            continue
        wrapped = textwrap.wrap(right, _width() - first - 2) or [""]
        name = paint(left, "label", colour) + " " * (first - len(left))
        print(f"{name}  " + ("\n" + " " * (first + 2)).join(wrapped))


def _width() -> int:
    return min(120, shutil.get_terminal_size((110, 24)).columns)
