"""Problems as users read them, the exceptions that carry them, and exit codes."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from typing import Iterable, Iterator, List, Optional, Set, Tuple, Union

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "ConfigError",
    "Findings",
    "Interrupted",
    "IpurunError",
    "Problem",
    "RunError",
    "error_chain",
    "in_short",
    "listing",
    "nearest",
    "underlying_os_error",
    "visible",
]

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
_WIDEST, _NARROWEST = 110, 36


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in the order a reader needs it.

    Args:
        what: What is wrong, without a full stop, keys in backticks.
        where: The source: ``command line: device=8`` or ``conf/recipe/mine.yaml:12``.
        seen: The value or state that was found.
        known: The alternatives: existing names, allowed values.
        fix: What to do, preferably something to type.
        key: The config key, to fill in `where` and to leave out later problems of the same key.
    """

    what: str
    where: str = ""
    seen: str = ""
    known: str = ""
    fix: str = ""
    key: str = ""

    def __str__(self) -> str:
        labelled = (("at", self.where), ("seen", self.seen), ("known", self.known), ("try", self.fix))
        lines = [_heading(f"error: {self.what}")]
        lines += [_field(label, text) for label, text in labelled if text]
        return visible("\n".join(lines))

    def to_dict(self) -> dict:
        """Return the problem as JSON-ready data without empty fields."""
        return {name: text for name, text in vars(self).items() if text}


def visible(text: str) -> str:
    """Return a text that cannot change a terminal or a page, with control characters as their hexadecimal codes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def _heading(text: str) -> str:
    """Return the first line of a problem; narrow terminals would break it inside words, files and pipes do not."""
    columns = _columns()
    if columns >= _WIDEST or "\n" in text or not sys.stderr.isatty():
        return text
    return "\n".join(textwrap.wrap(text, max(_NARROWEST, columns), subsequent_indent="  ", break_on_hyphens=False))


def _columns() -> int:
    """Return the columns of the terminal that shows errors, also where standard output is a pipe."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if not os.environ.get("COLUMNS") and sys.stderr.isatty():
            return os.get_terminal_size(sys.stderr.fileno()).columns or _WIDEST
    return shutil.get_terminal_size((_WIDEST, 24)).columns


def _field(label: str, text: str) -> str:
    indent = " " * 9
    columns = _columns()
    width = max(_NARROWEST, min(_WIDEST, columns)) - len(indent)
    wrapped = []
    for line in text.splitlines():
        wrapped += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return f"  {label:<7}" + ("\n" + indent).join(wrapped)


class IpurunError(Exception):
    """One or more problems that the user has to solve.

    Args:
        problems: A problem, several of them, or the `what` of one problem with the other arguments as its fields.
        where: As in `Problem`, like the remaining arguments.
    """

    exit_code = EXIT_FAILED

    def __init__(
        self,
        problems: Union[str, Problem, Iterable[Problem]],
        where: str = "",
        seen: str = "",
        known: str = "",
        fix: str = "",
        key: str = "",
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, where, seen, known, fix, key)
        self.problems: Tuple[Problem, ...] = ()
        super().__init__()
        self.set_problems([problems] if isinstance(problems, Problem) else problems)

    def set_problems(self, problems: Iterable[Problem]) -> None:
        """Take other problems in place of those it has, such as more complete ones."""
        self.problems = tuple(dict.fromkeys(problems))
        self.args = ("\n\n".join(map(str, self.problems)),)


class ConfigError(IpurunError, ValueError):
    """The config is wrong: nothing was run and nothing was written."""

    exit_code = EXIT_CONFIG


class RunError(IpurunError, RuntimeError):
    """The config was fine, but the run failed."""


class Interrupted(KeyboardInterrupt):
    """A run was stopped at once.

    Args:
        exit_code: The `interrupt_exit_code` of its config.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


def in_short(error: BaseException) -> str:
    """Return what an error says, in one line for those of ipurun."""
    if isinstance(error, IpurunError) and error.problems:
        return error.problems[0].what
    text = str(error).strip()
    if isinstance(error, KeyboardInterrupt) and not text:
        return "stopped by a signal before it could save"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def underlying_os_error(error: BaseException) -> BaseException:
    """Return the OSError that caused an error, such as a full disk, or the error itself."""
    return next((cause for cause in error_chain(error) if isinstance(cause, OSError)), error)


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it came from, each once: a chain in which causes and contexts alternate can be a loop."""
    seen: Set[int] = set()
    found: Optional[BaseException] = error
    while found is not None and id(found) not in seen:
        yield found
        seen.add(id(found))
        found = found.__cause__ or found.__context__


class Findings:
    """Collects problems and notes, so that all problems of a config are reported together."""

    def __init__(self, notes: Iterable[str] = ()) -> None:
        self.problems: List[Problem] = []
        self._notes: List[str] = list(notes)

    def problem(
        self, what: str, seen: str = "", known: str = "", fix: str = "", where: str = "", key: str = ""
    ) -> None:
        """Record something that must be changed before the run can start."""
        self.problems.append(Problem(what, where, seen, known, fix, key))

    def note(self, text: str) -> None:
        """Record a decision that the user should know about."""
        self._notes.append(text)

    @property
    def notes(self) -> List[str]:
        """The notes in order, each once."""
        return list(dict.fromkeys(self._notes))


def nearest(word: str, known: Iterable[str], most: int = 3) -> List[str]:
    """Return the known names closest to a word: by spelling, by last part, or as part of a longer name.

    Args:
        word: What was typed.
        known: What exists.
        most: The maximum number of names to return.
    """
    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    found = [by_lower[match] for match in difflib.get_close_matches(word.lower(), by_lower, n=most, cutoff=0.72)]
    last_part = word.lower().rpartition(".")[2]
    same_end = [name for name in names if name.lower().rpartition(".")[2] == last_part]
    by_end = {name.lower().rpartition(".")[2]: name for name in reversed(names)}
    similar_end = [by_end[match] for match in difflib.get_close_matches(last_part, by_end, n=most, cutoff=0.75)]
    inside = [name for name in names if len(last_part) > 3 and last_part in name.lower()]
    return list(dict.fromkeys(found + same_end + similar_end + inside))[:most]


def listing(names: Iterable[str], most: int = 12) -> str:
    """Join names in one line, cut off where there are too many to read."""
    ordered = list(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
