from __future__ import annotations

import io
import os
from typing import Any, List

import pytest

from ipurun.log.screen import PlainScreen
from ipurun.sweep.remote import RemoteScreen, ScreenReceiver, TableReceiver


def _shown(*points: List[str]) -> List[str]:
    """Return what a sweep shows of points that make these remarks, evaluate, train a step and end."""
    stream = io.StringIO()
    receiver = ScreenReceiver(PlainScreen(stream))
    for number, lines in enumerate(points):
        reader, writer = os.pipe()
        screen = RemoteScreen(writer)
        screen.panel("left out", [("a", "b")])
        screen.begin("compiling")
        screen.phase("lowering", 0.5)
        screen.end("compiled")
        for line in lines:
            screen.remark(line)
        screen.line("note: this is not a remark and stays in the point's log")
        screen.live(["step 1", "loss 0.5"], 0.5)
        os.close(writer)
        with os.fdopen(reader) as messages:
            for message in messages:
                receiver.show(message, f"[{number}]")
    return stream.getvalue().splitlines()


def test_a_point_is_shown_under_its_label() -> None:
    assert _shown(["note: rounded up"]) == [
        "[0] compiling ...",
        "  lowering",
        "[0] note: rounded up",
        "[0]  step 1  loss 0.5",
    ]


def test_the_same_remark_of_several_points_is_shown_once() -> None:
    shown = _shown(["note: subset"], ["note: subset", "note: other"])
    assert [line for line in shown if "note" in line] == ["[0] note: subset", "[1] note: other"]


def test_lines_that_are_not_messages_are_ignored() -> None:
    stream = io.StringIO()
    receiver = ScreenReceiver(PlainScreen(stream))
    for text in ("", "Segmentation fault", '{"no": 1}', "[1]"):
        receiver.show(text, "[1]")
    assert stream.getvalue() == ""


def test_a_point_whose_sweep_is_gone_ends() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        RemoteScreen(writer).live(["step 1"])
    os.close(writer)


def test_points_at_once_have_a_row_each() -> None:
    drawn: List[List[List[str]]] = []

    class Table(PlainScreen):
        draws_over = True

        def live_table(self, header: Any, rows: Any, note: str = "") -> None:
            drawn.append([list(row) for row in rows] + [[note]])

    receiver = TableReceiver(Table(io.StringIO()))
    receiver.begin("[1] a")
    receiver.begin("[2] b")
    receiver.show('{"do": "live", "parts": ["step 1", "loss 2"], "fraction": 0.1}', "[1] a")
    receiver.refresh("0 of 2 finished")
    assert [[row[0], row[-1]] for row in drawn[-1][:2]] == [["[1] a", "loss 2  step 1"], ["[2] b", "starting"]]
    assert drawn[-1][2] == ["0 of 2 finished"]
    receiver.end("[1] a")
    assert [row[0] for row in drawn[-1][:-1]] == ["[2] b"]


def test_live_lines_are_sent_a_few_times_a_second() -> None:
    reader, writer = os.pipe()
    screen = RemoteScreen(writer)
    assert screen.wants_live(0.1)
    screen.live(["step 1"], 0.1)
    assert not screen.wants_live(0.2) and not screen.wants_waiting() and screen.wants_live(1.0)
    os.close(writer)
    os.close(reader)
