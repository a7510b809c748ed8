"""Sensors of the IPUs during a run, with a script in place of gc-monitor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List

import pytest

from ipurun.profiling.ipu_sensors import IpuSensors
from ipurun.training.events import Note, Observer, RunStart, Summary

READING = {"cards": [{"ipus": [{"id": "0", "ipu power": "101.5 W", "average board temp": "29.6 C"}]}]}


class Notes(Observer):
    def __init__(self) -> None:
        self.texts: List[str] = []

    def on_note(self, event: Note) -> None:
        self.texts.append(event.text)


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Any:
    """Run the observer from start to end, with one reading, and return its notes and its file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    if script:
        (folder / "gc-monitor").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "gc-monitor").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    notes, path = Notes(), tmp_path / "ipus.jsonl"
    sensors = IpuSensors(path, 1e-3, notes)
    read, done = sensors._read, []

    def read_once() -> str:
        done.append(read())
        sensors._ended.set()
        return str(done[-1])

    monkeypatch.setattr(sensors, "_read", read_once)
    sensors.on_start(RunStart("a", "runs/a", 0, 10))
    sensors._thread.join()
    sensors.on_end(Summary("done", 10, 1.0, 100))
    return notes.texts, path


def test_readings_are_written_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, path = watched(tmp_path, monkeypatch, f"echo '{json.dumps(READING)}'")
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["ipu"], line["power_watts"], line["board_celsius"]) == ("0", 101.5, 29.6) and line["time"] > 0
    assert "power watts 101.5" in texts[0]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", "gc-monitor is not on PATH"),
        ("echo table", "printed no JSON"),
        ("echo '{}'", "names no power"),
        ("echo broken >&2; exit 4", "exit code 4: broken"),
    ],
)
def test_a_tool_that_says_nothing_is_mentioned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    texts, path = watched(tmp_path, monkeypatch, script)
    assert len(texts) == 1 and why in texts[0] and not path.exists()
