"""Run a sweep from its check to its table."""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipurun import engine as engines
from ipurun.config.compose import Points
from ipurun.config.secrets import mask_word
from ipurun.errors import ConfigError
from ipurun.log.format import metric, plural
from ipurun.log.screen import Screen
from ipurun.runs.folder import check_writable, new_folder, slug, timestamp
from ipurun.runs.lock import locked
from ipurun.sweep.check import Checked, check_points
from ipurun.sweep.forks import ForkServer
from ipurun.sweep.launchers import LocalLauncher
from ipurun.sweep.ledger import FAILED, INTERRUPTED, PENDING, Ledger, Record, find_earlier
from ipurun.sweep.pool import Pool, Source, swept_text
from ipurun.sweep.sharing import opening_lines, points_at_once
from ipurun.sweep.table import Ranking, csv_text, rank, rows_as_data, table_lines, throughput_lines, value_of

__all__ = ["final_line", "run_sweep", "show_result"]

_AUTO = "auto"


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep that has ended or was stopped."""

    folder: Path
    argv: Sequence[str]
    ranking: Ranking
    rank_by: Optional[str]  # of the config
    interrupted: bool

    def to_dict(self) -> Dict[str, Any]:
        """Return the sweep as JSON-ready data."""
        return _document(self.ranking, self.argv, self.folder)

    @property
    def best_value(self) -> Optional[float]:
        """The best point's value in the ranking's column."""
        return None if self.ranking.best is None else value_of(self.ranking.best, self.ranking.column)

    @property
    def num_failed(self) -> int:
        return sum(record.status == FAILED for record in self.ranking.records)

    @property
    def num_unfinished(self) -> int:
        return sum(record.status in (PENDING, INTERRUPTED) for record in self.ranking.records)


def run_sweep(
    points: Points, argv: Sequence[str], screen: Screen, errors: Screen, began: Optional[float] = None
) -> SweepResult:
    """Check every point, then run each in a separate process.

    Args:
        points: The points of the command line.
        argv: The command line, for the ledger.
        screen: Shows progress.
        errors: Shows failed points.
        began: When the time of `max_minutes` began, by `time.monotonic`; None: now, for each point.

    Raises:
        ConfigError: If a config is wrong; nothing was started and nothing was written.
    """
    config = points.points[0].config
    with contextlib.ExitStack() as stack:
        forks = _fork_server(points, stack)
        checked = check_points(points.points)
        problems = check_writable(config.runs_dir)
        if problems:
            raise ConfigError(problems)
        at_once = points_at_once(config.sweep.jobs, checked, points.points[0].where("sweep.jobs"))
        records = [_record(item, index) for index, item in enumerate(checked)]
        words = [mask_word(word) for word in argv]
        ledger = _open(points, words, records, screen)
        stack.enter_context(locked(ledger.folder, "sweep", screen.remark))
        ledger.save()
        for line in opening_lines(checked, at_once):
            screen.line(line)
        launcher = LocalLauncher(at_once.jobs, forks)
        pool = Pool(
            ledger,
            launcher,
            screen,
            errors,
            began,
            at_once.threads,
            lambda: _write_table(ledger, config.sweep.rank_by) and None,
        )
        interrupted = pool.run(Source(ledger.records, checked))
        ranking = _write_table(ledger, config.sweep.rank_by)
    return SweepResult(ledger.folder, words, ranking, config.sweep.rank_by, interrupted)


def _fork_server(points: Points, stack: contextlib.ExitStack) -> Optional[ForkServer]:
    """Start the process that points are forked from, if there are several on the CPU engine."""
    if len(points.points) < 2 or any(engines.load(point.config.engine).kind != "cpu" for point in points.points):
        return None
    forks = ForkServer()
    stack.callback(forks.close)
    return forks


def show_result(result: SweepResult, screen: Screen) -> None:
    """Show the table, throughput against the swept key, and what to type next."""
    lines = [""]
    wanted = result.rank_by
    if wanted is not None and wanted != result.ranking.column and result.ranking.best is not None:
        lines.append(f"note: no result has sweep.rank_by={wanted}; ranked by {result.ranking.column}")
    throughput = throughput_lines(result.ranking.records)
    lines += [*table_lines(result.ranking), *([""] if throughput else []), *throughput, "", final_line(result)]
    for line in [*lines, f"table: {result.folder / 'sweep.csv'} and sweep.json"]:
        screen.line(line)
    if result.num_failed or result.num_unfinished:
        words = [word for word in result.argv if not word.lstrip("+").startswith("resume=")]
        screen.line(f"run the unfinished points: {shlex.join(['ipurun', 'train', *words, f'resume={result.folder}'])}")


def final_line(result: SweepResult) -> str:
    """Return the result of a sweep in one line."""
    records = result.ranking.records
    done = len(records) - result.num_failed - result.num_unfinished
    parts = [f"{done} of {plural(len(records), 'point')} finished"]
    if result.num_failed:
        parts.append(f"{result.num_failed} failed")
    if result.num_unfinished:
        parts.append(f"{result.num_unfinished} not finished")
    best = result.ranking.best
    if best is not None:
        parts.append(f"best {result.ranking.column} {metric(result.best_value)} with {swept_text(best) or best.name}")
    return ", ".join(parts)


def _open(points: Points, argv: Sequence[str], records: List[Record], screen: Screen) -> Ledger:
    """Return a new ledger, or one that continues an earlier sweep."""
    config = points.points[0].config
    names = sorted({record.name for record in records})
    sweeps = Path(config.runs_dir) / slug(names[0] if len(names) == 1 else "sweep") / "sweeps"
    earlier: Optional[Ledger] = None
    if config.resume == _AUTO:
        earlier = find_earlier(sweeps, [record.id for record in records])
        if earlier is None:
            screen.line(f"note: resume=auto found no sweep of these points in {sweeps}; running all of them")
    elif config.resume is not None:
        earlier = Ledger.load(config.resume)
    if earlier is None:
        folder = new_folder(Path(points.launching.sweep_dir) if points.launching.sweep_dir else sweeps / timestamp())
        ledger = Ledger(folder, argv, records)
    else:
        ledger = Ledger(earlier.folder, argv, records)
        ledger.adopt(earlier)
        done = len(records) - len(ledger.unfinished)
        screen.line(f"resuming {earlier.folder}: {done} of {len(records)} points are finished")
    return ledger


def _record(item: Checked, index: int) -> Record:
    words = [word for word in item.point.overrides if not word.lstrip("+").startswith("resume=")]
    return Record(
        id=item.id,
        index=index,
        name=item.point.config.name or "run",
        swept=dict(item.point.swept),
        overrides=words,
    )


def _write_table(ledger: Ledger, rank_by: Optional[str]) -> Ranking:
    ranking = rank(ledger.records, rank_by)
    ledger.write("sweep.csv", csv_text(rows_as_data(ranking)))
    document = _document(ranking, ledger.argv, ledger.folder)
    ledger.write("sweep.json", json.dumps(document, indent=2, default=str) + "\n")
    return ranking


def _document(ranking: Ranking, argv: Sequence[str], folder: Path) -> Dict[str, Any]:
    return {
        "folder": str(folder),
        "argv": list(argv),
        "ranked_by": ranking.column,
        "points": rows_as_data(ranking),
    }
