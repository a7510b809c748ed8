"""Write spans in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

__all__ = ["Span", "Trace"]


@dataclass(frozen=True)
class Span:
    """Something that takes time, in seconds on one clock.

    Args:
        name: Its name, which decides its colour in viewers.
        begin: When it begins.
        seconds: How long it lasts.
        kind: Its category, which viewers search and filter by.
        details: Shown when it is selected.
    """

    name: str
    begin: float
    seconds: float
    kind: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Trace:
    """Spans in rows, and rows in groups.

    Args:
        about: Facts about the whole trace, as text.
    """

    def __init__(self, about: Mapping[str, str]) -> None:
        self._about = dict(about)
        self._groups: Dict[str, int] = {}
        self._rows: Dict[Tuple[str, str], int] = {}
        self._spans: List[Tuple[Tuple[str, str], Span]] = []

    def row(self, group: str, name: str) -> Tuple[str, str]:
        """Return a row of a group; groups and rows are shown in the order in which they were first asked for."""
        self._groups.setdefault(group, len(self._groups) + 1)
        self._rows.setdefault((group, name), len(self._rows) + 1)
        return group, name

    def add(self, row: Tuple[str, str], span: Span) -> None:
        """Add a span; spans of a row must be nested or follow each other."""
        self._spans.append((self.row(*row), span))

    def write(self, path: Path) -> None:
        """Write the file."""
        events = list(self._names()) + list(self._events())
        document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": self._about}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")

    def _names(self) -> Iterator[Dict[str, Any]]:
        for group, number in self._groups.items():
            yield _metadata("process_name", number, 0, name=group)
            yield _metadata("process_sort_index", number, 0, sort_index=number)
        for (group, row), number in self._rows.items():
            yield _metadata("thread_name", self._groups[group], number, name=row)
            yield _metadata("thread_sort_index", self._groups[group], number, sort_index=number)

    def _events(self) -> Iterator[Dict[str, Any]]:
        start = min((span.begin for _, span in self._spans), default=0.0)
        ordered = sorted(self._spans, key=lambda item: (item[1].begin, -item[1].seconds))
        for (group, row), span in ordered:
            # Both ends are rounded to a nanosecond, so that spans that touch still do.
            begin = round((span.begin - start) * 1e9)
            end = round((span.begin + span.seconds - start) * 1e9)
            event = {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "pid": self._groups[group],
                "tid": self._rows[group, row],
            }
            if span.details:
                event["args"] = dict(span.details)
            yield event


def _metadata(kind: str, group: int, row: int, **args: Any) -> Dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": group, "tid": row, "args": args}
