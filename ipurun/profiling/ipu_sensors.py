"""Log power, temperature and memory of the IPUs while a run trains, as gc-monitor reports them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Dict, List

from ipurun.host.tools import read_ipus, run_tool
from ipurun.training.events import Note, Observer, RunStart, Summary

__all__ = ["IpuSensors"]

_COMMAND = ("gc-monitor", "-j")
_JOIN_SECONDS = 5.0


class IpuSensors(Observer):
    """Asks gc-monitor at an interval, in a thread, and appends what it says to a file.

    Args:
        path: The file: one JSON object per line, with the time, the IPU and its sensors.
        interval_seconds: Time between two readings.
        notify: Takes remarks: the first failure, and what was seen in all.
    """

    def __init__(self, path: Path, interval_seconds: float, notify: Observer) -> None:
        self._path = path
        self._interval_seconds = interval_seconds
        self._notify = notify
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ipu sensors", daemon=True)
        self._largest: Dict[str, float] = {}
        self._problem = ""

    def on_start(self, event: RunStart) -> None:
        self._thread.start()

    def on_end(self, event: Summary) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)
        if self._problem:
            self._notify.on_note(Note(f"the IPUs' sensors are not logged: {self._problem}"))
        elif self._largest:
            seen = ", ".join(f"{name.replace('_', ' ')} {value:,.1f}" for name, value in sorted(self._largest.items()))
            self._notify.on_note(Note(f"the IPUs' sensors are in {self._path}; largest values: {seen}"))

    def _watch(self) -> None:
        while True:
            self._problem = self._read()
            if self._problem:  # the tool is absent or speaks another language: it will not learn it
                return
            if self._ended.wait(self._interval_seconds):
                return

    def _read(self) -> str:
        """Append one reading, and return why that failed, "" if it did not."""
        output = run_tool(*_COMMAND)
        if output.problem:
            return f"`{output.command}`: {output.problem}"
        try:
            readings = read_ipus(output.text)
        except ValueError:
            return f"`{output.command}` printed no JSON"
        if not any(reading.sensors for reading in readings):
            return f"`{output.command}` names no power, temperature or memory"
        now, lines = time.time(), []
        for reading in readings:
            lines.append(json.dumps({"time": now, "ipu": reading.ipu, **reading.sensors}))
            for name, value in reading.sensors.items():
                self._largest[name] = max(value, self._largest.get(name, value))
        return self._append(lines)

    def _append(self, lines: List[str]) -> str:
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write("\n".join(lines) + "\n")
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        return ""
