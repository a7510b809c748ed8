"""Output of a profiled run, and what its folder records about the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipurun.cli.main import main

RUN = ["train", "+recipe=mnist", "data=synthetic", "eval.max_samples=20", "max_steps=4"]


def test_the_terminal_shows_where_the_time_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "ERR")
    assert main([*RUN, "profile=trace", "poplar.log_level=WARN"]) == 0
    text = capsys.readouterr().out
    assert "profile=trace of steps 2 to 4" in text
    for title in ("most expensive ops", "most expensive modules", "time by stage", "host and device", "try next"):
        assert title in text
    assert "schedule modelled from op times measured on this CPU" in text
    (folder,) = (tmp_path / "runs/mnist").iterdir()
    assert f"  open      {folder.relative_to(tmp_path)}/profile/trace.json at https://ui.perfetto.dev" in text
    # The record of the run says where each variable came from.
    variables = json.loads((folder / "env.json").read_text())["variables"]
    assert variables["POPLAR_LOG_LEVEL"] == {
        "value": "WARN",
        "from": "poplar.log_level (command line: poplar.log_level=WARN)",
    }
    assert variables["POPTORCH_LOG_LEVEL"] == {"value": "ERR", "from": "environment"}


@pytest.mark.parametrize("kind", ["graph", "system"])
def test_popvision_has_nothing_on_the_cpu_engine_and_this_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "+recipe=mnist", f"profile={kind}", "engine=cpu"]) == 0
    assert f"profile={kind} records nothing on the CPU engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("profile.kind=perfetto", "`profile.kind`"),
        ("profile.steps=0", "`profile.steps`"),
        ("poplar.log_level=LOUD", "`poplar.log_level`"),
        ("poplar.wait_for_ipu_minutes=-1", "`poplar.wait_for_ipu_minutes`"),
        ("+poplar.engine_options.a=[1]", "`poplar.engine_options"),
    ],
)
def test_bad_values_have_one_message_with_place_and_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, word: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, word]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and what in error and "  at " in error and "  try " in error
