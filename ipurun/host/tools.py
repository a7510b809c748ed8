"""Graphcore's command-line tools: gc-info, gc-monitor and vipu, where they are installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

__all__ = ["IpuReading", "Partition", "ToolOutput", "ipu_ids", "partitions", "read_ipus", "run_tool"]

_TIMEOUT_SECONDS = 20.0
_DEVICE = re.compile(r"^\s*-\+-\s*Id:\s*\[(\d+)\](?P<rest>.*)$", re.MULTILINE)
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*")
# Words of an attribute's name -> what it is here; the first that fits counts.
_SENSORS: Tuple[Tuple[Tuple[str, ...], str], ...] = (
    (("board", "power"), "board_power_watts"),
    (("power",), "power_watts"),
    (("die", "temp"), "die_celsius"),
    (("temp",), "board_celsius"),
    (("clock",), "clock_mhz"),
    (("utilisation", "session"), ""),
    (("utilisation",), "utilisation_percent"),
    (("active", "size"), "memory_bytes"),
    (("memory",), "memory_bytes"),
)
_PROCESS = ("user process id", "pid", "process id")


@dataclass(frozen=True)
class ToolOutput:
    """Output of a command; `problem` says why it is not usable, "" if it is."""

    command: str
    text: str = ""
    problem: str = ""
    is_installed: bool = True


@dataclass(frozen=True)
class Partition:
    """One row of `vipu list partitions`."""

    name: str
    size: int
    state: str


@dataclass(frozen=True)
class IpuReading:
    """State of one IPU, from gc-monitor.

    Args:
        ipu: Its number.
        sensors: power_watts, board_power_watts, board_celsius, die_celsius, clock_mhz, utilisation_percent and
            memory_bytes, as far as they are known.
        process: Number of the process that uses it, "" if it is free.
    """

    ipu: str
    sensors: Dict[str, float]
    process: str = ""


def run_tool(*words: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> ToolOutput:
    """Run a command if it is installed; never fails."""
    command = " ".join(words)
    program = shutil.which(words[0])
    if program is None:
        return ToolOutput(command, problem=f"{words[0]} is not on PATH", is_installed=False)
    try:
        done = subprocess.run(
            [program, *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ToolOutput(command, problem=f"no answer in {timeout_seconds:g} s")
    except OSError as error:
        return ToolOutput(command, problem=str(error))
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        said = (done.stderr.decode("utf-8", "replace").strip() or text.strip()).splitlines()
        return ToolOutput(command, text, f"exit code {done.returncode}{': ' + said[-1] if said else ''}")
    return ToolOutput(command, text)


def ipu_ids(listing: str) -> List[int]:
    """Return the numbers of the single IPUs that `gc-info -l` lists; groups of several have numbers, too."""
    return [int(found[1]) for found in _DEVICE.finditer(listing) if "Multi IPU" not in found["rest"]]


def partitions(listing: str) -> List[Partition]:
    """Return the partitions that `vipu list partitions` shows."""
    rows = [[cell.strip() for cell in line.split("|")] for line in listing.splitlines() if "|" in line]
    if not rows:
        return []
    header = [cell.lower() for cell in rows[0]]
    found = []
    for row in rows[1:]:
        cells = dict(zip(header, row))
        size = cells.get("size", "")
        if cells.get("partition") and size.isdigit():
            found.append(Partition(cells["partition"], int(size), cells.get("state", "unknown")))
    return found


def read_ipus(text: str) -> List[IpuReading]:
    """Return what `gc-monitor -j` says about each IPU; releases of the tool nest it differently.

    Raises:
        ValueError: The text is not JSON.
    """
    found: List[IpuReading] = []
    for attributes in _dictionaries(json.loads(text)):
        sensors: Dict[str, float] = {}
        for name, value in attributes.items():
            sensor, number = _sensor(name), _number(value)
            if sensor and number is not None:
                sensors[sensor] = sensors.get(sensor, 0.0) + number if sensor == "memory_bytes" else number
        ipu = str(attributes.get("id", attributes.get("ipu", ""))).strip()
        if ipu and (sensors or "pid" in attributes):
            process = next((str(attributes[key]).strip() for key in _PROCESS if attributes.get(key)), "")
            found.append(IpuReading(ipu, sensors, "" if process in ("N/A", "0", "-") else process))
    return found


def _dictionaries(value: Any) -> Iterator[Dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from _dictionaries(child)


def _sensor(name: str) -> str:
    words = str(name).lower().replace("_", " ")
    return next((sensor for parts, sensor in _SENSORS if all(part in words for part in parts)), "")


def _number(value: Any) -> Optional[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    found = _NUMBER.match(str(value))
    return float(found[1]) if found else None
