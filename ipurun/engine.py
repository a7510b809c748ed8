"""The engine of a run: PopTorch or the emulator. Nothing else imports poptorch."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Dict, Optional

from ipurun.config.secrets import mask_word
from ipurun.errors import ConfigError

__all__ = ["Engine", "check_environment", "load", "probe", "watched_variables"]

_EMULATOR = "ipurun.emulator"
_LARGEST_ATTACHABLE = 64
_NEEDED = ("Options", "DataLoader", "trainingModel", "ipuHardwareIsAvailable")
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF")
_OLD_LOG_LEVELS = ("TRACE_ALL", "DEBUG_IR")
_WATCHED = ("POPTORCH_", "POPART_", "POPLAR_", "POPRUN_", "PVTI_", "IPUOF_", "GCDA_", "IPURUN_")
# PopTorch's modules while the emulator has their names. They cannot be imported twice: their core is native code.
_set_aside: Dict[str, ModuleType] = {}


@dataclass(frozen=True)
class Engine:
    """An imported engine.

    Args:
        module: Implements PopTorch's API.
        kind: ``ipu``, ``ipu_model`` or ``cpu``.
        version: For display: ``PopTorch 3.4.0`` or ``emulator of PopTorch 3.4.0``.
        available_ipus: Number of IPUs that can be attached; None: any number.
    """

    module: ModuleType
    kind: str
    version: str
    available_ipus: Optional[int] = None

    def options(self, popdist_ipus: Optional[int] = None) -> Any:
        """Return new options.

        Args:
            popdist_ipus: IPUs of a replica, for the options of PopDist, in a process that PopRun started.
        """
        if popdist_ipus is None:
            return self.module.Options()
        try:
            return importlib.import_module("popdist.poptorch").Options(ipus_per_replica=popdist_ipus)
        except (ImportError, RuntimeError, ValueError) as error:
            raise ConfigError(
                "PopDist refused these options",
                seen=str(error),
                fix="run the command that `ipurun plan` shows",
                key="distributed.kind",
            ) from error


def load(choice: str, offline: bool = False) -> Engine:
    """Find and import the engine of a run.

    Args:
        choice: ``ipu``, ``ipu_model``, ``cpu``, or ``auto``: hardware if available, else the CPU.
        offline: Only compile: PopTorch is enough, any number of IPUs will do, and none is needed.

    Raises:
        ConfigError: If the engine is not available.
    """
    if choice == "cpu":
        return _emulator()
    if choice == "auto" and not _poptorch_is_installed():
        return _emulator()
    was_loaded = _loaded_poptorch() is not None
    poptorch = _import_poptorch(choice)
    if choice == "ipu_model":
        return Engine(poptorch, "ipu_model", f"PopTorch {_version(poptorch)}")
    if offline:
        return Engine(poptorch, "ipu", f"PopTorch {_version(poptorch)}")
    ipus = _count_ipus(poptorch)
    if ipus:
        return Engine(poptorch, "ipu", f"PopTorch {_version(poptorch)}", ipus)
    if choice == "auto":
        if not was_loaded:  # only to look for IPUs
            _set_poptorch_aside()
        return _emulator()
    raise ConfigError(
        "`engine=ipu`: no IPU is available",
        seen=f"PopTorch {_version(poptorch)} is installed, but no IPU can be attached",
        fix="check the partition with `gc-info -l`, or run with engine=ipu_model or engine=cpu",
        key="engine",
    )


def check_environment() -> None:
    """Check the environment variables that an engine reads during its import.

    Raises:
        ConfigError: If PopTorch does not have the log level.
    """
    level = os.environ.get("POPTORCH_LOG_LEVEL")
    if level is not None and level not in (*_LOG_LEVELS, *_OLD_LOG_LEVELS):
        raise ConfigError(
            f"`POPTORCH_LOG_LEVEL` cannot be `{level}`",
            where="environment",
            known=", ".join(_LOG_LEVELS),
            fix="unset POPTORCH_LOG_LEVEL, or set it to WARN",
        )


def probe() -> Dict[str, Any]:
    """Collect what a bug report needs to know about this machine; never fails."""
    found: Dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "ipurun": importlib.import_module("ipurun").__version__,
    }
    for package in ("torch", "hydra", "omegaconf", "numpy", "rich"):
        found[package] = _package_version(package)
    found.update(_probe_poptorch())
    found["engine"] = "ipu" if found["ipus"] else "cpu"
    found["sdk"] = os.environ.get("POPLAR_SDK_ENABLED") or None
    found["environment"] = watched_variables()
    return found


def watched_variables() -> Dict[str, str]:
    """Return the environment variables that Graphcore's libraries or ipurun read, without secrets."""
    return {
        name: mask_word(f"{name}={value}").partition("=")[2]
        for name, value in sorted(os.environ.items())
        if name.startswith(_WATCHED)
    }


def _probe_poptorch() -> Dict[str, Any]:
    absent = {"poptorch": None, "poptorch_problem": None, "ipus": 0}
    if not _poptorch_is_installed():
        return absent
    try:
        poptorch = importlib.import_module("poptorch")
        return {
            "poptorch": _version(poptorch),
            "poptorch_problem": None,
            "ipus": _count_ipus(poptorch),
        }
    except Exception as error:  # a broken SDK fails in many ways, and `env` shows which
        return {**absent, "poptorch_problem": f"{type(error).__name__}: {error}"}


def _emulator() -> Engine:
    module = importlib.import_module(_EMULATOR)
    loaded = _loaded_poptorch()
    if loaded is None:
        # Models written for IPUs import poptorch; on the CPU they get the emulator. Other processes of a host with
        # PopTorch may be for its IPUs.
        module.install(inherited=not _poptorch_is_installed())
    else:
        _see_blocks(loaded)
    _silence_index_casts()
    return Engine(module, "cpu", f"emulator of PopTorch {_version(module)}")


def _see_blocks(poptorch: ModuleType) -> None:
    """Let the emulator, which traces models for plans too, see the blocks of a model that imported PopTorch."""
    if hasattr(poptorch, "Block"):
        importlib.import_module(_EMULATOR + ".graph").adopt_blocks(poptorch.Block)


def _set_poptorch_aside() -> None:
    names = [name for name in sys.modules if name == "poptorch" or name.startswith("poptorch.")]
    _set_aside.update({name: sys.modules.pop(name) for name in names})


def _loaded_poptorch() -> Optional[ModuleType]:
    """Return Graphcore's package if it has been imported, None if not or if the emulator has its name."""
    loaded = sys.modules.get("poptorch")
    return None if loaded is None or _is_emulator(loaded) else loaded


def _silence_index_casts() -> None:
    # PopTorch warns once that int64 inputs become int32. Class labels always are int64, so every run would say so.
    logger = logging.getLogger("poptorch::python")
    if not any(isinstance(known, _IndexCasts) for known in logger.filters):
        logger.addFilter(_IndexCasts())


class _IndexCasts(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "torch.int64" not in record.getMessage()


def _poptorch_is_installed() -> bool:
    """Whether Graphcore's package can be imported.

    Other things that have its name: the emulator in its place, a folder without code, and PopTorch's sources, which
    lack the compiled core.
    """
    if _set_aside or _loaded_poptorch() is not None:
        return True
    spec = _find_poptorch()
    if spec is None or spec.origin is None or "emulator" in spec.origin:
        return False
    folders = spec.submodule_search_locations
    return folders is None or PathFinder.find_spec("poptorch.poptorch_core", list(folders)) is not None


def _find_poptorch() -> Optional[ModuleSpec]:
    shim = os.path.join(os.path.dirname(os.path.abspath(__file__)), "emulator", "shim")
    return PathFinder.find_spec("poptorch", [entry for entry in sys.path if os.path.abspath(entry) != shim])


def _is_emulator(module: ModuleType) -> bool:
    emulator = sys.modules.get(_EMULATOR)
    return module is emulator or "emulator" in str(getattr(module, "__file__", ""))


def _import_poptorch(choice: str) -> ModuleType:
    if not _poptorch_is_installed():
        raise ConfigError(
            f"`engine={choice}` needs PopTorch, which is not installed here",
            seen=f"Python {platform.python_version()} at {sys.executable}{_other_poptorch()}",
            fix="enable Graphcore's SDK and install its poptorch wheel, or run with engine=cpu",
            key="engine",
        )
    if _loaded_poptorch() is None and "poptorch" in sys.modules:
        importlib.import_module(_EMULATOR + ".install").uninstall()
    sys.modules.update(_set_aside)
    _set_aside.clear()
    try:
        poptorch = importlib.import_module("poptorch")
    except Exception as error:
        raise ConfigError(
            f"`engine={choice}`: PopTorch is installed but cannot be imported",
            seen=f"{type(error).__name__}: {error}",
            fix="source the SDK's enable scripts (`source <sdk>/enable`), or run with engine=cpu",
            key="engine",
        ) from error
    missing = [name for name in _NEEDED if not hasattr(poptorch, name)]
    if missing:
        raise ConfigError(
            f"`engine={choice}`: the module `poptorch` is not Graphcore's PopTorch",
            where=str(getattr(poptorch, "__file__", None)),
            seen=f"it has no {', '.join(missing)}",
            fix="rename it or take its folder off PYTHONPATH, or run with engine=cpu",
            key="engine",
        )
    _see_blocks(poptorch)
    return poptorch


def _other_poptorch() -> str:
    """Describe the module named poptorch that is not PopTorch, for messages."""
    spec = _find_poptorch()
    folders = list((spec.submodule_search_locations if spec is not None else None) or ())
    if not folders or "emulator" in str(spec and spec.origin):
        return ""
    return f"; {folders[0]} is a folder of that name without PopTorch's compiled core"


def _count_ipus(poptorch: ModuleType) -> int:
    count = _LARGEST_ATTACHABLE
    while count and not poptorch.ipuHardwareIsAvailable(count):
        count //= 2
    return count


def _version(module: ModuleType) -> str:
    return str(getattr(module, "__version__", "of unknown version"))


def _package_version(package: str) -> Optional[str]:
    try:
        return str(importlib.import_module(package).__version__)
    except Exception:  # absent or broken: either way there is no version to show
        return None
