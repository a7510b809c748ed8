"""List of the runs and sweeps below a folder, for `ipurun runs ls` and the first page of `ipurun watch`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.errors import ConfigError
from ipurun.log.format import count, duration, metric, size_text, value_text
from ipurun.pages.data import age_text, flat, is_sweep, read_run, read_sweep, runs_below, size_of
from ipurun.pages.parts import Cell, badge, page, section, table, tiles
from ipurun.sweep.table import is_higher_better, value_of

__all__ = ["Entry", "entries_below", "index_page", "matching"]


@dataclass(frozen=True)
class Entry:
    """One run or sweep.

    Args:
        folder: Its folder.
        kind: ``run`` or ``sweep``.
        name: Name of the run, or of the points.
        status: How it ended, or ``running``.
        started: When it was started or resumed last, in seconds since 1970.
        steps: Weight updates; points of a sweep as ``done/all``.
        monitor: Name of the monitored metric, or of the column of the ranking.
        best: Its best value.
        higher_is_better: Whether a larger one is better.
        samples_per_second: Throughput; None for a sweep.
        seconds: Wall time; None if unknown.
        reason: Why it failed.
        config: Its keys, dotted; empty for a sweep.
        size: Bytes on disk; None where not asked for.
    """

    folder: Path
    kind: str
    name: str
    status: str
    started: Optional[float]
    steps: str
    monitor: str
    best: Optional[float]
    higher_is_better: bool
    samples_per_second: Optional[float]
    seconds: Optional[float]
    reason: str
    config: Mapping[str, Any]
    size: Optional[int] = None

    def to_dict(self) -> Dict[str, Any]:
        """Return it as JSON-ready data."""
        shown = {key: value for key, value in vars(self).items() if key not in ("config", "higher_is_better")}
        best = self.best if self.best is None or math.isfinite(self.best) else str(self.best)
        return {**shown, "folder": str(self.folder), "best": best}


def entries_below(folder: Path, with_size: bool = True) -> List[Entry]:
    """Return what ran below a folder, the newest first."""
    found = [entry_of(path, with_size) for path in runs_below(folder)]
    return sorted(found, key=lambda entry: (-(entry.started or 0), str(entry.folder)))


def entry_of(folder: Path, with_size: bool = True) -> Entry:
    """Return a run or sweep in short; one that cannot be read has the reason."""
    size = size_of(folder) if with_size else None
    if not is_sweep(folder):
        run = read_run(folder, with_metrics=False)
        if "step" not in run.summary:  # it is running, was killed, or failed
            run = read_run(folder)
        monitor = run.monitor or "loss"
        is_up = not any(word in monitor.lower() for word in ("loss", "error", "perplexity"))
        return Entry(
            folder, "run", run.name, run.status, run.started, count(run.step), monitor, run.best, is_up,
            run.samples_per_second, run.total_seconds, run.reason, flat(run.config), size,
        )  # fmt: skip
    try:
        sweep = read_sweep(folder)
    except ConfigError as error:
        reason = error.problems[0].seen
        return Entry(folder, "sweep", folder.name, "failed", None, "-", "", None, True, None, None, reason, {}, size)
    done = sum(record.status == "finished" for record in sweep.records)
    failed = sum(record.status == "failed" for record in sweep.records)
    status = "running" if sweep.is_running else "finished" if sweep.is_complete else "interrupted"
    if failed and not sweep.is_running:
        status = "failed"
    best = sweep.ranking.best
    column = sweep.ranking.column
    seconds = [value_of(record, "seconds") for record in sweep.records]
    return Entry(
        folder,
        "sweep",
        sweep.records[0].name if sweep.records else folder.name,
        status,
        sweep.started or None,
        f"{done}/{len(sweep.records)} points",
        column,
        None if best is None else value_of(best, column),
        best is None or is_higher_better(best, column),
        None,
        sum(spent for spent in seconds if spent) or None,
        f"{failed} failed" if failed else "",
        {},
        size,
    )


def matching(entries: Sequence[Entry], name: str = "", status: str = "", words: Sequence[str] = ()) -> List[Entry]:
    """Return the entries with a name, a status and values of keys.

    Args:
        entries: All.
        name: A part of the name.
        status: ``running``, ``finished``, ...; empty for any.
        words: Overrides, such as ``optimizer.lr=0.002``.

    Raises:
        ConfigError: A word is not an override.
    """
    wanted: List[Tuple[str, str]] = []
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if not equals:
            raise ConfigError(f"`{word}` is not a filter", "command line", fix="key=value, such as optimizer.lr=0.002")
        wanted.append((key, value))

    def agrees(entry: Entry) -> bool:
        if (name and name not in entry.name) or (status and status != entry.status):
            return False
        return all(value_text(entry.config.get(key)) == value for key, value in wanted)

    return [entry for entry in entries if agrees(entry)]


def rows_of(entries: Sequence[Entry]) -> Tuple[List[str], List[List[str]]]:
    """Return the header and the rows of a table of entries."""
    header = ["name", "status", "started", "steps", "best", "samples/s", "time", "size", "folder"]
    rows = []
    for entry in entries:
        best = "-" if entry.best is None else f"{entry.monitor} {metric(entry.best)}"
        row = [entry.name, entry.status, age_text(entry.started), entry.steps, best, count(entry.samples_per_second)]
        rows.append(
            [*row, duration(entry.seconds), "-" if entry.size is None else size_text(entry.size), str(entry.folder)]
        )
    return header, rows


def index_page(
    folder: Path, entries: Sequence[Entry], link_to: Callable[[Path], str], live: str = "", version: str = ""
) -> str:
    """Return the page that lists what ran below a folder."""
    rows = []
    for entry in entries:
        best = "-" if entry.best is None else f"{entry.monitor} {metric(entry.best)}"
        rows.append(
            (
                Cell(entry.name, link=link_to(entry.folder), kind="name"),
                Cell(entry.status, markup=badge(entry.status)),
                Cell(best, entry.best, kind="nowrap"),
                Cell(entry.steps, kind="nowrap"),
                Cell(count(entry.samples_per_second), entry.samples_per_second),
                Cell(duration(entry.seconds), entry.seconds),
                Cell(age_text(entry.started), entry.started, kind="nowrap"),
                entry.kind,
                Cell(entry.reason, kind="bad reason" if entry.reason else ""),
            )
        )
    header = ["name", "status", "best", "steps", "samples/s", "time", "started", "kind", "reason"]
    counts = {status: sum(entry.status == status for entry in entries) for status in ("running", "failed")}
    facts = [("runs and sweeps", str(len(entries)))]
    facts += [(status, str(number)) for status, number in counts.items() if number or status == "running"]
    shown = table(header, rows, "sortable", (4, 5))
    if shown:
        note = "Click a name for its page, a heading to sort."
        box = '<input class="filter" type="search" placeholder="filter" aria-label="filter runs">'
        shown = f'<p class="note">{note}</p><div>{box}{shown}</div>'
    body = [tiles(facts), section("All", shown or "<p>Nothing ran here yet.</p>")]
    return page("Runs", body, str(folder), "", live, version)
