"""Several points at once, forked points, what points share, and points that are jobs of a queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Set

import pytest
from user_project import enter_project

from ipurun import engine as engines
from ipurun.cli.main import main
from ipurun.config.compose import Points, points
from ipurun.errors import ConfigError
from ipurun.sweep import sharing
from ipurun.sweep.batch import RemotePoint
from ipurun.sweep.check import Checked, check_point
from ipurun.sweep.launchers import LocalLauncher, Task
from ipurun.sweep.ledger import Record
from ipurun.sweep.pool import Source
from ipurun.sweep.worker import Job, write_job

CODE = """
class Points(torch.utils.data.Dataset):
    def __init__(self, mode):
        self.mode = mode
        self.x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 15 and self.mode == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.mode == "slow":
            time.sleep(0.02)
        return self.x[index], int(self.x[index].argmax()) % 3

def splits(mode="ok"):
    if os.getpid() != int(os.environ["SWEEP_TEST_PID"]):
        with open("parents.txt", "a") as stream:
            stream.write(f"{os.getppid()}\\n")
    return {"train": Points(mode), "test": Points("ok")}
"""


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "beside_code", CODE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SWEEP_TEST_PID", str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def _manifest() -> List[Dict[str, Any]]:
    files = [*Path("runs/tiny/sweeps").glob("*/manifest.json"), *Path("elsewhere").glob("*/manifest.json")]
    return json.loads(files[0].read_text())["points"] if files else []


def _own_processes() -> Set[str]:
    """Return the processes of sweeps in this folder."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_sweep = b"ipurun.sweep" in (folder / "cmdline").read_bytes()
            if is_sweep and os.readlink(folder / "cwd") == os.getcwd():
                found.add(folder.name)  # a zombie has neither
        except OSError:
            continue
    return found


def test_points_run_side_by_side_and_a_crash_ends_only_its_own(capsys: Any) -> None:
    assert main(["train", "-m", "+recipe=tiny", "+data.mode=ok,crash", "seed=1,2", "sweep.jobs=2"]) == 1
    captured = capsys.readouterr()
    assert "4 points, 2 programs to compile, 2 at a time" in captured.out
    # All were forked from one process, which is not this one.
    parents = set(Path("parents.txt").read_text().split())
    assert len(parents) == 1 and str(os.getpid()) not in parents
    assert [point["status"] for point in _manifest()] == ["finished", "finished", "failed", "failed"]
    assert max(point["at_once"] for point in _manifest()) == 2
    assert captured.err.count("killed by SIGSEGV") == 2
    assert "samples/s side by side" in captured.out and "* measured beside other points" in captured.out
    # Output is kept apart.
    (folder,) = Path("runs/tiny/sweeps").iterdir()
    assert "Fatal Python error" in (folder / "jobs/002.output.txt").read_text()
    assert (folder / "jobs/000.output.txt").read_text() == ""
    assert not _own_processes()


def test_a_killed_sweep_leaves_no_process_and_is_resumed() -> None:
    words = ["train", "-m", "+recipe=tiny", "+data.mode=slow", "epochs=3", "seed=1,2,3,4", "sweep.jobs=2", "--quiet"]
    words.append("hydra.sweep.dir=elsewhere/mine")  # whose name a second sweep would get with a number
    sweep = subprocess.Popen([sys.executable, "-m", "ipurun", *words])
    end = time.monotonic() + 120
    while sum(point["status"] == "finished" for point in _manifest()) < 1:
        assert sweep.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    sweep.kill()
    sweep.wait()
    while _own_processes():
        assert time.monotonic() < end
        time.sleep(0.05)
    done = [point["index"] for point in _manifest() if point["status"] == "finished"]
    (folder,) = Path("elsewhere").iterdir()
    ended = {index: (folder / f"{index:03d}/summary.json").stat().st_mtime for index in done}
    assert main([*words, "resume=auto"]) == 0
    assert [point["status"] for point in _manifest()] == ["finished"] * 4
    assert {index: (folder / f"{index:03d}/summary.json").stat().st_mtime for index in done} == ended
    assert [path.name for path in Path("elsewhere").iterdir()] == ["mine"]


def test_ctrl_c_saves_all_points_that_run() -> None:
    words = ["+recipe=tiny", "+data.mode=slow", "epochs=1000", "seed=1,2,3", "sweep.jobs=2", "eval.every_epochs=null"]
    command = [sys.executable, "-m", "ipurun", "train", "-m", *words, "checkpoint.every_epochs=null"]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, universal_newlines=True)
    end = time.monotonic() + 120
    while sum(path.stat().st_size > 0 for path in Path().glob("runs/tiny/sweeps/*/*/metrics.jsonl")) < 2:
        assert sweep.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    out, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert [point["status"] for point in _manifest()] == ["interrupted", "interrupted", "pending"]
    assert len(list(Path().glob("runs/tiny/sweeps/*/*/checkpoints/step-*.pt"))) >= 2
    assert "3 not finished" in out and not _own_processes()


def _task(number: int, *words: str) -> Task:
    Path("jobs").mkdir(exist_ok=True)
    point = points(["+recipe=tiny", *words]).points[0]
    task = Task(Path(f"jobs/{number}").absolute(), can_be_forked=True)
    write_job(task.job_file, Job(point, str(Path(f"run{number}").absolute())))
    return task


def test_points_are_forked_unless_something_must_be_set_before_imports() -> None:
    server: Any = SimpleNamespace(environment={"A": "1"})
    launcher = LocalLauncher(1, server)
    task = Task(Path("x"), environment={"A": "1"}, can_be_forked=True)
    assert launcher._forks_for(task) is server
    assert launcher._forks_for(replace(task, environment={"A": "2"})) is None
    assert launcher._forks_for(replace(task, can_be_forked=False)) is None


def _checked(*words: str) -> List[Checked]:
    return [check_point(point) for point in points(["-m", "+recipe=tiny", *words]).points]


def test_points_that_share_a_program_run_next_to_each_other() -> None:
    checked = _checked("optimizer.lr=0.1,0.2", "device_iterations=1,2")
    records = [Record(item.id, place, "tiny", dict(item.point.swept), []) for place, item in enumerate(checked)]
    source = Source(records, checked)
    order = [source.take(set()) for _ in range(4)]
    assert [taken[0].index for taken in order if taken] == [0, 2, 1, 3]
    assert source.take(set()) is None
    # While one point compiles a program, points with another are started first.
    source = Source(records, checked)
    first = source.take(set())
    assert first is not None and first[0].index == 0
    second = source.take({first[1].program})
    assert second is not None and second[0].index == 1
    assert sharing.compilations_text(checked) == "2 programs to compile"


def _found(*words: str) -> Points:
    return points(["-m", "+recipe=tiny", *words])


def test_automatic_jobs_are_cores_with_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    found = _found("seed=1", "sweep.jobs=auto")
    checked = [check_point(found.points[0])] * 3
    at_once = sharing.points_at_once(found, checked, None)
    assert (at_once.jobs, at_once.threads, at_once.would_fit) == (3, 2, 3)
    found = _found("seed=1")
    at_once = sharing.points_at_once(found, checked, None)
    assert (at_once.jobs, at_once.threads) == (1, None)
    assert "3 points would fit on this machine (8 cores): sweep.jobs=3" in sharing.opening_lines(checked, at_once)[1]


@pytest.mark.parametrize(("devices", "jobs", "fits"), [(4, "auto", 4), (16, "auto", 1), (4, "5", None)])
def test_points_on_ipus_have_their_own_devices(monkeypatch: Any, devices: int, jobs: str, fits: Any) -> None:
    found = _found("seed=1", f"sweep.jobs={jobs}")
    checked = check_point(found.points[0])
    assert checked.plan is not None
    shared = replace(checked.plan.devices, total=devices)
    on_ipus = [replace(checked, plan=replace(checked.plan, engine="ipu", devices=shared))] * 9
    host = replace(engines.load("cpu"), kind="ipu", available_ipus=16)
    monkeypatch.setattr(sharing.engines, "load", lambda choice: host)
    if fits is not None:
        assert sharing.points_at_once(found, on_ipus, None).jobs == fits
        return
    with pytest.raises(ConfigError, match="more points at the same time than there are IPUs for") as error:
        sharing.points_at_once(found, on_ipus, None)
    assert error.value.problems[0].fix == "sweep.jobs=4"


@pytest.mark.parametrize("jobs", ["0", "many"])
def test_a_number_of_jobs_is_needed(jobs: str, capsys: Any) -> None:
    assert main(["train", "-m", "+recipe=tiny", "seed=1,2", f"sweep.jobs={jobs}"]) == 2
    assert "`sweep.jobs`" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_point_that_can_never_run_stops_the_sweep(capsys: Any) -> None:
    assert main(["train", "-m", "+recipe=tiny", "device_iterations=1,999"]) == 2
    text = capsys.readouterr().err
    assert "more samples than the training set has" in text and "device_iterations=999" in text
    assert not Path("runs").exists()


def test_the_plan_of_a_sweep_counts_programs(capsys: Any) -> None:
    assert main(["plan", "-m", "+recipe=tiny", "optimizer.lr=0.1,0.2", "device_iterations=1,2", "--quiet"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "sweep: 4 points, 2 programs to compile for training and for inference"


def test_a_remote_point_stops_when_it_is_asked_to() -> None:
    task = _task(0, "+data.mode=slow", "epochs=1000", "checkpoint.every_epochs=null")
    codes: List[int] = []
    thread = threading.Thread(target=lambda: codes.append(RemotePoint(task)()))
    thread.start()
    end = time.monotonic() + 120
    while '"live"' not in (task.messages_file.read_text() if task.messages_file.exists() else ""):
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.1)
    process = json.loads(task.messages_file.read_text().splitlines()[0])["pid"]
    os.killpg(process, signal.SIGUSR2)  # as SLURM signals a whole job: only submitit's process is meant
    time.sleep(0.5)
    task.stop_file.touch()
    thread.join(60)
    assert codes == [130] and list(Path("run0/checkpoints").glob("step-*.pt"))
    calls = [json.loads(line) for line in task.messages_file.read_text().splitlines()]
    assert calls[0]["do"] == "job" and calls[-1] == {"do": "ended", "code": 130, "by": "interrupt"}


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["hydra/launcher=joblib"], "joblib"),
        (["hydra/launcher=submitit_local"], "submitit"),
        (["hydra/sweeper=optuna"], "optuna"),
    ],
)
def test_a_missing_library_is_named(words: List[str], needed: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, needed, None)
    assert main(["train", "-m", "+recipe=tiny", "seed=1,2", *words]) == 2
    text = capsys.readouterr().err
    assert f"needs the package `{needed}`" in text and "pip install 'ipurun[sweep]'" in text
