"""`ipurun bench`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, List

import pytest

from ipurun.cli.main import main
from ipurun.planning.plan import BatchSizes
from ipurun.runs.bench import BenchReport, Rate, Rung, bench_lines

TOY = [
    "model._target_=run_toys.Net",
    "data._target_=run_toys.pair",
    "loss.name=CrossEntropyLoss",
    "micro_batch_size=4",
    "cache.enabled=false",
]


def test_everything_is_measured_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *TOY, "--seconds=0.01", "--ladder=2,1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rung["device_iterations"] for rung in found["ladder"]] == [1, 2, 1000]
    assert [rung["samples_per_call"] for rung in found["ladder"]] == [4, 8, None]
    assert found["ladder"][2]["skipped"]  # 32 samples do not fill a host call
    for rate in (found["configured"]["rate"], found["device_alone"], found["data_alone"], found["ladder"][1]["rate"]):
        assert 0 < rate["low"] <= rate["median"] <= rate["high"] and rate["calls"] >= 5
    assert found["estimate_for_ipus"]["samples_per_second"] > 0
    assert not list(tmp_path.iterdir())


def test_people_get_a_table_a_limit_and_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *TOY, "--seconds=0.01", "--ladder=2"]) == 0
    captured = capsys.readouterr()
    assert "<- configured" in captured.out and "-bound: the device waits for data" in captured.out
    assert "an estimate for IPUs, not measured" in captured.out and "try next" in captured.out
    assert "measuring the data pipeline alone ..." in captured.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--seconds=0"], "`--seconds` takes a number above 0"),
        (["--seconds=soon"], "`--seconds` takes a number above 0"),
        (["--ladder=1,x"], "`--ladder` takes whole numbers"),
        (["-m", "devices=1,2"], "this takes one config, not a sweep"),
        (["devises=2"], "unknown key `devises`"),
    ],
)
def test_bad_words_have_one_message(capsys: Any, words: List[str], what: str) -> None:
    assert main(["bench", *TOY, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and what in error and "  try " in error


def report(wait: float, rates: List[float]) -> BenchReport:
    rungs = [Rung(2**n, rate=Rate(each, each, each, 9), wait_share=wait) for n, each in enumerate(rates)]
    return BenchReport("a", "cpu", 1, rungs[0], rungs, Rate(10, 10, 10, 9), Rate(20, 20, 20, 9))


def test_a_bench_tells_how_much_faster_this_machine_is_than_the_host_of_a_pod() -> None:
    found = report(0.1, [10, 20])
    found.configured = dataclasses.replace(found.configured, sizes=BatchSizes(1, 1, 1, 1))
    found.core_seconds, found.pod_core_seconds = 2e-3, 5e-3
    (line,) = [line for line in bench_lines(found) if line.startswith("  CPU ")]
    assert "2.5 times as fast as a Pod's host" in line
    found.has_ipus = True
    assert not [line for line in bench_lines(found) if line.startswith("  CPU ")]


def test_what_limits_and_what_to_try() -> None:
    assert "host-bound" in report(0.5, [10, 20]).verdict and "loader.workers" in report(0.5, [10, 20]).advice
    assert "compute-bound" in report(0.01, [10, 20]).verdict
    assert report(0.01, [10, 20]).advice == "device_iterations=2 is 2.00 times as fast"
    assert "profile=trace" in report(0.01, [10, 10.5]).advice
