"""Recipes and group options: listed with the files that belong to each, and copied."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from ipurun.config.folders import builtin_folder, recipes_folder
from ipurun.errors import ConfigError, nearest

__all__ = ["RECIPE_GROUP", "Entry", "code_folder", "copy_recipe", "find", "groups", "own_options", "recipes"]

RECIPE_GROUP = "recipe"
_OVERRIDE = re.compile(r"^\s*-\s*(?:override\s+)?/?(?P<group>\w+)\s*:\s*(?P<option>[\w-]+)\s*(?:#.*)?$")
_TARGET = re.compile(r"_target_\s*:\s*[\"']?(?P<module>[\w.]+)")


@dataclass(frozen=True)
class Entry:
    """One config file: an option of a group, such as the recipe ``mnist``."""

    group: str
    name: str
    path: Path
    built_in: bool

    @property
    def summary(self) -> str:
        """The one-line comment that its file begins with."""
        with open(self.path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = line.strip()
                if text.startswith("#") and not text.startswith("# @package"):
                    return text.lstrip("# ")
                if text and not text.startswith("#"):
                    break
        return ""

    def text(self) -> str:
        """The file's content.

        Raises:
            ConfigError: If it cannot be read, or is not text.
        """
        try:
            return self.path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError("a config file cannot be read", str(self.path), seen=str(error)) from error
        except UnicodeDecodeError as error:
            seen = f"{error.reason} at byte {error.start}"
            raise ConfigError("a config file is not UTF-8 text", str(self.path), seen=seen) from error


def recipes() -> List[Entry]:
    """All recipes: the built-in ones, then those below ``./conf``."""
    return _entries(RECIPE_GROUP)


def groups() -> Dict[str, List[Entry]]:
    """Group name -> its options, recipes first."""
    names = {path.name for folder, _ in _folders() for path in folder.iterdir() if _is_group(path)}
    ordered = sorted(names, key=lambda name: (name != RECIPE_GROUP, name))
    return {name: _entries(name) for name in ordered}


def find(name: str) -> Entry:
    """A recipe by its name, or an option as ``group/name``.

    Raises:
        ConfigError: There is none; the message lists those that exist.
    """
    group, _, option = name.partition("/")
    if not option or any(entry.name == name for entry in recipes()):
        group, option = RECIPE_GROUP, name
    entries = {entry.name: entry for entry in _entries(group)}
    if option in entries:
        return entries[option]
    what = f"unknown recipe `{name}`" if group == RECIPE_GROUP else f"unknown option `{option}` of group `{group}`"
    if not entries:
        raise ConfigError(f"unknown group `{group}`", known=", ".join(groups()), fix="ipurun ls groups")
    close = nearest(option, entries, most=1)
    command = "ipurun ls" if group == RECIPE_GROUP else "ipurun ls groups"
    raise ConfigError(what, known=", ".join(entries), fix=close[0] if close else command)


def own_options(recipe: Entry) -> List[Entry]:
    """The group options that a recipe picks and that name its own code, such as its model and its data."""
    picked: List[Entry] = []
    for line in recipe.text().splitlines():
        match = _OVERRIDE.match(line)
        if match is None:
            continue
        options = {entry.name: entry for entry in _entries(match["group"])}
        option = options.get(match["option"])
        if option is not None and code_package(option) is not None:
            picked.append(option)
    return picked


def code_package(entry: Entry) -> Optional[str]:
    """The package of a recipe's own that a config names: ``ipurun.recipes.mnist``, or the user's ``my_mnist``."""
    for match in _TARGET.finditer(entry.text()):
        parts = match["module"].split(".")
        if parts[:2] == ["ipurun", "recipes"] and len(parts) > 3:
            return ".".join(parts[:3])
        if not entry.built_in and len(parts) > 1 and Path(parts[0]).is_dir():
            return parts[0]
    return None


def code_folder(package: str) -> Path:
    """The folder of a package that `code_package` gave."""
    prefix = "ipurun.recipes."
    return recipes_folder() / package[len(prefix) :] if package.startswith(prefix) else Path(package)


def _folders() -> List[Tuple[Path, bool]]:
    built_in = builtin_folder().resolve()
    found = [(built_in, True)]
    user = Path(os.getcwd()) / "conf"
    # In a clone of ipurun ./conf is the built-in folder itself.
    if user.is_dir() and user.resolve() != built_in:
        found.append((user, False))
    return found


def _entries(group: str) -> List[Entry]:
    return [
        Entry(group, path.relative_to(folder / group).with_suffix("").as_posix(), path, built_in)
        for folder, built_in in _folders()
        for path in sorted((folder / group).rglob("*.yaml"))
        if path.is_file()
    ]


def _is_group(path: Path) -> bool:
    return path.is_dir() and any(path.rglob("*.yaml"))


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
