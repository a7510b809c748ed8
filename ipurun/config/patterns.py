"""Names and patterns of modules and parameters, matched the same way for every key that takes them.

A name is dotted (``layer1.0``, or ``layer1/0``). In a pattern ``*`` matches any text within one part of a name, and at
the very beginning any parts before, too; ``**`` matches any text; ``?`` and ``[0-9]`` match one character. A pattern
that begins with ``re:`` is a regular expression for the whole name. Where parameters are meant, a pattern that ends in
``*`` also takes the parameters inside the modules it matches. docs/reference/patterns.md has the same for users.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Pattern, Sequence, Tuple

from ipurun.errors import Findings, listing, nearest

__all__ = [
    "Match",
    "check_parameters",
    "find_module",
    "flat_names",
    "is_pattern",
    "match_modules",
    "match_names",
    "match_parameters",
    "names_in",
    "unmatched",
    "widened",
]

_REGEX = "re:"


@dataclass(frozen=True)
class Match:
    """A name that fits a pattern, and the texts that its wildcards or groups stand for."""

    name: str
    texts: Tuple[str, ...] = ()


def is_pattern(text: str) -> bool:
    """Whether a text is a pattern rather than a name."""
    return text.startswith(_REGEX) or any(character in text for character in "*?[")


def find_module(name: str, key: str, known: Sequence[str], found: Findings) -> Optional[str]:
    """The module that a name means (``layer1.0``, or ``layer1/0``); None, and a problem, when there is none."""
    dotted = _dotted(name)
    if dotted in known and dotted:
        return dotted
    unmatched(name, key, known, found)
    return None


def match_modules(pattern: str, key: str, known: Sequence[str], found: Findings) -> List[str]:
    """Modules whose name fits a name or a pattern (``encoder.*.attention``); none is a problem."""
    return [match.name for match in match_names(pattern, key, known, found)]


def match_names(
    pattern: str, key: str, known: Sequence[str], found: Findings, what: str = "module", owner: str = "the model has"
) -> List[Match]:
    """Names that fit a name or a pattern, in their own order, with what the wildcards stand for.

    Args:
        pattern: A name or a pattern.
        key: The config key it comes from.
        known: All names.
        found: Takes a problem where nothing fits.
        what: What the names are names of, for the message.
        owner: Who has them, for the message.
    """
    expression = _checked(pattern, key, found)
    if expression is None:
        return []
    fitting = [(name, expression.fullmatch(name)) for name in known if name]
    matches = [Match(name, tuple(text or "" for text in fit.groups())) for name, fit in fitting if fit]
    if not matches:
        unmatched(pattern, key, known, found, what, owner)
    return matches


def match_parameters(pattern: str, known: Sequence[str]) -> List[str]:
    """Parameters that a name or a pattern means. `check_parameters` reports patterns that cannot be used."""
    expression = _compiled(pattern)
    if pattern.endswith("*") and not pattern.startswith(_REGEX):
        expression = re.compile(expression.pattern + r"(?:\..*)?")
    return [name for name in known if expression.fullmatch(name)]


def check_parameters(pattern: str, key: str, known: Sequence[str], found: Findings) -> None:
    """Report a pattern that matches no parameter, or fewer than before `*` stopped at dots."""
    if _checked(pattern, key, found) is None:
        return
    matched = match_parameters(pattern, known)
    before = [] if "**" in pattern else [name for name in known if fnmatch.fnmatchcase(name, pattern)]
    lost = [name for name in before if name not in matched]
    if lost:
        wide = f"`{widened(pattern)}` for all {len(before)}"
        exact = f", `{_REGEX}{_compiled(pattern).pattern}` for the {len(matched)} alone" if matched else ""
        found.problem(
            f"`{key}`: `{pattern}` leaves out parameters that it matched in earlier versions, as `*` stops at dots now",
            seen=f"{len(matched)} of {len(before)} parameters match; left out: {listing(lost, most=3)}",
            fix=wide + exact,
            key=key,
        )
    elif not matched:
        unmatched(pattern, key, known, found, "parameter")


def widened(pattern: str) -> str:
    """A pattern whose `*` match any text, also over dots, as those for parameters did in earlier versions."""
    return pattern if "**" in pattern or pattern.startswith(_REGEX) else pattern.replace("*", "**")


def names_in(value: Any, key: str, found: Findings, what: str = "module") -> List[str]:
    """A key that takes one name or a list of names, as a list."""
    if value is None:
        return []
    entries = [value] if isinstance(value, (str, int)) else list(value) if isinstance(value, (list, tuple)) else None
    if entries is None or not all(isinstance(entry, (str, int)) and not isinstance(entry, bool) for entry in entries):
        found.problem(
            f"`{key}` takes a {what} name or a list of them", seen=str(value), fix=f"{key}=[NAME, ...]", key=key
        )
        return []
    return [str(entry) for entry in entries]  # a name may look like a number: `0` of a Sequential


def flat_names(value: Mapping[Any, Any], fields: Sequence[str]) -> Dict[str, Any]:
    """A mapping by module name, whose names the command line has cut at their dots (``blocks.h.3.ipu=1``)."""
    flat: Dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping) and entry and not any(field in entry for field in fields):
            flat.update({f"{name}.{inner}": deeper for inner, deeper in flat_names(entry, fields).items()})
        else:
            flat[str(name)] = entry
    return flat


def unmatched(
    name: str, key: str, known: Sequence[str], found: Findings, what: str = "module", owner: str = "the model has"
) -> None:
    """Report a name that nothing fits, or that is only the end of several names."""
    names = [module for module in known if module]
    ends = [module for module in names if module.endswith("." + _dotted(name))]
    if len(ends) > 1:
        found.problem(
            f"`{key}` names `{name}`, which may be any of {len(ends)} {what}s",
            known=listing(ends),
            fix=f"the full name, such as `{ends[0]}`, or the pattern `**.{_dotted(name)}` for all of them",
            key=key,
        )
        return
    close = ends or nearest(name, names) or _siblings(_dotted(name), names)
    top = [module for module in names if "." not in module]
    found.problem(
        f"`{key}` names `{name}`, and {owner} no such {what}",
        known=listing(close or top or names),
        fix=f"`{_in_the_form_of(name, close[0])}` instead of `{name}`" if close else "one of the names above",
        key=key,
    )


def _in_the_form_of(pattern: str, name: str) -> str:
    """A name with the wildcards of a pattern: ``h.*.attn`` for ``h.*.atn`` and ``h.2.attn``."""
    parts, exact = _dotted(pattern).split("."), name.split(".")
    if pattern.startswith(_REGEX) or len(parts) != len(exact):
        return name
    return ".".join(part if is_pattern(part) else text for part, text in zip(parts, exact))


def _siblings(name: str, names: Sequence[str]) -> List[str]:
    """What the innermost module that exists of a dotted name holds."""
    while "." in name:
        name = name.rpartition(".")[0]
        inside = [module for module in names if module.rpartition(".")[0] == name]
        if inside:
            return inside
    return []


def _dotted(name: str) -> str:
    return name.replace("/", ".").strip(".")


def _checked(pattern: str, key: str, found: Findings) -> Optional[Pattern[str]]:
    """The expression of a pattern; None, and a problem, where it cannot be read."""
    try:
        return _compiled(pattern)
    except re.error as error:
        found.problem(
            f"`{key}`: `{pattern}` is not a regular expression",
            seen=str(error),
            fix="see Python's `re`; without `re:` the text is a name or a pattern such as layers.*.attn",
            key=key,
        )
        return None


def _compiled(pattern: str) -> Pattern[str]:
    if pattern.startswith(_REGEX):
        return re.compile(pattern[len(_REGEX) :])
    text = _dotted(pattern)
    parts: List[str] = []
    position = 0
    while position < len(text):
        rest = text[position:]
        bracket = re.match(r"\[!?\]?[^\]]*\]", rest)
        if rest.startswith("**") or (position == 0 and rest.startswith("*")):
            parts.append("(.*)")
            position += 2 if rest.startswith("**") else 1
        elif rest[0] == "*":
            parts.append("([^.]*)")
            position += 1
        elif rest[0] == "?":
            parts.append("([^.])")
            position += 1
        elif bracket:
            parts.append("(" + bracket.group().replace("[!", "[^", 1).replace("\\", "\\\\") + ")")
            position += bracket.end()
        else:
            parts.append(re.escape(rest[0]))
            position += 1
    return re.compile("".join(parts))
