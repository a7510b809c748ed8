"""Folders that configs and recipes are found in: the built-in one, ``./conf`` and ``--config-dir``."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Dict, List, Optional

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ipurun.errors import ConfigError, Problem

__all__ = ["builtin_folder", "check_user_folders", "files", "groups", "recipes_folder", "register", "user_folders"]


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


_extra_folder: Optional[str] = None


class UserFolders(SearchPathPlugin):
    """Appends the user's folders, so that built-in names stay what the documentation says they are."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in user_folders():
            search_path.append("user", f"file://{folder}")


def register(config_dir: Optional[str] = None) -> None:
    """Make Hydra look into the user's folders, whichever of its doors is used."""
    global _extra_folder
    _extra_folder = config_dir
    if UserFolders not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(UserFolders)


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
