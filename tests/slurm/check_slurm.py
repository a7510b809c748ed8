"""Sweeps on a real SLURM; `make test-slurm` starts one with one node around these tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
from user_project import enter_project

CODE = """
class Points(torch.utils.data.Dataset):
    def __init__(self, slow):
        self.slow = slow
        self.x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 16
    def __getitem__(self, index):
        time.sleep(self.slow)
        return self.x[index], int(self.x[index].argmax()) % 3

def splits(slow=0.0):
    return {"train": Points(slow), "test": Points(0.0)}
"""
_SECONDS = 240


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    enter_project(tmp_path, monkeypatch, "queued_code", CODE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    subprocess.run(["scancel", "--user=root", "--signal=KILL"], check=False)
    subprocess.run(["scancel", "--user=root"], check=False)


def _start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ipurun", "train", "-m", "+recipe=tiny", "hydra/launcher=submitit_slurm", *words]
    with Path("output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def _until(condition: Callable[[], Any], process: subprocess.Popen) -> Any:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, Path("output.txt").read_text()
        time.sleep(0.2)
    return condition()


def _records() -> List[Dict[str, Any]]:
    files = list(Path("runs/tiny/sweeps").glob("*/manifest.json"))
    return json.loads(files[0].read_text())["points"] if files else []


def _messages(point: int) -> List[Dict[str, Any]]:
    files = list(Path("runs/tiny/sweeps").glob(f"*/jobs/{point:03d}.messages.jsonl"))
    return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []


def _queue(form: str = "%i") -> List[str]:
    words = ["squeue", "--me", "--noheader", f"--format={form}"]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def test_points_are_jobs_and_end_in_the_table() -> None:
    process = _start("optimizer.lr=0.01,0.1", "hydra.launcher.timeout_min=5", "hydra.launcher.partition=debug")
    assert process.wait(_SECONDS) == 0, Path("output.txt").read_text()
    text = Path("output.txt").read_text()
    assert "2 of 2 points finished" in text and "accuracy by optimizer.lr" in text
    assert [record["status"] for record in _records()] == ["finished"] * 2
    assert len({record["job"] for record in _records()}) == 2 and not _queue()


def test_a_time_out_saves_and_requeues_and_the_job_resumes() -> None:
    # SLURM looks twice a minute, and half a minute ahead: the signal comes 15 to 45 seconds after the start.
    words = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=15", "hydra.launcher.max_num_timeout=20")
    process = _start("seed=1", "epochs=75", "+data.slow=0.05", "checkpoint.every_epochs=null", *words)
    _until(lambda: [message for message in _messages(0) if message["do"] == "requeued"], process)
    deadline = time.monotonic() + _SECONDS
    while process.poll() is None:
        assert time.monotonic() < deadline, Path("output.txt").read_text()
        if "PENDING" in _queue("%T"):  # SLURM lets a job that was put into the queue again wait for two minutes
            subprocess.run(["scontrol", "update", f"jobid={_records()[0]['job']}", "StartTime=now"], check=True)
        time.sleep(1)
    assert process.returncode == 0, Path("output.txt").read_text()
    assert [message["do"] for message in _messages(0)].count("job") >= 2
    (log,) = Path("runs/tiny/sweeps").glob("*/000/log.txt")
    shown = [message for message in _messages(0) if message["do"] in ("live", "requeued")]
    before = shown[: [message["do"] for message in shown].index("requeued")]
    reached = int(before[-1]["parts"][0].split()[1].partition("/")[0])
    resumed = int(log.read_text().partition("resuming after step ")[2].partition(",")[0])
    assert resumed >= reached > 4
    summary = json.loads((log.parent / "summary.json").read_text())
    assert summary["status"] == "done" and summary["step"] == 300


def test_a_killed_sweep_finds_its_jobs() -> None:
    process = _start("seed=1,2", "epochs=10", "+data.slow=0.05")
    _until(lambda: any(message["do"] == "job" for message in _messages(0)), process)
    process.kill()
    process.wait()
    jobs = [record["job"] for record in _records()]
    resumed = _start("seed=1,2", "epochs=10", "+data.slow=0.05", "resume=auto")
    assert resumed.wait(_SECONDS) == 0, Path("output.txt").read_text()
    assert [record["job"] for record in _records()] == jobs
    assert [record["status"] for record in _records()] == ["finished"] * 2


def test_ctrl_c_saves_what_runs_and_cancels_what_waits() -> None:
    process = _start("seed=1,2,3,4", "epochs=100", "+data.slow=0.05", f"hydra.launcher.cpus_per_task={os.cpu_count()}")
    _until(lambda: any(message["do"] == "live" for message in _messages(0)), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(_SECONDS) == 130
    deadline = time.monotonic() + 60
    while _queue() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not _queue()
    assert list(Path("runs/tiny/sweeps").glob("*/000/checkpoints/step-*.pt"))
    assert {record["status"] for record in _records()} == {"interrupted"}


def test_what_sbatch_refuses_is_reported() -> None:
    process = _start("seed=1,2", "hydra.launcher.partition=nowhere")
    assert process.wait(_SECONDS) == 1
    assert "the job cannot be submitted" in Path("output.txt").read_text()
    assert "artition" in Path("output.txt").read_text()


def test_a_job_that_would_be_signalled_at_its_start_is_refused() -> None:
    process = _start("seed=1,2", "hydra.launcher.timeout_min=2")
    assert process.wait(_SECONDS) == 2
    text = Path("output.txt").read_text()
    assert "hydra.launcher.signal_delay_s=30 or hydra.launcher.timeout_min=3" in text
