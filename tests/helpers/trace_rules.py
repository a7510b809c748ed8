"""The rules of the trace event format, as viewers need them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

_ROUNDING = 2e-3  # microseconds


def load_trace(path: Path) -> Dict[str, Any]:
    """Read a trace and check it: names, order, begin and end, nesting."""
    document = json.loads(path.read_text(encoding="utf-8"))
    events: List[Dict[str, Any]] = document["traceEvents"]
    assert document["displayTimeUnit"] in ("ms", "ns")
    _check_names(events)
    spans = [event for event in events if event["ph"] != "M"]
    starts = [event["ts"] for event in spans]
    assert starts == sorted(starts), "times run backwards"
    rows = defaultdict(list)
    for event in spans:
        assert isinstance(event["name"], str) and event["name"]
        assert event["ts"] >= 0
        rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        _check_nesting(row)
    return document


def _check_names(events: List[Dict[str, Any]]) -> None:
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {pid for pid, _ in used} <= processes, "a process has no name"
    assert used <= threads, "a thread has no name"
    assert all(event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name"))


def _check_nesting(row: List[Dict[str, Any]]) -> None:
    """Check that spans of a row are inside each other or one after the other: no begin without its end."""
    open_ends: List[Tuple[float, str]] = []
    for event in row:
        assert event["ph"] == "X", "only complete events are written"
        assert event["dur"] >= 0
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1][0] <= begin + _ROUNDING:
            open_ends.pop()
        if open_ends:
            assert end <= open_ends[-1][0] + _ROUNDING, f"{event['name']} ends after {open_ends[-1][1]} around it"
        open_ends.append((end, event["name"]))


def rows_of(document: Dict[str, Any]) -> Dict[Tuple[str, str], List[Dict[str, Any]]]:
    """Return the spans by name of process and thread."""
    events = document["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    rows = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            rows[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
    return dict(rows)
