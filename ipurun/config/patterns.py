"""Names and patterns of modules and parameters, matched the same way for every key that takes them.

A name is dotted (``layer1.0``, or ``layer1/0``). In a pattern, ``*`` matches any text within one part of a name, and
any text at the very beginning; ``**`` matches any text; ``?`` and ``[0-9]`` match one character. ``re:`` begins a
regular expression for the whole name. Where parameters are meant, a name or pattern also matches the parameters inside
the modules that it matches. docs/reference/patterns.md says the same for users.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Pattern, Sequence, Tuple

from ipurun.errors import Findings, listing, nearest

__all__ = [
    "TABLE_WORDS",
    "Match",
    "check_parameters",
    "find_module",
    "flat_names",
    "frozen_until",
    "is_pattern",
    "is_valid",
    "match_modules",
    "match_names",
    "match_parameters",
    "names_in",
    "renamed",
    "unmatched",
    "widened",
]

_REGEX = "re:"
# Names that `memory.serialize` has for the tables of models of transformers -> the method that returns one.
TABLE_WORDS: Mapping[str, str] = {
    "input_embeddings": "get_input_embeddings",
    "output_embeddings": "get_output_embeddings",
}


@dataclass(frozen=True)
class Match:
    """A name that matches a pattern, and the text of each wildcard or group."""

    name: str
    texts: Tuple[str, ...] = ()


def is_pattern(text: str) -> bool:
    """Whether a string is a pattern and not a name."""
    return text.startswith(_REGEX) or any(character in text for character in "*?[")


def find_module(name: str, key: str, known: Sequence[str], found: Findings) -> Optional[str]:
    """Return the module with a name (``layer1.0``, or ``layer1/0``); None, and a problem, where it does not exist."""
    dotted = _dotted(name)
    if dotted in known and dotted:
        return dotted
    unmatched(name, key, known, found)
    return None


def match_modules(pattern: str, key: str, known: Sequence[str], found: Findings) -> List[str]:
    """Return the modules that match a name or a pattern (``encoder.*.attention``); no match is a problem."""
    return [match.name for match in match_names(pattern, key, known, found)]


def match_names(
    pattern: str, key: str, known: Sequence[str], found: Findings, what: str = "module", owner: str = "the model has"
) -> List[Match]:
    """Return the names that match a name or a pattern, in order, with the text of each wildcard.

    Args:
        pattern: A name or a pattern.
        key: The config key it comes from.
        known: All names.
        found: Takes a problem where nothing matches.
        what: The kind of thing named, for the message.
        owner: Who has such things, for the message.
    """
    expression = _checked(pattern, key, found)
    if expression is None:
        return []
    tried = [(name, expression.fullmatch(name)) for name in known if name]
    matches = [Match(name, tuple(text or "" for text in match.groups())) for name, match in tried if match]
    if not matches:
        unmatched(pattern, key, known, found, what, owner)
    return matches


def match_parameters(pattern: str, known: Sequence[str]) -> List[str]:
    """Return the parameters that match a name or a pattern; `check_parameters` reports unusable patterns."""
    expression = _compiled(pattern)
    if not pattern.startswith(_REGEX):
        expression = re.compile(expression.pattern + r"(?:\..*)?")
    return [name for name in known if expression.fullmatch(name)]


def check_parameters(
    pattern: str,
    key: str,
    known: Sequence[str],
    found: Findings,
    what: str = "parameter",
    owner: str = "the model has",
) -> None:
    """Report a pattern that matches no parameter, or fewer than before `*` stopped at dots."""
    if _checked(pattern, key, found) is None:
        return
    matched = match_parameters(pattern, known)
    before = [] if "**" in pattern else [name for name in known if fnmatch.fnmatchcase(name, pattern)]
    lost = [name for name in before if name not in matched]
    if lost:
        wide = f"`{widened(pattern)}` for all {len(before)}"
        exact = f", `{_REGEX}{_compiled(pattern).pattern}` for only the {len(matched)}" if matched else ""
        found.problem(
            f"`{key}`: `{pattern}` matches fewer parameters than in earlier versions, as `*` now stops at dots",
            seen=f"{len(matched)} of {len(before)} parameters match; no longer matched: {listing(lost, most=3)}",
            fix=wide + exact,
            key=key,
        )
    elif not matched:
        unmatched(pattern, key, known, found, what, owner)


def frozen_until(freeze: Sequence[str], unfreeze: Mapping[Any, Any], known: Sequence[str]) -> Dict[str, Optional[int]]:
    """Return the parameters that `freeze` matches, each with the step after which it is trained, None if never."""
    frozen: Dict[str, Optional[int]] = {
        name: None for pattern in freeze if is_valid(pattern) for name in match_parameters(pattern, known)
    }
    for pattern, step in flat_names(unfreeze, ()).items():
        if isinstance(step, int) and is_valid(pattern):
            for name in match_parameters(pattern, list(frozen)):
                before = frozen[name]
                frozen[name] = step if before is None else min(before, step)
    return {name: frozen[name] for name in known if name in frozen}


def renamed(name: str, pattern: str, new: str, key: str, found: Findings) -> Optional[str]:
    r"""Return the new name of one that a pattern matches, or that is inside a module that it matches; None for others.

    Args:
        name: The name.
        pattern: A name or pattern.
        new: What takes its place: wildcards take the text of those in the pattern, in order; a regular expression's
            groups are ``\1``, ``\2``.
        key: The config key, for messages.
        found: Takes a problem of the pattern.
    """
    expression = _checked(pattern, key, found)
    if expression is None:
        return None
    if pattern.startswith(_REGEX):
        match = expression.fullmatch(name)
        return None if match is None else match.expand(new)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        match = expression.fullmatch(".".join(parts[:length]))
        if match is not None:
            return ".".join(filter(None, [_filled(new, match.groups()), *parts[length:]]))
    return None


def _filled(new: str, texts: Sequence[Optional[str]]) -> str:
    """Return a name whose wildcards are replaced by texts, in order."""
    left = iter([text or "" for text in texts])
    return re.sub(r"\*\*|\*|\?", lambda wildcard: next(left, ""), new)


def is_valid(pattern: str) -> bool:
    """Whether a pattern can be matched; `check_parameters` reports the others."""
    return _checked(pattern, "", Findings()) is not None


def widened(pattern: str) -> str:
    """Return a pattern whose `*` matches any text, dots included, as for parameters in earlier versions."""
    return pattern if "**" in pattern or pattern.startswith(_REGEX) else pattern.replace("*", "**")


def names_in(value: Any, key: str, found: Findings, what: str = "module") -> List[str]:
    """Return the value of a key that takes one name or several, as a list."""
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
    """Return a mapping by module name, joining names that the command line split at dots (``blocks.h.3.ipu=1``)."""
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
    """Report a name that nothing matches, or that is only the end of several names."""
    names = [module for module in known if module]
    ends = [module for module in names if module.endswith("." + _dotted(name))]
    if len(ends) > 1:
        found.problem(
            f"`{key}` names `{name}`, which could be any of {len(ends)} {what}s",
            known=listing(ends),
            fix=f"the full name, such as `{ends[0]}`, or the pattern `**.{_dotted(name)}` for all of them",
            key=key,
        )
        return
    close = ends or nearest(name, names) or _siblings(_dotted(name), names)
    top = [module for module in names if "." not in module]
    found.problem(
        f"`{key}` names `{name}`, but {owner} no such {what}",
        known=listing(close or top or names),
        fix=f"`{_with_wildcards(name, close[0])}` instead of `{name}`" if close else "one of the names above",
        key=key,
    )


def _with_wildcards(pattern: str, name: str) -> str:
    """Return a name with the wildcards of a pattern: ``h.*.attn`` for ``h.*.atn`` and ``h.2.attn``."""
    parts, exact = _dotted(pattern).split("."), name.split(".")
    if pattern.startswith(_REGEX) or len(parts) != len(exact):
        return name
    return ".".join(part if is_pattern(part) else text for part, text in zip(parts, exact))


def _siblings(name: str, names: Sequence[str]) -> List[str]:
    """Return the modules in the innermost existing parent of a dotted name."""
    while "." in name:
        name = name.rpartition(".")[0]
        inside = [module for module in names if module.rpartition(".")[0] == name]
        if inside:
            return inside
    return []


def _dotted(name: str) -> str:
    return name.replace("/", ".").strip(".")


def _checked(pattern: str, key: str, found: Findings) -> Optional[Pattern[str]]:
    """Return the expression of a pattern; None, and a problem, where it cannot be compiled."""
    try:
        return _compiled(pattern)
    except re.error as error:
        found.problem(
            f"`{key}`: `{pattern}` is not a regular expression",
            seen=str(error),
            fix="see Python's `re`, or leave out `re:` for a pattern such as layers.*.attn",
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
