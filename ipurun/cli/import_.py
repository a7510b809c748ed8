"""`ipurun import`: make a recipe out of the files, command lines and programs of other tools."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import yaml

from ipurun.cli.common import split
from ipurun.config.catalog import recipes
from ipurun.config.importers.huggingface import import_training_arguments
from ipurun.config.importers.lightning import import_lightning, is_lightning_cli
from ipurun.config.importers.optimum import Imported, import_config, split_arguments
from ipurun.config.importers.programs import import_application, import_command, read_flags
from ipurun.config.importers.recipe import Recipe
from ipurun.config.importers.script import import_program, lightning_words
from ipurun.errors import ConfigError, in_short

__all__ = ["run"]


_USAGE = """\
usage: ipurun import FILE [NAME] [flags]
       ipurun import FILE ARGUMENTS [NAME]
       ipurun import 'COMMAND LINE' [NAME]
       ipurun import SCRIPT.py [NAME] [-- ARGS ...]

Writes conf/recipe/NAME.yaml. What has no counterpart is listed at the top of the recipe, never dropped. Nothing is
overwritten. NAME is the folder's or file's name unless given. What was imported is planned at once.

sources
  ipu_config.json  of optimum, or its folder; with a JSON file or a command line of TrainingArguments after it
  training_args    HF's TrainingArguments as JSON
  configs.yml      of Graphcore's applications, with --section, and a command line of the application after it
  benchmarks.yml   the command of one of its benchmarks, with --section
  config.yaml      of Lightning's CLI (trainer, model, data)
  'poprun ...'     or the command line of a training script, in quotes
  SCRIPT.py        a PopTorch program, run up to its first compiled model

flags
  --layers MODULE  the model's list of layers, such as bert.encoder.layer; needed where it has several
  --section NAME   the section of a configs.yml
  --json           one JSON document on standard output

examples
  ipurun import ipu_config.json my_bert --layers bert.encoder.layer
  ipurun import configs.yml my_resnet --section resnet50_mk2
  ipurun import 'poprun --num-replicas 4 python train.py --learning_rate 3e-5' my_run
"""


def run(argv: List[str]) -> int:
    """Import one source and say what was made."""
    program_arguments: List[str] = []
    if "--" in argv:
        place = argv.index("--")
        argv, program_arguments = argv[:place], argv[place + 1 :]
    flags, words = split(argv, with_value=("--layers", "--section"))
    if flags.help:
        print(_USAGE, end="")
        return 0
    if not 1 <= len(words) <= 3 or any(word.startswith("-") for word in words):
        raise ConfigError(
            "`import` takes a file or a command line, and the name of the recipe",
            "command line",
            seen=" ".join(words),
            fix="ipurun import ipu_config.json my_recipe",
        )
    source = Path(words[0])
    if os.path.isdir(source):  # false for a name that is too long, where pathlib raises
        source = source / "ipu_config.json"
    layers, section = flags.values.get("layers"), flags.values.get("section")
    rest = words[1:]
    more = rest.pop(0) if rest and (rest[0].endswith(".json") or _is_command(rest[0])) else ""
    imported = _imported(
        words[0], source, str(layers) if layers else None, str(section) if section else None, program_arguments, more
    )
    is_command = _is_command(words[0])
    name = rest[0] if rest else "imported" if is_command else _name_of(source)
    made = _write(name, imported, "the command line" if is_command else source.name, words[0])
    plan = _planned(name)
    plan += _of_an_epoch(imported, plan)
    if flags.json:
        document = {"recipe": name, "made": [str(made)], "notes": imported.notes, "plan": plan}
        print(json.dumps(document, indent=2))
    elif not flags.quiet:
        print(f"made  {made}")
        for note in imported.notes:
            print(f"note  {note}")
        for line in plan:
            print(f"plan  {line}")
        lacks = f"add {imported.lacks} to it, then: " if imported.lacks else ""
        print(f"next  {lacks}ipurun plan +recipe={name}")
    return 0


def _imported(
    word: str, source: Path, layers: Optional[str], section: Optional[str], arguments: List[str], more: str
) -> Recipe:
    """Read a source, whose kind its name and content tell, with the arguments that it is used with."""
    if _is_command(word):
        return import_command(word)
    if source.suffix == ".py":
        return _program(source, arguments)
    text = _read(source)
    if source.suffix in (".yml", ".yaml"):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            seen = str(error).splitlines()[0]
            raise ConfigError("the file is not YAML", str(source), seen=seen, fix="check the file") from error
        if not isinstance(values, dict):
            raise ConfigError("the file is not a mapping of names and values", str(source), fix="check the file")
        return import_lightning(values) if is_lightning_cli(values) else import_application(values, section, more)
    given = _raw_arguments(more)
    if text.lstrip().startswith("{") and ('"per_device_train_batch_size"' in text or '"num_train_epochs"' in text):
        of_ipus, own = split_arguments(json.loads(text))
        if not {"layers_per_ipu", "ipus_per_replica"}.intersection(of_ipus):
            return import_training_arguments({**of_ipus, **own})
        recipe: Recipe = Imported(of_ipus, layers, {**own, **given})
        _merge(recipe, import_training_arguments({**own, "ipu_config_name": None}))
    else:
        recipe = import_config(text, layers, given)
    if more:
        _merge(recipe, _training_arguments(more))
    return recipe


def _is_command(word: str) -> bool:
    return len(word.split()) > 1 and not os.path.exists(word)


def _raw_arguments(word: str) -> Dict[str, Any]:
    """Return training arguments by name, from a command line or a JSON file."""
    if not word:
        return {}
    if _is_command(word):
        return dict(read_flags(word)[0])
    text = _read(Path(word))
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError("the training arguments are not JSON", word, seen=str(error), fix="check the file") from error
    if not isinstance(values, dict):
        what = "the training arguments are not a JSON object"
        raise ConfigError(
            what, word, seen=type(values).__name__, fix="give what TrainingArguments.to_json_string writes"
        )
    return values


def _training_arguments(word: str) -> Recipe:
    """Return the recipe of the arguments that an ipu_config.json is used with."""
    if _is_command(word):
        recipe = import_command(f"{word} --ipu_config_name OPTIMUM")  # says whose trainer reads them
    else:
        recipe = import_training_arguments({**_raw_arguments(word), "ipu_config_name": None})
    recipe.notes = [note for note in recipe.notes if "ipu_config_name" not in note]
    if recipe.keys.get("gradient_accumulation") == 1:  # the default, with which Optimum's file counts
        del recipe.keys["gradient_accumulation"]
    return recipe


def _merge(recipe: Recipe, more: Recipe) -> None:
    """Add the arguments of the same run, which win over its file as they do in Optimum."""

    def added(ours: Dict[str, Any], theirs: Mapping[str, Any]) -> None:
        for key, value in theirs.items():
            if isinstance(value, dict) and isinstance(ours.get(key), dict):
                added(ours[key], value)
            else:
                ours[key] = value

    choices = more.keys.pop("defaults", [])
    added(recipe.keys, more.keys)
    for choice in choices:
        recipe.choose(*choice.replace("override /", "").split(": "))
    recipe.notes += more.notes
    recipe.lacks = more.lacks


def _program(source: Path, arguments: List[str]) -> Recipe:
    if not source.is_file():
        raise ConfigError("the file cannot be read", str(source), seen="no such file", fix="ipurun import train.py")
    words = lightning_words(_read(source), source.stem)
    if words is not None:
        raise ConfigError(
            "the program trains with Lightning, whose modules are model and data as they are",
            str(source),
            seen="a call of Trainer, and none of poptorch.trainingModel",
            fix=f"ipurun train {shlex.join(words)}; the arguments of a class are +model.NAME=VALUE "
            "(docs/how-to/from-lightning.md)",
        )
    from ipurun.cli.exec import recorded_program
    from ipurun.inspect.model import user_blocks

    recorded = recorded_program(str(source), arguments)
    blocks = {str(block.module): block.ipu for block in user_blocks(recorded.model)}
    is_guarded = re.search(r"^if .*__name__", _read(source), re.MULTILINE) is not None
    return import_program(recorded, source.stem, blocks, is_guarded)


def _planned(name: str) -> List[str]:
    """Plan what was imported, and return the result in a few lines."""
    from ipurun.interface import plan_words

    try:
        (report,) = plan_words([f"+recipe={name}"])
    except ConfigError as error:
        shown = [(problem.what, problem.seen.strip().splitlines()) for problem in error.problems]
        return [f"not yet: {what}{f': {seen[0][:100]}' if seen else ''}" for what, seen in shown]
    except Exception as error:  # a class of the program without the arguments that could not be read
        return [f"not yet: {in_short(error)}"]
    lines = str(report).splitlines()
    kept = [line.strip() for line in lines[1:] if line.startswith("  ")][:8]
    return kept + [line for line in lines if line.startswith("estimate for")]


def _of_an_epoch(imported: Recipe, plan: List[str]) -> List[str]:
    """Compute the host calls that a share of the batches is, now that the plan has those of an epoch."""
    found = (re.search(r"limit\.train_calls is a number, not a share: ([\d.]+)", note) for note in imported.notes)
    share = next(filter(None, found), None)
    calls = next(filter(None, (re.match(r"epoch +([\d,]+) host calls", line) for line in plan)), None)
    if share is None or calls is None:
        return []
    number = max(1, int(float(share.group(1)) * int(calls.group(1).replace(",", ""))))
    return [f"limit.train_calls={number} is {share.group(1)} of an epoch"]


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


def _write(name: str, imported: Recipe, described: str, source: str) -> Path:
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
            file.write(imported.text(name, described))
    except FileExistsError as error:
        raise ConfigError(
            f"recipe `{name}` is there already", str(path), fix=f"ipurun import {source} ANOTHER_NAME"
        ) from error
    except OSError as error:
        seen = error.strerror or str(error)
        fix = f"ipurun import {source} NAME, in a folder that can be written"
        raise ConfigError("the recipe cannot be written", str(path), seen=seen, fix=fix) from error
    return path
