from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Dict

import pytest

from ipurun.api.calls import Call
from ipurun.checkpoint import latest, save
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


def test_opening_a_folder_that_is_not_a_run_is_refused(plan: Plan) -> None:
    existing = _create(plan)
    with pytest.raises(ConfigError) as caught:
        RunFolder.open("runs/mnist/nothing")
    assert "is not a run folder" in str(caught.value) and existing.path.name in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        RunFolder.open("runs/mnist")  # the folder of several runs
    assert caught.value.problems[0].known == str(existing.path)
    assert RunFolder.open(existing.path).path == existing.path
    checkpoint = existing.checkpoints / "step-00000001.pt"
    checkpoint.touch()
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(checkpoint)
    assert "a file" in str(caught.value) and f"give the run folder: {existing}" in str(caught.value)


def _runs_of(plan: Plan, monkeypatch: pytest.MonkeyPatch, **started: float) -> Dict[str, RunFolder]:
    """Create runs with a checkpoint, started at the given times."""
    found = {}
    for name, moment in started.items():
        monkeypatch.setattr("ipurun.runs.folder.timestamp", lambda name=name: name)
        monkeypatch.setattr("ipurun.runs.folder.time", SimpleNamespace(time=lambda moment=moment: moment))
        found[name] = _create(plan)
        save(found[name], 1, {})
    return found


def test_resume_auto_takes_the_run_that_ran_last(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _runs_of(plan, monkeypatch, a=3.0, b=4.0, c=2.0, d=1.0)
    os.utime(runs["b"].config_file, (1, 1))
    os.utime(runs["d"].config_file)
    assert find_latest("runs", "mnist").path.name == "b"
    assert find_latest("runs", "other") is None


def test_resume_auto_passes_over_runs_that_are_done_or_have_no_checkpoint(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = _runs_of(plan, monkeypatch, a=1.0, b=2.0, c=3.0, d=4.0)
    runs["a"].write_summary({"status": "interrupted"})
    runs["c"].write_summary({"status": "done"})
    latest(runs["d"]).path.unlink()
    assert find_latest("runs", "mnist").path.name == "b"
    latest(runs["b"]).path.unlink()
    assert find_latest("runs", "mnist").path.name == "a"


def test_runs_of_earlier_versions_are_ordered_by_the_time_in_their_name(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["2026-01-02_00-00-00", "2026-01-03_00-00-00-2", "2026-01-01_00-00-00"]
    for name, folder in _runs_of(plan, monkeypatch, **dict.fromkeys(names, 1.0)).items():
        folder.env_file.write_text("{}")
        assert folder.last_started == datetime.strptime(name[:19], "%Y-%m-%d_%H-%M-%S").timestamp()
    assert find_latest("runs", "mnist").path.name == names[1]


@pytest.mark.parametrize("file", ["config_file", "overrides_file", "origins_file", "plan_file", "env_file"])
def test_a_kill_while_a_run_is_described_again_leaves_whole_files(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    folder = _create(plan, "seed=1")
    before = getattr(folder, file).read_bytes()
    point = one(["+recipe=mnist", "seed=2"])
    replace = os.replace

    def stop(source: Any, target: Any) -> None:
        assert Path(source).stat().st_size  # what is renamed is whole: it was written before
        if Path(target) == getattr(folder, file):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        folder.describe(point.config, point, plan, ENGINE)
    assert getattr(folder, file).read_bytes() == before
    assert not list(folder.path.glob("*.partial"))


def test_a_run_that_was_killed_counts_as_unfinished(plan: Plan) -> None:
    folder = _create(plan)
    folder.summary_file.write_text('{"status": "do')
    assert not folder.finished and folder.summary() == {}


def test_discarding_removes_everything_it_created(plan: Plan) -> None:
    _create(plan).discard()
    assert not Path("runs").exists()
    Path("runs").mkdir()
    Path("runs/other").touch()
    _create(plan).discard()
    assert [path.name for path in Path("runs").iterdir()] == ["other"]


def test_a_full_disk_is_reported_and_leaves_no_partial_folder(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ipurun.runs.folder.write_atomically", refuse)
    with pytest.raises(ConfigError, match="cannot be made") as caught:
        _create(plan)
    assert "No space left" in str(caught.value) and "on a disk with room" in str(caught.value)
    assert not Path("runs").exists()


def test_a_file_in_the_way_is_a_config_error_found_before_anything_is_made() -> None:
    Path("runs").touch()
    (problem,) = check_writable("runs/deep")
    assert "cannot be made" in problem.what and "is not a folder" in problem.seen
    with pytest.raises(ConfigError, match="cannot be made"):
        new_folder(Path("runs/deep/x"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_reported() -> None:
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
    for name in (".env", ".env.local", "sub/prod.env", "sub/credentials.json", "api_token.txt", "tokenizer.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("hunter2\n" if name != "tokenizer.json" else "harmless\n")
    subprocess.run(["git", "add", "."], check=True)
    difference = git_diff()
    assert "+x = 1" in difference and "+harmless" in difference
    assert "hunter2" not in difference and "sub/credentials.json" in difference.splitlines()[0]
    os.chdir("sub")
    assert "hunter2" not in git_diff() and "prod.env" in git_diff()
