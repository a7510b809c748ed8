"""A screen over a pipe or a file: the process of a point sends its output, the sweep shows it."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List, Optional, Sequence, Set

from ipurun.log.format import duration
from ipurun.log.screen import Rows, Screen

__all__ = ["RemoteScreen", "ScreenReceiver", "TableReceiver", "read_message"]

_LIVE_SECONDS = 0.25  # between live lines of a point
_FIRST = {"ETA": 0, "loss": 1}  # of the values of a point, where not all fit in a row
_PLAIN_SECONDS = 10.0  # the same where lines cannot be replaced


class RemoteScreen(Screen):
    """Sends each call as one line of JSON.

    Args:
        descriptor: The writing end of the pipe, or a file. If the sweep is gone, writing to a pipe raises
            BrokenPipeError, which ends the point, so that it does not keep a device.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last_live = 0.0

    def _send(self, method: str, **arguments: Any) -> None:
        os.write(self._descriptor, (json.dumps({"do": method, **arguments}) + "\n").encode())

    def line(self, text: str, style: str = "", to_copy: bool = False) -> None:
        """Show nothing: evaluations and compile times are in each point's log."""

    def remark(self, text: str) -> None:
        self._send("remark", text=text)

    def begin(self, title: str) -> None:
        self._send("begin", title=title)

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        self._send("phase", text=text, fraction=fraction)

    def end(self, text: str) -> None:
        self._send("end", text=text)

    def wants_live(self, fraction: Optional[float] = None) -> bool:
        is_last = fraction is not None and fraction >= 1
        return is_last or time.monotonic() - self._last_live >= _LIVE_SECONDS

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        self._last_live = time.monotonic()
        self._send("live", parts=list(parts), fraction=fraction)

    def wants_waiting(self) -> bool:
        return self.wants_live()

    def waiting(self, text: str, fraction: Optional[float] = None) -> None:
        self._last_live = time.monotonic()
        self._send("waiting", text=text, fraction=fraction)

    def panel(self, title: str, rows: Rows) -> None:
        """Show nothing: the sweep has a line for each point, and the run folder has the rest."""


def read_message(line: str) -> Optional[Dict[str, Any]]:
    """Return the call that a line describes, with its name under ``do``; None for a line that is not a message."""
    try:
        call = json.loads(line)
    except ValueError:
        return None
    return call if isinstance(call, dict) and "do" in call else None


class ScreenReceiver:
    """Shows one point at a time on another screen, as if it ran there.

    Args:
        screen: The screen.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._remarks: Set[str] = set()

    def begin(self, label: str) -> None:
        """Begin a point."""
        self._screen.begin(f"{label} starting")

    def end(self, label: str) -> None:
        """End a point."""
        self._screen.close()

    def refresh(self, counts: str) -> None:
        """Show how many points are done."""

    def show(self, message: str, label: str) -> None:
        """Show one message with its point in front; ignore lines that are not messages."""
        call = read_message(message)
        if call is None:
            return
        if call["do"] == "remark":
            # Points share most of their config and so most remarks: each is shown once.
            if call["text"] not in self._remarks:
                self._remarks.add(call["text"])
                kind, colon, rest = call["text"].partition(": ")
                is_wrapped = self._screen.draws_over and colon and kind in ("note", "warning")
                self._screen.remark(f"{kind}: {label}: {rest}" if is_wrapped else f"{label} {call['text']}")
            return
        self._show(call, label)

    def _show(self, call: Dict[str, Any], label: str) -> None:
        method = call["do"]
        if method == "live":
            self._screen.live([label, *call["parts"]], call["fraction"])
        elif method == "waiting" and self._screen.wants_waiting():
            self._screen.waiting(f"{label} {call['text']}", call["fraction"])
        elif method == "begin":
            self._screen.begin(f"{label} {call['title']}")
        elif method == "phase":
            self._screen.phase(call["text"], call["fraction"])


class TableReceiver(ScreenReceiver):
    """Shows points that run at the same time: one table with a row for each, or lines where lines cannot be replaced.

    Args:
        screen: The screen.
    """

    def __init__(self, screen: Screen) -> None:
        super().__init__(screen)
        self._rows: Dict[str, List[str]] = {}
        self._done: Dict[str, str] = {}
        self._begun: Dict[str, float] = {}
        self._last_line: Dict[str, float] = {}
        self._counts = ""

    def begin(self, label: str) -> None:
        self._begun[label] = self._last_line[label] = time.monotonic()
        self._rows[label], self._done[label] = ["starting"], ""
        self._screen.line(f"{label} starting ...") if not self._screen.draws_over else self._draw()

    def end(self, label: str) -> None:
        self._rows.pop(label, None)
        if self._rows:
            self._draw()
        else:
            self._screen.close()

    def refresh(self, counts: str) -> None:
        self._counts = counts
        if self._rows:
            self._draw()

    def _show(self, call: Dict[str, Any], label: str) -> None:
        method = call["do"]
        if method == "live":
            self._rows[label] = sorted(call["parts"], key=lambda part: _FIRST.get(part.split(" ")[0], 2))
            self._done[label] = "" if call["fraction"] is None else f"{call['fraction']:.0%}"
        elif method == "begin":
            self._rows[label] = [call["title"]]
        elif method in ("phase", "waiting") and call["text"]:
            self._rows[label] = [call["text"]]
        else:
            return
        now = time.monotonic()
        if not self._screen.draws_over and now - self._last_line[label] >= _PLAIN_SECONDS:
            self._last_line[label] = now
            self._screen.line("  ".join([label, *self._rows[label]]))
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        rows = [
            [label, duration(now - self._begun[label]), self._done[label], "  ".join(parts)]
            for label, parts in self._rows.items()
        ]
        self._screen.live_table(("point", "time", "done", ""), rows, self._counts)
