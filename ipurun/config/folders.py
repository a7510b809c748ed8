"""Folders that configs and recipes are found in: the built-in one, ``./conf`` and ``--config-dir``."""

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
    """The folder that Hydra reads as ``pkg://ipurun.conf``."""
    return _folder_of("ipurun.conf")


def recipes_folder() -> Path:
    """The folder of ``ipurun.recipes``."""
    return _folder_of("ipurun.recipes")


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; in a clone, run `make dev`")
    return Path(next(iter(spec.submodule_search_locations)))


def add_user_folder(folder: Optional[str]) -> None:
    """Make ``--config-dir`` one of the user's folders; None takes it back."""
    global _extra_folder
    _extra_folder = folder


def user_folders() -> List[str]:
    """Folders of configs outside the package, those that exist."""
    candidates = [Path(os.getcwd()) / "conf"] + ([Path(_extra_folder)] if _extra_folder else [])
    built_in = builtin_folder().resolve()
    # In a clone of ipurun ./conf is the built-in folder itself.
    return [str(folder.resolve()) for folder in candidates if folder.is_dir() and folder.resolve() != built_in]


def files(folder: str) -> List[Path]:
    """The config files below a folder."""
    return sorted(path for path in Path(folder).rglob("*.yaml") if path.is_file())


def groups() -> Dict[str, List[str]]:
    """Group name -> names of its files, over all folders.

    Read off the folders, because Hydra's own listing takes ten times as long as composing.
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
    """Refuse user configs that a built-in of the same name would hide in silence.

    Raises:
        ConfigError: With one problem for each such file, or for a missing ``--config-dir``.
    """
    problems: List[Problem] = []
    if _extra_folder and not Path(_extra_folder).is_dir():
        problems.append(Problem("`--config-dir` is not a folder", "command line", seen=_extra_folder))
    for folder in user_folders():
        for path in files(folder):
            relative = path.relative_to(folder)
            if (builtin_folder() / relative).is_file():
                group, name = relative.parent.as_posix(), relative.stem
                problems.append(
                    Problem(
                        f"{group if group != '.' else 'config'} `{name}` has the name of a built-in one",
                        where=os.path.relpath(path),
                        seen="Hydra would take the built-in file and ignore this one",
                        fix=f"rename it, for example to {path.with_name('my_' + path.name).name}",
                    )
                )
    if problems:
        raise ConfigError(problems)
