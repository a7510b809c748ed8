"""Sweeps as a user runs them: processes that crash, hang, fail and are interrupted."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from user_project import enter_project

from ipurun.cli.main import main
from ipurun.runs.folder import RunFolder

CODE = """
class Points(torch.utils.data.Dataset):
    # The sweep process also creates the data, to plan the points: only the points fail.
    def __init__(self, mode):
        self.mode = mode if os.getpid() != int(os.environ["SWEEP_TEST_PID"]) else "ok"
        if os.getpid() != int(os.environ["SWEEP_TEST_PID"]):
            with open("started.txt", "a") as stream:
                stream.write(f"{mode}\\n")
        if os.path.exists("repaired"):
            self.mode = "ok"
        self.x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 16
    def __getitem__(self, index):
        if index == 15 and self.mode == "crash":
            print("about to crash", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == 15 and self.mode == "fail":
            raise OSError("sample 15 is broken")
        if self.mode == "hang":
            time.sleep(1000)
        if self.mode == "slow":
            time.sleep(0.02)
        return self.x[index], int(self.x[index].argmax()) % 3

def splits(mode="ok"):
    return {"train": Points(mode), "test": torch.utils.data.Subset(Points("ok"), range(8))}
"""


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "swept_code", CODE)
    monkeypatch.setenv("SWEEP_TEST_PID", str(os.getpid()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def _sweep(*argv: str) -> int:
    return main(["train", "-m", "+recipe=tiny", *argv])


def _folder() -> Path:
    (folder,) = Path("runs/tiny/sweeps").iterdir()
    return folder


def _rows() -> List[Dict[str, str]]:
    with (_folder() / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def _started() -> List[str]:
    """Return the modes of the points that created their data, in order."""
    return Path("started.txt").read_text().split()[::2]


def test_a_failed_point_does_not_end_the_sweep_and_resume_runs_the_rest(capsys: Any) -> None:
    assert _sweep("+data.mode=crash,ok", "optimizer.lr=0.1") == 1
    captured = capsys.readouterr()
    assert _started() == ["crash", "ok"]
    by_mode = {row["data.mode"]: row for row in _rows()}
    assert by_mode["ok"]["status"] == "finished" and by_mode["ok"]["rank"] == "1"
    assert float(by_mode["ok"]["samples_per_second"]) > 0 and by_mode["ok"]["best_accuracy"]
    assert by_mode["crash"]["status"] == "failed" and "killed by SIGSEGV" in by_mode["crash"]["reason"]
    # Shown at once with the last output of the process; the table repeats the reason.
    assert "[1/2] data.mode=crash failed" in captured.err and "about to crash" in captured.err
    table = captured.out[captured.out.index("rank ") :]
    assert "killed by SIGSEGV" in table and "1 of 2 points finished, 1 failed" in table
    assert RunFolder(by_mode["ok"]["folder"]).finished

    Path("repaired").touch()
    Path("started.txt").unlink()
    assert _sweep("+data.mode=crash,ok", "optimizer.lr=0.1", "resume=auto") == 0
    assert _started() == ["crash"]
    assert "1 of 2 points are finished" in capsys.readouterr().out
    assert [row["status"] for row in _rows()] == ["finished"] * 2

    Path("started.txt").unlink()
    assert _sweep("+data.mode=crash,ok", "optimizer.lr=0.1", "resume=auto", "--quiet") == 0
    assert not Path("started.txt").exists()
    assert capsys.readouterr().out.startswith("2 of 2 points finished")


def test_a_config_error_in_the_last_point_stops_the_sweep_before_the_first(capsys: Any) -> None:
    assert _sweep("devices=1,2,3", "micro_batch_size=4,400") == 2
    text = capsys.readouterr().err
    assert "power of two" in text and "micro_batch_size=400" in text
    assert not Path("runs").exists() and not Path("started.txt").exists()


def test_a_sweep_may_stop_at_the_first_failure(capsys: Any) -> None:
    assert _sweep("+data.mode=fail,ok", "sweep.on_error=stop", "--json") == 1
    captured = capsys.readouterr()
    points = json.loads(captured.out)["points"]
    assert [point["status"] for point in points] == ["failed", "pending"]
    assert _started() == ["fail"]
    log = _folder() / "000/log.txt"
    assert "sample 15 is broken" in captured.err and f"log    {log}" in captured.err
    assert "Traceback" in log.read_text()


def test_a_point_that_hangs_is_ended(capsys: Any) -> None:
    assert _sweep("+data.mode=hang", "sweep.timeout_seconds=1", "--quiet") == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["0 of 1 point finished, 1 failed"]
    assert "took longer than sweep.timeout_seconds=1" in captured.err


def test_missing_data_is_a_failed_row(capsys: Any) -> None:
    recipe = Path("conf/recipe/tiny.yaml").read_text()
    absent = recipe.replace("swept_code.splits", "ipurun.recipes.fashion_mnist.dataset.splits")
    Path("conf/recipe/nodata.yaml").write_text(absent)
    assert main(["train", "-m", "+recipe=nodata,tiny", "max_steps=1", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [point["status"] for point in document["points"]] == ["finished", "failed"]
    assert "data.root" in document["points"][1]["reason"]


def test_ctrl_c_saves_the_point_and_ends_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_TEST_PID", "0")
    argv = ["+recipe=tiny", "+data.mode=slow", "epochs=1000", "seed=1,2", "eval.every_epochs=null"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ipurun", "train", "-m", *argv, "checkpoint.every_epochs=null"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    end = time.monotonic() + 120
    while not any(path.stat().st_size for path in Path().glob("runs/tiny/sweeps/*/000/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    table = out[out.index("rank ") :]
    assert "interrupted" in table and "pending" in table and "resume=" in table
    assert list((_folder() / "000/checkpoints").glob("step-*.pt"))
    assert not (_folder() / "001").exists()
