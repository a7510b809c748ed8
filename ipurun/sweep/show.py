"""How a sweep's result is told."""

from __future__ import annotations

import shlex
from typing import List

from ipurun.log.format import metric, plural
from ipurun.log.screen import Screen
from ipurun.sweep.run import SweepResult
from ipurun.sweep.table import table_lines, throughput_lines

__all__ = ["final_line", "show_result"]


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
