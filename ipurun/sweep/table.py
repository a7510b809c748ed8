"""Rank the points of a sweep, as a table for people and as CSV and JSON for scripts."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipurun.errors import visible
from ipurun.log.format import count, duration, metric
from ipurun.log.screen import Screen
from ipurun.log.style import aligned
from ipurun.sweep.ledger import ENDED, FAILED, FINISHED, INTERRUPTED, PRUNED, Record

__all__ = [
    "SPEED",
    "Ranking",
    "chart_lines",
    "csv_text",
    "is_higher_better",
    "is_smaller_better",
    "rank",
    "rows_as_data",
    "short",
    "table_cells",
    "show_table",
    "table_notes",
    "value_of",
]

SPEED = "samples_per_second"
_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "seconds", "distance")
_BAR_WIDTH = 30
_LONGEST_REASON = 60
_SIDE_BY_SIDE = " *"  # marks the speed of points that ran at the same time
_LONGEST_NUMBER = 9
_MOST_BARS = 40
_MOST_COLUMNS = 12


@dataclass(frozen=True)
class Ranking:
    """Records in order, best first, and the column they are ranked by."""

    column: str
    records: List[Record]

    @property
    def best(self) -> Optional[Record]:
        first = self.records[0] if self.records else None
        return first if first is not None and first.status == FINISHED else None


def rank(records: Sequence[Record], rank_by: Optional[str] = None, higher_is_better: Optional[bool] = None) -> Ranking:
    """Rank the records of a sweep.

    Args:
        records: All points.
        rank_by: The column; if None or in no result, the monitored metric, else samples per second.
        higher_is_better: Its direction; None: that of the metric.
    """
    finished = [record for record in records if record.status == FINISHED]
    wanted = [name for name in (rank_by, _monitor(finished)) if name]
    known = [name for name in wanted if any(value_of(record, name) is not None for record in finished)]
    column = known[0] if known else SPEED
    ranked = [record for record in finished if value_of(record, column) is not None]
    unranked = [record for record in finished if value_of(record, column) is None]
    ranked.sort(
        key=lambda record: _sort_key(
            value_of(record, column),
            is_higher_better(record, column) if higher_is_better is None else higher_is_better,
        )
    )
    rest = [record for record in records if record.status != FINISHED]
    rest.sort(key=lambda record: record.status != PRUNED)
    return Ranking(column, ranked + unranked + rest)


def rows_as_data(ranking: Ranking) -> List[Dict[str, Any]]:
    """Return one flat row per point, for CSV and JSON."""
    rows = []
    for place, record in enumerate(ranking.records, 1):
        results = record.results
        row: Dict[str, Any] = {"rank": place if record.status == FINISHED else None, "point": record.index}
        row.update(record.swept)
        row.update({"status": record.status, "name": record.name})
        if results.get("monitor"):
            row[f"best_{results['monitor']}"] = results.get("best")
        row.update(results.get("metrics", {}))
        row["train_loss"] = results.get("loss")
        row[SPEED] = value_of(record, SPEED)
        row["points_at_once"] = record.at_once if record.status in ENDED else None
        row["seconds"] = results.get("seconds", {}).get("total")
        row.update({"reason": record.reason, "folder": record.folder, "overrides": " ".join(record.overrides)})
        rows.append(row)
    return rows


def csv_text(rows: Sequence[Dict[str, Any]]) -> str:
    """Return rows as CSV; missing values stay empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def show_table(ranking: Ranking, screen: Screen) -> None:
    """Show the ranked points, in colours where the screen has them."""
    header, rows = table_cells(ranking)
    status, last = header.index("status"), len(header) - 1
    meanings = {FINISHED: "good", INTERRUPTED: "warning", FAILED: "bad"}
    best = rows[0][status + 1] if rows and ranking.best is not None else None
    styles = {status: lambda text: meanings.get(text, "quiet"), status + 1: lambda text: "best" if text == best else ""}
    # Where not all fit: without time, speed and the metrics beside the ranked one, then without folder and status.
    droppable = [*range(last - 1, status + 1, -1), last, status]
    screen.table(header, rows, styles, [0, *range(status + 1, last)], droppable)
    for line in table_notes(ranking):
        screen.line(line)


def table_notes(ranking: Ranking) -> List[str]:
    """Return what a reader of the table has to know."""
    marked = any(record.results and record.at_once > 1 for record in ranking.records)
    note = [f"{_SIDE_BY_SIDE.strip()} measured beside other points: speeds do not compare; sweep.jobs=1 measures alone"]
    return note if marked else []


def table_cells(ranking: Ranking) -> Tuple[List[str], List[List[str]]]:
    """Return header and rows of the table of a sweep, failed points at the bottom with their reasons."""
    swept = list(dict.fromkeys(key for record in ranking.records for key in record.swept))
    metrics = list(dict.fromkeys(name for record in ranking.records for name in record.results.get("metrics", {})))
    first = [] if ranking.column == SPEED else [ranking.column]
    columns = first + [name for name in metrics if name not in first]
    monitor = _monitor(ranking.records)
    heads = [f"best {name}" if name == monitor else name for name in columns]
    header = ["rank", *swept, "status", *heads, "samples/s", "time", "folder or reason"]
    body = []
    for place, record in enumerate(ranking.records, 1):
        done = record.status == FINISHED
        results = record.results
        cells = [str(place) if done else "-", *(short(record.swept.get(key, "")) for key in swept), record.status]
        cells += ["-" if value is None else metric(value) for value in (value_of(record, name) for name in columns)]
        speed = value_of(record, SPEED)
        beside = _SIDE_BY_SIDE if speed is not None and record.at_once > 1 else ""
        cells += [count(speed) + beside, duration(results.get("seconds", {}).get("total"))]
        cells.append(Path(record.folder or "").name if done else _shortened(record.reason))
        body.append(cells)
    return header, body


def short(value: str) -> str:
    """Return a swept value for people: a number that a search has chosen with all its digits becomes readable."""
    number = _number(value) if len(value) > _LONGEST_NUMBER else None
    return visible(value) if number is None else f"{number:.4g}"


def chart_lines(ranking: Ranking) -> List[str]:
    """Return the ranked value against the swept key as bars, or against two swept keys as a grid; empty for others."""
    found = sorted(ranking.records, key=lambda record: record.index)
    keys = list(dict.fromkeys(key for record in found for key in record.swept))
    values = [(record.swept, value_of(record, ranking.column)) for record in found if record.status == FINISHED]
    known = [(swept, value) for swept, value in values if value is not None and value == value]
    if len(keys) == 1 and len(known) > 1:
        bars = [(swept[keys[0]], value) for swept, value in known]
        return [f"{ranking.column} by {keys[0]}", *_bars(bars, ranking.column)]
    if len(keys) == 2 and len(known) > 1 and all(len(swept) == 2 for swept, _ in known):
        cells = {(swept[keys[0]], swept[keys[1]]): value for swept, value in known}
        return _grid(keys[0], keys[1], cells, ranking)
    return []


def _bars(bars: Sequence[Tuple[str, float]], column: str) -> List[str]:
    """Return a bar for each value, by the size of a swept number."""
    numbers = [_number(label) for label, _ in bars]
    if all(number is not None for number in numbers):
        bars = [bar for _, bar in sorted(zip(numbers, bars), key=lambda pair: pair[0] or 0.0)]
    left_out = len(bars) - _MOST_BARS
    bars = bars[:_MOST_BARS]
    bars = [(short(label), value) for label, value in bars]
    longest = max(len(label) for label, _ in bars)
    values = [value for _, value in bars]
    # Metrics that hardly differ would all have a full bar: it begins below the smallest, and the ends are given.
    low, high = min(values), max(values)
    begin = low - (high - low) / 4
    if low == high or (low >= 0 and (low < high / 2 or column == SPEED)):
        begin = min(low, 0.0)
    lines = []
    for label, value in bars:
        share = 1.0 if high == begin else (value - begin) / (high - begin)
        bar = "#" * max(1, round(_BAR_WIDTH * share))
        lines.append(f"  {label:>{longest}}  {bar:<{_BAR_WIDTH}}  {_shown(value, column)}")
    if begin:
        lines.append(f"  bars begin at {_shown(begin, column)}")
    return lines + ([f"  and {left_out} more"] if left_out > 0 else [])


def _grid(rows: str, columns: str, cells: Dict[Tuple[str, str], float], ranking: Ranking) -> List[str]:
    """Return a table of the values, the best of them marked."""
    downward = _in_order([row for row, _ in cells])
    across = _in_order([column for _, column in cells])
    is_sparse = 2 * len(cells) < len(downward) * len(across)  # values that a search has chosen
    if is_sparse or len(across) > _MOST_COLUMNS < len(downward):
        return []
    if len(across) > _MOST_COLUMNS:
        rows, columns, downward, across = columns, rows, across, downward
        cells = {(row, column): value for (column, row), value in cells.items()}
    best = ranking.best.swept if ranking.best is not None else {}
    body = []
    for row in downward:
        texts = []
        for column in across:
            value = cells.get((row, column))
            is_best = best.get(rows) == row and best.get(columns) == column
            texts.append("-" if value is None else _shown(value, ranking.column) + (" <" if is_best else ""))
        body.append([short(row), *texts])
    header = [f"{rows} \\ {columns}", *map(short, across)]
    return [f"{ranking.column} by {rows} and {columns}", *(f"  {line}" for line in aligned(header, body))]


def _in_order(labels: Sequence[str]) -> List[str]:
    unique = list(dict.fromkeys(labels))
    numbers = {label: _number(label) for label in unique}
    return sorted(unique, key=lambda label: numbers[label] or 0.0) if None not in numbers.values() else unique


def _number(text: str) -> Optional[float]:
    try:
        return float(text)
    except ValueError:
        return None


def _shown(value: float, column: str) -> str:
    return count(value) if column == SPEED else metric(value)


def _monitor(records: Sequence[Record]) -> Optional[str]:
    return next((record.results["monitor"] for record in records if record.results.get("monitor")), None)


def value_of(record: Record, column: str) -> Optional[float]:
    """Return a record's value in a column: the best value of the monitored metric, else the last."""
    results = record.results
    if column == results.get("monitor") and results.get("best") is not None:
        return float(results["best"])
    if column == "seconds":
        column = "total"
    places = (results.get("metrics", {}), results, results.get("seconds", {}))
    found = next((place[column] for place in places if isinstance(place.get(column), (int, float))), None)
    if column == SPEED and not found:  # a resumed point that had made its last step
        return None
    return None if found is None else float(found)


def is_higher_better(record: Record, column: str) -> bool:
    """Return whether a larger value of a column is a better one."""
    results = record.results
    if column == results.get("monitor") and "higher_is_better" in results:
        return bool(results["higher_is_better"])
    return not is_smaller_better(column)


def is_smaller_better(column: str) -> bool:
    """Return whether small values are better, judged by the name of a column."""
    return any(word in column.lower() for word in _SMALLER_IS_BETTER)


def _sort_key(value: Optional[float], higher_is_better: bool) -> Tuple[bool, float]:
    assert value is not None
    if value != value:  # NaN belongs last
        return True, 0.0
    return False, -value if higher_is_better else value


def _shortened(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."
