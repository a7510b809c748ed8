"""Check single values for what a type cannot express: allowed words and ranges. The plan checks rules across keys."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Callable, List, Optional, Tuple

from ipurun.config.keys import all_keys
from ipurun.config.schema import Key, RunConfig
from ipurun.errors import Problem, listing, nearest

__all__ = ["check_values", "with_valid_values"]

_GROUPS_OF_TARGETS = ("metrics", "logger")  # name -> `_target_` and arguments


def check_values(config: RunConfig, where_set: Callable[[str], str]) -> List[Problem]:
    """Return the problems of single keys.

    Args:
        config: The typed config.
        where_set: Returns where a key was set, for the message.
    """
    checked = [_check(key, _read(config, path)) for path, key in all_keys().items()]
    problems = [problem for problem, _ in filter(None, checked)]
    for group in _GROUPS_OF_TARGETS:
        for name, node in _read(config, group).items():
            if not (node is None or isinstance(node, dict)):
                path = f"{group}.{name}"
                what = f"`{path}` takes a mapping: `_target_` and arguments"
                problems.append(Problem(what, seen=str(node), fix=f"{path}={{}}", key=path))
    return [replace(problem, where=where_set(problem.key)) for problem in problems]


def with_valid_values(config: RunConfig) -> RunConfig:
    """Return a copy with a valid value wherever `check_values` finds a problem, so that the rest can be checked."""
    valid = copy.deepcopy(config)
    for path, key in all_keys().items():
        found = _check(key, _read(valid, path))
        if found is not None:
            _write(valid, path, found[1])
    for group in _GROUPS_OF_TARGETS:
        nodes = _read(valid, group)
        _write(valid, group, {name: node for name, node in nodes.items() if node is None or isinstance(node, dict)})
    return valid


def _check(key: Key, value: Any) -> Optional[Tuple[Problem, Any]]:
    """Return the problem of an invalid value, with a valid one to replace it."""
    path = key.path
    if key.choices and value is not None and str(value) not in key.choices:
        close = nearest(str(value), key.choices, most=1)
        fix = f"{path}={close[0] if close else key.choices[0]}"
        return Problem(f"`{path}` cannot be `{value}`", known=listing(key.choices), fix=fix, key=path), key.default
    if not isinstance(value, (int, float)):
        return None
    default = "" if key.default is None else f"{path}={key.default_text}"
    if key.minimum is not None and value < key.minimum:
        what, fix, valid = f"must be {key.minimum} or more", f"{path}={max(key.minimum, 1)}", key.minimum
    elif key.maximum is not None and value > key.maximum:
        what, fix, valid = f"must be {key.maximum} or less", f"{path}={key.maximum}", key.maximum
    elif isinstance(value, float) and not math.isfinite(value):
        what, fix, valid = "must be a finite number", default, key.default
    elif key.positive and value <= 0:
        what, fix, valid = "must be above 0", default, key.default
    else:
        return None
    return Problem(f"`{path}` {what}", seen=str(value), fix=fix, key=path), valid


def _write(config: RunConfig, path: str, value: Any) -> None:
    group, _, name = path.rpartition(".")
    setattr(_read(config, group) if group else config, name, value)


def _read(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
