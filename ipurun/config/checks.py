"""Checks of single values that a type cannot express: words, ranges. Rules across keys are the plan's."""

from __future__ import annotations

import copy
import math
from typing import Any, Callable, List

from ipurun.config.keys import all_keys
from ipurun.config.schema import Key, RunConfig
from ipurun.errors import Problem, listing, nearest

__all__ = ["check_values", "without_misfits"]

_GROUPS_OF_TARGETS = ("metrics", "logger")  # name -> `_target_` and arguments


def check_values(config: RunConfig, where_set: Callable[[str], str]) -> List[Problem]:
    """Problems of single keys.

    Args:
        config: The typed config.
        where_set: Tells where a key was set, for the message.
    """
    problems: List[Problem] = []
    for path, key in all_keys().items():
        value = _read(config, path)
        where = where_set(path)
        if key.choices and value is not None and str(value) not in key.choices:
            close = nearest(str(value), key.choices, most=1)
            fix = f"{path}={close[0] if close else key.choices[0]}"
            problems.append(
                Problem(f"`{path}` does not know `{value}`", where, known=listing(key.choices), fix=fix, key=path)
            )
        elif key.minimum is not None and isinstance(value, (int, float)) and value < key.minimum:
            fix = f"{path}={max(key.minimum, 1)}"
            problems.append(
                Problem(f"`{path}` must be {key.minimum} or more", where, seen=str(value), fix=fix, key=path)
            )
        elif key.maximum is not None and isinstance(value, (int, float)) and value > key.maximum:
            fix = f"{path}={key.maximum}"
            problems.append(
                Problem(f"`{path}` must be {key.maximum} or less", where, seen=str(value), fix=fix, key=path)
            )
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(
                Problem(f"`{path}` must be a finite number", where, seen=str(value), fix=_default(key), key=path)
            )
        elif key.positive and isinstance(value, (int, float)) and value <= 0:
            problems.append(Problem(f"`{path}` must be above 0", where, seen=str(value), fix=_default(key), key=path))
    for group in _GROUPS_OF_TARGETS:
        for name, node in _read(config, group).items():
            if not (node is None or isinstance(node, dict)):
                path = f"{group}.{name}"
                what = f"`{path}` takes a mapping: `_target_` and arguments"
                problems.append(Problem(what, where_set(path), seen=str(node), fix=f"{path}={{}}", key=path))
    return problems


def without_misfits(config: RunConfig) -> RunConfig:
    """A copy in which a value that `check_values` refuses is one that makes sense, to go on checking the rest with."""
    mended = copy.deepcopy(config)
    for path, key in all_keys().items():
        value = _read(mended, path)
        number = isinstance(value, (int, float))
        if key.choices and value is not None and str(value) not in key.choices:
            _write(mended, path, key.default)
        elif number and key.minimum is not None and value < key.minimum:
            _write(mended, path, key.minimum)
        elif isinstance(value, float) and (not math.isfinite(value) or (key.positive and value <= 0)):
            _write(mended, path, key.default)
    for group in _GROUPS_OF_TARGETS:
        nodes = _read(mended, group)
        _write(mended, group, {name: node for name, node in nodes.items() if node is None or isinstance(node, dict)})
    return mended


def _default(key: Key) -> str:
    return "" if key.default is None else f"{key.path}={key.default_text}"


def _write(config: RunConfig, path: str, value: Any) -> None:
    group, _, name = path.rpartition(".")
    setattr(_read(config, group) if group else config, name, value)


def _read(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
