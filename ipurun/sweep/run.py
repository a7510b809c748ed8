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
from ipurun.config.schema.hydra_plugins import BASIC
from ipurun.config.secrets import mask_word
from ipurun.distributed.environment import launched
from ipurun.errors import ConfigError
from ipurun.log.format import metric, plural
from ipurun.log.screen import Screen
from ipurun.runs.folder import check_writable, new_folder, slug, timestamp
from ipurun.runs.lock import locked
from ipurun.sweep.batch import JoblibLauncher, SubmititLauncher
from ipurun.sweep.check import Checked, check_points
from ipurun.sweep.forks import ForkServer
from ipurun.sweep.launchers import Launcher, LocalLauncher
from ipurun.sweep.ledger import FAILED, FINISHED, PRUNED, Ledger, Record, find_earlier, find_same_command
from ipurun.sweep.pool import Pool, Source, swept_text
from ipurun.sweep.search import Search, TrialSource
from ipurun.sweep.sharing import opening_lines, points_at_once
from ipurun.sweep.table import Ranking, chart_lines, csv_text, rank, rows_as_data, show_table, value_of

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
    num_points: int

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
    def num_pruned(self) -> int:
        return sum(record.status == PRUNED for record in self.ranking.records)

    @property
    def num_finished(self) -> int:
        return sum(record.status == FINISHED for record in self.ranking.records)

    @property
    def num_unfinished(self) -> int:
        return self.num_points - self.num_finished - self.num_failed - self.num_pruned


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
    config, started = points.points[0].config, launched()
    if started is not None:
        raise ConfigError(
            f"{started.by} started this sweep as {started.count} processes, each of which would run all points",
            seen=f"process {started.rank} of {started.count}",
            fix="start the sweep without it; distributed=torchrun or poprun gives each point several processes",
        )
    with contextlib.ExitStack() as stack:
        search = _search(points)
        forks = _fork_server(points, search is not None, stack)
        checked = check_points(points.points)
        problems = check_writable(config.runs_dir)
        if problems:
            raise ConfigError(problems)
        at_once = points_at_once(points, checked, search)
        records = [] if search else [_record(item, index) for index, item in enumerate(checked)]
        words = [mask_word(word) for word in argv]
        ledger = _open(points, words, records, screen)
        stack.enter_context(locked(ledger.folder, "sweep", screen.remark))
        launcher = _launcher(points, at_once.jobs, ledger.folder, forks)
        ledger.save()
        for line in opening_lines(checked, at_once, search):
            screen.remark(line)
        higher = None if search is None else search.direction == "maximize"

        def write_table() -> Ranking:
            return _write_table(ledger, search.metric if search else config.sweep.rank_by, higher)

        pool = Pool(ledger, launcher, screen, errors, began, at_once.threads, write_table)
        source = TrialSource(points, search, ledger) if search else Source(ledger.records, checked)
        interrupted = pool.run(source)
        ranking = write_table()
    return SweepResult(ledger.folder, words, ranking, config.sweep.rank_by, interrupted, source.total)


def _search(points: Points) -> Optional[Search]:
    return None if points.composer is None else Search(points)


def _fork_server(points: Points, searches: bool, stack: contextlib.ExitStack) -> Optional[ForkServer]:
    """Start the process that points are forked from, if there are several on the CPU engine of this machine."""
    several = len(points.points) > 1 or searches
    if not several or points.launching.launcher != BASIC:
        return None
    if any(engines.load(point.config.engine).kind != "cpu" for point in points.points):
        return None
    forks = ForkServer(("optuna",) if searches else ())
    stack.callback(forks.close)
    return forks


def _launcher(points: Points, at_once: int, folder: Path, forks: Optional[ForkServer]) -> Launcher:
    name, keys = points.launching.launcher, points.launching.launcher_keys
    if name == BASIC:
        return LocalLauncher(at_once, forks)
    hidden = sorted({key for point in points.points for key in point.hidden})
    if hidden:
        raise ConfigError(
            f"`hydra/launcher={name}` would write secrets of the config to files",
            seen=", ".join(hidden),
            fix="leave them out of the config and set the variables that the libraries read, such as WANDB_API_KEY",
        )
    if name == "joblib":
        return JoblibLauncher(keys, at_once)
    return SubmititLauncher(name, keys, folder, points.points[0].config.name or "run", at_once)


def show_result(result: SweepResult, screen: Screen) -> None:
    """Show the table, the ranked value against the swept keys, and what to type next."""
    screen.line("")
    wanted = result.rank_by
    if wanted is not None and wanted != result.ranking.column and result.ranking.best is not None:
        screen.remark(f"note: no result has sweep.rank_by={wanted}; ranked by {result.ranking.column}")
    show_table(result.ranking, screen)
    chart = chart_lines(result.ranking)
    lines = [*([""] if chart else []), *chart, "", final_line(result)]
    for line in [*lines, f"table: {result.folder / 'sweep.csv'} and sweep.json"]:
        screen.line(line)
    if result.num_failed or result.num_unfinished:
        words = [word for word in result.argv if not word.lstrip("+").startswith("resume=")]
        again = shlex.join(["ipurun", "train", *words, f"resume={result.folder}"])
        screen.line(f"run the unfinished points: {again}", to_copy=True)


def final_line(result: SweepResult) -> str:
    """Return the result of a sweep in one line."""
    parts = [f"{result.num_finished} of {plural(result.num_points, 'point')} finished"]
    if result.num_pruned:
        parts.append(f"{result.num_pruned} pruned")
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
    names = sorted({point.config.name or "run" for point in points.points})
    sweeps = Path(config.runs_dir) / slug(names[0] if len(names) == 1 else "sweep") / "sweeps"
    chosen = Path(points.launching.sweep_dir) if points.launching.sweep_dir else None
    earlier: Optional[Ledger] = None
    if config.resume == _AUTO:
        # A folder that exists gets a number, and its name may have the time in it: its neighbours count, too.
        places = [sweeps] if chosen is None else [chosen.parent, sweeps]
        if points.composer is None:
            earlier = find_earlier(places, [record.id for record in records])
        else:
            earlier = find_same_command(places, argv)
        if earlier is None:
            looked = " or ".join(map(str, places))
            screen.line(f"note: resume=auto found no sweep of these points in {looked}; running all of them")
    elif config.resume is not None:
        earlier = Ledger.load(config.resume)
    if earlier is None:
        ledger = Ledger(new_folder(chosen or sweeps / timestamp()), argv, records)
    else:
        ledger = Ledger(earlier.folder, argv, records)
        if points.composer is None:
            ledger.adopt(earlier)
        else:
            ledger.records = earlier.records
        done = len(ledger.records) - len(ledger.unfinished)
        total = len(records) or points.launching.sweeper_keys["n_trials"]
        screen.line(f"resuming {earlier.folder}: {done} of {total} points are finished")
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


def _write_table(ledger: Ledger, rank_by: Optional[str], higher_is_better: Optional[bool]) -> Ranking:
    ranking = rank(ledger.records, rank_by, higher_is_better)
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
