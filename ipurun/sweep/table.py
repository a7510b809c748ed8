"""Rank the points of a sweep, as a table for people and as CSV and JSON for scripts."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipurun.log.format import count, duration, metric
from ipurun.log.style import aligned
from ipurun.sweep.ledger import FINISHED, Record

__all__ = [
    "Ranking",
    "csv_text",
    "higher_is_better",
    "rank",
    "rows_as_data",
    "table_cells",
    "table_lines",
    "throughput_lines",
    "value_of",
]

_SPEED = "samples_per_second"
_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "seconds", "distance")
_BAR_WIDTH = 30
_LONGEST_REASON = 60


@dataclass(frozen=True)
class Ranking:
    """Records in order, best first, and the column they are ranked by."""

    column: str
    records: List[Record]

    @property
    def best(self) -> Optional[Record]:
        first = self.records[0] if self.records else None
        return first if first is not None and first.status == FINISHED else None


def rank(records: Sequence[Record], rank_by: Optional[str] = None) -> Ranking:
    """Rank the records of a sweep.

    Args:
        records: All points.
        rank_by: The column; if None or in no result, the monitored metric, else samples per second.
    """
    finished = [record for record in records if record.status == FINISHED]
    wanted = [name for name in (rank_by, _monitor(finished)) if name]
    known = [name for name in wanted if any(value_of(record, name) is not None for record in finished)]
    column = known[0] if known else _SPEED
    ranked = [record for record in finished if value_of(record, column) is not None]
    unranked = [record for record in finished if value_of(record, column) is None]
    ranked.sort(key=lambda record: _sort_key(value_of(record, column), higher_is_better(record, column)))
    rest = [record for record in records if record.status != FINISHED]
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
        row[_SPEED] = results.get(_SPEED)
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


def table_lines(ranking: Ranking) -> List[str]:
    """Return the table of a sweep as plain lines; see `table_cells`."""
    return aligned(*table_cells(ranking))


def table_cells(ranking: Ranking) -> Tuple[List[str], List[List[str]]]:
    """Return header and rows of the table of a sweep, failed points at the bottom with their reasons."""
    swept = list(dict.fromkeys(key for record in ranking.records for key in record.swept))
    metrics = list(dict.fromkeys(name for record in ranking.records for name in record.results.get("metrics", {})))
    first = [] if ranking.column == _SPEED else [ranking.column]
    columns = first + [name for name in metrics if name not in first]
    monitor = _monitor(ranking.records)
    heads = [f"best {name}" if name == monitor else name for name in columns]
    header = ["rank", *swept, "status", *heads, "samples/s", "time", "folder or reason"]
    body = []
    for place, record in enumerate(ranking.records, 1):
        done = record.status == FINISHED
        results = record.results
        cells = [str(place) if done else "-", *(record.swept.get(key, "") for key in swept), record.status]
        cells += ["-" if value is None else metric(value) for value in (value_of(record, name) for name in columns)]
        cells += [count(results.get(_SPEED)), duration(results.get("seconds", {}).get("total"))]
        cells.append(Path(record.folder or "").name if done else _shortened(record.reason))
        body.append(cells)
    return header, body


def throughput_lines(records: Sequence[Record]) -> List[str]:
    """Return throughput against the swept key as bars; empty unless exactly one key was swept."""
    keys = {key for record in records for key in record.swept}
    speeds = [
        (record.swept, record.results[_SPEED])
        for record in sorted(records, key=lambda record: record.index)
        if record.status == FINISHED and record.results.get(_SPEED)
    ]
    if len(keys) != 1 or len(speeds) < 2:
        return []
    key = keys.pop()
    longest = max(len(swept[key]) for swept, _ in speeds)
    fastest = max(speed for _, speed in speeds)
    lines = [f"samples/s by {key}"]
    for swept, speed in speeds:
        bar = "#" * max(1, round(_BAR_WIDTH * speed / fastest))
        lines.append(f"  {swept[key]:>{longest}}  {bar:<{_BAR_WIDTH}}  {count(speed)}")
    return lines


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
    return None if found is None else float(found)


def higher_is_better(record: Record, column: str) -> bool:
    """Return whether a larger value of a column is a better one."""
    results = record.results
    if column == results.get("monitor") and "higher_is_better" in results:
        return bool(results["higher_is_better"])
    return not any(word in column.lower() for word in _SMALLER_IS_BETTER)


def _sort_key(value: Optional[float], higher_is_better: bool) -> Tuple[bool, float]:
    assert value is not None
    if value != value:  # NaN belongs last
        return True, 0.0
    return False, -value if higher_is_better else value


def _shortened(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."
