"""List the recipes and other config files, and copy a recipe with its code."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipurun.config.folders import builtin_folder, recipes_folder, user_folders
from ipurun.errors import ConfigError, nearest

__all__ = ["RECIPE_GROUP", "ConfigFile", "copy_recipe", "find", "groups", "recipes"]

RECIPE_GROUP = "recipe"
_OVERRIDE = re.compile(r"^\s*-\s*(?:override\s+)?/?(?P<group>\w+)\s*:\s*(?P<option>[\w-]+)\s*(?:#.*)?$")
_TARGET = re.compile(r"_target_\s*:\s*[\"']?(?P<module>[\w.]+)")
_RECIPES_PREFIX = "ipurun.recipes."
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc")


@dataclass(frozen=True)
class ConfigFile:
    """One config file of a group, such as the recipe ``mnist``."""

    group: str
    name: str
    path: Path
    built_in: bool

    @property
    def summary(self) -> str:
        """The comment at the beginning of the file."""
        with open(self.path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = line.strip()
                if text.startswith("#") and not text.startswith("# @package"):
                    return text.lstrip("# ")
                if text and not text.startswith("#"):
                    break
        return ""

    def text(self) -> str:
        """Return the file's content.

        Raises:
            ConfigError: If the file cannot be read or is not text.
        """
        try:
            return self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError("a config file cannot be read", str(self.path), seen=str(error)) from error
        except UnicodeDecodeError as error:
            seen = f"{error.reason} at byte {error.start}"
            raise ConfigError("a config file is not UTF-8 text", str(self.path), seen=seen) from error


def recipes() -> List[ConfigFile]:
    """Return all recipes: the built-in ones, then those below ``./conf``."""
    return _files(RECIPE_GROUP)


def groups() -> Dict[str, List[ConfigFile]]:
    """Return the files of each group, recipes first."""
    inside = [path for folder, _ in _folders() for path in folder.iterdir()]
    names = {path.name for path in inside if path.is_dir() and any(path.rglob("*.yaml"))}
    ordered = sorted(names, key=lambda name: (name != RECIPE_GROUP, name))
    return {name: _files(name) for name in ordered}


def find(name: str) -> ConfigFile:
    """Return a recipe by its name, or another config file by ``group/name``.

    Raises:
        ConfigError: If it does not exist; the message lists those that do.
    """
    group, _, option = name.partition("/")
    if not option or any(recipe.name == name for recipe in recipes()):
        group, option = RECIPE_GROUP, name
    files = {file.name: file for file in _files(group)}
    if option in files:
        return files[option]
    what = f"unknown recipe `{name}`" if group == RECIPE_GROUP else f"unknown option `{option}` of group `{group}`"
    if not files:
        raise ConfigError(f"unknown group `{group}`", known=", ".join(groups()), fix="ipurun ls groups")
    close = nearest(option, files, most=1)
    command = "ipurun ls" if group == RECIPE_GROUP else "ipurun ls groups"
    raise ConfigError(what, known=", ".join(files), fix=close[0] if close else command)


def copy_recipe(name: str, new_name: Optional[str] = None) -> List[Path]:
    """Copy a recipe so that the copy runs and can be edited.

    Copies the recipe's YAML, the model and data options that name its code, and the code itself; names inside them
    are changed to those of the copy.

    Args:
        name: The recipe to copy.
        new_name: Name of the copy, its config files and its package; None: ``my_`` and the old name.

    Returns:
        The new files and folders, relative to the working folder.

    Raises:
        ConfigError: If the recipe does not exist, or the new name cannot be used.
    """
    recipe = find(name)
    if recipe.group != RECIPE_GROUP:
        raise ConfigError(f"`{name}` is not a recipe", fix="ipurun ls")
    new_name = new_name or "my_" + recipe.name.replace("/", "_")
    options = _options_with_code(recipe)
    packages = {_code_package(file) for file in [recipe, *options]} - {None}
    _check_name(new_name, recipe)
    configs = {Path("conf") / file.group / f"{new_name}.yaml": file for file in [recipe, *options]}
    taken = [path for path in [*configs, *([Path(new_name)] if packages else [])] if path.exists()]
    if taken:
        raise ConfigError(
            f"`{new_name}` would overwrite existing files",
            where=", ".join(map(str, taken)),
            fix=f"ipurun cp {name} ANOTHER_NAME",
        )
    if len(packages) > 1:
        raise ConfigError(f"recipe `{name}` names code of several packages", seen=", ".join(sorted(map(str, packages))))
    return _write(configs, options, packages.pop() if packages else None, new_name)


def _folders() -> List[Tuple[Path, bool]]:
    """Return the folders of configs and whether they are built-in."""
    return [(builtin_folder().resolve(), True), *((Path(folder), False) for folder in user_folders())]


def _files(group: str) -> List[ConfigFile]:
    return [
        ConfigFile(group, path.relative_to(folder / group).with_suffix("").as_posix(), path, built_in)
        for folder, built_in in _folders()
        for path in sorted((folder / group).rglob("*.yaml"))
        if path.is_file()
    ]


def _options_with_code(recipe: ConfigFile) -> List[ConfigFile]:
    """Return the options in a recipe's defaults list that name its code, such as its model and its data."""
    chosen = [match for match in map(_OVERRIDE.match, recipe.text().splitlines()) if match is not None]
    options = [file for match in chosen for file in _files(match["group"]) if file.name == match["option"]]
    return [option for option in options if _code_package(option) is not None]


def _code_package(file: ConfigFile) -> Optional[str]:
    """Return the package of recipe code that a config names: ``ipurun.recipes.mnist``, or the user's ``my_mnist``."""
    for match in _TARGET.finditer(file.text()):
        parts = match["module"].split(".")
        if parts[:2] == ["ipurun", "recipes"] and len(parts) > 3:
            return ".".join(parts[:3])
        if not file.built_in and len(parts) > 1 and Path(parts[0]).is_dir():
            return parts[0]
    return None


def _check_name(new_name: str, recipe: ConfigFile) -> None:
    if not new_name.isidentifier() or keyword.iskeyword(new_name):
        raise ConfigError(
            f"`{new_name}` cannot name a recipe and its Python package",
            known="letters, digits and underscores, not beginning with a digit",
            fix=f"ipurun cp {recipe.name} {re.sub(r'[^0-9A-Za-z_]+', '_', 'my_' + new_name).rstrip('_')}",
        )
    if any(other.built_in and other.name == new_name for other in recipes()):
        raise ConfigError(
            f"`{new_name}` is a built-in recipe, which would hide the copy",
            fix=f"ipurun cp {recipe.name} my_{new_name}",
        )
    if not Path(new_name).exists() and importlib.util.find_spec(new_name) is not None:
        raise ConfigError(
            f"`{new_name}` is already the name of an installed Python package",
            fix=f"ipurun cp {recipe.name} my_{new_name}",
        )


def _write(
    configs: Dict[Path, ConfigFile], options: List[ConfigFile], package: Optional[str], new_name: str
) -> List[Path]:
    made: List[Path] = []
    try:
        for path, file in configs.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_renamed(file.text(), options, package, new_name), encoding="utf-8")
            made.append(path)
        if package is not None:
            built_in = package.startswith(_RECIPES_PREFIX)
            folder = recipes_folder() / package[len(_RECIPES_PREFIX) :] if built_in else Path(package)
            shutil.copytree(folder, new_name, ignore=_NOT_COPIED)
            made.append(Path(new_name))
            for module in sorted(Path(new_name).rglob("*.py")):
                source = module.read_text(encoding="utf-8")
                module.write_text(_with_package(source, package, new_name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "the copy cannot be written", where=os.getcwd(), seen=str(error), fix="run it in a writable folder"
        ) from error
    return made


def _renamed(text: str, options: List[ConfigFile], package: Optional[str], new_name: str) -> str:
    for option in options:
        chosen = re.compile(rf"^(\s*-\s*(?:override\s+)?/?{option.group}\s*:\s*){option.name}\b", re.MULTILINE)
        text = chosen.sub(rf"\g<1>{new_name}", text)
    return text if package is None else _with_package(text, package, new_name)


def _with_package(text: str, package: str, new_name: str) -> str:
    return re.sub(rf"\b{re.escape(package)}\b", new_name, text)
