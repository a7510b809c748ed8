"""Flags that every command has, taken off a command line before Hydra's words are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Sequence, Tuple

from ipurun.errors import ConfigError

__all__ = ["Flags", "split"]

_COMMON = {"--quiet": "quiet", "-q": "quiet", "--json": "json", "--debug": "debug", "--help": "help", "-h": "help"}


@dataclass(frozen=True)
class Flags:
    """The flags of one command line.

    Args:
        quiet: Only errors and the last line.
        json: One JSON document on standard output and nothing else.
        debug: Tracebacks.
        help: Help was asked for.
        values: Value of each further flag of the command; True for a flag without a value.
    """

    quiet: bool = False
    json: bool = False
    debug: bool = False
    help: bool = False
    values: Dict[str, object] = field(default_factory=dict)


def split(argv: Sequence[str], switches: Sequence[str] = (), with_value: Sequence[str] = ()) -> Tuple[Flags, List[str]]:
    """Take ipurun's own flags off a command line.

    Args:
        argv: The words after the command.
        switches: Further flags of this command that stand alone, such as ``--explain``.
        with_value: Further flags that take a value, such as ``--html``.

    Raises:
        ConfigError: If a flag misses its value.
    """
    common = dict.fromkeys(_COMMON.values(), False)
    values: Dict[str, object] = {}
    rest: List[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if word in _COMMON:
            common[_COMMON[word]] = True
        elif word in switches:
            values[word.lstrip("-")] = True
        elif flag in with_value:
            if not equals:
                if not waiting:
                    raise ConfigError(f"`{flag}` needs a value", "command line", fix=f"{flag} VALUE")
                value = waiting.pop(0)
            values[flag.lstrip("-")] = value
        else:
            rest.append(word)
    return Flags(values=values, **common), rest
