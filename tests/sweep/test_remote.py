from __future__ import annotations

import io
import os
from typing import List

import pytest

from ipurun.log.screen import PlainScreen
from ipurun.sweep.remote import RemoteScreen, Replay


def _shown(*points: List[str]) -> List[str]:
    """What a sweep shows of points that make these remarks, evaluate, train a step and end."""
    stream = io.StringIO()
    replay = Replay(PlainScreen(stream))
    for number, lines in enumerate(points):
        reader, writer = os.pipe()
        screen = RemoteScreen(writer)
        screen.panel("left out", [("a", "b")])
        screen.begin("compiling")
        screen.phase("lowering", 0.5)
        screen.end("compiled")
        for line in lines:
            screen.remark(line)
        screen.line("note: this is no remark and stays in the point's log")
        screen.live(["step 1", "loss 0.5"], 0.5)
        os.close(writer)
        with os.fdopen(reader) as messages:
            for message in messages:
                replay.perform(message, f"[{number}]")
    return stream.getvalue().splitlines()


def test_a_point_is_shown_under_its_label() -> None:
    assert _shown(["note: rounded up"]) == [
        "[0] compiling ...",
        "  lowering",
        "[0] note: rounded up",
        "[0]  step 1  loss 0.5",
    ]


def test_the_same_remark_of_many_points_is_told_once() -> None:
    shown = _shown(["note: subset"], ["note: subset", "note: other"])
    assert [line for line in shown if "note" in line] == ["[0] note: subset", "[1] note: other"]


def test_what_is_no_message_is_passed_over() -> None:
    stream = io.StringIO()
    replay = Replay(PlainScreen(stream))
    for text in ("", "Segmentation fault", '{"no": 1}', "[1]"):
        replay.perform(text, "[1]")
    assert stream.getvalue() == ""


def test_a_point_whose_sweep_is_gone_ends() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        RemoteScreen(writer).live(["step 1"])
    os.close(writer)
