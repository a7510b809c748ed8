"""Screens: where the console writes. A terminal redraws lines, a stream only appends them.

All screens have the same methods, so a log file gets the same text as a terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass
from typing import IO, Callable, List, Mapping, Optional, Sequence, Tuple

from ipurun.errors import visible
from ipurun.log.format import count
from ipurun.log.style import aligned, fitted_table, is_drawn_on
from ipurun.training.events import EvalEnd, EvalProgress, StepEnd

__all__ = [
    "PlainScreen",
    "Rows",
    "Screen",
    "SilentScreen",
    "TrainingState",
    "error_screen",
    "fit",
    "make_screen",
    "narrowed",
    "show_progress",
    "wrapped",
]

Rows = Sequence[Tuple[str, str]]  # label and text; an empty label continues the row above

_PLAIN_WIDTH = 110
_LABEL_WIDTH = 12
_PROBLEM_INDENT = 9  # of the lines of a problem that follow a label


@dataclass
class TrainingState:
    """State of a live view of training: the latest events, stored by the console and read by the view.

    Args:
        step: The latest host call.
        evaluation: The latest evaluation.
        evaluating: How far the evaluation under way is.
        best: The best evaluation by the monitored metric.
        saved_step: Weight updates in the newest checkpoint.
        save_intervals: Weight updates between checkpoints: by steps, by epochs.
        message: What an interrupt has to say.
    """

    step: Optional[StepEnd] = None
    evaluation: Optional[EvalEnd] = None
    evaluating: Optional[EvalProgress] = None
    best: Optional[EvalEnd] = None
    saved_step: Optional[int] = None
    save_intervals: Sequence[int] = ()
    message: str = ""

    def announce(self, text: str) -> None:
        """Store the message of an interrupt; called by a signal handler."""
        self.message = text.strip()

    @property
    def next_save(self) -> Optional[int]:
        """The step of the next checkpoint, None where that is not known."""
        if self.step is None or not self.save_intervals:
            return None
        coming = min((self.step.step // interval + 1) * interval for interval in self.save_intervals)
        return coming if self.step.total_steps is None else min(coming, self.step.total_steps)


class SilentScreen:
    """Shows nothing; also the interface of all screens."""

    draws_over = False  # whether it moves the cursor, so that nothing else may write to the terminal

    def panel(self, title: str, rows: Rows) -> None:
        """Show a block of labelled rows."""

    def line(self, text: str, style: str = "", to_copy: bool = False) -> None:
        """Show a line that stays; a terminal shows it in a style of rich, such as ``red``.

        Args:
            text: The line, or several.
            style: The style.
            to_copy: Whether it is a command: copied from a terminal, it must not contain line breaks.
        """

    def remark(self, text: str) -> None:
        """Show a note or a warning, also from a point of a sweep."""
        self.line(text)

    def notes(self, notes: Sequence[str]) -> None:
        """Show the notes of a plan together."""
        for note in notes:
            self.remark(f"note: {note}")

    def result(self, text: str, is_best: bool = False) -> None:
        """Show a line with the result of an evaluation."""
        self.line(text)

    def begin(self, title: str) -> None:
        """Begin a long task, such as a compilation: show a bar with the elapsed time."""

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        """Show what the long task is doing, and the fraction done if known."""

    def end(self, text: str) -> None:
        """End the long task: replace the bar by a line that stays."""

    def follow(self, state: TrainingState) -> bool:
        """Show the state of a run several times a second; return False if this screen shows `live` lines instead."""
        return False

    def wants_live(self, fraction: Optional[float] = None) -> bool:
        """Return whether it would show a live line now: most of many short steps are not worth composing one."""
        return False

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        """Replace the live line; most important parts first."""

    def live_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Replace the live line by a table, and a note below it, where lines can be replaced."""

    def table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        styles: Optional[Mapping[int, Callable[[str], str]]] = None,
        numeric: Sequence[int] = (),
        droppable: Sequence[int] = (),
    ) -> None:
        """Show a table that stays; see `ipurun.log.style.print_table`."""

    def wants_waiting(self) -> bool:
        """Return whether it would show how far a long wait is now."""
        return False

    def waiting(self, text: str, fraction: Optional[float] = None) -> None:
        """Show how far a long wait is, such as an evaluation, with a bar; the next live line takes its place."""

    def close(self) -> None:
        """Restore the terminal; safe to call twice."""


Screen = SilentScreen


class PlainScreen(Screen):
    """Lines on a stream that is not a terminal, or in a log file.

    Args:
        stream: The stream.
        interval_seconds: Live lines within this time are left out, unless another tenth is done.
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
        for text in panel_lines(rows, self._width() - 2):
            self.line("  " + text)

    def _width(self) -> int:
        """Return the columns of a terminal that cannot be redrawn, at most those of any other stream."""
        if not self._stream.isatty():
            return _PLAIN_WIDTH + 2
        return min(_PLAIN_WIDTH + 2, shutil.get_terminal_size().columns)

    def result(self, text: str, is_best: bool = False) -> None:
        self.line(narrowed(text, self._width()) if self._stream.isatty() else text)

    def table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        styles: Optional[Mapping[int, Callable[[str], str]]] = None,
        numeric: Sequence[int] = (),
        droppable: Sequence[int] = (),
    ) -> None:
        is_narrow = self._stream.isatty()
        shown = fitted_table(header, rows, numeric, droppable, self._width()) if is_narrow else aligned(header, rows)
        for text in shown:
            self.line(text, to_copy=True)

    def line(self, text: str, style: str = "", to_copy: bool = False) -> None:
        if self._stream.isatty() and not to_copy:
            text = wrapped(text, self._width())
        try:
            self._stream.write(visible(text).rstrip() + "\n")
            self._stream.flush()
        except BrokenPipeError:
            # The reader (`| head`) is gone. A long run continues without it; its log has every line.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def begin(self, title: str) -> None:
        self._phase = ""
        self.line(f"{title} ...")

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        # A stream cannot replace a line: write only what has changed.
        if text != self._phase:
            self._phase = text
            self.line(f"  {text}")

    def end(self, text: str) -> None:
        self.line(text)

    def wants_live(self, fraction: Optional[float] = None) -> bool:
        due = self._last_live is None or self._clock() - self._last_live >= self._interval_seconds
        return due or _tenth(fraction) > self._last_tenth

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        if self.wants_live(fraction):
            self._last_live, self._last_tenth = self._clock(), _tenth(fraction)
            self.line(fit(parts, self._width()) if self._stream.isatty() else "  ".join(parts))

    def wants_waiting(self) -> bool:
        if self._last_live is None:
            self._last_live = self._clock()  # a short wait needs no line
        return self._clock() - self._last_live >= self._interval_seconds

    def waiting(self, text: str, fraction: Optional[float] = None) -> None:
        self._last_live = self._clock()
        self.line(f"  {text}")


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many parts as fit in one line, most important first: the first part, the ETA, then the others."""
    chosen: List[int] = []
    for place in sorted(range(len(parts)), key=lambda place: place > 0 and not parts[place].startswith("ETA ")):
        if sum(len(parts[each]) + 2 for each in [*chosen, place]) - 2 <= width:
            chosen.append(place)
    return "  ".join(parts[place] for place in sorted(chosen))


def wrapped(text: str, width: int) -> str:
    """Return lines as they are, but those that are too long broken between words, with a hanging indent."""
    lines = []
    for line in text.split("\n"):
        leading = len(line) - len(line.lstrip(" "))
        is_problem = leading >= _PROBLEM_INDENT or re.match(r"  (at|seen|known|try|log) ", line)
        indent = " " * (_PROBLEM_INDENT if is_problem else leading + 2)
        broken = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
        )
        lines += broken if len(line) > width else [line]
    return "\n".join(lines)


def narrowed(text: str, width: int) -> str:
    """Return the line of an evaluation without what a narrow terminal leaves out: samples and time, then the epoch.

    What is still too long is broken between its fields, and what follows is indented.
    """
    for pattern in (r"  \[[^\]]*\]$", r"  epoch [\d.]+"):
        if len(text) > width:
            text = re.sub(pattern, "", text)
    lines = [""]
    for field in text.split("  "):
        longer = f"{lines[-1]}  {field}" if lines[-1] else field
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(f"  {field}")
    return "\n".join(lines)


def _tenth(fraction: Optional[float]) -> int:
    return -1 if fraction is None else int(fraction * 10 + 1e-9)


def make_screen(stream: IO[str], quiet: bool = False) -> Screen:
    """Return the screen for a stream: redrawn on a terminal, plain lines elsewhere, silent if quiet."""
    if quiet:
        return SilentScreen()
    if is_drawn_on(stream):
        from ipurun.log.terminal import TerminalScreen

        return TerminalScreen(stream)
    return PlainScreen(stream)


def error_screen(screen: Screen) -> Screen:
    """Return where errors go during a task that a screen shows: to standard error.

    On the terminal whose lines the screen replaces, only the screen itself can add lines that stay.
    """
    return screen if screen.draws_over and sys.stderr.isatty() else make_screen(sys.stderr)


def show_progress(screen: Screen, doing: str, done: int, total: Optional[int], unit: str) -> None:
    """Show how far a long task is: ``predicting 480/1,000 samples``; a counter where the total is unknown."""
    fraction = done / total if total else None
    if screen.wants_live(fraction):
        of_all = f"/{count(total)}" if total else ""
        screen.live([f"{doing} {count(done)}{of_all} {unit}{'' if (total or done) == 1 else 's'}"], fraction)


def panel_lines(rows: Rows, width: int) -> List[str]:
    """Return rows as aligned, wrapped lines."""
    lines: List[str] = []
    for label, text in rows:
        wrapped = textwrap.wrap(
            text, max(20, width - _LABEL_WIDTH), break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(f"{label:<{_LABEL_WIDTH}}{wrapped[0]}")
        lines += [" " * _LABEL_WIDTH + rest for rest in wrapped[1:]]
    return lines
