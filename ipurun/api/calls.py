"""Calls on PopTorch's API as data: shown by `plan`, stored, compared and performed by the builder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Sequence, Tuple

__all__ = ["Call", "Symbol", "last_call"]


@dataclass(frozen=True)
class Symbol:
    """A name that only the engine or torch can turn into a value, such as ``poptorch.OutputMode.Sum``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """One call on PopTorch's API, as data: `plan` prints it, the builder performs it.

    Args:
        path: Dotted path of what is called: ``Training.gradientAccumulation``.
        args: Positional arguments: Python values, `Symbol`s, or nested `Call`s (settings objects).
        kwargs: Named arguments.
        origin: The config key, file or rule that asked for it.
        chain: Further setters on what the call returns (settings objects).
    """

    path: str
    args: Tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    chain: Tuple[Call, ...] = ()


def last_call(path: str, *sources: Sequence[Call]) -> Optional[Call]:
    """The call of a setter that counts: the last one of the first source that has it."""
    for calls in sources:
        found = [call for call in calls if call.path == path]
        if found:
            return found[-1]
    return None
