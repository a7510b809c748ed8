"""Import the object that a `_target_` names, check its arguments, and call it."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import traceback
import typing
from types import ModuleType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.keys import suggest_arguments
from ipurun.errors import ConfigError, Problem, nearest
from ipurun.module_search import append_working_folder
from ipurun.moved import new_path

__all__ = [
    "arguments_of",
    "check_arguments",
    "check_named",
    "check_node",
    "first_parameter",
    "innermost_line",
    "locate",
    "make",
]

# Keys of a node that say how to call its target, rather than being arguments, with what they take.
_CALL_KEYS: Dict[str, Tuple[Callable[[Any], bool], str, str]] = {
    "_target_": (lambda value: True, "a dotted Python path", "package.module.Name"),
    "_args_": (lambda value: isinstance(value, (list, tuple)), "a list of arguments", "[VALUE]"),
    "_partial_": (lambda value: isinstance(value, bool), "true or false", "true"),
    "_convert_": (lambda value: value in ("none", "partial", "object", "all"), "none, partial, object or all", "all"),
    "_recursive_": (lambda value: isinstance(value, bool), "true or false", "true"),
}


def locate(path: str, key: str, engine_module: Optional[ModuleType] = None) -> Any:
    """Import the object that a dotted path names.

    Args:
        path: Such as ``mymodel.Net`` or ``poptorch.optim.SGD``.
        key: The config key that holds the path, for messages.
        engine_module: Used for paths that begin with ``poptorch.``, so that one config serves both engines.

    Raises:
        ConfigError: It cannot be imported. The message names the cause, even deep inside a module.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"`{key}` is not a dotted Python path", seen=repr(path), fix=f"{key}=package.module.Name", key=key
        )
    parts = new_path(path).split(".")
    if parts[0] == "poptorch" and engine_module is not None:
        return _attribute_of(engine_module, parts, 1, path, key)
    if len(parts) == 1:
        raise ConfigError(
            f"`{key}` does not name a module",
            seen=path,
            fix=f"{key}=module.{path}, with the name of its module",
            key=key,
        )
    append_working_folder()
    module, used = _import_longest(parts, path, key)
    return _attribute_of(module, parts, used, path, key)


def check_arguments(
    target: Callable[..., Any],
    kwargs: Mapping[str, Any],
    key: str,
    given: Sequence[str] = (),
    positional: int = 0,
    shown: str = "",
) -> List[Problem]:
    """Return the problems of calling a target with these arguments, without calling it.

    Args:
        target: A class or function.
        kwargs: Its arguments from the config; keys such as ``_target_`` are ignored.
        key: The config key of the arguments, for messages.
        given: Names of arguments that ipurun adds.
        positional: Number of leading arguments that ipurun passes by position.
        shown: Name of the target in messages, by default its qualified name.
    """
    parameters = _parameters(target)
    if parameters is None:
        return []
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    leading = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    filled = set(leading[: positional + len(kwargs.get("_args_", ()))]) | set(given)
    takes_any = _takes_any(parameters) or _decorator_takes_any(target)
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    problems = []
    shown = shown or _name_of(target)
    wanted = arguments_of(kwargs)
    for name in wanted:
        if name not in named and not takes_any:
            free = [known for known in named if known not in filled]
            problems.append(_unknown_argument(shown, str(name), wanted[name], free, key))
        elif name in filled and name not in given:
            problems.append(
                Problem(
                    f"`{key}.{name}`: {shown} gets the argument `{name}` by position",
                    fix=f"~{key}.{name} removes it" + (f", or change {key}._args_" if kwargs.get("_args_") else ""),
                    key=f"{key}.{name}",
                )
            )
    if not kwargs.get("_partial_"):
        missing = [
            name
            for name, parameter in parameters.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            and name not in wanted
            and name not in filled
        ]
        problems += [
            Problem(
                f"`{key}`: {shown} needs the argument `{name}`",
                seen=", ".join(str(n) for n in wanted) or "no arguments",
                fix=f"+{key}.{name}=VALUE",
                key=key,
            )
            for name in missing
        ]
    return problems


def check_node(
    node: Mapping[str, Any],
    key: str,
    engine_module: Optional[ModuleType] = None,
    given: Sequence[str] = (),
    positional: int = 0,
) -> List[Problem]:
    """Return the problems of a node with `_target_` and of its nested targets, without calling any."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        return [Problem(f"`{key}` has no `_target_`", seen=repr(node), fix=f"{key}._target_=module.Name", key=key)]
    problems = _call_key_problems(node, key)
    if problems:
        return problems
    for index, value in enumerate(node.get("_args_", ())):
        problems += _check_nested(value, f"{key}._args_.{index}", engine_module)
    for name, value in arguments_of(node).items():
        problems += _check_nested(value, f"{key}.{name}", engine_module)
    try:
        target = locate(node["_target_"], f"{key}._target_", engine_module)
    except ConfigError as error:
        return list(error.problems) + problems
    if not callable(target):
        problems.append(
            Problem(
                f"`{key}._target_` is not callable",
                seen=f"{node['_target_']} is {target!r:.80}",
                fix=f"{key}._target_=package.module.Name of a class or function",
                key=f"{key}._target_",
            )
        )
        return problems
    return check_arguments(target, node, key, given, positional, node["_target_"]) + problems


def check_named(arguments: Mapping[str, Any], key: str) -> List[Problem]:
    """Refuse keys such as ``_args_`` among arguments that are passed by name to something without `_target_`."""
    return [
        Problem(
            f"`{key}.{name}` goes with a `_target_`; here are only arguments by name",
            seen=f"{name}: {arguments[name]}",
            fix=f"~{key}.{name} removes it",
            key=f"{key}.{name}",
        )
        for name in _CALL_KEYS
        if name in arguments
    ]


def _call_key_problems(node: Mapping[str, Any], key: str) -> List[Problem]:
    return [
        Problem(
            f"`{key}.{name}` takes {takes}", seen=repr(node[name]), fix=f"{key}.{name}={example}", key=f"{key}.{name}"
        )
        for name, (fits, takes, example) in _CALL_KEYS.items()
        if name in node and not fits(node[name])
    ]


def make(
    node: Mapping[str, Any],
    key: str,
    *positional: Any,
    engine_module: Optional[ModuleType] = None,
    **extra: Any,
) -> Any:
    """Call a node's target with its arguments, nested targets first.

    Args:
        node: A mapping with ``_target_``.
        key: Its config key, for messages.
        *positional: Leading arguments that ipurun adds.
        engine_module: See `locate`.
        **extra: Named arguments that ipurun adds; they override the node's.

    Raises:
        ConfigError: The target cannot be imported, the arguments do not fit, or the call fails.
    """
    problems = check_node(node, key, engine_module, tuple(extra), len(positional))
    if problems:
        raise ConfigError(problems)
    target = locate(node["_target_"], f"{key}._target_", engine_module)
    arguments = {
        name: _make_nested(value, f"{key}.{name}", engine_module) for name, value in arguments_of(node).items()
    }
    arguments.update(extra)
    leading = (
        *positional,
        *(_make_nested(value, f"{key}._args_", engine_module) for value in node.get("_args_", ())),
    )
    if node.get("_partial_"):
        return functools.partial(target, *leading, **arguments)
    try:
        return target(*leading, **arguments)
    except ConfigError:
        raise
    except Exception as error:
        refused = _refused_argument(error, target, node, key)
        if refused is not None:
            raise ConfigError(refused) from error
        raise ConfigError(
            f"`{key}`: calling {node['_target_']} failed",
            where=innermost_line(error),
            seen=f"{type(error).__name__}: {error}",
            fix="--debug shows the whole traceback",
            key=key,
        ) from error


def arguments_of(node: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments of a node without keys such as ``_target_``."""
    return {name: value for name, value in node.items() if name not in _CALL_KEYS}


def first_parameter(target: Callable[..., Any]) -> Optional[str]:
    """Return the name of a target's first parameter, None if it has none or no signature."""
    parameters = _parameters(target)
    return next(iter(parameters), None) if parameters else None


def innermost_line(error: BaseException, *skipped: ModuleType) -> str:
    """Return file and line of the innermost frame of an error that is not ours.

    Args:
        error: The error.
        *skipped: Packages whose frames do not count, beside this one and the import machinery.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    folders = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep for module in skipped)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename
        and os.path.dirname(frame.filename) != os.path.dirname(__file__)
        and not frame.filename.startswith(folders)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _import_longest(parts: List[str], path: str, key: str) -> Tuple[ModuleType, int]:
    # The last part is not imported: if a package has a function and a module of that name, the function is meant.
    for used in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:used])
        try:
            return importlib.import_module(name), used
        except ModuleNotFoundError as error:
            # Try a shorter path only if this one does not exist (or a parent of it is not a package).
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise _import_problem(path, key, _loaded_from(error, parts) or name, error) from error
        except (Exception, SystemExit) as error:
            raise _import_problem(path, key, _loaded_from(error, parts) or name, error) from error
    raise ConfigError(
        f"`{key}`: no module named `{parts[0]}`",
        seen=path,
        fix=f"put {parts[0]}.py into {os.getcwd()}, or install the package that provides it",
        key=key,
    )


def _loaded_from(error: BaseException, parts: List[str]) -> str:
    """Return the module of the path whose code failed: importing ``net.Model`` first runs net.py."""
    where = innermost_line(error).rpartition(":")[0]
    stem = os.path.basename(os.path.dirname(where) if where.endswith("__init__.py") else where)
    name = os.path.splitext(stem)[0]
    return ".".join(parts[: parts.index(name) + 1]) if name in parts else ""


def _import_problem(path: str, key: str, module: str, error: BaseException) -> ConfigError:
    is_program = isinstance(error, SystemExit)  # a script that reads its arguments, or ends, when it is imported
    return ConfigError(
        f"`{key}`: {path} cannot be imported because importing {module} fails",
        where=innermost_line(error),
        seen=f"{type(error).__name__}: {error}",
        fix=f'put all of {module} but its classes and functions below if __name__ == "__main__":'
        if is_program
        else f"python -c 'import {module}' shows the whole traceback",
        key=key,
    )


def _attribute_of(start: Any, parts: List[str], used: int, path: str, key: str) -> Any:
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
                fix=f"{key}={owner}.{close[0] if close else 'NAME'}",
                key=key,
            ) from error
        except Exception as error:  # packages that import their parts on first access, such as transformers
            raise ConfigError(
                f"`{key}`: importing `{parts[index]}` from {owner} failed",
                where=innermost_line(error),
                seen=f"{type(error).__name__}: {error}",
                fix=f"python -c 'from {owner} import {parts[index]}' shows the whole traceback",
                key=key,
            ) from error
        if isinstance(found, ModuleType) and not found.__name__.startswith(f"{start.__name__}."):
            # Else every prefix of `security.allow_targets` would lead to everything: most modules import others.
            real = ".".join([found.__name__, *parts[index + 1 :]])
            raise ConfigError(
                f"`{key}`: {owner} only imports {parts[index]}, it is the module {found.__name__}",
                seen=path,
                fix=f"{key}={real}",
                key=key,
            )
    return found


def _is_target(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _make_nested(value: Any, key: str, engine_module: Optional[ModuleType]) -> Any:
    if _is_target(value):
        return make(value, key, engine_module=engine_module)
    if isinstance(value, Mapping):
        return {name: _make_nested(item, f"{key}.{name}", engine_module) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_make_nested(item, f"{key}.{index}", engine_module) for index, item in enumerate(value)]
    return value


def _check_nested(value: Any, key: str, engine_module: Optional[ModuleType]) -> List[Problem]:
    if _is_target(value):
        return check_node(value, key, engine_module)
    if isinstance(value, Mapping):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return []
    return [problem for name, item in items for problem in _check_nested(item, f"{key}.{name}", engine_module)]


def _parameters(target: Callable[..., Any]) -> Optional[Mapping[str, inspect.Parameter]]:
    try:
        if inspect.isclass(target) and target.__new__ in (object.__new__, typing.Generic.__new__):
            # Before Python 3.9 a generic class (torch's Dataset and Sampler are) shows typing's own signature.
            if target.__init__ is object.__init__:
                return {}
            return dict(list(inspect.signature(target.__init__).parameters.items())[1:])
        return inspect.signature(target).parameters
    except (
        TypeError,
        ValueError,
    ):  # some builtins have no signature: only calling them shows whether the arguments fit
        return None


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _decorator_takes_any(target: Callable[..., Any]) -> bool:
    """Return whether a decorator of the target may accept more arguments than the signature shows.

    The config classes of transformers do: they keep any further argument (`num_labels`).
    """
    outer = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]  # the class's own
    if not hasattr(outer, "__wrapped__"):
        return False
    try:
        return _takes_any(inspect.signature(outer, follow_wrapped=False).parameters)
    except (TypeError, ValueError):
        return False


def _refused_argument(
    error: Exception, target: Callable[..., Any], node: Mapping[str, Any], key: str
) -> Optional[Problem]:
    """Return the problem of an argument that the call refused, None if it failed for another reason."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error)) if isinstance(error, TypeError) else None
    wanted = arguments_of(node)
    if found is None or found.group(1) not in wanted:
        return None
    name = found.group(1)
    known = [known for known in _parameters(target) or {} if known not in wanted]
    return _unknown_argument(node["_target_"], name, wanted[name], known, key)


def _unknown_argument(shown: str, name: str, value: Any, known: List[str], key: str) -> Problem:
    close = suggest_arguments(key, name, known)
    return Problem(
        f"`{key}.{name}`: {shown} has no argument `{name}`",
        known=", ".join(known) or "it takes no arguments",
        fix=f"{key}.{close[0]}={value}" if close else f"~{key}.{name} removes it",
        key=f"{key}.{name}",
    )


def _name_of(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or repr(target)
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module and module != "builtins" else str(name)
