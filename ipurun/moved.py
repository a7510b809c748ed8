"""Modules that have moved: their old paths, in YAML and in Python code, work for one release.

Imported with the package itself: only modules that Python has loaded by then may be imported here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Iterator, Optional

__all__ = ["install", "moved_paths", "new_path"]

_MOVED = {
    "ipurun.train.events": "ipurun.training.events",
    "ipurun.train.metrics": "ipurun.metrics",
    "ipurun.train.schedule": "ipurun.schedules",
}
_PARENT = "ipurun.train"  # a package once; the function `ipurun.train` now


def new_path(path: str) -> str:
    """Return the present path of what an old path names; other paths come back as they are."""
    for old, new in _MOVED.items():
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path


def moved_paths(value: Any) -> Iterator[str]:
    """Yield every old path in a config."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from moved_paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from moved_paths(inner)
    elif isinstance(value, str) and new_path(value) != value:
        yield value


def install() -> None:
    """Let Python find the old paths, after everything else was asked."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())


class _MovedModules:
    """Finder and loader that put a moved module under its old name, too."""

    def find_spec(self, name: str, path: object = None, target: Optional[ModuleType] = None) -> Optional[ModuleSpec]:
        if name != _PARENT and name not in _MOVED:
            return None
        return ModuleSpec(name, self, is_package=name == _PARENT)  # type: ignore[arg-type]  # no base class needed

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name == _PARENT:
            # Importing a submodule sets it as an attribute of its parent, and the parent as one of `ipurun`: with the
            # function in the place of the package, `ipurun.train` stays callable.
            function: Any = import_module("ipurun.interface").train
            function.__path__, function.__spec__ = [], module.__spec__
            sys.modules[name] = function
            return
        import warnings

        warnings.warn(f"{name} is now {_MOVED[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(_MOVED[name])
