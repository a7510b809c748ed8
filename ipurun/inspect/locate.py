"""Importing what a dotted path of a config names, with the real cause where that fails."""

from __future__ import annotations

import importlib
import os
import traceback
from types import ModuleType
from typing import Any, List, Optional, Tuple

from ipurun.errors import ConfigError, nearest
from ipurun.module_search import append_working_folder

__all__ = ["innermost_line", "locate"]


def locate(path: str, key: str, engine_module: Optional[ModuleType] = None) -> Any:
    """Import what a dotted path names.

    Args:
        path: Such as ``mymodel.Net`` or ``poptorch.optim.SGD``.
        key: The config key it was found under, for messages.
        engine_module: Answers for paths that begin with ``poptorch.``: one config serves both engines.

    Raises:
        ConfigError: It cannot be imported; the message names the real cause, also from deep inside a module.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"`{key}` is not a dotted Python path", seen=repr(path), fix=f"{key}=package.module.Name", key=key
        )
    parts = path.split(".")
    if parts[0] == "poptorch" and engine_module is not None:
        return _walk(engine_module, parts, 1, path, key)
    if len(parts) == 1:
        raise ConfigError(
            f"`{key}` names no module", seen=path, fix=f"{key}=module.{path}, with the module's name", key=key
        )
    append_working_folder()
    module, used = _import_longest(parts, path, key)
    return _walk(module, parts, used, path, key)


def _import_longest(parts: List[str], path: str, key: str) -> Tuple[ModuleType, int]:
    # The last part is never imported: where a package has a function and a module of one name, the function is meant.
    for used in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:used])
        try:
            return importlib.import_module(name), used
        except ModuleNotFoundError as error:
            # Only the absence of this very path (or a parent that is no package) means: try a shorter one.
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise _import_problem(path, key, _loaded_from(error, parts) or name, error) from error
        except Exception as error:
            raise _import_problem(path, key, _loaded_from(error, parts) or name, error) from error
    raise ConfigError(
        f"`{key}`: no module named `{parts[0]}`",
        seen=path,
        fix=f"put {parts[0]}.py into {os.getcwd()}, or install the package that has it",
        key=key,
    )


def _loaded_from(error: Exception, parts: List[str]) -> str:
    """The module of the path whose own code failed: asking for ``net.Model`` first runs net.py."""
    where = innermost_line(error).rpartition(":")[0]
    stem = os.path.basename(os.path.dirname(where) if where.endswith("__init__.py") else where)
    name = os.path.splitext(stem)[0]
    return ".".join(parts[: parts.index(name) + 1]) if name in parts else ""


def _import_problem(path: str, key: str, module: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"`{key}`: {path} cannot be imported, because importing {module} fails",
        where=innermost_line(error),
        seen=f"{type(error).__name__}: {error}",
        fix=f"python -c 'import {module}' shows the whole traceback",
        key=key,
    )


def _walk(start: Any, parts: List[str], used: int, path: str, key: str) -> Any:
    found = start
    for index in range(used, len(parts)):
        owner = ".".join(parts[:index])
        try:
            found = getattr(found, parts[index])
        except AttributeError as error:
            names = [name for name in dir(found) if not name.startswith("_")]
            close = nearest(parts[index], names)
            raise ConfigError(
                f"`{key}`: {owner} has no `{parts[index]}`",
                seen=path,
                known=", ".join(close or names[:12]),
                fix=f"{key}={owner}.{close[0]}" if close else "",
                key=key,
            ) from error
        except Exception as error:  # packages that import their parts when they are asked for, as transformers does
            raise ConfigError(
                f"`{key}`: importing `{parts[index]}` from {owner} failed",
                where=innermost_line(error),
                seen=f"{type(error).__name__}: {error}",
                fix=f"python -c 'from {owner} import {parts[index]}' shows the whole traceback",
                key=key,
            ) from error
    return found


def innermost_line(error: BaseException) -> str:
    """File and line of the user's code where an error was raised, import machinery left out."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and os.path.dirname(frame.filename) != os.path.dirname(__file__)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
