"""The page of a run and the page of a sweep."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.errors import ConfigError
from ipurun.log.console import without_classes
from ipurun.log.format import count, duration, metric, plural, rate, value_text
from ipurun.pages.charts import COLOURS, Mark, Series, heat_grid, line_chart, line_keys, numbers_of, smoothed
from ipurun.pages.data import TITLES, Curve, RunData, SweepData, age_text, curves_of, flat, number, read_run, read_text
from ipurun.pages.parts import (
    Cell,
    Piece,
    badge,
    bar_rows,
    command,
    details,
    escape,
    page,
    section,
    swatches,
    table,
    tiles,
)
from ipurun.sweep.table import is_higher_better, short, value_of

__all__ = ["changes_from_recipe", "recipe_config", "run_page", "sweep_page", "value_by_key"]

_TIMES = (
    ("compile", "compilation", "var(--s3)"),
    ("train", "training", "var(--s0)"),
    ("data_wait", "waiting for data", "var(--s1)"),
    ("eval", "evaluation", "var(--s2)"),
    ("checkpoint", "saving", "var(--s6)"),
    ("averaging", "averaging weights", "var(--s5)"),
    ("recovery", "recovery", "var(--s4)"),
    ("other", "start and end", "var(--s7)"),
)
_OF_THE_LOOP = ("samples_per_second", "call_seconds", "data_wait")
_HOW = "Drag to zoom, double-click for the whole, click a name to hide its line"
_MOST_NAMED = 6  # points of a sweep whose curves are drawn in colours
_MOST_CURVES = 60  # of the points of a sweep


def run_page(
    run: RunData,
    plan_parts: Sequence[str] = (),
    no_plan: str = "",
    recipe: Optional[Mapping[str, Any]] = None,
    live: str = "",
    version: str = "",
    home: str = "",
) -> str:
    """Return the page of a run.

    Args:
        run: The run.
        plan_parts: Sections with the estimate of its plan.
        no_plan: Why there are none.
        recipe: The config of its recipe alone, as dotted keys; None if that is not known here.
        live: As for `parts.page`, like `version`.
        version: Version of the content.
        home: Address of the list of all runs, for pages that are served.
    """
    body = [f'<p><a href="{escape(home)}">all runs</a></p>' if home else "", _run_head(run)]
    body.append(section("Curves", _run_charts(run)))
    body.append(section("Where the time went", _times(run)))
    body.append(section("Evaluations", _evaluations(run)))
    body.append(section("Config", _config(run, recipe)))
    body += list(plan_parts)
    if no_plan:
        body.append(section("Plan", f'<p class="note">No estimate here: {escape(no_plan)}</p>'))
    body.append(
        details("the plan as text", f"<pre>{escape(_text_of(run.folder / 'plan.txt'))}</pre>", name="plan-text")
    )
    body.append(section("Where it ran", _machine(run)))
    body.append(section("Log", _log(run)))
    lead = " · ".join(filter(None, (str(run.folder), age_text(run.started), ", ".join(run.recipes))))
    return page(run.name, body, lead, run.status, live, version)


def _run_head(run: RunData) -> str:
    summary = run.summary
    best_step = number(summary.get("best_step"))
    at = "" if best_step is None else f" at step {count(best_step)}"
    metrics = _mapping(summary.get("metrics"))
    final = {str(key): found for key, found in ((k, number(v)) for k, v in metrics.items()) if found is not None}
    is_running, share = run.status == "running", run.progress
    total = f" of {count(run.step / share)}" if is_running and share else ""
    facts = [
        ("to go (ETA)", "" if run.eta_seconds is None else duration(run.eta_seconds)),
        (f"best {run.monitor or ''}{at}", "" if run.best is None else metric(run.best)),
        (f"weight update{'' if run.step == 1 else 's'}{total}", count(run.step)),
        ("samples/s", "" if run.samples_per_second is None else rate(run.samples_per_second)),
        ("time", "" if run.total_seconds is None else duration(run.total_seconds)),
        ("train loss", "" if number(summary.get("loss")) is None else metric(number(summary["loss"]))),
    ]
    facts += [(f"eval {name}", metric(value)) for name, value in list(without_classes(final).items())[:4]]
    devices = run.config.get("devices")
    facts.append(("IPUs", value_text(devices) if isinstance(devices, int) else ""))  # not if chosen by the plan
    words = [word for word in run.overrides if word]
    shown = [_outcome(run), tiles(facts)]
    if is_running and share is not None:
        shown.append(bar_rows([("", [Piece(share, "var(--s0)", f"{share:.0%} done")], f"{share:.0%}", "")]))
    typed = str(summary.get("reproduce_command") or " ".join(["ipurun", "train", *words]))
    shown.append(command(typed))
    if summary.get("resume_command") and run.status != "finished":
        shown.append(command(str(summary["resume_command"])))
    if run.faults:
        shown.append(f'<p class="tight">Not all files could be read: {escape("; ".join(run.faults))}</p>')
    return "".join(shown)


def _outcome(run: RunData) -> str:
    """Return why a run failed or stopped early, with what its log says after that: what was seen and what to try."""
    if not run.reason:
        return ""
    kind = "bad" if run.status == "failed" else "tight"
    lines = run.log_tail(200).splitlines() if run.status == "failed" else []
    places = [place for place, line in enumerate(lines) if line.endswith(f"error: {run.reason}")]
    advice = lines[places[-1] + 1 :] if places else []
    return f'<div class="outcome {kind}"><b>{escape(run.reason)}</b>{_advice(advice)}</div>'


def _advice(lines: Sequence[str]) -> str:
    """Return the lines of an error: `  try    a smaller ...` becomes a row, without the breaks made for a terminal."""
    rows: List[List[str]] = []
    for line in lines:
        found = re.match(r"  (\w+) +(\S.*)", line)
        if found:
            rows.append([found[1], found[2]])
        elif rows and line.startswith("   "):
            rows[-1][1] += f" {line.strip()}"
        else:  # a trace or the text of a library
            return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows) + "</dl>"
        if rows
        else ""
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a value of a file if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def marks_of(run: RunData) -> List[Mark]:
    """Return where a run was resumed or returned to an earlier step."""
    marks = [Mark(step, f"resumed after step {count(step)}") for step in run.resumes if step > 0]
    return marks + [Mark(step, f"back to step {count(step)}: {why}") for step, why in run.rollbacks]


def _run_charts(run: RunData) -> str:
    curves = curves_of(run)
    marks = marks_of(run)
    by_name: Dict[str, List[Curve]] = {}
    for curve in curves:
        by_name.setdefault(curve.name, []).append(curve)
    kept = without_classes(dict.fromkeys(by_name, 0.0))
    names = [name for name in ("loss", *kept) if name in by_name and name not in _OF_THE_LOOP and name != "lr"]
    steps = [step for curve in curves for step in curve.steps] or [0]
    shown = []
    for place, name in enumerate(dict.fromkeys([*names, "lr", "samples_per_second", "data_wait"])):
        series: List[Series] = []
        for colour, curve in enumerate(by_name.get(name, ())):
            is_train = curve.split == "train"
            values = [100 * value for value in curve.values] if name == "data_wait" else curve.values
            one = Series(curve.split, curve.steps, values, colour, dots=not is_train)
            series += smoothed(one) if is_train and name not in ("lr",) else [one]
        title = TITLES.get(name, name)
        if len(by_name.get(name, ())) == 1 and series and series[0].name != "train":
            title = f"{series[0].name} {name}"
        from_zero = name in ("samples_per_second", "data_wait")
        shown.append(
            line_chart(
                title,
                series,
                marks=marks,
                name=f"c{place}",
                from_zero=from_zero,
                x_range=(min(steps), max(steps)),
            )
        )
    if not any(shown):
        return '<p class="note">Nothing was recorded yet.</p>' if run.status == "running" else ""
    said = "; ".join(mark.label for mark in marks)
    notes = f'<p class="note">Dashed lines: {escape(said)}.</p>' if marks else ""
    notes += "".join(f'<p class="tight">{escape(_gaps_text(curve))}</p>' for curve in curves if _gaps(curve))
    how = f"{_HOW}; thick lines are moving means of the faint ones."
    return f'<p class="note">{how}</p><div class="grid">{"".join(shown)}</div>{notes}'


def _gaps(curve: Curve) -> List[float]:
    """Return the steps whose values cannot be drawn."""
    return [step for step, value in zip(curve.steps, curve.values) if not math.isfinite(value)]


def _gaps_text(curve: Curve) -> str:
    found = _gaps(curve)
    where = f"first at step {count(found[0])}" if len(found) > 1 else f"at step {count(found[0])}"
    return f"{curve.split} {curve.name}: {len(found):,} of {plural(len(curve.values), 'value')} not finite, {where}"


def _times(run: RunData) -> str:
    seconds = {str(kind): number(spent) or 0.0 for kind, spent in _mapping(run.summary.get("seconds")).items()}
    total = seconds.get("total", 0.0)
    if not total > 0 or not math.isfinite(total):
        return ""
    known = sum(seconds.get(kind, 0.0) for kind, _, _ in _TIMES)
    seconds["other"] = max(0.0, total - known)
    parts = [(seconds.get(kind, 0.0), label, colour) for kind, label, colour in _TIMES]
    parts = [part for part in parts if part[0] > total * 1e-4]
    pieces = [Piece(spent / max(total, known), colour, f"{label}: {duration(spent)}") for spent, label, colour in parts]
    legend = [(colour, f"{label} {duration(spent)} ({spent / total:.1%})") for spent, label, colour in parts]
    whole = bar_rows([("", pieces, duration(total), "")])
    note = ""
    if run.resumes:
        note = '<p class="note">Of the last process; the run was resumed.</p>'
    written = seconds.get("checkpoint_write", 0.0)
    if written > 0.05:
        note += f'<p class="note">Checkpoints were written for {duration(written)} in the background.</p>'
    uses = _mapping(run.summary.get("cache")).items()
    said = [f"{mode}: {use.get('state')}" for mode, use in uses if isinstance(use, dict)]
    if said:
        note += f'<p class="note">Executable cache: {escape("; ".join(said))}.</p>'
    return whole + swatches(legend) + note


def _evaluations(run: RunData) -> str:
    found = [record for record in run.records if record.get("split") != "train"]
    if not found:
        return ""
    hidden = {"split", "step", "call", "time", "is_best", "samples", "seconds", "epoch"}
    names = list(dict.fromkeys(name for record in found for name in record if name not in hidden))
    names = [name for name in without_classes(dict.fromkeys(names, 0.0)) if not isinstance(found[-1].get(name), list)]
    best = [record for record in found if record.get("is_best") is True]
    rows = []
    for record in reversed(found[-200:]):
        is_best = bool(best) and record is best[-1]
        row = [Cell(count(number(record.get("step")))), Cell(str(record.get("split")))]
        for name in names[:12]:
            value = number(record.get(name))
            row.append(
                Cell("-" if value is None else metric(value), value, "best" if is_best and name == run.monitor else "")
            )
        row.append(Cell(duration(number(record.get("seconds")))))
        rows.append(row)
    shown = table(["step", "split", *names[:12], "time"], rows, "sortable", range(2, 3 + len(names[:12])))
    return details(plural(len(found), "evaluation"), shown, name="evaluations", is_open=len(found) <= 12)


def changes_from_recipe(run: RunData, recipe: Mapping[str, Any]) -> List[Tuple[str, str, str]]:
    """Return the keys whose values differ from the run's recipe: key, value there, value here."""
    here = flat(run.config)
    missing = object()
    changes = []
    for key in sorted({*here, *recipe}):
        there, now = recipe.get(key, missing), here.get(key, missing)
        if there != now and key not in ("name", "resume"):
            texts = ["" if value is missing else value_text(value) for value in (there, now)]
            changes.append((key, texts[0], texts[1]))
    return changes


def _config(run: RunData, recipe: Optional[Mapping[str, Any]]) -> str:
    origins = run.origins
    shown = ""
    if recipe is not None:
        rows = [
            (Cell(key, kind="mono"), Cell(old, kind="old"), Cell(new, kind="new"), _origin(key, origins))
            for key, old, new in changes_from_recipe(run, recipe)
        ]
        name = ", ".join(run.recipes) or "the defaults"
        differs = table(["key", name, "this run", "set at"], rows, "diff")
        shown += f"<h3>Against {escape(name)}</h3>" + (differs or "<p>No key differs.</p>")
    else:
        typed = [word for word in run.overrides if not word.lstrip("+").startswith("recipe=")]
        shown += "<h3>Typed</h3>" + (f"<p><code>{escape(' '.join(typed))}</code></p>" if typed else "<p>Nothing.</p>")
    values = flat(run.config)
    keys = [(Cell(key, kind="mono"), Cell(value_text(values[key])), _origin(key, origins)) for key in values]
    where = table(["key", "value", "set at"], keys, "keys")
    if where:
        filtered = f'<input class="filter" type="search" placeholder="filter" aria-label="filter keys">{where}'
        shown += details(f"all {len(values)} keys, and where each was set", f"<div>{filtered}</div>", name="all-keys")
    return shown


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Return where a key, or the part of the config around it, was set."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = origins.get(".".join(parts[:length]))
        if found:
            return found
    return "default"


def _machine(run: RunData) -> str:
    engine, versions, git = (_mapping(run.env.get(name)) for name in ("engine", "versions", "git"))
    rows = [("engine", f"{engine.get('kind', '')} {engine.get('version', '')}".strip())]
    rows += [(str(name), str(version)) for name, version in versions.items()]
    if git:
        state = "with uncommitted changes" if git.get("dirty") else "clean"
        rows.append(("git", f"{git.get('commit', '')} on {git.get('branch', '')}, {state}"))
        changed = git.get("changed_files")
        if isinstance(changed, list) and changed:
            rows.append(("changed files", ", ".join(map(str, changed))))
    for name, variable in _mapping(run.env.get("variables")).items():
        if isinstance(variable, dict):
            rows.append((str(name), f"{variable.get('value')} (from {variable.get('from')})"))
    rows.append(("schema of the folder", str(run.env.get("schema", 1))))
    difference = _text_of(run.folder / "git.diff")
    more = details("git.diff", f"<pre>{escape(difference[:200_000])}</pre>", name="git-diff") if difference else ""
    return table(["what", "value"], [(Cell(label, kind="nowrap"), text) for label, text in rows if text], "keys") + more


def _log(run: RunData) -> str:
    tail = run.log_tail()
    title = "the last lines of log.txt"
    return details(title, f"<pre>{escape(tail)}</pre>", name="log", is_open=run.status == "failed") if tail else ""


def _text_of(path: Path) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def sweep_page(
    sweep: SweepData,
    link_to: Optional[Callable[[Path], str]] = None,
    live: str = "",
    version: str = "",
    home: str = "",
) -> str:
    """Return the page of a sweep.

    Args:
        sweep: The sweep.
        link_to: Address of the page of a point, for pages that are served.
        live: As for `parts.page`, like `version`.
        version: Version of the content.
        home: Address of the list of all runs.
    """
    column, keys = sweep.ranking.column, sweep.keys
    finished = [record for record in sweep.records if record.status == "finished"]
    failed = [record for record in sweep.records if record.status == "failed"]
    best = sweep.ranking.best
    best_value = None if best is None else value_of(best, column)
    done = f"{len(finished)} of {len(sweep.records)}"
    facts = [
        (f"best {column.replace('_', ' ')}", "" if best_value is None else metric(best_value)),
        (
            "setting of the best point",
            "" if best is None else _point_text(best.swept),
        ),
        ("points finished", done),
        ("failed", str(len(failed)) if failed else ""),
    ]
    body = [f'<p><a href="{escape(home)}">all runs</a></p>' if home else "", tiles(facts)]
    body.append(command(" ".join(["ipurun", "train", *sweep.argv])))
    body.append(section("Ranking", _ranking(sweep, link_to)))
    body.append(section("By swept key", _by_key(sweep)))
    body.append(section("Curves", _sweep_curves(sweep)))
    rows = [(_point_text(record.swept), Cell(record.reason, kind="reason bad")) for record in failed]
    body.append(section("Failed points", table(["point", "reason"], rows)))
    body.append(section("Config of the points", _constant_keys(sweep)))
    status = "running" if sweep.is_running else "finished" if sweep.is_complete else "interrupted"
    if failed and not sweep.is_running:
        status = "failed" if not finished else f"{len(failed)} failed"
    lead = " · ".join(filter(None, (str(sweep.folder), age_text(sweep.started), f"swept: {', '.join(keys)}")))
    name = sweep.records[0].name if sweep.records else sweep.folder.name
    return page(f"Sweep of {name}", body, lead, status, live, version)


def _short_point_text(swept: Mapping[str, str]) -> str:
    """Return a point with the last parts of its keys, where they tell the keys apart."""
    by_last_part = {key.rpartition(".")[2]: value for key, value in swept.items()}
    return _point_text(by_last_part if len(by_last_part) == len(swept) else swept)


def _point_text(swept: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={short(value)}" for key, value in swept.items())


def _ranking(sweep: SweepData, link_to: Optional[Callable[[Path], str]]) -> str:
    keys, column = sweep.keys, sweep.ranking.column
    names = list(dict.fromkeys(name for record in sweep.records for name in record.results.get("metrics", {})))
    names = [column] * (column != "samples_per_second") + [
        n for n in without_classes(dict.fromkeys(names, 0.0)) if n != column
    ]
    rows = []
    for place, record in enumerate(sweep.records, 1):
        folder = sweep.folder_of(record)
        link = link_to(folder) if link_to and folder else ""
        is_done = record.status == "finished"
        row = [Cell(str(place) if is_done else "-", place), Cell(f"{record.index:03d}", record.index, link=link)]
        values = []
        for name in names:
            value = value_of(record, name)
            is_best = record is sweep.ranking.best and name == column
            values.append(Cell("-" if value is None else metric(value), value, "best" if is_best else ""))
        row += values[:1]  # beside the rank, where narrow screens show it
        row += [Cell(short(record.swept.get(key, ""))) for key in keys]
        row.append(Cell(record.status, markup=badge(record.status)))
        speed, total = value_of(record, "samples_per_second"), value_of(record, "seconds")
        row += [*values[1:], Cell(count(speed), speed), Cell(duration(total), total)]
        rows.append(row)
    header = ["rank", "point", *names[:1], *keys, "status", *names[1:], "samples/s", "time"]
    status = header.index("status")
    numeric = [0, *range(2, 2 + len(names[:1])), *range(status + 1, len(header))]
    return table(header, rows, "sortable", numeric, first_is_best=sweep.ranking.best is not None)


def _by_key(sweep: SweepData) -> str:
    column, keys = sweep.ranking.column, sweep.keys
    points = [(record, value_of(record, column)) for record in sweep.records if record.status == "finished"]
    points = [(record, value) for record, value in points if value is not None and math.isfinite(value)]
    if not points:
        return ""
    shown = []
    for place, key in enumerate(keys):
        values_of = [(str(r.swept.get(key, "")), float(v or 0), _short_point_text(r.swept)) for r, v in points]
        shown.append(value_by_key(key, column, values_of, place))
    grid = ""
    if len(keys) == 2:
        values = {(str(r.swept.get(keys[0])), str(r.swept.get(keys[1]))): float(v or 0) for r, v in points}
        ordered = dict(sorted(values.items(), key=lambda item: [_sort_key(part) for part in item[0]]))
        grid = heat_grid(f"{column} by both keys", (keys[0], keys[1]), ordered, is_higher_better(points[0][0], column))
    return f'<div class="grid">{"".join(shown)}</div>{grid}'


def _sort_key(text: str) -> Tuple[bool, float, str]:
    found = numbers_of([text])
    return (found is None, found[0] if found else 0.0, text)


def value_by_key(key: str, column: str, points: Sequence[Tuple[str, float, str]], place: int) -> str:
    """Return a chart of a value against a key: at its number where it has one, else one place after the other.

    Args:
        key: The key.
        column: What the values are.
        points: Value of the key, value of the column, and name of each point.
        place: Number of the chart.
    """
    texts = sorted({text for text, _, _ in points}, key=_sort_key)
    numbers = numbers_of(texts)
    if numbers is None:
        positions = [float(number) for number in range(len(texts))]
    else:
        is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= 8
        positions = [math.log10(value) if is_log else value for value in numbers]
    position = dict(zip(texts, positions))
    means = []
    for text in texts:
        values = [value for other, value, _ in points if other == text]
        means.append(sum(values) / len(values))
    series = [Series("mean", positions, means, 0)] if len(points) > len(texts) else []
    ordered = sorted(points, key=lambda point: position[point[0]])
    xs, ys, names = [position[p[0]] for p in ordered], [p[1] for p in ordered], [p[2] for p in ordered]
    series.append(Series("points", xs, ys, 1, texts=names))
    return line_chart(f"{column} by {key}", series, key, name=f"k{place}", x_ticks=list(zip(positions, texts)))


def _sweep_curves(sweep: SweepData) -> str:
    """Return the curves of the best points: the first few in colours, the others in grey."""
    column = sweep.ranking.column
    series: Dict[str, List[Series]] = {}
    shown = sweep.records[:_MOST_CURVES]
    keys: List[Tuple[int, str]] = []
    others = 0
    last = 0.0
    for record in shown:
        folder = sweep.folder_of(record)
        curves = [] if folder is None else curves_of(read_run(folder))
        place = min(len(keys), _MOST_NAMED)
        colour = COLOURS - 1 if place == _MOST_NAMED else place
        label = _short_point_text(record.swept) or f"{record.index:03d}"
        for curve in curves:
            if curve.name == "loss" or (curve.split != "train" and curve.name == column):
                one = Series(label, curve.steps, curve.values, colour, dots=curve.split != "train")
                series.setdefault(f"{curve.split} {curve.name}", []).append(smoothed(one)[-1])
                last = max(last, *curve.steps)
        if curves and place < _MOST_NAMED:
            keys.append((colour, label))
        elif curves:
            others += 1
    charts = [
        line_chart(title, found[::-1], name=f"s{place}", x_range=(0.0, last), has_legend=False)
        for place, (title, found) in enumerate(series.items())
    ]
    if not any(charts):
        return ""
    legend = line_keys(keys) + (swatches([("var(--s7)", f"{others} more")]) if others else "")
    only = f" The best {len(shown)} points." if len(sweep.records) > len(shown) else ""
    how = f'<p class="note">{_HOW}.{only}</p><div class="legend">{legend}</div>'
    return f'{how}<div class="grid ranked">{"".join(charts)}</div>'


def _constant_keys(sweep: SweepData) -> str:
    """Return what was typed for every point."""
    swept = set(sweep.keys)
    first = next(iter(sweep.records), None)
    words = [] if first is None else [w for w in first.overrides if w.lstrip("+").partition("=")[0] not in swept]
    return f"<p>The same for all points: <code>{escape(' '.join(words))}</code></p>" if words else ""


def recipe_config(run: RunData) -> Optional[Dict[str, Any]]:
    """Return the config of a run's recipe alone as dotted keys, None where it cannot be composed here."""
    from ipurun.config import compose
    from ipurun.config.documents import load_text

    words = [word for word in run.overrides if word.lstrip("+").startswith("recipe=")]
    try:
        point = compose.one([f"+{word.lstrip('+')}" for word in words], "train")
        return flat(load_text(compose.to_yaml(point.config, point.hidden)))
    except (ConfigError, OSError, ValueError, TypeError):
        return None
