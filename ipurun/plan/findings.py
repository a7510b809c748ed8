"""What planning finds on its way: problems that stop it in the end, notes that the user should read."""

from __future__ import annotations

from typing import Iterable, List

from ipurun.errors import Problem

__all__ = ["Findings"]


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
        """Record a decision that the user should know of."""
        self._notes.append(text)

    @property
    def notes(self) -> List[str]:
        """The notes in order, each once."""
        return list(dict.fromkeys(self._notes))
