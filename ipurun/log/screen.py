"""Where lines go: a terminal that is drawn over, or a stream that only grows.

A screen knows nothing of runs; `ipurun.log.console` decides what is said. All screens have the same methods, so a log
file gets the words that a terminal gets.
"""

from __future__ import annotations

import os
import textwrap
import time
from typing import IO, Callable, List, Optional, Sequence, Tuple

__all__ = ["PlainScreen", "Rows", "Screen", "SilentScreen", "make_screen"]

Rows = Sequence[Tuple[str, str]]  # label and text; an empty label continues the row above

_PLAIN_WIDTH = 110
_LABEL_WIDTH = 12


class SilentScreen:
    """Shows nothing; also the list of what a screen can do."""

    draws_over = False  # whether it moves the cursor, so that nothing else may write meanwhile

    def panel(self, title: str, rows: Rows) -> None:
        """A block of labelled rows."""

    def line(self, text: str) -> None:
        """One line that stays."""

    def remark(self, text: str) -> None:
        """A note or a warning, which a sweep shows of its points as well."""
        self.line(text)

    def begin(self, title: str) -> None:
        """Something long begins, such as a compilation: a bar with the time that has passed."""

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        """What the long thing does now, and how far it is where that is known."""

    def end(self, text: str) -> None:
        """The long thing is over; the text stays in place of the bar."""

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        """The one line that is replaced as training goes on; most important parts first."""

    def close(self) -> None:
        """Leaves the terminal as a shell expects it; safe to call twice."""


Screen = SilentScreen


class PlainScreen(Screen):
    """Lines on a stream that is not a terminal, or in a log file.

    Args:
        stream: Where they go.
        interval_seconds: Live lines closer together than this are left out, unless a further tenth is done.
        clock: Time source, replaceable in tests.
    """

    def __init__(
        self,
        stream: IO[str],
        interval_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._last_live: Optional[float] = None
        self._last_tenth = -1
        self._phase = ""

    def panel(self, title: str, rows: Rows) -> None:
        self.line(title)
        for text in panel_lines(rows, _PLAIN_WIDTH):
            self.line("  " + text)

    def line(self, text: str) -> None:
        try:
            self._stream.write(text.rstrip() + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # The reader (`| head`) went away. A run of hours goes on without it; its log has every line.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def begin(self, title: str) -> None:
        self._phase = ""
        self.line(f"{title} ...")

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        # A stream cannot take a line back: only what is new is worth one.
        if text != self._phase:
            self._phase = text
            self.line(f"  {text}")

    def end(self, text: str) -> None:
        self.line(text)

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        now = self._clock()
        tenth = -1 if fraction is None else int(fraction * 10 + 1e-9)
        due = self._last_live is None or now - self._last_live >= self._interval_seconds
        if due or tenth > self._last_tenth:
            self._last_live, self._last_tenth = now, tenth
            self.line("  ".join(parts))


def make_screen(stream: IO[str], quiet: bool = False) -> Screen:
    """The screen that suits a stream: drawn over on a terminal, plain lines elsewhere, none when quiet."""
    if quiet:
        return SilentScreen()
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from ipurun.log.terminal import TerminalScreen

        return TerminalScreen(stream)
    return PlainScreen(stream)


def panel_lines(rows: Rows, width: int) -> List[str]:
    """Rows as aligned, wrapped lines."""
    lines: List[str] = []
    for label, text in rows:
        wrapped = textwrap.wrap(
            text, max(20, width - _LABEL_WIDTH), break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(f"{label:<{_LABEL_WIDTH}}{wrapped[0]}")
        lines += [" " * _LABEL_WIDTH + rest for rest in wrapped[1:]]
    return lines
