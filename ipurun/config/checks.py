"""Checks of single values that a type cannot express: words, ranges. Rules across keys are the plan's."""

from __future__ import annotations

from typing import Any, Callable, List

from ipurun.config.keys import all_keys
from ipurun.config.schema import RunConfig
from ipurun.config.suggest import listing, nearest
from ipurun.errors import Problem

__all__ = ["check_values"]


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
            problems.append(Problem(f"`{path}` does not know `{value}`", where, known=listing(key.choices), fix=fix))
        elif key.minimum is not None and isinstance(value, (int, float)) and value < key.minimum:
            fix = f"{path}={max(key.minimum, 1)}"
            problems.append(Problem(f"`{path}` must be {key.minimum} or more", where, seen=str(value), fix=fix))
        elif key.maximum is not None and isinstance(value, (int, float)) and value > key.maximum:
            fix = f"{path}={key.maximum}"
            problems.append(Problem(f"`{path}` must be {key.maximum} or less", where, seen=str(value), fix=fix))
    return problems


def _read(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
