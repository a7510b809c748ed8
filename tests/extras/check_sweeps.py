"""Sweeps with the real joblib, submitit and Optuna."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import optuna
import pytest
from user_project import enter_project

from ipurun.cli.main import main

CODE = """
class Points(torch.utils.data.Dataset):
    def __init__(self, slow):
        self.slow = slow
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(self.slow)
        return self.x[index], int(self.x[index].argmax()) % 3

def splits(slow=0.0):
    return {"train": Points(slow), "test": Points(0.0)}
"""
SEARCH = ["optimizer.lr=tag(log, interval(0.00001, 1))", "hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1"]


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "searched_code", CODE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _sweep(*words: str) -> int:
    return main(["train", "-m", "+recipe=tiny", *words])


def _folder() -> Path:
    (folder,) = Path("runs/tiny/sweeps").iterdir()
    return folder


def _records() -> List[Dict[str, Any]]:
    files = list(Path("runs/tiny/sweeps").glob("*/manifest.json"))
    return json.loads(files[0].read_text())["points"] if files else []


def _study() -> Any:
    backend = optuna.storages.journal.JournalFileBackend(str(_folder() / "optuna.journal"))
    return optuna.load_study(study_name=_folder().name, storage=optuna.storages.JournalStorage(backend))


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_joblib_runs_points(backend: str, capsys: Any) -> None:
    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.launcher.backend={backend}"]
    assert _sweep("seed=1,2,3", *words) == 0
    assert [record["status"] for record in _records()] == ["finished"] * 3
    assert "3 of 3 points finished" in capsys.readouterr().out
    assert _sweep("seed=1,2,3", *words, "resume=auto", "--quiet") == 0


def test_submitit_runs_points_of_this_machine_and_a_time_out_resumes(capsys: Any) -> None:
    words = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=1", "hydra.launcher.max_num_timeout=9"]
    # The time limit of the queue is a minute, and submitit asks local jobs to save 30 s before it.
    assert _sweep("seed=1", "epochs=20", "+data.slow=0.025", "checkpoint.every_epochs=null", *words) == 0
    assert "resuming after step" in (_folder() / "000/log.txt").read_text()
    messages = (_folder() / "jobs/000.messages.jsonl").read_text()
    assert '"requeued"' in messages
    assert json.loads((_folder() / "000/summary.json").read_text())["step"] == 320


def test_a_job_that_times_out_too_often_is_a_failed_row_that_can_be_resumed(capsys: Any) -> None:
    words = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=1"]
    assert _sweep("seed=1", "epochs=40", "+data.slow=0.025", *words) == 1
    assert "hydra.launcher.timeout_min=1" in _records()[0]["reason"]
    assert list((_folder() / "000/checkpoints").glob("step-*.pt"))


def test_trials_report_and_bad_ones_are_pruned(capsys: Any) -> None:
    assert _sweep(*SEARCH, "hydra.sweeper.n_trials=20", "epochs=6", "sweep.jobs=2", "sweep.rank_by=loss") == 0
    out = capsys.readouterr().out
    states = [record["status"] for record in _records()]
    assert len(states) == 20 and "pruned" in states and set(states) <= {"finished", "pruned"}
    study = _study()
    assert study.direction == optuna.study.StudyDirection.MINIMIZE and len(study.trials) == 20
    for record in _records():
        trial = study.trials[record["trial"]]
        assert trial.state.name == {"finished": "COMPLETE", "pruned": "PRUNED"}[record["status"]]
        assert float(record["swept"]["optimizer.lr"]) == trial.params["optimizer.lr"]
        assert len(trial.intermediate_values) == (6 if record["status"] == "finished" else record["results"]["epoch"])
    best = min(record["results"]["metrics"]["loss"] for record in _records() if record["status"] == "finished")
    assert study.best_value == best and f"{states.count('pruned')} pruned, best loss" in out
    assert "loss by optimizer.lr" in out


def test_a_killed_search_is_resumed_with_its_trials() -> None:
    words = [*SEARCH, "hydra.sweeper.n_trials=6", "epochs=3", "+data.slow=0.005", "hydra/sweeper/pruner=none"]
    command = [sys.executable, "-m", "ipurun", "train", "-m", "+recipe=tiny", *words, "--quiet"]
    sweep = subprocess.Popen(command)
    end = time.monotonic() + 120
    while sum(record["status"] == "finished" for record in _records()) < 2:
        assert sweep.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    before = [record["swept"] for record in _records()]
    assert _sweep(*words, "resume=auto", "--quiet") == 0
    assert [record["swept"] for record in _records()][: len(before)] == before
    assert [record["status"] for record in _records()] == ["finished"] * 6
    assert [trial.state.name for trial in _study().trials] == ["COMPLETE"] * 6


def test_a_search_over_choices_and_ranges_with_a_database_and_a_direction() -> None:
    words = ["optimizer=choice(sgd,adam)", "device_iterations=range(1,5,3)", "optimizer.lr=0.1"]
    keys = ["hydra.sweeper.n_trials=4", "hydra.sweeper.direction=minimize", "hydra.sweeper.study_name=mine"]
    storage = "hydra.sweeper.storage=sqlite:///study.db"
    grid = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "sweep.rank_by=loss", storage]
    assert _sweep(*words, *keys, *grid, "--quiet") == 0
    study = optuna.load_study(study_name="mine", storage="sqlite:///study.db")
    found = {(trial.params["optimizer"], trial.params["device_iterations"]) for trial in study.trials}
    assert found == {("sgd", 1), ("sgd", 4), ("adam", 1), ("adam", 4)}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["hydra.sweeper.direction=[minimize,maximize]"], "several objectives are not supported"),
        (["hydra.sweeper.direction=up"], "takes minimize or maximize"),
        (["hydra.sweeper.n_trials=0"], "must be at least 1"),
        (["hydra.sweeper.sampler.sead=1"], "TPESampler of Optuna does not take `sead`"),
        (["hydra/sweeper/sampler=grid"], "a grid needs a list of values"),
        (["hydra.sweeper.storage=nowhere://x"], "the Optuna study cannot be opened"),
        (["device_iterations=interval(1,999)"], "more samples than the training set has"),
    ],
)
def test_what_cannot_be_searched_is_refused(words: List[str], text: str, capsys: Any) -> None:
    assert _sweep(*SEARCH, *words) == 2
    assert text in capsys.readouterr().err
