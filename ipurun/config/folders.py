"""The folders that ipurun's own configs and recipes are in, from a wheel and from a clone alike."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["builtin_folder", "recipes_folder"]


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
