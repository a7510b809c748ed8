"""A screen at the far end of a pipe: a point's process writes what it would show, the sweep shows it."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Optional, Sequence, Set

from ipurun.log.screen import Rows, Screen

__all__ = ["RemoteScreen", "Replay"]


class RemoteScreen(Screen):
    """Writes each call as one JSON line.

    Args:
        descriptor: The writing end of the pipe. A sweep that is gone closes the other end: writing then raises
            BrokenPipeError, which ends the point, so no orphan keeps a device.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def _send(self, method: str, **arguments: Any) -> None:
        os.write(self._descriptor, (json.dumps({"do": method, **arguments}) + "\n").encode())

    def line(self, text: str) -> None:
        """Left out: evaluations and compile times are in each point's log."""

    def remark(self, text: str) -> None:
        self._send("remark", text=text)

    def begin(self, title: str) -> None:
        self._send("begin", title=title)

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        self._send("phase", text=text, fraction=fraction)

    def end(self, text: str) -> None:
        self._send("end", text=text)

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        self._send("live", parts=list(parts), fraction=fraction)

    def panel(self, title: str, rows: Rows) -> None:
        """Left out: the sweep has a line for each point, and the run folder has the rest."""


class Replay:
    """Performs the lines of `RemoteScreen`s on another screen.

    Args:
        screen: Where they are shown.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._remarks: Set[str] = set()

    def perform(self, message: str, prefix: str) -> None:
        """Shows one message with its point in front; a line that is no message is passed over."""
        try:
            call: Dict[str, Any] = json.loads(message)
            method = call.pop("do")
        except (ValueError, KeyError, AttributeError, TypeError):
            return
        if method == "live":
            self._screen.live([prefix, *call["parts"]], call["fraction"])
        elif method == "begin":
            self._screen.begin(f"{prefix} {call['title']}")
        elif method == "phase":
            self._screen.phase(call["text"], call["fraction"])
        elif method == "remark":
            self._remark(call["text"], prefix)

    def _remark(self, text: str, prefix: str) -> None:
        # Points share most of their config and so most remarks: each is shown once.
        if text not in self._remarks:
            self._remarks.add(text)
            self._screen.line(f"{prefix} {text}")
