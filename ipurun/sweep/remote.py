"""A screen over a pipe: the process of a point sends its output, the sweep shows it."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, Optional, Sequence, Set

from ipurun.log.screen import Rows, Screen

__all__ = ["RemoteScreen", "ScreenReceiver"]


class RemoteScreen(Screen):
    """Sends each call as one line of JSON.

    Args:
        descriptor: The writing end of the pipe. If the sweep is gone, writing raises BrokenPipeError, which ends the
            point, so that it does not keep a device.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def _send(self, method: str, **arguments: Any) -> None:
        os.write(self._descriptor, (json.dumps({"do": method, **arguments}) + "\n").encode())

    def line(self, text: str, style: str = "") -> None:
        """Show nothing: evaluations and compile times are in each point's log."""

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
        """Show nothing: the sweep has a line for each point, and the run folder has the rest."""


class ScreenReceiver:
    """Shows the messages of `RemoteScreen`s on another screen.

    Args:
        screen: The screen.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._remarks: Set[str] = set()

    def show(self, message: str, prefix: str) -> None:
        """Show one message with its point in front; ignore lines that are not messages."""
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
        elif method == "remark" and call["text"] not in self._remarks:
            # Points share most of their config and so most remarks: each is shown once.
            self._remarks.add(call["text"])
            self._screen.line(f"{prefix} {call['text']}")
