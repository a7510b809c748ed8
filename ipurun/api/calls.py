"""Calls on PopTorch's API as data: they can be shown as source, stored, compared and made on an engine."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple

from ipurun.errors import ConfigError, Problem

__all__ = ["Call", "Symbol", "apply_calls", "call_text", "construct", "last_call", "resolve", "value_text"]


@dataclass(frozen=True)
class Symbol:
    """A name that only the engine or torch can turn into a value, such as ``poptorch.OutputMode.Sum``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """One call on PopTorch's API, as data: `plan` prints it, the builder makes it.

    Args:
        path: Dotted path of the callable: ``Training.gradientAccumulation``.
        args: Positional arguments: Python values, `Symbol`s, or nested `Call`s (settings objects).
        kwargs: Named arguments.
        origin: The config key, file or rule that asked for it.
        chain: Further setters on the returned object (settings objects).
    """

    path: str
    args: Tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    chain: Tuple[Call, ...] = ()


def last_call(path: str, *sources: Sequence[Call]) -> Optional[Call]:
    """Return the call of a setter that counts: the last one in the first source that has it."""
    for calls in sources:
        same = [call for call in calls if call.path == path]
        if same:
            return same[-1]
    return None


def call_text(call: Call) -> str:
    """Return a call as source: ``Training.gradientAccumulation(8)``."""
    arguments = [value_text(value) for value in call.args]
    arguments += [f"{name}={value_text(value)}" for name, value in call.kwargs.items()]
    chained = "".join(f".{call_text(setter)}" for setter in call.chain)
    return f"{call.path}({', '.join(arguments)}){chained}"


def value_text(value: Any) -> str:
    """Return an argument as source."""
    if isinstance(value, Symbol):
        return value.name
    if isinstance(value, Call):
        return call_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {value_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(value_text(entry) for entry in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def apply_calls(options: Any, calls: Iterable[Call], engine_module: ModuleType) -> Any:
    """Make calls on an Options object (or any other), in order, and return the object.

    Args:
        options: The object that the calls' paths start from.
        calls: The calls.
        engine_module: ``poptorch`` or ``ipurun.emulator``.

    Raises:
        ConfigError: The engine refuses a call; all refusals are reported together.
    """
    problems = []
    for call in calls:
        try:
            _perform(options, call, engine_module)
        except Exception as error:  # PopTorch refuses by AssertionError, ValueError, AttributeError, its own Error, ...
            problems.append(
                Problem(f"PopTorch refuses `{call_text(call)}`", call.origin, seen=f"{type(error).__name__}: {error}")
            )
    if problems:
        raise ConfigError(problems)
    return options


def resolve(value: Any, engine_module: ModuleType) -> Any:
    """Return the object that a value of a plan means, with symbols looked up and nested calls made."""
    if isinstance(value, Symbol):
        return _look_up(value.name, engine_module)
    if isinstance(value, Call):
        return construct(value, engine_module)
    if isinstance(value, Mapping):
        return {key: resolve(entry, engine_module) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(resolve(entry, engine_module) for entry in value)
    return value


def construct(call: Call, engine_module: ModuleType, *first: Any, **extra: Any) -> Any:
    """Call the callable at a path (``poptorch.TensorLocationSettings``), then the setters chained to it.

    Args:
        call: The call; its path begins with ``poptorch.``, ``torch.`` or any importable package.
        engine_module: The module to use as ``poptorch``.
        first: Arguments to put first (an optimizer's parameters).
        extra: Further named arguments.
    """
    args, kwargs = _arguments(call, engine_module)
    made = _look_up(call.path, engine_module)(*first, *args, **kwargs, **extra)
    for setter in call.chain:
        _perform(made, setter, engine_module)
    return made


def _perform(target: Any, call: Call, engine_module: ModuleType) -> None:
    args, kwargs = _arguments(call, engine_module)
    result = functools.reduce(getattr, call.path.split("."), target)(*args, **kwargs)
    for setter in call.chain:
        _perform(result, setter, engine_module)


def _arguments(call: Call, engine_module: ModuleType) -> Tuple[Tuple[Any, ...], Mapping[str, Any]]:
    args = tuple(resolve(value, engine_module) for value in call.args)
    return args, {name: resolve(value, engine_module) for name, value in call.kwargs.items()}


def _look_up(path: str, engine_module: ModuleType) -> Any:
    package, _, rest = path.partition(".")
    if package == "poptorch":
        return functools.reduce(getattr, rest.split("."), engine_module)
    module_name, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module_name), attribute)
