"""The table of a self-test, and the one file to send when something differs."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Sequence, Tuple

from ipurun.log.format import duration, plural
from ipurun.runs.folder import timestamp, versions
from ipurun.selftest.outcome import AGREES, DIFFERS, FAILED, REASONS, SKIPPED, Outcome, other_side

if TYPE_CHECKING:
    from ipurun.selftest.layers import Layer, LayerTest

__all__ = [
    "document_of",
    "layer_lines",
    "layers_verdict",
    "reason_lines",
    "row",
    "style_of",
    "summary_line",
    "table_head",
    "title_lines",
    "write_report",
]

_STYLES = {AGREES: "", SKIPPED: "dim", DIFFERS: "bold red", FAILED: "bold red"}
_SHARE = "of tolerance"
_MODEL = "(model)"
_SECRET = re.compile(r"(?i)(\w*(?:token|secret|passw|api_?key|credential)\w*[\"']?\s*[:=]\s*)[^\s,}]+")


def title_lines(engine: Dict[str, Any]) -> List[str]:
    """Return the first lines of a self-test: what is compared with what."""
    ipus = f", {plural(engine['ipus'], 'IPU')}" if engine.get("ipus") else ""
    kind = engine["kind"]
    return [f"ipurun selftest: engine={kind}, compared with {other_side(kind)}", f"  {engine['version']}{ipus}"]


def table_head(names: Sequence[str]) -> List[str]:
    """Return the first lines of the table."""
    heads = ("case", "result", "time", _SHARE, "largest difference")
    widths = _widths(names)
    return [_joined(heads, widths), _joined(["-" * (width or len(heads[-1])) for width in widths], widths)]


def row(outcome: Outcome, names: Sequence[str], columns: int) -> str:
    """Return the line of a case: how it ended, and how much of a tolerance its largest difference takes."""
    last = outcome.worst or outcome.reason
    seconds = duration(outcome.seconds) if outcome.seconds else "-"
    cells = [outcome.case, outcome.status, seconds, _share_text(outcome), " ".join(last.split())]
    line = _joined(cells, _widths(names))
    return line if len(line) <= columns else line[: max(columns - 3, 0)] + "..."


def reason_lines(outcome: Outcome) -> List[str]:
    """Return what differs or went wrong in a case, a line for each."""
    parts = outcome.reason.split(REASONS) if outcome.status == DIFFERS else [outcome.reason]
    return [line for part in parts for line in part.splitlines()]


def style_of(outcome: Outcome) -> str:
    """Return the style of a case's line on a terminal."""
    return _STYLES[outcome.status]


def summary_line(outcomes: Sequence[Outcome], asked: int, seconds: float) -> str:
    """Return the last line: ``49 cases: 47 agree, 1 differs, 1 skipped (58 s)``."""
    words = {AGREES: ("agrees", "agree"), DIFFERS: ("differs", "differ"), FAILED: ("failed",) * 2}
    counts = []
    for status in (AGREES, DIFFERS, FAILED, SKIPPED):
        number = sum(outcome.status == status for outcome in outcomes)
        if number:
            one, several = words.get(status, (status, status))
            counts.append(f"{number} {one if number == 1 else several}")
    if len(outcomes) < asked:
        counts.append(f"{asked - len(outcomes)} not run")
    return f"{plural(asked, 'case')}: {', '.join(counts)} ({duration(seconds)})"


def layer_lines(test: LayerTest, columns: int, only_wrong: bool = False) -> Iterator[Tuple[str, str]]:
    """Yield the lines of the table of layers, each with its style on a terminal.

    Args:
        test: The comparison.
        columns: Width of the terminal.
        only_wrong: Whether to leave out the layers that agree.
    """
    layers = [layer for layer in test.layers if not (only_wrong and layer.agrees)]
    titles = {"output": "output of", "gradient": "gradient of, last layer first"}
    numbers = [8, 8, 7]
    shapes = max((len(_shape_text(layer)) for layer in layers), default=0)
    wide = max((len(text) for text in [*(layer.name for layer in layers), *titles.values()]), default=0)
    if wide + sum(numbers) + 6 + shapes + 2 > columns:
        shapes = 0  # the shape is what a narrow terminal can do without
    wide = max(20, min(wide, columns - sum(numbers) - 6 - (shapes + 2 if shapes else 0)))
    widths = [wide, *([shapes] if shapes else []), *numbers]
    kind = ""
    for layer in layers:
        if layer.kind != kind:
            kind = layer.kind
            head = [titles[kind], *(["shape"] if shapes else []), "max abs", "relative", "result"]
            yield _joined([_shortened(cell, width) for cell, width in zip(head, widths)], widths), "bold"
        cells = [_shortened(layer.name, wide), *([_shape_text(layer)] if shapes else [])]
        cells += [f"{layer.largest:.1e}", f"{layer.difference:.1e}", AGREES if layer.agrees else DIFFERS]
        yield _joined(cells, widths), "" if layer.agrees else _STYLES[DIFFERS]


def layers_verdict(test: LayerTest) -> str:
    """Return the last line of a comparison of layers: the first one that differs."""
    first = test.first_wrong
    if first is None:
        outputs = sum(layer.kind == "output" for layer in test.layers)
        gradients = len(test.layers) - outputs
        return f"all {plural(outputs, 'output')} and {plural(gradients, 'gradient')} agree"
    wrong = sum(not layer.agrees for layer in test.layers)
    how = f"off by {first.difference:.1e}, allowed {first.tolerance:.0e} ({wrong} of {len(test.layers)} differ)"
    if first.kind == "output":
        return f"the first layer that differs is `{first.name}`: its output is {how}"
    layer, _, parameter = first.name.rpartition(".")
    named = f"the first layer that differs is `{layer or _MODEL}`"
    return f"{named}: outputs agree, the gradient of its {parameter} is {how}"


def document_of(
    engine: Dict[str, Any], machine: Dict[str, Any], words: Sequence[str], **results: Any
) -> Dict[str, Any]:
    """Return a self-test as JSON-ready data without secrets.

    Args:
        engine: Kind, version and number of IPUs.
        machine: What `ipurun env` shows.
        words: The command line.
        **results: What was found.
    """
    document = {
        "command": ["ipurun", "selftest", *words],
        "engine": engine,
        "compared_with": other_side(engine["kind"]) if engine else None,
        "versions": {**machine, **versions()},
        **results,
    }
    cleaned: Dict[str, Any] = _cleaned(document)
    return cleaned


def write_report(document: Dict[str, Any]) -> Path:
    """Write the file to send: to the working folder, or if that fails to the folder of temporary files."""
    name = f"ipurun-selftest-{timestamp()}.json"
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    for folder in (Path(), Path(tempfile.gettempdir())):
        path = folder / name
        try:
            path.write_text(text, encoding="utf-8")
            return path
        except OSError as error:
            failure = error
    raise failure


def _widths(names: Sequence[str]) -> List[int]:
    return [max(len("case"), *map(len, names)), len("skipped"), len("12.3 s"), len(_SHARE), 0]


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()


def _share_text(outcome: Outcome) -> str:
    if outcome.share is None:
        return "-"
    if outcome.share > 1:
        return f"{outcome.share:.2g} times" if outcome.share < 100 else "> 100 times"
    return f"{outcome.share:.0%}" if outcome.share >= 0.01 or not outcome.share else "< 1%"


def _shape_text(layer: Layer) -> str:
    return "x".join(map(str, layer.shape)) or "number"


def _shortened(text: str, width: int) -> str:
    """Cut the beginning of a name that is too long: its end says more."""
    return text if len(text) <= width else "..." + text[-(width - 3) :]


def _cleaned(value: Any) -> Any:
    """Return data that strict JSON can hold, without secrets and without the name of the home folder."""
    if isinstance(value, dict):
        return {
            str(key): "(left out)" if _SECRET.match(f"{key}=x") and item else _cleaned(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_cleaned(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    home = os.path.expanduser("~")
    text = str(value).replace(home + os.sep, "~" + os.sep) if len(home) > 1 else str(value)
    return _SECRET.sub(r"\1(left out)", text)
