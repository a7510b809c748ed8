"""`plan --calibrate`: constants from a run that was measured on IPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ipurun.cli.main import main

PLAN = ["plan", "+recipe=mnist", "device_iterations=4", "--json"]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def measured_run(folder: Path, engine: str, samples_per_second: float) -> str:
    folder.mkdir()
    (folder / "env.json").write_text(json.dumps({"engine": {"kind": engine}}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "samples_per_second": samples_per_second}) + "\n")
    return str(folder)


def throughput(capsys: pytest.CaptureFixture, *words: str) -> float:
    assert main([*PLAN, *words]) == 0
    return float(json.loads(capsys.readouterr().out)["estimate"]["time"]["samples_per_second"])


def test_the_constants_bring_the_estimate_to_the_measurement(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = throughput(capsys)
    measured = before * 0.7
    run = measured_run(tmp_path / "run", "ipu", measured)
    assert main([*PLAN, "--calibrate", run]) == 0
    constants = json.loads(capsys.readouterr().out)["calibrated"]
    after = throughput(capsys, *constants)
    assert abs(after - measured) < 0.3 * abs(before - measured)


def test_a_run_on_the_cpu_tells_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = measured_run(tmp_path / "run", "cpu", 100.0)
    assert main(["plan", "+recipe=mnist", "--calibrate", run]) == 2
    assert "`--calibrate` needs a run on IPUs" in capsys.readouterr().err


def test_a_folder_that_is_not_a_run(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "+recipe=mnist", "--calibrate", "nowhere"]) == 2
    assert "`--calibrate` needs the folder of a run" in capsys.readouterr().err
