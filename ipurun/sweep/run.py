"""Runs the points of a sweep one after the other and keeps its books."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipurun.checkpoint import latest
from ipurun.config.compose import Points
from ipurun.errors import ConfigError
from ipurun.log.format import count, duration, metric, plural
from ipurun.log.screen import Screen
from ipurun.runs.folder import RunFolder, check_writable, new_folder, slug, timestamp
from ipurun.sweep.check import Checked, check_points
from ipurun.sweep.child import Outcome, run_child
from ipurun.sweep.ledger import FAILED, FINISHED, INTERRUPTED, PENDING, RUNNING, Ledger, Record, find_earlier
from ipurun.sweep.remote import Replay
from ipurun.sweep.table import Ranking, csv_text, rank, rows_as_data, table_lines, throughput_lines, value_of
from ipurun.sweep.worker import write_job

__all__ = ["SweepResult", "final_line", "run_sweep", "show_result"]

_AUTO = "auto"


@dataclass(frozen=True)
class SweepResult:
    """A sweep that is over, or was stopped."""

    folder: Path
    argv: Sequence[str]
    ranking: Ranking
    rank_by: Optional[str]  # as the config asks
    interrupted: bool

    def to_dict(self) -> Dict[str, Any]:
        """The sweep as JSON-ready data."""
        return _document(self.ranking, self.argv, self.folder)

    @property
    def best_value(self) -> Optional[float]:
        """What the best point has in the ranking's column."""
        return None if self.ranking.best is None else value_of(self.ranking.best, self.ranking.column)

    @property
    def num_failed(self) -> int:
        return sum(record.status == FAILED for record in self.ranking.records)

    @property
    def num_unfinished(self) -> int:
        return sum(record.status in (PENDING, INTERRUPTED) for record in self.ranking.records)


def run_sweep(points: Points, argv: Sequence[str], screen: Screen, errors: Screen) -> SweepResult:
    """Checks every point, then runs each in a process of its own.

    Args:
        points: The points of the command line.
        argv: The command line, for the manifest.
        screen: Where progress is shown.
        errors: Where a failed point is told at once.

    Raises:
        ConfigError: A point's config is wrong; nothing was started and nothing was written.
    """
    checked = check_points(points.points)
    config = points.points[0].config
    problems = check_writable(config.runs_dir)
    if problems:
        raise ConfigError(problems)
    records = [_record(item, index) for index, item in enumerate(checked)]
    manifest = _open(points, argv, records, screen)
    interrupted = _run_all(manifest, checked, screen, errors)
    ranking = _write_table(manifest, config.sweep.rank_by)
    return SweepResult(manifest.folder, list(argv), ranking, config.sweep.rank_by, interrupted)


def _open(points: Points, argv: Sequence[str], records: List[Record], screen: Screen) -> Ledger:
    """The manifest to work through: a new one, or an earlier sweep's with what it has done."""
    config = points.points[0].config
    names = sorted({record.name for record in records})
    sweeps = Path(config.runs_dir) / slug(names[0] if len(names) == 1 else "sweep") / "sweeps"
    earlier: Optional[Ledger] = None
    if config.resume == _AUTO:
        earlier = find_earlier(sweeps, [record.id for record in records])
        if earlier is None:
            screen.line(f"note: resume=auto finds no sweep of these points in {sweeps}: all are run")
    elif config.resume is not None:
        earlier = Ledger.load(config.resume)
    if earlier is None:
        folder = new_folder(Path(points.sweep_dir) if points.sweep_dir else sweeps / timestamp())
        manifest = Ledger(folder, argv, records)
    else:
        manifest = Ledger(earlier.folder, argv, records)
        manifest.adopt(earlier)
        done = len(records) - len(manifest.unfinished)
        screen.line(f"going on with {earlier.folder}: {done} of {len(records)} points are finished")
    manifest.save()
    return manifest


def _run_all(manifest: Ledger, checked: Sequence[Checked], screen: Screen, errors: Screen) -> bool:
    """Runs what is unfinished; True when the user stopped it."""
    num_points = len(manifest.records)
    replay = Replay(screen)
    for record, item in zip(manifest.records, checked):
        if record.status == FINISHED:
            continue
        label = f"[{record.index + 1}/{num_points}] {_swept_text(record)}".rstrip()
        screen.begin(f"{label} starting")
        try:
            outcome = _run_one(manifest, record, item, label, screen, replay)
        except KeyboardInterrupt:
            outcome = Outcome(INTERRUPTED, "interrupted")
        screen.close()
        record.status, record.reason = outcome.status, outcome.reason
        record.folder = outcome.folder or record.folder
        record.results = outcome.results
        manifest.save()
        _write_table(manifest, item.point.config.sweep.rank_by)
        if outcome.status == INTERRUPTED:
            return True
        if outcome.status == FINISHED:
            screen.line(f"{label} {_result_text(record)}")
        elif outcome.status == FAILED:
            errors.line(f"{label} failed\n{outcome.detail}{_log_text(record)}")
            if item.point.config.sweep.on_error == "stop":
                return False
    return False


def _run_one(manifest: Ledger, record: Record, item: Checked, label: str, screen: Screen, replay: Replay) -> Outcome:
    if item.obstacle is not None or item.plan is None:
        reason = item.obstacle.problems[0].what if item.obstacle else "it has no plan"
        return Outcome(FAILED, reason, str(item.obstacle))
    folder = manifest.folder / f"{record.index:03d}"
    resume_folder = _resumable(record, folder)
    jobs = manifest.folder / "jobs"
    jobs.mkdir(exist_ok=True)
    job_file = jobs / f"{record.index:03d}.json"
    write_job(job_file, item.point, str(folder), resume_folder)
    record.status, record.folder = RUNNING, str(resume_folder or folder)
    manifest.save()
    return run_child(
        job_file,
        jobs / f"{record.index:03d}.output.txt",
        item.plan.environment,
        lambda message: replay.perform(message, label),
        lambda: screen.line(f"{label} is asked to save and stop; Ctrl-C again stops it at once"),
        item.point.config.sweep.timeout_seconds,
    )


def _resumable(record: Record, folder: Path) -> Optional[str]:
    """The folder of an earlier attempt that has saved something."""
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


def _write_table(manifest: Ledger, rank_by: Optional[str]) -> Ranking:
    ranking = rank(manifest.records, rank_by)
    _replace(manifest.folder / "sweep.csv", csv_text(rows_as_data(ranking)))
    document = _document(ranking, manifest.argv, manifest.folder)
    _replace(manifest.folder / "sweep.json", json.dumps(document, indent=2, default=str) + "\n")
    return ranking


def _document(ranking: Ranking, argv: Sequence[str], folder: Path) -> Dict[str, Any]:
    return {
        "folder": str(folder),
        "argv": list(argv),
        "ranked_by": ranking.column,
        "points": rows_as_data(ranking),
    }


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def show_result(result: SweepResult, screen: Screen) -> None:
    """The table, throughput against the swept key, and what to type next."""
    screen.line("")
    asked = result.rank_by
    if asked is not None and asked != result.ranking.column and result.ranking.best is not None:
        screen.line(f"note: no result has sweep.rank_by={asked}; ranked by {result.ranking.column}")
    for line in [*table_lines(result.ranking), *_spaced(throughput_lines(result.ranking.records))]:
        screen.line(line)
    screen.line("")
    screen.line(final_line(result))
    screen.line(f"table: {result.folder / 'sweep.csv'} and sweep.json")
    if result.num_failed or result.num_unfinished:
        words = [word for word in result.argv if not word.lstrip("+").startswith("resume=")]
        screen.line(f"run what is unfinished: {shlex.join(['ipurun', 'train', *words, f'resume={result.folder}'])}")


def final_line(result: SweepResult) -> str:
    """The sweep in one line."""
    records = result.ranking.records
    done = len(records) - result.num_failed - result.num_unfinished
    parts = [f"{done} of {plural(len(records), 'point')} finished"]
    if result.num_failed:
        parts.append(f"{result.num_failed} failed")
    if result.num_unfinished:
        parts.append(f"{result.num_unfinished} not run to the end")
    best = result.ranking.best
    if best is not None:
        swept = " ".join(f"{key}={value}" for key, value in best.swept.items())
        parts.append(f"best {result.ranking.column} {metric(result.best_value)} with {swept or best.name}")
    return ", ".join(parts)


def _spaced(lines: List[str]) -> List[str]:
    return ["", *lines] if lines else []
