"""Format numbers, times, batch equations and values for people, and wrap lines to the terminal."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from typing import Any, Iterable, List, Optional, Sequence

from ipurun.planning.plan import BatchSizes, Devices

__all__ = [
    "WIDE",
    "batch_equation",
    "columns",
    "count",
    "devices_text",
    "duration",
    "epochs_text",
    "fitted",
    "learning_rate",
    "metric",
    "plural",
    "rate",
    "size_text",
    "spelled_duration",
    "value_text",
]

WIDE = 120  # columns from which on lines are not wrapped
_NARROWEST = 36


def duration(seconds: Optional[float]) -> str:
    """Format a duration: ``0.8 s``, ``42 s``, ``3:05``, ``1:02:03``; ``-`` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spelled_duration(seconds: float) -> str:
    """Format a duration in words: ``0.8 s``, ``42 s``, ``6 min 12 s``, ``1 h 2 min``."""
    if seconds < 59.5:
        return duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def count(number: Optional[float]) -> str:
    """Format a whole number with thousands separators, or ``-``."""
    if number is None or not math.isfinite(number):
        return "-"
    return f"{number:,.0f}"


def rate(number: Optional[float]) -> str:
    """Format samples per second: whole, or with two digits if there are fewer than ten."""
    return f"{number:.2g}" if number is not None and 0 < number < 9.95 else count(number)


def plural(number: int, word: str) -> str:
    """Format a number of things: ``1 replica``, ``8 replicas``."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def size_text(size: float) -> str:
    """Format a number of bytes: ``640 B``, ``12.3 MB``, ``1.50 TB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size / scale < 999.5 else f"{size / scale:,.0f} {unit}"
    return f"{size:.0f} B"


def epochs_text(number: float) -> str:
    """Format a number of epochs: ``1 epoch``, ``2.5 epochs``."""
    return f"{number:.2f}".rstrip("0").rstrip(".") + (" epoch" if number == 1 else " epochs")


def metric(value: Any) -> str:
    """Format a metric with four significant digits; values that are not numbers stay as they are."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 4
        return f"{value:.{min(digits, 6)}f}"
    return f"{value:.3e}"


def matrix_lines(name: str, matrix: Sequence[Sequence[float]]) -> List[str]:
    """Return a matrix as a table: a row for each true class, a column for each predicted one."""
    cells = [[f"{value:g}" for value in row] for row in matrix]
    width = max((len(cell) for row in cells for cell in row), default=1)
    width = max(width, len(str(len(matrix))))
    label = len(str(len(matrix))) + 2
    numbers = "".join(f"  {number:>{width}}" for number in range(len(cells[0]) if cells else 0))
    lines = [f"{name} (rows: true class, columns: predicted)", f"{'':{label}}{numbers}"]
    return lines + [
        f"{number:>{label}}" + "".join(f"  {cell:>{width}}" for cell in row) for number, row in enumerate(cells)
    ]


def learning_rate(value: Optional[float]) -> str:
    """Format a learning rate: ``0.001``, ``2.5e-05``."""
    return "-" if value is None else f"{value:.3g}"


def batch_equation(batch: BatchSizes) -> str:
    """Format the factors of a host call: ``micro-batch 16 x ... = 1,024 samples per host call``."""
    replicas = f"replicas {batch.distinct_replicas}"
    if batch.input_group_size > 1:
        replicas += f" (groups of {batch.input_group_size} share their input)"
    return (
        f"micro-batch {batch.micro_batch_size} x device_iterations {batch.device_iterations} "
        f"x accumulation {batch.gradient_accumulation} x {replicas} "
        f"= {plural(batch.samples_per_call, 'sample')} per host call"
    )


def devices_text(devices: Devices, num_stages: int) -> str:
    """Format the devices: ``8 IPUs = 4 replicas x 2 IPUs, 2 stages``."""
    text = (
        f"{plural(devices.total, 'IPU')} = {plural(devices.replicas, 'replica')} "
        f"x {plural(devices.per_replica, 'IPU')}, {plural(max(num_stages, 1), 'stage')}"
    )
    return text + (f" ({devices.idle} idle)" if devices.idle else "")


def value_text(value: Any) -> str:
    """Format a config value as typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(value_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{value_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def columns() -> int:
    """Return the width of the terminal; files and pipes count as `WIDE`."""
    return shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() else WIDE


def fitted(lines: Iterable[str], indent: int) -> List[str]:
    """Wrap lines to a narrow terminal.

    Args:
        lines: The lines.
        indent: Indentation of continuation lines.
    """
    if columns() >= WIDE:
        return list(lines)
    width, hanging = max(columns(), _NARROWEST), " " * indent
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=hanging) or [""]]
