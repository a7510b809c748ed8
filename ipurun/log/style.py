"""The looks that terminals share: colours by meaning, bars in block characters, sparklines, tables.

Nothing here loads rich before a table is drawn, so that errors and help come at once.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import textwrap
from typing import IO, Any, Callable, Dict, List, Mapping, Match, Optional, Sequence, Set, Tuple

from ipurun.errors import visible

__all__ = [
    "STYLES",
    "aligned",
    "block_bar",
    "draws_blocks",
    "fitted_table",
    "folded",
    "has_colour",
    "is_drawn_on",
    "paint",
    "paint_plan",
    "paint_problem",
    "plot",
    "print_table",
    "sparkline",
    "verdict_style",
]

# What a text means -> how rich draws it. Only the eight colours that every terminal's theme keeps readable.
STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "good": "green",
    "tight": "yellow",
    "bad": "red",
    "best": "bold green",
    "label": "cyan",
    "title": "bold",
    "quiet": "dim",
    "key": "bold yellow",
    "try": "green",
}
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-=+*#"
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character, by column and row
_PLOT_COLOURS = (36, 33, 35, 32, 34, 31)
_PLOT_MARKS = "abcdef"
_FULL_LINE = "━━"
_LOG_RATIO = 30.0  # a plot whose largest value is so many times the smallest has a logarithmic axis
_SET_BY_PYTHON = ("C.UTF-8", "C.utf8", "UTF-8")  # LC_CTYPE, when it starts in the locale C
_NEVER_FOLDED = 16  # letters of a table's cell, unless the table would not fit
_VERDICTS = {"fits": "good", "tight": "tight", "does not fit": "bad"}


def is_drawn_on(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal on which lines can be redrawn."""
    return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("", "dumb")


def has_colour(stream: IO[str]) -> bool:
    """Return whether to write colours to a stream."""
    return is_drawn_on(stream) and not os.environ.get("NO_COLOR")


def draws_blocks(stream: IO[str]) -> bool:
    """Return whether a stream can show block characters: not where the locale is C, which Python reads as UTF-8."""
    found = {name: os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)}
    if found.get("LANG") in ("C", "POSIX") and found.get("LC_CTYPE") in _SET_BY_PYTHON:
        del found["LC_CTYPE"]
    if next(iter(found.values()), "") in ("C", "POSIX"):
        return False
    try:
        (_EIGHTHS + _LEVELS).encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def paint(text: str, meaning: str, colour: bool = True) -> str:
    """Return a text with the ANSI codes of a meaning, or as it is."""
    if not colour or not text or meaning not in STYLES:
        return text
    codes = ";".join(_CODES[word] for word in STYLES[meaning].split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def paint_problem(text: str, key: str = "") -> str:
    """Return the text of a problem in colours: what is wrong in red, keys and values marked, advice in green."""
    lines = []
    part = ""  # of the problem, which may continue on the next lines
    for line in text.splitlines():
        label, shown = line[:9], line[9:]
        if line.startswith("error: "):
            part, label, shown = "error", paint("error:", "error") + " ", line[len("error: ") :]
        elif re.match(r"  (at|seen|known|try|log) ", line):
            part, label = label.strip(), paint(label, "label")
        elif part == "error":
            label, shown = line[:2], line[2:]
        if part == "error":
            marked = re.sub(r"`([^`]*)`", lambda found: f"\x1b[0m{paint(str(found[0]), 'key')}\x1b[1m", shown)
            shown = f"\x1b[1m{marked}\x1b[0m"
        elif part == "try":
            shown = paint(shown, "try")
        elif part == "at" and key:
            shown = shown.replace(f"{key}=", paint(f"{key}=", "key"), 1)
        lines.append(label + shown)
    return "\n".join(lines)


_LABELLED = re.compile(r"^  (?=.{10} \S)([A-Za-z][A-Za-z/ ]*?)( +)(?<=^.{13})(\S.*)$")  # a column of 11 characters
_BAR = re.compile(r"\[(?=[#.>]{3})(#*)(\.*)(>?)\]")
_COMMAND = re.compile(r"^ {5,}['\"]?[a-z_.]+=")  # to be copied as it is
_VERDICT = re.compile(r"\b(does not fit|tight|fits)\b")


def paint_plan(text: str, width: int, blocks: bool = True, colour: bool = True) -> str:
    """Return the text of a plan for a terminal: wrapped, verdicts in their colours, bars in block characters.

    Args:
        text: The plan as files and pipes get it.
        width: Columns of the terminal.
        blocks: Whether it shows block characters.
        colour: Whether it shows colours.
    """
    lines: List[str] = []
    in_code = False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            in_code = line == "in PopTorch"
        lines += [_paint_line(part, line, in_code, blocks, colour) for part in _wrap_plan(line, width, in_code)]
    return "\n".join(lines)


def _wrap_plan(line: str, width: int, in_code: bool) -> List[str]:
    if len(line) <= width or _COMMAND.match(line):
        return [line]
    if in_code and "  # " in line.strip():
        code, mark, comment = line.rpartition("  # ")
        if max(len(code), len(comment) + len(mark) + 4) <= width:  # the comment stays whole, on the next line
            return [code, f"    {mark}{comment}"]
    labelled = _LABELLED.match(line)
    start = re.match(r"\s*(- |\d+\. )?", line)
    indent = len(line) - len(labelled[3]) if labelled and not in_code else len(start[0] if start else "") + 4 * in_code
    narrow = min(indent, max(2, width // 3))
    return textwrap.wrap(
        line, width, subsequent_indent=" " * narrow, drop_whitespace=True, break_on_hyphens=False, break_long_words=True
    ) or [""]


def _paint_line(part: str, line: str, in_code: bool, blocks: bool, colour: bool) -> str:
    """Paint a part of a wrapped line."""
    verdicts = _VERDICT.findall(line)
    if not part.startswith(" "):
        heading, verdict, rest = part.partition(verdicts[0]) if verdicts else (part, "", "")
        return paint(heading, "title", colour) + paint(verdict, verdict_style(verdict), colour) + rest
    if in_code:
        code, mark, comment = part.partition("  # ")
        return code + paint(mark + comment, "quiet", colour)
    meaning = verdict_style(verdicts[-1]) if verdicts else "label"
    label = _LABELLED.match(part)
    if label:
        part = f"  {paint(label[1], 'label', colour)}{label[2]}{label[3]}"
    if blocks or colour:
        part = _BAR.sub(lambda found: _block_bar(found, meaning, blocks, colour), part)
    part = _VERDICT.sub(lambda found: paint(found[0], verdict_style(found[0]), colour), part)
    return part.replace(" (estimate)", paint(" (estimate)", "quiet", colour))


def _block_bar(found: Match[str], meaning: str, blocks: bool, colour: bool) -> str:
    """Return a bar of the plain text in block characters; one that is too long ends with an arrow."""
    if not blocks:
        return paint(found[0], meaning, colour)
    full, rest = len(found[1]), len(found[2])
    return paint("█" * full, meaning, colour) + paint("░" * rest, "quiet", colour) + ("▶" if found[3] else "")


def verdict_style(verdict: str) -> str:
    """Return the meaning of a verdict of the planner: good, tight or bad."""
    return _VERDICTS.get(verdict, "quiet")


def block_bar(share: float, width: int, blocks: bool = True) -> str:
    """Draw a bar that is full at 1, in eighths of a character where the terminal can show them."""
    share = min(max(share, 0.0), 1.0) if share == share else 0.0
    if not blocks:
        return ("#" * round(share * width)).ljust(width, ".")
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[rest] if rest else "")
    return drawn.ljust(width, "░" if full < width else " ")


def sparkline(values: Sequence[float], width: int, blocks: bool = True) -> str:
    """Draw values as one line of columns, the newest on the right; means of neighbours where there are too many."""
    kept = [value for value in values if value == value and abs(value) != float("inf")]
    if not kept or width < 1:
        return ""
    if len(kept) > width:
        edges = [round(place * len(kept) / width) for place in range(width + 1)]
        kept = [sum(kept[low:high]) / (high - low) for low, high in zip(edges, edges[1:])]
    levels = _LEVELS if blocks else _PLAIN_LEVELS
    low, high = min(kept), max(kept)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in kept)


def plot(
    title: str,
    curves: Sequence[Tuple[str, Sequence[float], Sequence[float]]],
    width: int,
    height: int = 10,
    blocks: bool = True,
    colour: bool = True,
) -> List[str]:
    """Draw curves on one picture: lines in colours, or letters where a terminal lacks colours or braille characters.

    Args:
        title: What the values are.
        curves: A label, places and values for each; as many as there are colours are drawn.
        width: Columns of the terminal.
        height: Lines of the picture.
        blocks: Whether the terminal shows characters that are not ASCII.
        colour: Whether it shows colours.
    """
    drawn = [
        (label, [(x, y) for x, y in zip(xs, ys) if math.isfinite(y)]) for label, xs, ys in curves[: len(_PLOT_COLOURS)]
    ]
    places = [x for _, points in drawn for x, _ in points]
    values = [y for _, points in drawn for _, y in points]
    if not values or min(places) == max(places):
        return []
    is_log = min(values) > 0 and max(values) > _LOG_RATIO * min(values)
    ends = [f"{value:.4g}" for value in (max(values), min(values))]
    margin = max(map(len, ends))
    fine = blocks and colour
    across, down = (2, 4) if fine else (1, 1)
    columns, rows = max(10, width - margin - 4) * across, height * down
    cells: Dict[Tuple[int, int], Set[Tuple[int, int, int]]] = {}
    for number, (_, points) in enumerate(drawn):
        heights = _heights(points, min(places), max(places), columns, is_log)
        low, high = (math.log(end) if is_log else end for end in (min(values), max(values)))
        before: Optional[int] = None
        for column, value in sorted(heights.items()):
            row = round((high - value) / (high - low or 1.0) * (rows - 1))
            joined = range(min(row, before), max(row, before) + 1) if fine and before is not None else (row,)
            for each in joined:
                cells.setdefault((each // down, column // across), set()).add((number, column % across, each % down))
            before = row

    def cell(row: int, column: int) -> str:
        found = cells.get((row, column), set())
        numbers = {number for number, _, _ in found}
        if not found or not fine:
            return " " if not found else _PLOT_MARKS[numbers.pop()] if len(numbers) == 1 else "*"
        bits = sum({_DOTS[x][y] for _, x, y in found})
        return f"\x1b[{_PLOT_COLOURS[max(numbers)]}m{chr(0x2800 + bits)}\x1b[0m"

    bar, corner, rule = ("│", "└", "─") if blocks else ("|", "+", "-")
    lines = [paint(title, "title", colour) + (" (logarithmic)" if is_log else "")]
    for row in range(height):
        label = ends[0] if row == 0 else ends[1] if row == height - 1 else ""
        lines.append(f"{label:>{margin}} {bar}" + "".join(cell(row, column) for column in range(columns // across)))
    first, last = (f"{place:,.0f}" for place in (min(places), max(places)))
    lines.append(f"{'':>{margin}} {corner}{rule * (columns // across)}")
    lines.append(f"{'':>{margin}}  {first}{'step':^{max(6, columns // across - len(first) - len(last))}}{last}")
    for number, (label, _) in enumerate(drawn):
        mark = f"\x1b[{_PLOT_COLOURS[number]}m{_FULL_LINE}\x1b[0m" if fine else _PLOT_MARKS[number]
        lines.append(f"{'':>{margin}}  {mark} {visible(label)}")
    if len(curves) > len(drawn):
        lines.append(f"{'':>{margin}}  and {len(curves) - len(drawn)} more")
    return [line.rstrip() for line in lines]


def _heights(
    points: Sequence[Tuple[float, float]], first: float, last: float, columns: int, is_log: bool
) -> Dict[int, float]:
    """Return the height of a curve in each column: means of its values, and straight lines between them."""
    found: Dict[int, List[float]] = {}
    for place, value in points:
        column = round((place - first) / (last - first) * (columns - 1))
        found.setdefault(column, []).append(math.log(value) if is_log else value)
    means = {column: sum(values) / len(values) for column, values in found.items()}
    known = sorted(means)
    for left, right in zip(known, known[1:]):
        for column in range(left + 1, right):
            share = (column - left) / (right - left)
            means[column] = means[left] * (1 - share) + means[right] * share
    return means


def _cell(text: str) -> str:
    """Return the text of a cell in one line, which cannot change the terminal."""
    return visible(text).replace("\n", " ")


def aligned(header: Sequence[str], body: Sequence[Sequence[str]]) -> List[str]:
    """Return a table as plain lines: columns of equal width, a rule below the header."""
    header, *body = [[_cell(text) for text in row] for row in [header, *body]]
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]
    rows = [header, ["-" * width for width in widths], *body]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def print_table(
    stream: IO[str],
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    styles: Optional[Mapping[int, Callable[[str], str]]] = None,
    numeric: Sequence[int] = (),
    droppable: Sequence[int] = (),
) -> None:
    """Print a table: drawn by rich on a terminal, in plain columns elsewhere.

    Args:
        stream: Where to.
        header: Names of the columns.
        body: The rows, as text.
        styles: Column -> the meaning of a cell by its text, a key of `STYLES` or "".
        numeric: Columns to align to the right on a terminal.
        droppable: Columns to leave out where the terminal is too narrow for all, first to go first.
    """
    if not is_drawn_on(stream):
        columns = shutil.get_terminal_size().columns
        lines = fitted_table(header, body, numeric, droppable, columns) if stream.isatty() else aligned(header, body)
        stream.write("\n".join(lines) + "\n")
        return
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    console.print(rich_table(header, body, styles, numeric, droppable, console.width, draws_blocks(stream)))


def fitted_table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    numeric: Sequence[int] = (),
    droppable: Sequence[int] = (),
    width: int = 80,
) -> List[str]:
    """Return a table as plain lines that fit on a terminal which cannot be drawn on."""
    lines = aligned(header, body)
    if max(map(len, lines)) <= width:
        return lines
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as shown:
        console.print(rich_table(header, body, None, numeric, droppable, width, blocks=False))
    return shown.get().splitlines()


def rich_table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    styles: Optional[Mapping[int, Callable[[str], str]]] = None,
    numeric: Sequence[int] = (),
    droppable: Sequence[int] = (),
    width: int = 80,
    blocks: bool = True,
) -> Any:
    """Return a table for rich, with as many columns as fit; see `print_table`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    header, *body = [[_cell(text) for text in row] for row in [header, *body]]
    widest = max(_NEVER_FOLDED, width // 3)  # one long name must not push out the other columns
    bodies = [max((len(row[column]) for row in body), default=0) for column in range(len(header))]
    heads = [max(map(len, folded(name, 1))) for name in header]
    wanted = [
        max(head, length if column in numeric else min(length, widest))
        for column, (head, length) in enumerate(zip(heads, bodies))
    ]
    shown = list(range(len(header)))
    for column in droppable:
        if _total(wanted, shown) > width and len(shown) > 1:
            shown.remove(column)
    least = [
        max(4, length if column in numeric else min(length, _NEVER_FOLDED)) for column, length in enumerate(bodies)
    ]
    longest = [max(len(name), length) for name, length in zip(header, bodies)]
    texts = [column for column in shown if column not in numeric]
    widths = _shared([least, wanted, longest], shown, width, texts)
    table = Table(box=box.SIMPLE_HEAD if blocks else box.ASCII2, pad_edge=False, show_edge=False, header_style="bold")
    for column in shown:
        # Numbers are never cut: text gives way, and headings are folded.
        table.add_column(
            Text("\n".join(folded(header[column], widths[column]))),
            justify="right" if column in numeric else "left",
            overflow="fold",
            width=widths[column],
        )
    for row in body:
        cells = []
        for column in shown:
            meaning = styles[column](row[column]) if styles and column in styles else ""
            lines = folded(row[column], widths[column])
            cells.append(Text("\n".join(lines), style=STYLES.get(meaning, "")))
        table.add_row(*cells)
    return table


def folded(text: str, width: int) -> List[str]:
    """Return the lines of a text: broken at spaces, long words after a slash, an underscore or the dot of a key."""
    lines = []
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]:
        parts = [""]
        for part in re.split(r"(?<=_)|(?<=/)(?=[^/]{3})|(?<=\.)(?=[A-Za-z])", line) if len(line) > width else [line]:
            if parts[-1] and len(parts[-1] + part) > width:
                parts.append("")
            parts[-1] += part
        lines += parts
    return lines


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[column] + 3 for column in shown) - 3  # between columns


def _shared(steps: Sequence[Sequence[int]], shown: Sequence[int], width: int, texts: Sequence[int]) -> List[int]:
    """Return the widths of columns.

    Args:
        steps: The least width of each column, the width that it should have, and that of its longest text.
        shown: The columns.
        width: What they share.
        texts: Columns of text, which become narrower than their least width if need be.
    """
    least, wanted, longest = steps
    widths = [min(pair) for pair in zip(least, wanted)]
    free = width - _total(widths, shown)
    for targets in (wanted, longest):
        while free > 0:
            short = [column for column in shown if widths[column] < targets[column]]
            if not short:
                break
            widths[min(short, key=lambda column: widths[column] - targets[column])] += 1  # the one that misses most
            free -= 1
    while free < 0 and texts:
        column = max(texts, key=widths.__getitem__)
        if widths[column] <= 4:
            break
        widths[column] -= 1
        free += 1
    return widths
