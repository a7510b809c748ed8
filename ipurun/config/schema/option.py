"""Declare config keys: typed dataclass fields with a default and one line of help."""

from __future__ import annotations

import copy
import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Sequence, Tuple

__all__ = ["Key", "node", "option", "walk_keys"]


def option(
    default: Any,
    help: str,
    choices: Sequence[str] = (),
    minimum: Optional[int] = None,
    maximum: Optional[int] = None,
    positive: bool = False,
) -> Any:
    """Declare a config key.

    Args:
        default: The default value.
        help: One line for ``ipurun ls keys``.
        choices: The values of a string key. A tuple rather than an enum, because users type values that
            are not Python names (``async``, ``32.32``).
        minimum: The smallest valid number.
        maximum: The largest valid number.
        positive: Whether a fractional number must be above zero.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
        "positive": positive,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def node(schema: type, help: str) -> Any:
    """Declare a group of keys by its dataclass."""
    return dataclasses.field(default_factory=schema, metadata={"help": help, "choices": ()})


@dataclass(frozen=True)
class Key:
    """One key of the schema, as ``ls keys`` and the reference show it."""

    path: str
    type_name: str
    default: Any
    help: str
    choices: Tuple[str, ...]
    minimum: Optional[int]
    maximum: Optional[int]
    positive: bool
    is_open: bool  # a mapping with keys outside the schema: arguments of a target, setters, names

    @property
    def default_text(self) -> str:
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "null" if self.default is None else str(self.default)


def walk_keys(schema: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a schema class, depth first, in the order of declaration."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        path = prefix + field.name
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from walk_keys(hint, path + ".")
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]  # mypy: MISSING is not callable, excluded above
        is_open = typing.get_origin(hint) is dict
        choices = field.metadata["choices"]
        nullable = type(None) in typing.get_args(hint)
        type_name = " | ".join(choices + (("null",) if nullable else ())) if choices else _type_name(hint)
        limits = field.metadata["minimum"], field.metadata["maximum"], field.metadata["positive"]
        yield Key(path, type_name, default, field.metadata["help"], choices, *limits, is_open)


def _type_name(hint: Any) -> str:
    arguments: Tuple[Any, ...] = typing.get_args(hint)
    origin: Optional[Any] = typing.get_origin(hint)
    if origin is typing.Union:
        parts = [_type_name(part) for part in arguments if part is not type(None)]
        if type(None) in arguments:
            parts.append("null")
        return " | ".join(parts)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of {_type_name(arguments[1])}"
    return "any" if hint is Any else getattr(hint, "__name__", str(hint))
