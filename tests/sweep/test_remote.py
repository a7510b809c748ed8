from __future__ import annotations

import io
import os
from typing import List

import pytest

from ipurun.log.screen import PlainScreen
from ipurun.sweep.remote import RemoteScreen, ScreenReceiver


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
