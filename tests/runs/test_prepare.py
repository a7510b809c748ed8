"""Problems of all packages in one report: each key once, with the place that set it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ipurun.config.compose import points
from ipurun.errors import ConfigError, Problem
from ipurun.runs.prepare import prepare


def problems_of(*argv: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        prepare(points(argv).points[0])
    return list(caught.value.problems)


def test_a_key_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The check of values, the plan and the inspection each find something wrong with one of these keys.
    found = problems_of("+recipe=mnist", "micro_batch_size=0", "optimizer.learning_rate=0.1", "devices=3")
    assert [problem.key for problem in found] == ["micro_batch_size", "optimizer.learning_rate", "devices"]
    assert [problem.where for problem in found] == [
        "command line: micro_batch_size=0",
        "command line: optimizer.learning_rate=0.1",
        "command line: devices=3",
    ]


def test_a_key_is_found_whatever_the_message_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Neither message names its key first, or at all.
    found = problems_of("+recipe=mnist", "loss_scaling=auto", "optimizer=adam", "pipeline.strategy=serial_phased")
    assert {problem.where for problem in found} == {
        "command line: loss_scaling=auto",
        "command line: pipeline.strategy=serial_phased",
    }


def test_an_error_takes_the_fields_of_its_problem() -> None:
    error = ConfigError("`devices` is odd", where="here", seen="3", known="2, 4", fix="devices=4", key="devices")
    assert error.problems == (Problem("`devices` is odd", "here", "3", "2, 4", "devices=4", "devices"),)
    assert error.problems[0].to_dict()["key"] == "devices"
    assert pickle.loads(pickle.dumps(error)).problems == error.problems
