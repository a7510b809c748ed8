from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from ipurun.api.calls import Call
from ipurun.config.compose import one
from ipurun.engine import Engine
from ipurun.errors import ConfigError
from ipurun.planning.plan import BatchSizes, Devices, Plan, Steps
from ipurun.runs.folder import RunFolder, check_writable, find_latest, git_diff, git_state, new_folder, versions

ENGINE = Engine(ModuleType("engine"), "cpu", "emulator of PopTorch 3.4.0")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan() -> Plan:
    batch = BatchSizes(16, 1, 1, 1)
    return Plan(
        name="mnist",
        engine="cpu",
        engine_version="emulator of PopTorch 3.4.0",
        devices=Devices(1, 1, 1, 0),
        training=batch,
        inference=batch,
        steps=Steps(10, 10, 5, 5, 2.0, 3, None, None, 1),
        precision="32.32",
        output_mode="sum",
        training_options=(),
        inference_options=(),
        placements=(),
        inference_placements=(),
        optimizer=Call("poptorch.optim.SGD", kwargs={"lr": 0.1}, origin="optimizer"),
        environment={},
        cache_dir=None,
        profile_dir=None,
        parameters=3,
        notes=("a note",),
    )


def _create(plan: Plan, *argv: str) -> RunFolder:
    point = one(["+recipe=mnist", *argv])
    return RunFolder.create(point.config, point, plan, ENGINE)


def test_a_new_folder_says_what_runs(plan: Plan) -> None:
    folder = _create(plan, "seed=7")
    assert re.fullmatch(r"runs/mnist/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(folder))
    assert "seed: 7" in folder.config_file.read_text()
    assert folder.overrides() == ["+recipe=mnist", "seed=7"]
    text = folder.plan_file.read_text()
    assert "micro-batch 16 x device_iterations 1" in text and "3 samples dropped" in text and "a note" in text
    environment = json.loads(folder.env_file.read_text())
    assert environment["engine"]["version"] == "emulator of PopTorch 3.4.0"
    assert environment["versions"]["torch"] == versions()["torch"]
    assert folder.checkpoints.is_dir()


def test_two_runs_of_one_second_have_two_folders(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipurun.runs.folder.timestamp", lambda: "now")
    names = [_create(plan).path.name for _ in range(3)]
    assert names == ["now", "now-2", "now-3"]


def test_a_name_cannot_lead_out_of_the_runs_folder(plan: Plan) -> None:
    object.__setattr__(plan, "name", "../a/b c")
    assert _create(plan).path.parent.parent == Path("runs")


def test_opening_what_is_no_run_says_so(plan: Plan) -> None:
    existing = _create(plan)
    with pytest.raises(ConfigError) as caught:
        RunFolder.open("runs/mnist/nothing")
    assert "is not a run folder" in str(caught.value) and existing.path.name in str(caught.value)
    assert RunFolder.open(existing.path).path == existing.path


def test_the_newest_unfinished_run_is_found(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, status in enumerate(["interrupted", "failed", "done"]):
        monkeypatch.setattr("ipurun.runs.folder.timestamp", lambda number=number: f"run{number}")
        folder = _create(plan)
        folder.write_summary({"status": status})
        os.utime(folder.config_file, (number, number))
    found = find_latest("runs", "mnist")
    assert found is not None and found.path.name == "run1"
    newest = find_latest("runs", "mnist", unfinished_only=False)
    assert newest is not None and newest.path.name == "run2"
    assert find_latest("runs", "other") is None


def test_a_run_that_was_killed_counts_as_unfinished(plan: Plan) -> None:
    folder = _create(plan)
    folder.summary_file.write_text('{"status": "do')
    assert not folder.finished and folder.summary() == {}


def test_discarding_leaves_nothing_of_its_own_behind(plan: Plan) -> None:
    _create(plan).discard()
    assert not Path("runs").exists()
    Path("runs").mkdir()
    Path("runs/other").touch()
    _create(plan).discard()
    assert [path.name for path in Path("runs").iterdir()] == ["other"]


def test_a_file_in_the_way_is_a_config_error_found_before_anything_is_made() -> None:
    Path("runs").touch()
    (problem,) = check_writable("runs/deep")
    assert "cannot be made" in problem.what and "is not a folder" in problem.seen
    with pytest.raises(ConfigError, match="cannot be made"):
        new_folder(Path("runs/deep/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_told() -> None:
    Path("runs").mkdir(mode=0o500)
    assert "no permission" in check_writable("runs")[0].seen


def test_a_writable_place_has_no_problem_and_is_not_touched() -> None:
    assert check_writable("runs/a/b") == []
    assert list(Path().iterdir()) == []


def test_git_state_has_commit_and_changes() -> None:
    assert git_state() == {} and git_diff() == ""
    for command in (
        ["init", "-q", "-b", "work"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "--allow-empty", "-m", "first"],
    ):
        subprocess.run(["git", *command], check=True)
    state = git_state()
    assert re.fullmatch("[0-9a-f]{40}", state["commit"]) and state["branch"] == "work"
    assert state["dirty"] is False
    Path("model.py").write_text("x = 1\n")
    assert git_state()["changed_files"] == ["model.py"]
    subprocess.run(["git", "add", "model.py"], check=True)
    assert "+x = 1" in git_diff()
