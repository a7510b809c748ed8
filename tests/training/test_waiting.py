"""A run waits for IPUs that are in use, with a countdown."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any, Iterator, List

import pytest
from run_harness import Folder, built

from ipurun.errors import RunError
from ipurun.training import failures
from ipurun.training.events import DeviceWait, Observer
from ipurun.training.loop import train


@pytest.fixture(name="lock")
def fixture_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """Hold the IPU that a run asks for, as another process would."""
    monkeypatch.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(failures, "SECONDS_BETWEEN_TRIES", 0.01)
    file = os.open(tmp_path / f"poptorch-emulator-{os.getuid()}-ipu0.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    yield file
    os.close(file)


class Watcher(Observer):
    """Keeps the countdown, and frees the IPU when it has been reported twice."""

    def __init__(self, lock: int) -> None:
        self.lock = lock
        self.left: List[float] = []

    def on_device_wait(self, event: DeviceWait) -> None:
        self.left.append(event.seconds_left)
        if len(self.left) == 2:
            fcntl.flock(self.lock, fcntl.LOCK_UN)


def run_on_ipu_0(folder: Path, observer: Observer, **changes: Any) -> Any:
    return train(built(options={"useIpuId": 0}, epochs=1, **changes), Folder(folder), [observer])


def test_the_run_begins_when_the_ipu_is_free(tmp_path: Path, lock: int) -> None:
    watcher = Watcher(lock)
    summary = run_on_ipu_0(tmp_path / "run", watcher, poplar__wait_for_ipu_minutes=5)
    assert summary.status == "done" and 0 < watcher.left[1] < watcher.left[0] <= 300


def test_without_the_key_it_fails_at_once_and_says_what_waits(tmp_path: Path, lock: int) -> None:
    watcher = Watcher(lock)
    with pytest.raises(RunError) as raised:
        run_on_ipu_0(tmp_path / "run", watcher)
    problem = raised.value.problems[0]
    assert not watcher.left and "in use" in problem.what and "poplar.wait_for_ipu_minutes=30" in problem.fix


def test_the_wait_has_an_end(tmp_path: Path, lock: int) -> None:
    with pytest.raises(RunError, match="still in use by others after"):
        run_on_ipu_0(tmp_path / "run", Observer(), poplar__wait_for_ipu_minutes=0.0005)
