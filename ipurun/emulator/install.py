"""Make ``import poptorch`` import the emulator, in this process and its child processes."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from types import ModuleType
from typing import Any, Optional, Sequence

import torch
from torch.utils.data import Sampler

from ipurun.emulator._ops import annotations as native_ops
from ipurun.emulator.autocasting import autocast_module

__all__ = ["find_real_poptorch", "install", "load_whole_objects", "restore_removed", "shim_folder", "uninstall"]

_WHOLE_OBJECTS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_ALIAS = "poptorch"
_TARGET = __package__ or "ipurun.emulator"
# Ops of PopTorch's native layer that programs call, for example when they rewrite torch.fx graphs or name modules.
_OPS_OF_PROGRAMS = ("set_attribute", "clear_attribute", "push_name_scope", "pop_name_scope", "internal_cast")


def restore_removed() -> None:
    """Restore what newer torch removed; do nothing on torch 2.0 or when called again."""
    if Sampler.__init__ is object.__init__:
        Sampler.__init__ = _take_data_source  # type: ignore[assignment]


def load_whole_objects() -> None:
    """Let `torch.load(file)` read whole objects, such as saved models, here and in child processes.

    Since 2.6, torch reads only tensors unless `weights_only=False` is passed. Calls that pass the argument are not
    affected, nor are users who set torch's environment variable.
    """
    if _WHOLE_OBJECTS in os.environ:
        return
    os.environ[_WHOLE_OBJECTS] = "1"
    # Torch warns about the variable at every load, but the user did not set it.
    warnings.filterwarnings("ignore", message=f"Environment variable {_WHOLE_OBJECTS} detected")


def _take_data_source(self: Any, data_source: Any = None) -> None:
    """Ignore the data source, as torch 2.0 does."""


class _AliasLoader(importlib.abc.Loader):
    """Loads a module of the emulator under PopTorch's name, without importing it twice."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._own_spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just set the alias's spec on the module: restore the original.
        module.__spec__ = self._own_spec
        # Programs get modules with `find_spec(name).loader.load_module()`, which would execute this one again.
        self._own_spec.loader.load_module = self.load_module

    def load_module(self, fullname: Optional[str] = None) -> ModuleType:
        """Return the module, imported if it was not; the name may be left out, as with loaders of files."""
        return importlib.import_module(self._target)


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds ``poptorch.x`` as ``ipurun.emulator.x``."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if not fullname.startswith(_ALIAS + "."):
            return None
        real_name = _TARGET + fullname[len(_ALIAS) :]
        found = importlib.util.find_spec(real_name)
        if found is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, _AliasLoader(real_name), is_package=found.submodule_search_locations is not None
        )


def shim_folder() -> str:
    """Return the folder that, on PYTHONPATH, makes ``import poptorch`` import the emulator.

    It also contains replacements for other SDK modules, used if those are not installed.
    """
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")


def find_real_poptorch() -> Optional[str]:
    """Return the location of Graphcore's poptorch, None if it is not installed."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != shim_folder()]
    spec = importlib.machinery.PathFinder.find_spec(_ALIAS, elsewhere)
    # A folder without __init__.py is a namespace package, not PopTorch.
    return None if spec is None else spec.origin


def install(inherited: bool = True) -> None:
    """Make ``import poptorch`` and its submodules import the emulator from now on; again without effect.

    Args:
        inherited: Whether child processes inherit this through PYTHONPATH, including those started by spawn or
            forkserver.

    Raises:
        RuntimeError: The real poptorch was already imported.
    """
    emulator = importlib.import_module(_TARGET)
    present = sys.modules.get(_ALIAS)
    shim_loads = present is not None and _is_shim(present)
    if present is not None and present is not emulator and not shim_loads:
        raise RuntimeError(
            f"poptorch was imported before install(): {getattr(present, '__file__', present)}. "
            "Call ipurun.emulator.install() before the first `import poptorch`."
        )
    sys.modules[_ALIAS] = emulator
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AliasFinder())
    torch.nn.Module.autocast = autocast_module  # type: ignore[attr-defined]  # as PopTorch did up to 3.0
    for name in _OPS_OF_PROGRAMS:
        setattr(torch.ops.poptorch, name, getattr(native_ops, name))
    restore_removed()
    if not inherited:
        return
    folder = shim_folder()
    if folder not in sys.path:
        sys.path.insert(1, folder)
    folders = os.environ.get("PYTHONPATH", "")
    if folder not in folders.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, folders]))


def uninstall() -> None:
    """Let ``import poptorch`` import the real package again, in this process."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AliasFinder)]
    for name in [name for name in sys.modules if name == _ALIAS or name.startswith(_ALIAS + ".")]:
        if getattr(sys.modules[name], "__name__", "").startswith(_TARGET):
            del sys.modules[name]


def _is_shim(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.abspath(file).startswith(shim_folder() + os.sep)
