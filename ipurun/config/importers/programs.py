"""Import command lines, of poprun and of training scripts, and the files of Graphcore's applications."""

from __future__ import annotations

import os
import re
import shlex
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import yaml

from ipurun.config.importers.applications import (
    add_program,
    find_section,
    from_environment,
    take_application,
)
from ipurun.config.importers.huggingface import take_arguments
from ipurun.config.importers.recipe import Recipe
from ipurun.errors import ConfigError

__all__ = ["import_application", "import_command", "read_flags"]


def import_command(command: str) -> Recipe:
    """Return the recipe of a command line: of a training script, of torchrun, or of poprun with one.

    Raises:
        ConfigError: It has no flags.
    """
    flags, rest = read_flags(command)
    if not flags:
        raise ConfigError(
            "the command line has no flags to import",
            seen=command.strip()[:100],
            fix="ipurun import 'poprun --num-replicas 4 python train.py --learning_rate 3e-5' my_recipe",
        )
    recipe = Recipe("model and data")
    own: Dict[str, Any] = {}
    for name, value in flags:
        if name in _POPRUN:
            _POPRUN[name](recipe, value)
        elif name == "config" and isinstance(value, str):
            recipe.notes.append(
                f"--config {value}: if it is a section of the application's configs.yml, import both: "
                f"ipurun import configs.yml 'THE COMMAND' NAME --section {value}"
            )
        else:
            own[name] = value
    program = next((os.path.basename(word) for word in rest if word.endswith(".py")), "")
    take_arguments(recipe, own, "--", program)
    if program:
        recipe.versions.append(f"the command of {program}")
    return recipe


def import_application(values: Mapping[str, Any], section: Optional[str], command: str = "") -> Recipe:
    """Return the recipe of one section of a ``configs.yml`` or ``benchmarks.yml`` of Graphcore's applications.

    Args:
        values: The file.
        section: Name of the section; None for the file's only level.
        command: A command line of the application, which wins over the file, as it does there.

    Raises:
        ConfigError: There is no such section.
    """
    chosen = find_section(values, section)
    if isinstance(chosen.get("cmd"), str):  # of a benchmarks.yml
        recipe = import_command(chosen["cmd"])
        recipe.notes += [
            f"env: {name}={value}: set it in the shell" for name, value in (chosen.get("env") or {}).items()
        ]
        return recipe
    flags = read_flags(command)[0] if command else []
    recipe = Recipe("model and data")
    own = {name: value for name, value in flags if name not in _POPRUN and name != "config"}
    kept = {name: value for name, value in chosen.items() if str(name).replace("-", "_") not in own}
    take_application(recipe, {**kept, **own})
    add_program(recipe, {**kept, **own})
    for name, value in flags:
        if name in _POPRUN:
            _POPRUN[name](recipe, value)
    return recipe


def read_flags(command: str) -> Tuple[List[Tuple[str, Any]], List[str]]:
    """Return the flags of a command line with their values, and its other words."""
    words = shlex.split(command.replace("\\\n", " "))
    flags: List[Tuple[str, Any]] = []
    rest: List[str] = []
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        if not word.startswith("--"):
            rest.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if not equals and number < len(words) and not words[number].startswith("--") and not _is_program(words[number]):
            text = words[number]
            number += 1
        value = _value(text) if text else True
        several = [value]
        while text and not equals and number < len(words) and _goes_on(name, several, words[number]):
            several.append(_value(words[number]))
            number += 1
        flags.append((name.replace("-", "_"), several if len(several) > 1 else value))
    return flags, rest


def _goes_on(name: str, values: List[Any], word: str) -> bool:
    """Return whether a word belongs to a flag with several values: numbers, or of a flag whose name is a plural."""
    if word.startswith("-") or _is_program(word):
        return False
    numbers = all(isinstance(value, (int, float)) for value in (*values, _value(word)))
    return numbers or name.endswith(("s", "checkpoints"))


def _is_program(word: str) -> bool:
    return word.endswith(".py") or os.path.basename(word).startswith("python")


def _value(text: str) -> Any:
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)  # YAML reads 3e-5 as text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value


def _sets(key: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Recipe, Any], None]:
    def apply(recipe: Recipe, value: Any) -> None:
        made = None if value is None else convert(value)
        if made is not None:
            recipe.set(key, made)

    return apply


def _ignored(recipe: Recipe, value: Any) -> None:
    """Nothing of a recipe: the host, the partition or the launcher."""


_POPRUN: Mapping[str, Callable[[Recipe, Any], None]] = {
    "num_replicas": _sets("replication.factor"),
    "ipus_per_replica": _sets("pipeline.ipus"),
    "executable_cache_path": _sets("cache.dir", from_environment),
    **dict.fromkeys(
        (
            "num_instances",
            "vipu_partition",
            "vipu_server_host",
            "vipu_server_port",
            "vipu_server_timeout",
            "vipu_cluster",
            "vipu_allocation",
            "sync_type",
            "print_topology",
            "offline_mode",
            "v",
            "host",
            "host_rank",
            "host_subnet",
        )
        + ("mpi_global_args", "mpi_local_args", "numa_aware", "update_partition", "remove_partition", "reset_partition")
        + ("synchronous_execution", "instances_per_host", "only_output_from_instance", "vv", "tag_output", "ipus"),
        _ignored,
    ),
}
