"""Run the points of a sweep one after the other, and show and store the results."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipurun.checkpoint import latest
from ipurun.config.compose import Points
from ipurun.config.secrets import mask_word
from ipurun.errors import ConfigError
from ipurun.log.format import count, duration, metric, plural
from ipurun.log.screen import Screen
from ipurun.runs.folder import RunFolder, check_writable, new_folder, slug, timestamp
from ipurun.runs.lock import locked
from ipurun.sweep.check import Checked, check_points
from ipurun.sweep.child import Outcome, run_child
from ipurun.sweep.ledger import FAILED, FINISHED, INTERRUPTED, PENDING, RUNNING, Ledger, Record, find_earlier
from ipurun.sweep.remote import ScreenReceiver
from ipurun.sweep.table import Ranking, csv_text, rank, rows_as_data, table_lines, throughput_lines, value_of
from ipurun.sweep.worker import job_environment, write_job

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
    checked = check_points(points.points)
    config = points.points[0].config
    problems = check_writable(config.runs_dir)
    if problems:
        raise ConfigError(problems)
    records = [_record(item, index) for index, item in enumerate(checked)]
    words = [mask_word(word) for word in argv]
    ledger = _open(points, words, records, screen)
    with locked(ledger.folder, "sweep", screen.remark):
        ledger.save()
        interrupted = _run_all(ledger, checked, screen, errors, began)
        ranking = _write_table(ledger, config.sweep.rank_by)
    return SweepResult(ledger.folder, words, ranking, config.sweep.rank_by, interrupted)


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
        parts.append(f"best {result.ranking.column} {metric(result.best_value)} with {_swept_text(best) or best.name}")
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
        folder = new_folder(Path(points.sweep_dir) if points.sweep_dir else sweeps / timestamp())
        ledger = Ledger(folder, argv, records)
    else:
        ledger = Ledger(earlier.folder, argv, records)
        ledger.adopt(earlier)
        done = len(records) - len(ledger.unfinished)
        screen.line(f"resuming {earlier.folder}: {done} of {len(records)} points are finished")
    return ledger


def _run_all(
    ledger: Ledger, checked: Sequence[Checked], screen: Screen, errors: Screen, began: Optional[float]
) -> bool:
    """Run the unfinished points; return True if the user stopped the sweep."""
    num_points = len(ledger.records)
    receiver = ScreenReceiver(screen)
    for record, item in zip(ledger.records, checked):
        if record.status == FINISHED:
            continue
        label = f"[{record.index + 1}/{num_points}] {_swept_text(record)}".rstrip()
        screen.begin(f"{label} starting")
        try:
            outcome = _run_one(ledger, record, item, label, screen, receiver, began)
        except KeyboardInterrupt:
            outcome = Outcome(INTERRUPTED, "interrupted")
        screen.close()
        record.status, record.reason = outcome.status, outcome.reason
        record.folder = outcome.folder or record.folder
        record.results = outcome.results
        ledger.save()
        _write_table(ledger, item.point.config.sweep.rank_by)
        if outcome.status == INTERRUPTED:
            return True
        if outcome.status == FINISHED:
            screen.line(f"{label} {_result_text(record)}")
        elif outcome.status == FAILED:
            errors.line(f"{label} failed\n{outcome.detail}{_log_text(record)}")
            if item.point.config.sweep.on_error == "stop":
                return False
    return False


def _run_one(
    ledger: Ledger,
    record: Record,
    item: Checked,
    label: str,
    screen: Screen,
    receiver: ScreenReceiver,
    began: Optional[float],
) -> Outcome:
    if item.obstacle is not None or item.plan is None:
        reason = item.obstacle.problems[0].what if item.obstacle else "it has no plan"
        return Outcome(FAILED, reason, str(item.obstacle))
    folder = ledger.folder / f"{record.index:03d}"
    resume_folder = _resumable(record, folder)
    jobs = ledger.folder / "jobs"
    jobs.mkdir(exist_ok=True)
    job_file = jobs / f"{record.index:03d}.json"
    write_job(job_file, item.point, str(folder), resume_folder, began)
    record.status, record.folder = RUNNING, str(resume_folder or folder)
    ledger.save()
    return run_child(
        job_file,
        jobs / f"{record.index:03d}.output.txt",
        {**item.plan.environment, **job_environment(item.point)},
        lambda message: receiver.show(message, label),
        lambda: screen.line(f"{label} is saving before it stops; press Ctrl-C again to stop it at once"),
        item.point.config.sweep.timeout_seconds,
    )


def _resumable(record: Record, folder: Path) -> Optional[str]:
    """Return the folder of an earlier attempt that has a checkpoint."""
    for candidate in (record.folder, str(folder)):
        if candidate and (Path(candidate) / "config.yaml").is_file() and latest(RunFolder(candidate)):
            return candidate
    return None


def _record(item: Checked, index: int) -> Record:
    words = [word for word in item.point.overrides if not word.lstrip("+").startswith("resume=")]
    return Record(
        id=item.id,
        index=index,
        name=item.point.config.name or "run",
        swept=dict(item.point.swept),
        overrides=words,
    )


def _log_text(record: Record) -> str:
    log = RunFolder(record.folder).log_file if record.folder else None
    return f"\n  log    {log}" if log is not None and log.is_file() else ""


def _result_text(record: Record) -> str:
    results = record.results
    parts = ["finished"]
    if results.get("best") is not None:
        parts.append(f"best {results['monitor']} {metric(results['best'])}")
    parts += [f"{count(results['samples_per_second'])} samples/s", duration(results["seconds"].get("total"))]
    return ", ".join(parts)


def _swept_text(record: Record) -> str:
    return " ".join(f"{key}={value}" for key, value in record.swept.items())


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
