"""The screen of a terminal: framed panels, bars for long tasks, and a live view of training."""

from __future__ import annotations

import re
import threading
import time
from typing import IO, Any, Callable, List, Mapping, Optional, Sequence, Tuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text as RichText

from ipurun.errors import visible
from ipurun.log.format import count, duration, learning_rate, metric, rate
from ipurun.log.screen import Rows, Screen, TrainingState, fit, narrowed, wrapped
from ipurun.log.style import STYLES, block_bar, draws_blocks, folded, paint_problem, rich_table, sparkline
from ipurun.training.events import EvalEnd, StepEnd

__all__ = ["TerminalScreen", "TrainingView"]

_SEPARATOR = "  "
_LIVE_PER_SECOND = 5
_BAR_WIDTH = 24
_SHORTEST_BAR = 6
_MARGIN = 4  # columns that stay free in live lines: a terminal echoes ^C there, and must not wrap
_LONGEST_HISTORY = 240  # losses; neighbours are merged beyond that
_SMOOTHING = 0.8  # share of the old value in a smoothed one, for each host call since the last redraw
_LEAST_SMOOTHING = 0.2  # the same after many host calls: a fast run is not shown with the loss of long ago
_NARROW = 60
_WIDEST_PANEL = 120  # columns; a frame around empty space is harder to read
_FRAME = 6  # columns of a panel that hold neither label nor text

Field = Tuple[str, str]  # text and what it means, a key of STYLES or ""


class Text(RichText):
    """Text from configs, data and files, which must not change the terminal: rich lets escape sequences through."""

    def __init__(self, text: str = "", style: str = "", **options: Any) -> None:
        super().__init__(visible(text), style, **options)


class _Console(Console):
    """A console on which one thread at a time writes.

    rich finds out where its live lines are before it draws over them, and another thread may have moved them meanwhile:
    the one that redraws them. Parts of old lines would stay on the screen.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.writing = threading.RLock()
        super().__init__(file=stream, highlight=False, soft_wrap=False)

    def __enter__(self) -> _Console:
        self.writing.acquire()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        try:
            super().__exit__(*details)
        finally:
            self.writing.release()


class TerminalScreen(Screen):
    """Draws on a terminal with rich, which respects NO_COLOR.

    Args:
        stream: The terminal.
    """

    draws_over = True

    def __init__(self, stream: IO[str]) -> None:
        self._console = _Console(stream)
        self._blocks = draws_blocks(stream)
        self._live: Optional[Live] = None
        self._last_live = 0.0
        self._progress: Optional[Progress] = None
        self._view: Optional[TrainingView] = None
        self._is_following = False

    def panel(self, title: str, rows: Rows) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style=STYLES["label"], no_wrap=True)
        table.add_column(overflow="fold")
        width = min(self._console.width, _WIDEST_PANEL)
        inside = max(10, width - max((len(label) for label, _ in rows), default=0) - _FRAME)
        for label, text in rows:
            shown = "\n".join(folded(visible(text), inside))
            table.add_row(Text(label), Text(shown, style=STYLES["best"] if label == "best" else ""))
        self.close()
        self._to_line_start()
        name, colon, outcome = title.rpartition(": ")
        heading = Text(f"{name}{colon}", style="bold not dim") + Text(outcome, style=_outcome_style(outcome))
        self._console.print(
            Panel(
                table,
                box.ROUNDED if self._blocks else box.ASCII,
                title=heading,
                title_align="left",
                border_style="dim",
                width=width,
            )
        )

    def line(self, text: str, style: str = "", to_copy: bool = False) -> None:
        # Live keeps its lines at the bottom and lets this one scroll above them.
        self._to_line_start()
        shown = visible(text if to_copy else wrapped(text, self._console.width))
        problem = shown.find("error: ")
        if problem == 0 or (problem > 0 and shown[problem - 1] == "\n"):  # of a point of a sweep
            colours = RichText.from_ansi(paint_problem(shown[problem:]))
            self._console.print(RichText(shown[:problem]) + colours, soft_wrap=True)
        else:
            self._console.print(RichText(shown, style=style), soft_wrap=True)

    def remark(self, text: str) -> None:
        kind, colon, rest = text.partition(": ")
        if not colon or kind not in ("note", "warning"):
            self.line(text)
            return
        style = STYLES["warning" if kind == "warning" else "quiet"]
        table = Table.grid(padding=(0, 1))
        table.add_column(style=style, no_wrap=True)
        table.add_column(style=style if kind == "warning" else "", overflow="fold")
        table.add_row(Text(f"{kind}:"), Text(rest))
        self._to_line_start()
        self._console.print(table)

    def notes(self, notes: Sequence[str]) -> None:
        if not notes:
            return
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, style=STYLES["quiet"])
        table.add_column(overflow="fold", style=STYLES["quiet"])
        for note in notes:
            table.add_row("•" if self._blocks else "-", Text(note))
        self._to_line_start()
        self._console.print(Text("notes", style=STYLES["quiet"]))
        self._console.print(Padding(table, (0, 0, 0, 2)))

    def result(self, text: str, is_best: bool = False) -> None:
        shown = Text(narrowed(text, self._console.width))
        if is_best:
            shown.highlight_regex(r"\(best so far\)", STYLES["best"])
        shown.highlight_regex(r"\[[^\]]*\]$", STYLES["quiet"])
        self._to_line_start()
        self._console.print(shown, soft_wrap=False, overflow="fold")

    def begin(self, title: str) -> None:
        self.close()
        self._to_line_start()
        self._progress = Progress(
            SpinnerColumn("dots" if self._blocks else "line", style=STYLES["label"]),
            TextColumn("[bold]{task.description}"),
            _BlockBar(self._blocks),
            TimeElapsedColumn(),
            TextColumn("{task.fields[phase]}"),
            console=self._console,
            refresh_per_second=_LIVE_PER_SECOND,
            transient=True,
        )
        self._start(self._progress.live)
        self._progress.add_task(escape(visible(title)), total=None, phase="")

    def phase(self, text: str, fraction: Optional[float] = None) -> None:
        if self._progress is None:
            return
        task = self._progress.tasks[0].id
        if fraction is None:
            self._progress.update(task, phase=escape(visible(text)))
        else:
            self._progress.update(task, phase=escape(visible(text)), total=1.0, completed=fraction)

    def end(self, text: str) -> None:
        self.close()
        self._to_line_start()
        self._console.print(Text(text, style=STYLES["quiet"]), overflow="fold")

    def follow(self, state: TrainingState) -> bool:
        if self._view is None or self._view.state is not state:
            self._view = TrainingView(state, self._blocks)
        view = self._view  # after a pause the same one: it has the history of the loss
        self.close()
        self._is_following = True
        self._to_line_start()
        # rich draws in a separate thread: a host call only stores its values, however short it is.
        self._live = Live(
            console=self._console,
            get_renderable=lambda: view.draw(self._console.width),
            refresh_per_second=_LIVE_PER_SECOND,
            transient=True,
        )
        self._start(self._live)
        return True

    def wants_live(self, fraction: Optional[float] = None) -> bool:
        is_last = fraction is not None and fraction >= 1
        return self._live is None or is_last or time.monotonic() - self._last_live >= 1 / _LIVE_PER_SECOND

    def live(self, parts: Sequence[str], fraction: Optional[float] = None) -> None:
        self._last_live = time.monotonic()
        width = self._console.width - _MARGIN
        if fraction is not None and self._console.width >= _NARROW:
            width -= _BAR_WIDTH + 1
        text: RichText = Text(fit(parts, width), no_wrap=True, overflow="ellipsis")
        if fraction is not None and self._console.width >= _NARROW:
            text = Text(block_bar(fraction, _BAR_WIDTH, self._blocks) + " ", style=STYLES["label"]) + text
        self._draw(text)

    def live_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        if time.monotonic() - self._last_live < 1 / _LIVE_PER_SECOND and self._live is not None:
            return
        self._last_live = time.monotonic()
        most = max(1, self._console.height - 4)  # what does not fit on the screen would scroll it at every refresh
        shown = [list(row) for row in rows[:most]]
        for row, label in zip(shown, _shortened([row[0] for row in shown], self._console.width // 2)):
            row[0] = label
        if self._console.width < _NARROW:  # no place for the time, and none for a bar
            kept = [place for place, name in enumerate(header) if name != "time"]
            header, shown = [header[place] for place in kept], [[row[place] for place in kept] for row in shown]
        else:
            for place, name in enumerate(header):
                for row in shown if name == "done" else ():
                    row[place] = _bar_text(row[place], self._blocks)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        before = sum(max(len(name), *(len(row[place]) for row in shown)) + 2 for place, name in enumerate(header[:-1]))
        for name in header:
            table.add_column(name, no_wrap=True, style=STYLES["label"] if name == "done" else "")
        for row in shown:
            row[-1] = fit(row[-1].split(_SEPARATOR), max(self._console.width - before - _MARGIN, 8))
            table.add_row(*map(Text, row))
        more = f"and {len(rows) - most} more; " if len(rows) > most else ""
        self._draw(Group(table, Text(more + note, style="dim")))

    def table(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[str]],
        styles: Optional[Mapping[int, Callable[[str], str]]] = None,
        numeric: Sequence[int] = (),
        droppable: Sequence[int] = (),
    ) -> None:
        self.close()
        self._to_line_start()
        width = self._console.width
        self._console.print(rich_table(header, rows, styles, numeric, droppable, width, self._blocks))

    def _draw(self, shown: RenderableType) -> None:
        if self._live is None or self._is_following:
            self.close()
            self._to_line_start()
            self._live = Live(shown, console=self._console, refresh_per_second=_LIVE_PER_SECOND, transient=True)
            self._start(self._live)
        else:
            self._live.update(shown)

    def _start(self, live: Live) -> None:
        """Draw live lines until they are stopped, never while another thread writes."""
        live._lock = self._console.writing  # a shared lock: each of the two writes while it holds its own
        live.start()

    def wants_waiting(self) -> bool:
        return time.monotonic() - self._last_live >= 1 / _LIVE_PER_SECOND

    def waiting(self, text: str, fraction: Optional[float] = None) -> None:
        self.live([text], fraction)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._is_following = False

    def _to_line_start(self) -> None:
        """Overwrite what the terminal has echoed, such as ^C: the next line would be shifted by it."""
        if self._live is None and self._progress is None:
            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def _bar_text(percent: str, blocks: bool) -> str:
    """Return a percentage with a short bar."""
    share = float(percent[:-1]) / 100 if percent.endswith("%") else None
    return "" if share is None else f"{block_bar(share, _SHORTEST_BAR + 2, blocks)} {percent:>4}"


def _shortened(labels: Sequence[str], most: int) -> Sequence[str]:
    """Return labels of points that fit: with the last parts of their keys, or with the values alone."""
    forms = (r"\b(?:\w+\.)+(\w+=)", r"\1"), (r"\S+?=", "")
    for pattern, instead in forms:
        if max(map(len, labels), default=0) > most:
            labels = [re.sub(pattern, instead, label) for label in labels]
    return [label[:most] for label in labels]


def _outcome_style(outcome: str) -> str:
    meaning = {"finished": "good", "failed": "error", "interrupted": "warning"}.get(outcome)
    return f"bold not dim {STYLES[meaning]}" if meaning else "bold not dim"  # the frame around it is dim


class _BlockBar(ProgressColumn):
    """A bar in block characters, empty while it is not known how much there is to do."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self._blocks = blocks

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(block_bar((task.completed or 0) / task.total, _BAR_WIDTH, self._blocks), style=STYLES["label"])


class TrainingView:
    """Draws the state of a run in a few lines, most useful fields first.

    Args:
        state: The state, read at every redraw.
        blocks: Whether the terminal shows block characters.
    """

    def __init__(self, state: TrainingState, blocks: bool = True) -> None:
        self.state = state
        self._blocks = blocks
        self._begun = time.monotonic()
        self._losses: List[float] = []
        self._loss: Optional[float] = None
        self._speed: Optional[float] = None
        self._eta: Optional[float] = None
        self._seen_step = -1
        self._seen_call = 0

    def draw(self, width: int) -> Any:
        """Return what to show on a terminal of a width."""
        event = self.state.step
        if event is None:
            return Text("")
        self._smooth(event)
        inside = max(width - _MARGIN, 20)
        lines = [self._progress_line(event, inside), *self._value_lines(event, inside)]
        evaluating = self.state.evaluating
        if evaluating is not None:
            of_all = f"/{count(evaluating.total_samples)}" if evaluating.total_samples else ""
            text = f"evaluating {evaluating.split} {count(evaluating.samples)}{of_all}"
            fraction = evaluating.samples / evaluating.total_samples if evaluating.total_samples else None
            lines.append(self._with_bar([(text, "")], fraction, inside))
        if self.state.message:
            lines.append(_joined([(self.state.message[:inside], "warning")], inside))
        return Group(*(Text.assemble(*parts, no_wrap=True, overflow="crop") for parts in lines if parts))

    def _smooth(self, event: StepEnd) -> None:
        if event.step == self._seen_step:
            return
        old = max(_SMOOTHING ** max(event.call - self._seen_call, 1), _LEAST_SMOOTHING)
        self._seen_step, self._seen_call = event.step, event.call
        self._loss = _smoothed(self._loss, event.loss, old)
        self._speed = _smoothed(self._speed, event.samples_per_second, _SMOOTHING)
        if event.eta_seconds is not None:
            self._eta = event.eta_seconds
        self._losses.append(self._loss)
        if len(self._losses) > _LONGEST_HISTORY:
            pairs = zip(self._losses[::2], self._losses[1::2])
            self._losses = [(one + other) / 2 for one, other in pairs] + self._losses[len(self._losses) // 2 * 2 :]

    def _progress_line(self, event: StepEnd, width: int) -> List[Any]:
        fraction = event.step / event.total_steps if event.total_steps else None
        elapsed = duration(time.monotonic() - self._begun)
        total = f"/{count(event.total_steps)}" if event.total_steps else ""
        fields: List[Field] = [(f"ETA {duration(self._eta)}", "title")] if event.total_steps else []
        fields += [(f"step {count(event.step)}{total}", ""), (f"epoch {event.epoch:.2f}", "quiet")]
        fields.append((f"elapsed {elapsed}", "quiet"))
        return self._with_bar(fields, fraction, width)

    def _with_bar(self, fields: Sequence[Field], fraction: Optional[float], width: int) -> List[Any]:
        """Return the first field, a bar with its share, and the other fields that fit."""
        if fraction is None:
            return _joined(fields, width)
        room = width - len(fields[0][0]) - len(" 100%") - len(_SEPARATOR)  # for the bar alone
        with_second = room - len(_SEPARATOR) - (len(fields[1][0]) if len(fields) > 1 else 0)
        bar_width = min(_BAR_WIDTH, max(with_second if with_second >= _SHORTEST_BAR else room, _SHORTEST_BAR))
        bar = (f"{block_bar(fraction, bar_width, self._blocks)} {fraction:4.0%}", "label")
        return _joined([fields[0], bar, *fields[1:]], width)

    def _value_lines(self, event: StepEnd, width: int) -> List[List[Any]]:
        spark = sparkline(self._losses, 20 if width >= _NARROW else 12, self._blocks)
        loss = "-" if self._loss is None else metric(self._loss)
        values: List[Field] = [(f"loss {loss}", ""), (spark, "label")]
        values += [(f"{rate(self._speed)} samples/s", ""), (f"lr {learning_rate(event.lr)}", "")]
        values += [(f"{name} {metric(value)}", "") for name, value in event.metrics.items()]
        if event.data_wait >= 0.005:
            values.append((f"data wait {event.data_wait:.0%}", "warning" if event.data_wait > 0.2 else "quiet"))
        state = self.state
        results: List[Field] = []
        if state.evaluation is not None:
            results.append((f"{state.evaluation.split} {_short_result(state.evaluation)}", ""))
        if state.best is not None and state.best.monitor:
            results.append((f"best {_short_result(state.best)} at {count(state.best.step)}", "best"))
        if state.next_save is not None:
            results.append((f"next save at {count(state.next_save)}", "quiet"))
        results.append(
            ("not saved yet" if state.saved_step is None else f"saved at {count(state.saved_step)}", "quiet")
        )
        if width >= _NARROW:
            return [_joined(values, width), _joined(results, width)]
        # A narrow terminal has more lines instead of longer ones.
        halves = (values[:2], values[2:], results[:1], results[1:])
        return [_joined(half, width) for half in halves]


def _smoothed(before: Optional[float], now: float, old: float) -> float:
    if before is None or before != before or abs(before) == float("inf"):
        return now
    return old * before + (1 - old) * now


def _short_result(event: EvalEnd) -> str:
    """Return the monitored metric of an evaluation, or its loss."""
    name = event.monitor if event.monitor in event.metrics else next(iter(event.metrics), None)
    return "" if name is None else f"{name} {metric(event.metrics[name])}"


def _joined(fields: Sequence[Field], width: int) -> List[Any]:
    """Return as many fields as fit in one line, most important first, as parts for rich."""
    parts: List[Any] = []
    used = 0
    for text, meaning in fields:
        gap = len(_SEPARATOR) if parts else 0
        if text and used + gap + len(text) <= width:
            if parts:
                parts.append(_SEPARATOR)
            parts.append((text, STYLES.get(meaning, "")))
            used += gap + len(text)
    return parts
