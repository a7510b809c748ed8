"""`ipurun import`: make a recipe out of optimum's ipu_config.json."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import List

from ipurun.cli.common import split
from ipurun.config.catalog import recipes
from ipurun.config.optimum import Imported, import_config
from ipurun.errors import ConfigError

__all__ = ["run"]


_USAGE = """\
usage: ipurun import FILE [NAME] [--layers MODULE]

Writes conf/recipe/NAME.yaml from an ipu_config.json of optimum. What has no counterpart is listed at the top of
the recipe, never dropped. Nothing is overwritten. NAME is the folder's or file's name unless given.

flags
  --layers MODULE  the model's list of layers, such as bert.encoder.layer; needed where it has several
  --json           one JSON document on standard output

example
  ipurun import ipu_config.json my_bert --layers bert.encoder.layer
"""


def run(argv: List[str]) -> int:
    """Import one file and say what was made."""
    flags, words = split(argv, with_value=("--layers",))
    if flags.help:
        print(_USAGE, end="")
        return 0
    if len(words) not in (1, 2) or any(word.startswith("-") for word in words):
        raise ConfigError(
            "`import` takes a file and the name of the recipe",
            "command line",
            seen=" ".join(words),
            fix="ipurun import ipu_config.json my_recipe",
        )
    source = Path(words[0])
    if os.path.isdir(source):  # false for a name that is too long, where pathlib raises
        source = source / "ipu_config.json"
    layers = flags.values.get("layers")
    imported = import_config(_read(source), str(layers) if layers else None)
    name = words[1] if len(words) == 2 else _name_of(source)
    made = _write(name, imported, source)
    if flags.json:
        print(json.dumps({"recipe": name, "made": [str(made)], "notes": imported.notes}, indent=2))
    elif not flags.quiet:
        print(f"made  {made}")
        for note in imported.notes:
            print(f"note  {note}")
        print(f"next  add model, data, loss and optimizer to it, then: ipurun plan +recipe={name}")
    return 0


def _read(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "the file cannot be read", str(source), seen=reason, fix="ipurun import ipu_config.json"
        ) from error


def _name_of(source: Path) -> str:
    stem = source.resolve().parent.name if source.stem == "ipu_config" else source.stem
    return re.sub(r"[^0-9A-Za-z_]+", "_", stem).strip("_") or "imported"


def _write(name: str, imported: Imported, source: Path) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ConfigError(
            f"`{name}` cannot name a recipe",
            known="letters, digits, underscores, dots and dashes",
            fix=f"ipurun import {source} my_recipe",
        )
    if any(entry.built_in and entry.name == name for entry in recipes()):
        raise ConfigError(
            f"`{name}` is a built-in recipe, which would hide the imported one",
            fix=f"ipurun import {source} my_{name}",
        )
    path = Path("conf") / "recipe" / f"{name}.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(imported.text(name, source.name))
    except FileExistsError as error:
        raise ConfigError(
            f"recipe `{name}` is there already", str(path), fix=f"ipurun import {source} ANOTHER_NAME"
        ) from error
    except OSError as error:
        seen = error.strerror or str(error)
        fix = f"ipurun import {source} NAME, in a folder that can be written"
        raise ConfigError("the recipe cannot be written", str(path), seen=seen, fix=fix) from error
    return path
