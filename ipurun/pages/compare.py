"""Several runs side by side: curves on one picture, keys that differ, speed."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from ipurun.log.console import without_classes
from ipurun.log.format import count, duration, metric, value_text
from ipurun.log.style import sparkline
from ipurun.pages.charts import Series, line_chart, line_keys, smoothed
from ipurun.pages.data import TITLES, RunData, curves_of, flat
from ipurun.pages.parts import Cell, badge, command, page, section, table

__all__ = ["compare_page", "comparison", "differing_keys", "labels_of", "loss_curves"]

_MISSING = "(not set)"
_NOT_COMPARED = ("resume",)


def labels_of(runs: Sequence[RunData]) -> List[str]:
    """Return a short name for each run that no other has; that of its folder alone says enough of runs of one name."""
    names = [run.name for run in runs]
    folders = [run.folder.name for run in runs] if len(set(names)) == 1 else names
    for candidates in (names, folders, [run.label for run in runs]):
        if len(set(candidates)) == len(runs):
            return candidates
    return [str(run.folder) for run in runs]


def differing_keys(runs: Sequence[RunData]) -> List[Tuple[str, List[str]]]:
    """Return the keys whose values differ, with the value of each run as text."""
    configs = [flat(run.config) for run in runs]
    found = []
    for key in sorted({key for config in configs for key in config}):
        texts = [value_text(config[key]) if key in config else _MISSING for config in configs]
        if len(set(texts)) > 1 and key not in _NOT_COMPARED:
            found.append((key, texts))
    return found


def comparison(runs: Sequence[RunData], blocks: bool = True) -> Tuple[List[str], List[List[str]]]:
    """Return header and rows of the table of runs: how each ended, its best value, speed and loss curve."""
    header = ["run", "status", "steps", "best", "train loss", "loss curve", "samples/s", "time"]
    rows = []
    for label, run in zip(labels_of(runs), runs):
        losses = [curve for curve in curves_of(run) if curve.split == "train" and curve.name == "loss"]
        best = "-" if run.best is None else f"{run.monitor or 'loss'} {metric(run.best)}"
        last = metric(losses[0].values[-1]) if losses else "-"
        spark = sparkline(losses[0].values, 24, blocks) if losses else ""
        speed, time = count(run.samples_per_second), duration(run.total_seconds)
        rows.append([label, run.status, count(run.step), best, last, spark, speed, time])
    return header, rows


def loss_curves(runs: Sequence[RunData]) -> List[Tuple[str, Sequence[float], Sequence[float]]]:
    """Return the label of each run, the steps and the values of its training loss, smoothed where there are many."""
    found = []
    for label, run in zip(labels_of(runs), runs):
        for curve in curves_of(run):
            if (curve.split, curve.name) == ("train", "loss"):
                line = smoothed(Series(label, curve.steps, curve.values, 0))[-1]
                found.append((label, line.xs, line.ys))
    return found


def compare_page(runs: Sequence[RunData]) -> str:
    """Return the page of a comparison."""
    labels = labels_of(runs)
    series: Dict[Tuple[str, str], List[Series]] = {}
    for colour, (label, run) in enumerate(zip(labels, runs)):
        kept = without_classes({curve.name: 0.0 for curve in curves_of(run)})
        for curve in curves_of(run):
            if curve.name in kept and curve.name != "call_seconds":
                values = [100 * value for value in curve.values] if curve.name == "data_wait" else curve.values
                one = Series(label, curve.steps, values, colour, dots=curve.split != "train")
                shown = smoothed(one)[-1:] if curve.split == "train" and curve.name != "lr" else [one]
                series.setdefault((curve.split, curve.name), []).extend(shown)
    order = sorted(series, key=lambda pair: (pair[1] in ("samples_per_second", "data_wait", "lr"), pair[1] != "loss"))
    last = max((step for found in series.values() for one in found for step in one.xs), default=1.0)
    charts = [
        line_chart(
            TITLES.get(name, f"{split} {name}"),
            series[split, name],
            name=f"c{place}",
            x_range=(0.0, last),
            has_legend=False,
        )
        for place, (split, name) in enumerate(order)
    ]
    rows: List[Sequence[Any]] = []
    speeds = [run.samples_per_second or 0.0 for run in runs]
    for label, run, speed in zip(labels, runs, speeds):
        ratio = f"{speed / speeds[0]:.2f}x" if speeds[0] and speed else "-"
        best = "-" if run.best is None else f"{run.monitor or 'loss'} {metric(run.best)}"
        rows.append(
            (
                Cell(label, kind="name"),
                Cell(run.status, markup=badge(run.status)),
                count(run.step),
                Cell(best, run.best, kind="nowrap"),
                Cell(count(run.samples_per_second), run.samples_per_second),
                ratio,
                Cell(duration(run.total_seconds), run.total_seconds),
                Cell(str(run.folder), kind="name"),
            )
        )
    header = ["run", "status", "steps", "best", "samples/s", "speed", "time", "folder"]
    keys = [[Cell(key, kind="mono name"), *map(Cell, texts)] for key, texts in differing_keys(runs)]
    body = [
        section("Runs", table(header, rows, "sortable", (4, 5, 6))),
        section(
            "Curves",
            f'<div class="legend">{line_keys(enumerate(labels))}</div><div class="grid">{"".join(charts)}</div>'
            if any(charts)
            else "",
        ),
        section("Keys that differ", table(["key", *labels], keys, "compared") or "<p>No key differs.</p>"),
        section("Again", command(" ".join(["ipurun", "compare", *(str(run.folder) for run in runs)]))),
    ]
    return page("Comparison of runs", body, " · ".join(labels))
