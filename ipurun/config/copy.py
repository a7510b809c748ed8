"""Copy a recipe, YAML and code, into the working folder under a name of its own."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
from pathlib import Path
from typing import Dict, List, Optional

from ipurun.config.catalog import RECIPE_GROUP, Entry, code_folder, code_package, find, own_options, recipes
from ipurun.errors import ConfigError

__all__ = ["copy_recipe"]

_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


def copy_recipe(name: str, new_name: Optional[str] = None) -> List[Path]:
    """Copy a recipe so that the copy runs and can be edited.

    The recipe's YAML, the model and data options that name its code, and the code itself are copied; names inside them
    point to the copy.

    Args:
        name: The recipe to copy.
        new_name: Name of the copy, its config files and its package; None: ``my_`` and the old name.

    Returns:
        The files and folders that were made, relative to the working folder.

    Raises:
        ConfigError: The recipe does not exist, or the new name cannot be used.
    """
    recipe = find(name)
    if recipe.group != RECIPE_GROUP:
        raise ConfigError(f"`{name}` is not a recipe", fix="ipurun ls")
    new_name = new_name or "my_" + recipe.name.replace("/", "_")
    options = own_options(recipe)
    packages = {code_package(entry) for entry in [recipe, *options]} - {None}
    _check_name(new_name, recipe)
    configs = {Path("conf") / entry.group / f"{new_name}.yaml": entry for entry in [recipe, *options]}
    taken = [path for path in [*configs, *([Path(new_name)] if packages else [])] if path.exists()]
    if taken:
        raise ConfigError(
            f"`{new_name}` would overwrite what is there",
            where=", ".join(map(str, taken)),
            fix=f"ipurun cp {name} ANOTHER_NAME",
        )
    if len(packages) > 1:
        raise ConfigError(f"recipe `{name}` names code of several packages", seen=", ".join(sorted(map(str, packages))))
    return _write(configs, options, packages.pop() if packages else None, new_name)


def _check_name(new_name: str, recipe: Entry) -> None:
    if not new_name.isidentifier() or keyword.iskeyword(new_name):
        raise ConfigError(
            f"`{new_name}` cannot name a recipe and its Python package",
            known="letters, digits and underscores, not beginning with a digit",
            fix=f"ipurun cp {recipe.name} {re.sub(r'[^0-9A-Za-z_]+', '_', 'my_' + new_name).rstrip('_')}",
        )
    if any(entry.built_in and entry.name == new_name for entry in recipes()):
        raise ConfigError(
            f"`{new_name}` is a built-in recipe, which would hide the copy",
            fix=f"ipurun cp {recipe.name} my_{new_name}",
        )
    if not Path(new_name).exists() and importlib.util.find_spec(new_name) is not None:
        raise ConfigError(
            f"`{new_name}` is already the name of an installed Python package",
            fix=f"ipurun cp {recipe.name} my_{new_name}",
        )


def _write(configs: Dict[Path, Entry], options: List[Entry], package: Optional[str], new_name: str) -> List[Path]:
    made: List[Path] = []
    try:
        for path, entry in configs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_renamed(entry.text(), options, package, new_name), encoding="utf-8")
            made.append(path)
        if package is not None:
            shutil.copytree(code_folder(package), new_name, ignore=_IGNORED)
            made.append(Path(new_name))
            for module in sorted(Path(new_name).rglob("*.py")):
                source = module.read_text(encoding="utf-8")
                module.write_text(_with_package(source, package, new_name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "the copy cannot be written", where=os.getcwd(), seen=str(error), fix="run it elsewhere"
        ) from error
    return made


def _renamed(text: str, options: List[Entry], package: Optional[str], new_name: str) -> str:
    for option in options:
        chosen = re.compile(rf"^(\s*-\s*(?:override\s+)?/?{option.group}\s*:\s*){option.name}\b", re.MULTILINE)
        text = chosen.sub(rf"\g<1>{new_name}", text)
    return text if package is None else _with_package(text, package, new_name)


def _with_package(text: str, package: str, new_name: str) -> str:
    return re.sub(rf"\b{re.escape(package)}\b", new_name, text)
