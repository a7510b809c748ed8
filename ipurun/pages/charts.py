"""Charts as inline SVG, complete without a script; page.js adds values under the pointer, and zoom."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from ipurun.log.format import metric
from ipurun.pages.parts import Cell, escape, json_script, table

__all__ = [
    "COLOURS",
    "Mark",
    "Series",
    "heat_grid",
    "line_chart",
    "line_keys",
    "nice_ticks",
    "short_number",
    "smoothed",
    "strip",
]

COLOURS = 8
_WIDTH, _HEIGHT = 480, 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 38
_X_TICKS, _Y_TICKS = 6, 6  # at most
_TICK_GAP = 8  # between the labels of an axis, in the unit of the picture
_LETTER = 7  # width of a letter there
_LOG_RATIO = 10  # of the largest value to the least, from which a chart offers a logarithmic axis
_MOST_POINTS = 1200
_MOST_KEYS = 7  # in a legend
_SMOOTHING_POINTS = 60  # fewer are drawn as they are


@dataclass(frozen=True)
class Series:
    """A line or points of a chart.

    Args:
        name: Name in the legend.
        xs: Ascending positions.
        ys: Values; those that are not finite leave a gap.
        colour: Number of its colour.
        dots: Whether its points are marked.
        is_faint: Whether it is the noisy form of another one.
        texts: What each point is; its points then have no line between them.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dots: bool = False
    is_faint: bool = False
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Mark:
    """A vertical line at a position, with what happened there."""

    x: float
    label: str


def line_chart(
    title: str,
    series: Sequence[Series],
    xlabel: str = "step",
    marks: Sequence[Mark] = (),
    *,
    name: str,
    from_zero: bool = False,
    x_range: Optional[Tuple[float, float]] = None,
    x_ticks: Sequence[Tuple[float, str]] = (),
    has_legend: bool = True,
) -> str:
    """Return a chart, or nothing if no series has a finite value.

    Args:
        title: What is shown.
        series: The lines, in the order of the legend.
        xlabel: What the positions are.
        marks: What happened at some of them.
        name: Identity in the page; a page that is replaced keeps its zoom by it.
        from_zero: Whether the axis of values begins at 0.
        x_range: The least and the largest position, for charts that share an axis; those of the series by default.
        x_ticks: Positions to label, with their labels; round numbers by default.
        has_legend: Whether to name the lines here: charts that share a legend do not.
    """
    drawn = [_visible(thinned(one)) for one in series]
    points = [(x, y) for one in drawn for x, y in zip(one.xs, one.ys) if math.isfinite(y)]
    if not points:
        return ""
    margin = 0.02 if any(one.dots for one in drawn) or x_range else 0.0
    low_x, high_x = _range([*(x for x, _ in points), *(x_range or ())], 0.05 if x_ticks else margin)
    is_whole = xlabel == "step"
    if is_whole and high_x - low_x < 2:  # a single step
        low_x, high_x = max(0.0, math.ceil(low_x) - 1.0), math.floor(high_x) + 1.0
    low_y, high_y = _range([y for _, y in points], 0.06)
    if from_zero:
        low_y = min(0.0, low_y)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> Tuple[float, float]:
        return (
            _LEFT + (x - low_x) / (high_x - low_x) * width,
            _TOP + height - (y - low_y) / (high_y - low_y) * height,
        )

    shapes = [_path(one, at) for one in drawn]
    for mark in marks:
        if low_x <= mark.x <= high_x:
            x = at(mark.x, low_y)[0]
            shapes.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}">'
                f"<title>{escape(mark.label)}</title></line>"
            )
    places = [tick for tick in nice_ticks(low_x, high_x, _X_TICKS) if not is_whole or tick == round(tick)]
    ticks = list(x_ticks) or [(tick, short_number(tick)) for tick in places]
    labels = [
        f'<text x="{x:.1f}" y="{_TOP + height + 16}" text-anchor="{_anchor(text, (x - _LEFT) / width)}">'
        f"{escape(text)}</text>"
        for x, text in _apart([(at(tick, low_y)[0], text) for tick, text in ticks])
    ]
    for tick in nice_ticks(low_y, high_y, _Y_TICKS):
        y = at(low_x, tick)[1]
        labels.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        labels.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short_number(tick)}</text>')
    data: Dict[str, Any] = {
        "box": [_LEFT, _TOP, width, height],
        "size": [_WIDTH, _HEIGHT],
        "x": [low_x, high_x],
        "y": [low_y, high_y],
        "xticks": _X_TICKS,
        "yticks": _Y_TICKS,
        "xlabel": xlabel,
        "series": [_data(one) for one in drawn],
    }
    if is_whole:
        data["whole"] = True
    if x_ticks:
        data["named"] = [[_rounded(tick), text] for tick, text in x_ticks]
    least, most = min(y for _, y in points), max(y for _, y in points)
    buttons = ""
    if least > 0 and most / least >= _LOG_RATIO and not from_zero:
        buttons = '<button class="log" type="button" aria-pressed="false">log</button>'
    keys = [(one.colour, one.name) for one in drawn if not one.is_faint]
    axis = (
        f'<text class="xlabel" x="{_LEFT + width / 2:.0f}" y="{_HEIGHT - 5}" text-anchor="middle">'
        f"{escape(_shortened(xlabel))}</text>"
    )
    picture = _svg(title, name, labels, shapes, width, height, names=axis)
    return _figure(title, picture, data, keys if len(keys) > 1 and has_legend else [], name, buttons)


def _visible(one: Series) -> Series:
    """Return a series whose only point, or points with gaps around them, show: a line needs two."""
    gaps = [not math.isfinite(y) for y in (math.nan, *one.ys, math.nan)]
    alone = any(before and after and not at for before, at, after in zip(gaps, gaps[1:], gaps[2:]))
    return replace(one, dots=True) if alone and not one.is_faint else one


def _anchor(text: str, side: float) -> str:
    """Return where a label of the x axis is held: long names at the ends would leave the picture. As in page.js."""
    if len(text) < 7 or 0.15 < side < 0.85:
        return "middle"
    return "start" if side < 0.5 else "end"


def _shortened(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _apart(labels: Sequence[Tuple[float, str]]) -> List[Tuple[float, str]]:
    """Return the labels of an axis that do not overlap, from the left."""
    kept: List[Tuple[float, str]] = []
    for x, text in sorted(labels):
        free_from = kept[-1][0] + len(kept[-1][1]) * _LETTER / 2 + _TICK_GAP if kept else -math.inf
        if x - len(text) * _LETTER / 2 >= free_from:
            kept.append((x, _shortened(text, 16)))
    return kept


def strip(
    title: str,
    rows: Sequence[str],
    seconds: float,
    shapes: str,
    views: Sequence[Tuple[str, float, float]],
    name: str,
    first: str = "",
) -> str:
    """Return rows of work over time in milliseconds that can be zoomed, as for a pipeline.

    Args:
        title: What is shown.
        rows: Labels of the rows.
        seconds: The whole time.
        shapes: SVG of the rows in a unit of milliseconds by 26, from 0.
        views: Buttons: label, first and last millisecond.
        name: Identity in the page.
        first: Label of the view to begin with; the whole by default, and without a script.
    """
    row, top, left = 26, 6, 62
    wide = 1040
    width, height = wide - left - 12, row * len(rows)
    end = seconds * 1e3
    scale = width / end
    labels = [
        f'<text x="{left + tick * scale:.1f}" y="{top + height + 16}" text-anchor="middle">{short_number(tick)}</text>'
        for tick in nice_ticks(0.0, end, 8)
    ]
    names = "".join(f'<text x="2" y="{top + n * row + 17}">{escape(label)}</text>' for n, label in enumerate(rows))
    names += f'<text class="xlabel" x="{left + width / 2:.0f}" y="{top + height + 34}" text-anchor="middle">ms</text>'
    inside = f'<g transform="translate({left} {top}) scale({scale:.9g} 1)">{shapes}</g>'
    data = {
        "box": [left, top, width, height],
        "size": [wide, top + height + 40],
        "x": [0.0, end],
        "y": [0.0, 1.0],
        "xticks": 8,
        "xlabel": "ms",
        "series": [],
        "rows": True,
    }
    svg = _svg(title, name, labels, [inside], width, height, left, top, (wide, top + height + 40), names)
    buttons = "".join(
        f'<button type="button" data-zoom="{low!r},{high!r}"{" data-first" if label == first else ""}>'
        f"{escape(label)}</button>"
        for label, low, high in views
    )
    return _figure(title, f'<div class="scroll">{svg}</div>', data, [], name, buttons, "chart wide")


def _figure(
    title: str,
    svg: str,
    data: Dict[str, Any],
    keys: Sequence[Tuple[int, str]],
    name: str,
    buttons: str = "",
    kind: str = "chart",
) -> str:
    if len(keys) > _MOST_KEYS:  # the values under the pointer have the names
        keys = [*keys[: _MOST_KEYS - 1], (COLOURS - 1, f"and {len(keys) - _MOST_KEYS + 1} more")]
    legend = line_keys(keys)
    identity = f' id="{escape(name)}"' if name else ""
    return (
        f'<figure class="{kind}"{identity}><figcaption><b>{escape(title)}</b>{legend}{buttons}</figcaption>{svg}'
        f'<button class="reset" type="button">whole</button>{json_script(data)}</figure>'
    )


def line_keys(keys: Iterable[Tuple[int, str]]) -> str:
    """Return the names of lines with their colours; page.js makes them hide and highlight their lines."""
    return "".join(
        f'<span class="key" data-key="{escape(text)}" title="{escape(text)}">'
        f'<i class="b{colour % COLOURS}"></i>{escape(text)}</span>'
        for colour, text in keys
    )


def _svg(
    label: str,
    name: str,
    labels: Sequence[str],
    shapes: Sequence[str],
    width: float,
    height: float,
    left: int = _LEFT,
    top: int = _TOP,
    size: Tuple[int, int] = (_WIDTH, _HEIGHT),
    names: str = "",
) -> str:
    clip = f"clip-{escape(name)}"
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label)}">'
        f'<clipPath id="{clip}"><rect x="{left}" y="{top}" width="{width}" height="{height}"/></clipPath>{names}'
        f'<g class="labels">{"".join(labels)}</g>'
        f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{height}"/>'
        f'<g clip-path="url(#{clip})"><g class="plot">{"".join(shapes)}</g></g></svg>'
    )


def _path(one: Series, at: Any) -> str:
    colour, named = f"c{one.colour % COLOURS}", f'data-name="{escape(one.name)}"'
    words: List[str] = []
    dots: List[str] = []
    is_open = False
    for x, y in zip(one.xs, one.ys):
        if not math.isfinite(y):
            is_open = False
            continue
        px, py = at(x, y)
        words.append(f"{'L' if is_open else 'M'}{px:.1f} {py:.1f}")
        dots.append(f"M{px:.1f} {py:.1f}h0")
        is_open = True
    shown = ""
    if not one.texts:
        shown = f'<path class="{"faint" if one.is_faint else "line"} {colour}" {named} d="{"".join(words)}"/>'
    if one.dots or one.texts:
        shown += f'<path class="dots {colour}" {named} d="{"".join(dots)}"/>'
    return shown


def _data(one: Series) -> Dict[str, Any]:
    data: Dict[str, Any] = {
        "name": one.name,
        "colour": one.colour % COLOURS,
        "x": [_rounded(x) for x in one.xs],
        "y": [_rounded(y) if math.isfinite(y) else None for y in one.ys],
    }
    if one.texts:
        data["texts"] = list(one.texts)
    elif one.dots:
        data["dots"] = True
    if one.is_faint:
        data["hidden"] = True
    return data


def _rounded(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0


def thinned(one: Series, most: int = _MOST_POINTS) -> Series:
    """Return a series with at most so many points: the least and the largest of each stretch, so that peaks stay."""
    if len(one.xs) <= most:
        return one
    kept: List[int] = []
    buckets = most // 2
    for bucket in range(buckets):
        low, high = bucket * len(one.xs) // buckets, (bucket + 1) * len(one.xs) // buckets
        finite = [place for place in range(low, high) if math.isfinite(one.ys[place])] or [low]
        kept += sorted({min(finite, key=one.ys.__getitem__), max(finite, key=one.ys.__getitem__)})
    texts = [one.texts[i] for i in kept] if one.texts else ()
    xs, ys = [one.xs[i] for i in kept], [one.ys[i] for i in kept]
    return replace(one, xs=xs, ys=ys, texts=texts)


def smoothed(one: Series) -> List[Series]:
    """Return a long series as a faint line of its values and a line of their moving mean; a short one as it is."""
    if len(one.xs) < _SMOOTHING_POINTS:
        return [one]
    decay = 1 - 1 / max(2.0, len(one.xs) / 50)
    means: List[float] = []
    mean, weight = 0.0, 0.0
    for value in one.ys:
        if math.isfinite(value):
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        means.append(mean / weight if weight else math.nan)
    faint = Series(one.name, one.xs, one.ys, one.colour, is_faint=True)
    return [faint, Series(one.name, one.xs, means, one.colour)]


def heat_grid(
    title: str,
    keys: Tuple[str, str],
    values: Dict[Tuple[str, str], float],
    higher_is_better: bool,
) -> str:
    """Return a table of a value by two keys, coloured from worst to best."""
    downs = list(dict.fromkeys(pair[0] for pair in values))
    acrosses = list(dict.fromkeys(pair[1] for pair in values))
    finite = [value for value in values.values() if math.isfinite(value)]
    if len(downs) < 2 or len(acrosses) < 2 or not finite:
        return ""
    low, high = min(finite), max(finite)
    rows: List[Sequence[Cell]] = []
    for down in downs:
        row = [Cell(down)]
        for across in acrosses:
            value = values.get((down, across), math.nan)
            if not math.isfinite(value):
                row.append(Cell("-"))
                continue
            share = 1.0 if high == low else (value - low) / (high - low)
            goodness = share if higher_is_better else 1 - share
            colour = f"hsl({goodness * 130:.0f} 55% {72 - 8 * goodness:.0f}%)"
            text = f'<div class="heat-cell" style="background:{colour}">{metric(value)}</div>'
            row.append(Cell(metric(value), value, markup=text))
        rows.append(row)
    return f"<h3>{escape(title)}</h3>" + table([f"{keys[0]} \\ {keys[1]}", *acrosses], rows, "heat")


def _range(values: Iterable[float], room: float) -> Tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    if low == high:
        around = abs(low) * 0.05 or 0.5
        return low - around, high + around
    return low - (high - low) * room, high + (high - low) * room


def nice_ticks(low: float, high: float, most: int) -> List[float]:
    """Return round numbers in a range."""
    raw = (high - low) / most
    if not raw > 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step)
    return [place * step for place in range(first, first + most + 3) if place * step <= high + step * 1e-6]


def short_number(value: float) -> str:
    """Return a number for an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def numbers_of(texts: Sequence[str]) -> Optional[List[float]]:
    """Return texts as numbers, None unless all are finite ones."""
    try:
        found = [float(text) for text in texts]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None
