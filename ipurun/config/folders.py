"""The folders of configs and recipes: built-in, ``./conf`` and ``--config-dir``."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Dict, List, Optional

from ipurun.errors import ConfigError, Problem

__all__ = [
    "add_user_folder",
    "builtin_folder",
    "check_user_folders",
    "files",
    "groups",
    "recipes_folder",
    "user_folders",
]

_extra_folder: Optional[str] = None


def builtin_folder() -> Path:
    """Return the folder that Hydra reads as ``pkg://ipurun.conf``."""
    return _folder_of("ipurun.conf")


def recipes_folder() -> Path:
    """Return the folder of ``ipurun.recipes``."""
    return _folder_of("ipurun.recipes")


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; in a clone, run `make dev`")
    return Path(next(iter(spec.submodule_search_locations)))


def add_user_folder(folder: Optional[str]) -> None:
    """Add the folder of ``--config-dir`` to the user's folders; None removes it again."""
    global _extra_folder
    _extra_folder = folder


def user_folders() -> List[str]:
    """Return the existing folders of configs outside the package."""
    candidates = [Path(os.getcwd()) / "conf"] + ([Path(_extra_folder)] if _extra_folder else [])
    built_in = builtin_folder().resolve()
    # In a clone of ipurun, ./conf is the built-in folder.
    return [str(folder.resolve()) for folder in candidates if folder.is_dir() and folder.resolve() != built_in]


def files(folder: str) -> List[Path]:
    """Return the config files below a folder."""
    return sorted(path for path in Path(folder).rglob("*.yaml") if path.is_file())


def groups() -> Dict[str, List[str]]:
    """Return the file names of each group, over all folders.

    Lists the folders itself, because Hydra's own listing takes ten times as long as composing.
    """
    found: Dict[str, List[str]] = {}
    for folder in [str(builtin_folder()), *user_folders()]:
        for path in files(folder):
            relative = path.relative_to(folder)
            group = relative.parent.as_posix()
            if group != "." and not group.startswith("hydra"):
                found.setdefault(group, []).append(relative.stem)
    return found


def check_user_folders() -> None:
    """Refuse user configs that a built-in config of the same name would silently hide.

    Raises:
        ConfigError: With one problem for each such file and for a missing ``--config-dir``.
    """
    problems: List[Problem] = []
    if _extra_folder and not Path(_extra_folder).is_dir():
        where = f"command line: --config-dir {_extra_folder}"
        fix = "--config-dir FOLDER, one with recipes in FOLDER/recipe"
        problems.append(Problem("`--config-dir` is not a folder", where, seen=_extra_folder, fix=fix))
    for folder in user_folders():
        for path in files(folder):
            relative = path.relative_to(folder)
            if (builtin_folder() / relative).is_file():
                group, name = relative.parent.as_posix(), relative.stem
                problems.append(
                    Problem(
                        f"{group if group != '.' else 'config'} `{name}` has the name of a built-in config",
                        where=os.path.relpath(path),
                        seen="Hydra would use the built-in file and ignore this one",
                        fix=f"rename it, for example to {path.with_name('my_' + path.name).name}",
                    )
                )
    if problems:
        raise ConfigError(problems)
