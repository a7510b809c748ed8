"""Sweeps whose points have several processes: start, deaths, Ctrl-C, resume, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from user_project import enter_project

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.runs.folder import RunFolder

CODE = """
class Points(torch.utils.data.Dataset):
    def __init__(self, mode):
        self.mode = mode
        self.x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if self.mode == "slow":
            time.sleep(0.02)
        if self.mode == "crash" and index > 3 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.x[index], int(self.x[index].argmax()) % 3

def splits(mode="ok"):
    return {"train": Points(mode), "test": Points("ok")}
"""
EXACT = "distributed.deterministic=true"
TWO = ["distributed=torchrun", "devices=2"]


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "swept_processes", CODE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the launch, whose notes tell the process ids
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def _manifest() -> List[Dict[str, Any]]:
    files = list(Path("runs/tiny/sweeps").glob("*/manifest.json"))
    return json.loads(files[0].read_text())["points"] if files else []


def _weights(number: int) -> Dict[str, torch.Tensor]:
    (folder,) = Path("runs/tiny/sweeps").iterdir()
    weights: Dict[str, torch.Tensor] = load(latest(RunFolder(folder / f"{number:03d}")))["model"]
    return weights


def _wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


def _own_processes() -> List[str]:
    """Return the processes that run in this folder, except this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == os.getcwd() and int(process.name) != os.getpid():
                found.append(process.name)  # a zombie has no folder
        except OSError:
            continue
    return found


def _all_ended() -> bool:
    end = time.monotonic() + 30
    while _own_processes() and time.monotonic() < end:
        time.sleep(0.05)
    return not _own_processes()


def test_points_of_two_processes_train_as_those_of_one(capsys: Any) -> None:
    words = ["train", "-m", "+recipe=tiny", *TWO, "distributed.instances=1,2", "seed=1,2", EXACT, "epochs=2"]
    assert main(words) == 0
    assert "4 of 4 points finished" in capsys.readouterr().out
    for one, several in ((0, 2), (1, 3)):
        assert all(torch.equal(value, _weights(several)[name]) for name, value in _weights(one).items())
        first, second = _manifest()[one], _manifest()[several]
        assert first["results"]["metrics"] == pytest.approx(second["results"]["metrics"])
    (folder,) = Path("runs/tiny/sweeps").iterdir()
    assert [path.parent.parent.name for path in sorted(folder.glob("*/logs/instance-1.log"))] == ["002", "003"]
    assert "2 (torchrun), each with 1 replica of 2" in (folder / "002/plan.txt").read_text()
    assert _all_ended()
    assert not list(Path().glob("ipurun-launch-*"))


def test_a_point_whose_instance_dies_is_a_failed_row_that_names_it(capsys: Any) -> None:
    words = ["train", "-m", "+recipe=tiny", *TWO, "distributed.instances=2", "distributed.max_restarts=0"]
    assert main([*words, "+data.mode=ok,crash"]) == 1
    assert [point["status"] for point in _manifest()] == ["finished", "failed"]
    assert "instance 1 was killed by SIGSEGV" in _manifest()[1]["reason"]
    captured = capsys.readouterr()
    assert "logs/instance-1.log" in captured.err and "Fatal Python error: Segmentation fault" in captured.err
    assert _all_ended()


def test_ctrl_c_saves_a_point_of_two_processes_and_resume_ends_it_exactly(capsys: Any) -> None:
    words = ["train", "-m", "+recipe=tiny", *TWO, "distributed.instances=2", "seed=1,2", EXACT, "epochs=6"]
    words += ["eval.every_epochs=null", "checkpoint.every_epochs=null"]
    sweep = subprocess.Popen([sys.executable, "-m", "ipurun", *words, "+data.mode=slow", "--quiet"])
    _wait_for(lambda: any(p.stat().st_size for p in Path().glob("runs/tiny/sweeps/*/*/metrics.jsonl")), sweep)
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(120) == 130
    assert [point["status"] for point in _manifest()] == ["interrupted", "pending"]
    assert _all_ended()
    assert main([*words, "+data.mode=slow", "resume=auto", "--quiet"]) == 0
    assert main(["train", "+recipe=tiny", "runs_dir=one", "devices=2", "seed=1", EXACT, *words[-3:], "--quiet"]) == 0
    expected = load(latest(RunFolder(next(Path("one/tiny").iterdir()))))["model"]
    assert all(torch.equal(value, _weights(0)[name]) for name, value in expected.items())


def test_a_killed_sweep_takes_its_instances_with_it() -> None:
    words = ["+recipe=tiny", *TWO, "distributed.instances=2", "seed=1,2", "+data.mode=slow", "epochs=100", "--quiet"]
    sweep = subprocess.Popen([sys.executable, "-m", "ipurun", "train", "-m", *words])
    _wait_for(lambda: any(p.stat().st_size for p in Path().glob("runs/tiny/sweeps/*/*/metrics.jsonl")), sweep)
    assert len(_own_processes()) >= 4, "the sweep, the point and its two instances"
    sweep.kill()
    sweep.wait()
    assert _all_ended()


def test_what_cannot_work_is_refused_before_the_first_point(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ["train", "-m", "+recipe=tiny", "seed=1,2", "devices=2", "distributed.instances=2"]
    hosts = ["distributed.hosts=[a,b]", "distributed.rendezvous=a:29400"]
    assert main([*words, "distributed=torchrun", *hosts]) == 2
    assert "on several machines with torchrun" in capsys.readouterr().err
    assert main([*words, "distributed=poprun", "sweep.jobs=2"]) == 2
    assert "the points of poprun share a partition" in capsys.readouterr().err
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["train", "-m", "+recipe=tiny", "seed=1,2"]) == 2
    assert "mpirun started this sweep as 2 processes" in capsys.readouterr().err
    assert not Path("runs").exists()
