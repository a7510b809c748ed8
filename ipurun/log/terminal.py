"""The screen of a terminal: a framed panel, a bar while compiling, a live line while training."""

from __future__ import annotations

import time
from typing import IO, List, Optional, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ipurun.log.screen import Rows, Screen

__all__ = ["TerminalScreen", "fit"]

_SEPARATOR = "  "
_LIVE_PER_SECOND = 8
_BAR_WIDTH = 24


class TerminalScreen(Screen):
    """Draws on a terminal with rich, which respects NO_COLOR.

    Args:
        stream: The terminal.
    """

    draws_over = True

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=False)
        self._live: Optional[Live] = None
        self._last_live = 0.0
        self._progress: Optional[Progress] = None

    def panel(self, title: str, rows: Rows) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows:
            table.add_row(Text(label), Text(text))
        self.close()
        self._console.print(Panel(table, title=f"[bold]{escape(title)}[/bold]", title_align="left", border_style="dim"))

    def line(self, text: str, style: str = "") -> None:
        # Live keeps its line at the bottom and lets this one scroll above it. The terminal wraps long lines: a command
        # copied from here must not contain line breaks.
        self._console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, title: str) -> None:
        self.close()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[phase]}"),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        self._progress.add_task(escape(title), total=None, phase="")

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        if self._progress is None:
            return
        task = self._progress.tasks[0].id
        if fraction is None:
            self._progress.update(task, phase=escape(text))
        else:
            self._progress.update(task, phase=escape(text), total=1.0, completed=fraction)

    def end(self, text: str) -> None:
        self.close()
        self.line(text)

    def wants_live(self, fraction: Optional[float] = None) -> bool:
        is_last = fraction is not None and fraction >= 1
        return self._live is None or is_last or time.monotonic() - self._last_live >= 1 / _LIVE_PER_SECOND

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        self._last_live = time.monotonic()
        self._draw(Text(fit(parts, self._console.width), no_wrap=True, overflow="ellipsis"))

    def live_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        if time.monotonic() - self._last_live < 1 / _LIVE_PER_SECOND and self._live is not None:
            return
        self._last_live = time.monotonic()
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for place, name in enumerate(header):
            last = place == len(header) - 1
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if last else None)
        most = max(1, self._console.height - 4)  # what does not fit on the screen would scroll it at every refresh
        for row in rows[:most]:
            table.add_row(*map(Text, row))
        more = f"and {len(rows) - most} more; " if len(rows) > most else ""
        self._draw(Group(table, Text(more + note, style="dim")))

    def _draw(self, shown: RenderableType) -> None:
        if self._live is None:
            self.close()
            self._live = Live(shown, console=self._console, refresh_per_second=_LIVE_PER_SECOND, transient=True)
            self._live.start()
        else:
            self._live.update(shown)

    def wants_waiting(self) -> bool:
        return time.monotonic() - self._last_live >= 1 / _LIVE_PER_SECOND

    def waiting(self, text: str, fraction: Optional[float] = None) -> None:
        if fraction is not None:
            done = round(fraction * _BAR_WIDTH)
            text = f"[{'=' * done}{' ' * (_BAR_WIDTH - done)}] {text}"
        self.live([text])

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._live is not None:
            self._live.stop()
            self._live = None


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many parts as fit in one line, most important first."""
    chosen: List[str] = []
    for part in parts:
        if len(_SEPARATOR.join(chosen + [part])) <= width:
            chosen.append(part)
    return _SEPARATOR.join(chosen)
