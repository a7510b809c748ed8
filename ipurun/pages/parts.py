"""The parts that all pages are made of: the frame with its style and script, tiles, tables, commands, bars.

Every text that reaches a page passes through `escape` here or in `charts`: names and values of runs may be hostile.
The policy of a page lets no script run but ours, and nothing load.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable, List, Optional, Sequence, Tuple, Union

from ipurun import __version__
from ipurun.errors import visible

__all__ = [
    "Cell",
    "Piece",
    "badge",
    "bar_rows",
    "command",
    "details",
    "escape",
    "json_script",
    "page",
    "section",
    "swatches",
    "table",
    "tiles",
]

_HERE = Path(__file__).parent
_BADGES = {
    "finished": "good",
    "fits": "good",
    "running": "live",
    "interrupted": "tight",
    "tight": "tight",
    "pending": "waits",
    "pruned": "tight",
    "failed": "bad",
    "killed": "bad",
    "does not fit": "bad",
}


def escape(text: Any) -> str:
    """Return a text for HTML, without characters that HTML cannot have."""
    return html.escape(visible(str(text)), quote=True)


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: Its text.
        value: What to sort by, if not the text.
        kind: Classes of the style sheet: ``num``, ``best``, ``bad``, ``reason``.
        link: Address of a page, only ever one that ipurun made.
        markup: Markup in place of the text, which must be escaped already.
    """

    text: str
    value: Optional[float] = None
    kind: str = ""
    link: str = ""
    markup: str = ""


@lru_cache(maxsize=None)
def _resource(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


@lru_cache(maxsize=None)
def _policy(is_live: bool) -> str:
    digest = base64.b64encode(hashlib.sha256(_resource("page.js").encode()).digest()).decode()
    connect = " connect-src 'self';" if is_live else ""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:;{connect}"
        " base-uri 'none'; form-action 'none'"
    )


def page(title: str, body: Iterable[str], lead: str = "", mark: str = "", live: str = "", version: str = "") -> str:
    """Return a whole page, which needs nothing from elsewhere.

    Args:
        title: Title and heading.
        body: The parts below the heading.
        lead: A line of text below the heading.
        mark: The outcome, shown as a badge.
        live: Address at which the page can be had again; only for pages that are served.
        version: Version of the content, for such pages.
    """
    served = f' data-live="{escape(live)}" data-version="{escape(version)}"' if live else ""
    stale = '<p class="stale">The server does not answer: what is shown may be out of date.</p>' if live else ""
    kind = "It updates itself while `ipurun watch` runs." if live else "This page is complete: it loads nothing."
    made = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(bool(live))}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_resource("page.css")}</style></head>'
        f"<body{served}>{stale}<main><h1>{escape(title)} {badge(mark) if mark else ''}</h1>"
        + (f'<p class="lead">{escape(lead)}</p>' if lead else "")
        + "".join(body)
        + f"<footer>Made by ipurun {escape(__version__)} on {made}. {kind}</footer>"
        f"</main><script>{_resource('page.js')}</script></body></html>\n"
    )


def badge(text: str) -> str:
    """Return an outcome in its colour."""
    kind = "bad" if text.endswith(" failed") else _BADGES.get(text, "")
    return f'<span class="badge {kind}">{escape(text)}</span>'


def section(title: str, *body: str) -> str:
    """Return a section, or nothing if it would be empty."""
    inside = "".join(body)
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def tiles(facts: Iterable[Tuple[str, str]]) -> str:
    """Return the most important facts side by side, as pairs of label and text; those without a text are left out."""
    shown, places = [], 0
    for label, text in facts:
        if text:
            is_wide = len(text) > 20
            places += 2 if is_wide else 1
            kind = "tile wide" if is_wide else "tile"
            shown.append(f'<div class="{kind}"><b>{escape(text)}</b><span>{escape(label)}</span></div>')
    # Rows of equal length: one row on wide screens, two of half the length on others.
    style = f"--one-row:{min(max(places, 6), 8)};--two-rows:{min(max((places + 1) // 2, 4), 6)}"
    return f'<div class="tiles" style="{style}">{"".join(shown)}</div>' if shown else ""


def command(text: str) -> str:
    """Return a command with a button that copies it."""
    return f'<div class="command"><code>{escape(text)}</code><button class="copy" type="button">copy</button></div>'


def details(summary: str, *body: str, name: str = "", is_open: bool = False) -> str:
    """Return parts that open with a click."""
    inside = "".join(body)
    if not inside:
        return ""
    identity = f' id="{escape(name)}"' if name else ""
    return f"<details{identity}{' open' if is_open else ''}><summary>{escape(summary)}</summary>{inside}</details>"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Union[str, Cell]]],
    kind: str = "",
    numeric: Sequence[int] = (),
    first_is_best: bool = False,
) -> str:
    """Return a table that scrolls sideways where it is too wide; nothing without rows.

    Args:
        header: Names of the columns.
        rows: Texts or cells.
        kind: Classes, such as ``sortable``.
        numeric: Columns of numbers.
        first_is_best: Whether to mark the first row.
    """
    heads = "".join(f"<th{_kind('num' if place in numeric else '')}>{escape(h)}</th>" for place, h in enumerate(header))
    body: List[str] = []
    for number, row in enumerate(rows):
        cells = "".join(_cell(cell, place in numeric) for place, cell in enumerate(row))
        body.append(f"<tr{_kind('first' if first_is_best and not number else '')}>{cells}</tr>")
    if not body:
        return ""
    return (
        f'<div class="scroll"><table{_kind(kind)}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _kind(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""


def _cell(cell: Union[str, Cell], is_number: bool) -> str:
    shown = cell if isinstance(cell, Cell) else Cell(cell)
    kind = " ".join(filter(None, (shown.kind, "num" if is_number else "")))
    value = "" if shown.value is None else f' data-value="{shown.value!r}"'
    text = shown.markup or escape(shown.text)
    if "mono" in kind and not shown.markup:  # a key, which breaks between its words
        text = re.sub(r"([._])(?=\w)", r"\1<wbr>", text)
    if shown.link:
        text = f'<a href="{escape(shown.link)}">{text}</a>'
    return f"<td{_kind(kind)}{value}>{text}</td>"


def swatches(entries: Iterable[Tuple[str, str]]) -> str:
    """Return a legend: pairs of a colour of the style sheet and a label."""
    shown = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(label)}</span>' for colour, label in entries
    )
    return f'<div class="legend">{shown}</div>' if shown else ""


@dataclass(frozen=True)
class Piece:
    """A piece of a bar: its share of the whole width, its colour and what it is."""

    share: float
    colour: str
    label: str


def bar_rows(rows: Iterable[Tuple[str, Sequence[Piece], str, str]], limit: Optional[float] = None) -> str:
    """Return stacked bars, one below the other: label, pieces, text after the bar and its classes.

    Args:
        rows: The bars.
        limit: Where to draw a line, as a share of the width.
    """
    shown: List[str] = []
    mark = "" if limit is None else f'<span class="limit" style="left:{limit * 100:.2f}%"></span>'
    for label, pieces, text, kind in rows:
        drawn = "".join(
            f'<i style="width:{max(piece.share, 0) * 100:.3f}%;background:{piece.colour}" '
            f'title="{escape(piece.label)}"></i>'
            for piece in pieces
        )
        shown.append(
            f"<span{_kind(kind)}>{escape(label)}</span>"
            f'<span class="bar">{drawn}{mark}</span><span{_kind(kind)}>{escape(text)}</span>'
        )
    return f'<div class="bars">{"".join(shown)}</div>' if shown else ""


def json_script(data: Any) -> str:
    """Return data for the script of a page; no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f'<script type="application/json">{text.replace("<", chr(92) + "u003c")}</script>'
