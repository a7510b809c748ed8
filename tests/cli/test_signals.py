"""Signals to the whole process group, as batch systems send them, time limits, and processes that hang or die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
from user_project import enter_project

from ipurun.checkpoint import latest
from ipurun.cli.main import main
from ipurun.runs.folder import RunFolder

CODE = """
class Points(torch.utils.data.Dataset):
    def __init__(self, samples, seconds, hangs_at):
        random = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 4, generator=random)
        self.y = self.x.argmax(1) % 3
        self.seconds, self.hangs_at = seconds, hangs_at
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        if index == self.hangs_at:
            open("hangs", "a").write(f"{os.getpid()}\\n")
            time.sleep(600)
        time.sleep(self.seconds)
        return self.x[index], self.y[index]

def splits(samples=24, seconds=0.0, hangs_at=-1, test_hangs_at=-1):
    return {"train": Points(samples, seconds, hangs_at), "test": Points(8, 0.0, test_hangs_at)}
"""
MODES = {
    "sync": [],
    "workers": ["loader.workers=2"],
    "async": ["loader.mode=async"],
    "async with workers": ["loader.mode=async_rebatched", "loader.workers=2"],
}
LONG = ["+data.seconds=0.01", "epochs=1000", "checkpoint.every_epochs=null", "eval.every_epochs=null"]
HANGS = ["+data.hangs_at=20", "loader.shuffle=false", "checkpoint.every_steps=1", "max_steps=100"]


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "signal_code", CODE, "epochs: 2\n")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen]:
    """A run in a separate session, of which nothing is left afterwards."""
    command = [sys.executable, "-m", "ipurun", "train", "+recipe=tiny", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition: Callable[[], Any], process: Any = None) -> Any:
    end = time.monotonic() + 240
    while True:
        found = condition()
        if found:
            return found
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def is_training() -> bool:
    return any(path.stat().st_size for path in Path().glob("runs/tiny/**/metrics.jsonl"))


def hanging() -> List[int]:
    """Processes of the loader that hang; a line that is still being written does not count."""
    path = Path("hangs")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [int(line) for line in lines if line.endswith("\n")]


def running(session: int) -> List[int]:
    """Processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, _group, owner = path.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def only_run() -> RunFolder:
    (path,) = Path("runs/tiny").iterdir()
    return RunFolder(path)


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("sync", signal.SIGTERM),
        ("workers", signal.SIGTERM),
        ("workers", signal.SIGHUP),
        ("async", signal.SIGTERM),
        ("async", signal.SIGINT),
        ("async with workers", signal.SIGTERM),
        ("async with workers", signal.SIGHUP),
    ],
)
def test_a_signal_to_the_group_saves_in_every_loader_mode(mode: str, number: int) -> None:
    with started(*LONG, *MODES[mode], "interrupt_exit_code=75") as process:
        wait_for(is_training, process)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 75, err
        assert f"{signal.Signals(number).name}: saving after this host call;" in err and "Traceback" not in err
        assert f"ipurun train resume={only_run()}" in out
        checkpoint = latest(only_run())
        assert checkpoint is not None and checkpoint.step == only_run().summary()["step"]
        wait_for(lambda: not running(process.pid))


def test_a_batch_system_may_send_more_than_one_signal() -> None:
    with started(*LONG, "loader.workers=1") as process:
        wait_for(is_training, process)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.killpg(process.pid, number)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130, err
        assert latest(only_run()) is not None


def test_the_second_ctrl_c_stops_now() -> None:
    with started(*LONG, "+data.hangs_at=20", "loader.shuffle=false") as process:
        wait_for(hanging, process)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "SIGINT: saving after this host call; again to stop now\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130 and "interrupted" in err


def test_a_signal_before_the_first_step_ends_the_run_at_once() -> None:
    with started(*LONG, "+data.hangs_at=0", "loader.shuffle=false", "interrupt_exit_code=3") as process:
        wait_for(hanging, process)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 3 and "Traceback" not in err


@pytest.mark.parametrize("mode", ["workers", "async with workers"])
def test_a_signal_while_a_process_of_the_loader_hangs_saves(mode: str) -> None:
    with started(*HANGS, *MODES[mode], "checkpoint.every_steps=null", "checkpoint.every_epochs=null") as process:
        wait_for(lambda: hanging() and is_training(), process)
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130, err
        assert latest(only_run()) is not None
        wait_for(lambda: not running(process.pid))


def test_a_signal_while_a_worker_of_an_evaluation_hangs_saves() -> None:
    words = ["+data.test_hangs_at=5", "loader.workers=2", "loader.timeout_seconds=500", "checkpoint.every_epochs=null"]
    with started(*words) as process:
        wait_for(hanging, process)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130, err
        newest = latest(only_run())
        assert newest is not None and newest.step > 0
        wait_for(lambda: not running(process.pid))


@pytest.mark.parametrize("mode", ["workers", "async", "async with workers"])
def test_a_process_of_the_loader_that_hangs_is_found(mode: str) -> None:
    with started(*HANGS, *MODES[mode], "loader.timeout_seconds=1.5") as process:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 1
        err = " ".join(err.split())  # long lines are wrapped
        assert "no batch in 1.5 s" in err and f"ipurun train resume={only_run()}" in err
        wait_for(lambda: not running(process.pid))


def test_a_stopped_worker_does_not_keep_the_run_from_ending() -> None:
    with started(*HANGS, "loader.workers=1", "loader.timeout_seconds=1.5") as process:
        (worker,) = wait_for(hanging, process)
        os.kill(worker, signal.SIGSTOP)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 1 and "no batch in 1.5 s" in err
        wait_for(lambda: not running(process.pid))


@pytest.mark.parametrize("mode", ["workers", "async"])
def test_a_worker_that_was_killed_is_named(mode: str) -> None:
    with started(*HANGS, *MODES[mode]) as process:
        wait_for(lambda: hanging() and latest(only_run()) is not None, process)
        worker = hanging()[0]
        os.kill(worker, signal.SIGKILL)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 1
        err = " ".join(err.split())
        assert "process of the data loader died" in err and f"ipurun train resume={only_run()}" in err
        assert str(worker) in err


@pytest.mark.parametrize("mode", ["workers", "async with workers"])
def test_after_a_kill_no_process_is_left(mode: str) -> None:
    with started(*HANGS, *MODES[mode]) as process:
        wait_for(hanging, process)
        before = running(process.pid)
        process.kill()
        process.wait()
        wait_for(lambda: not running(process.pid))
        assert len(before) > 1


def test_max_minutes_saves_and_stops(capsys: Any) -> None:
    with started(*LONG, "max_minutes=0.07", "interrupt_exit_code=99") as process:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 99, err
        assert "max_minutes=0.07 has passed: saving and stopping" in out
        assert f"ipurun train resume={only_run()}" in out
    steps = only_run().summary()["step"]
    assert latest(only_run()).step == steps > 0
    assert main(["train", f"resume={only_run()}", f"max_steps={steps + 1}", "max_minutes=null"]) == 0
    assert "tiny: finished" in capsys.readouterr().out


def test_max_minutes_of_a_sweep_counts_all_points(capsys: Any) -> None:
    argv = ["train", "-m", "+recipe=tiny", *LONG, "seed=1,2", "max_minutes=0.001", "interrupt_exit_code=99"]
    assert main(argv) == 99
    out = capsys.readouterr().out
    assert "interrupted" in out and "pending" in out and "resume=" in out


def test_plan_mentions_the_limits(capsys: Any) -> None:
    main(["plan", "+recipe=tiny", "max_minutes=30", "loader.timeout_seconds=5"])
    out = " ".join(capsys.readouterr().out.split())
    assert "max_minutes=30: the run then saves and stops" in out and "exit code 130" in out
    assert "loader.timeout_seconds has no effect" in out


@pytest.mark.parametrize("where", ["> /dev/full", ">&-", "2>&- >&-", "< /dev/null | head -n 1"])
@pytest.mark.parametrize("flags", ["", "--quiet"])
def test_lost_output_does_not_end_a_run(where: str, flags: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m ipurun train +recipe=tiny epochs=20 {flags} {where}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    log = only_run().log_file.read_text()
    assert "step 120/120" in log and "tiny: finished" in log
    assert only_run().finished


def test_a_cache_folder_that_cannot_be_written_is_a_note(capsys: Any) -> None:
    Path("taken").write_text("a file, not a folder")
    assert main(["train", "+recipe=tiny", "max_steps=1", "cache.enabled=true", "cache.dir=taken/cache"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: executables are not cached:" in out and "taken is not a folder" in out
