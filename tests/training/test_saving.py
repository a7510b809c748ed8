"""Checkpoints are written in the background: training waits for the copy only, and no failure is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from run_harness import Folder, Recorder, built, trained

from ipurun import checkpoint
from ipurun.checkpoint import latest, listed, load
from ipurun.errors import RunError
from ipurun.training import saving
from ipurun.training.events import Observer, StepEnd
from ipurun.training.loop import train

SLOW_SECONDS = 0.4


def _slowly(then: Callable[..., Any]) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return then(*args, **kwargs)

    return save


class _WhereSteps(Observer):
    """Records which steps end while a checkpoint is being written, and the newest checkpoint of each."""

    def __init__(self) -> None:
        self.during_write: list = []
        self.newest: dict = {}
        self.is_past_fourth = threading.Event()

    def on_step(self, event: StepEnd) -> None:
        if any(thread.name == "checkpoint" for thread in threading.enumerate()):
            self.during_write.append(event.step)
        self.newest[event.step] = event.checkpoint
        if event.step > 4:
            self.is_past_fourth.set()


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _WhereSteps()

    def save(*args: Any, **kwargs: Any) -> Any:
        assert steps.is_past_fourth.wait(60)
        return checkpoint.save(*args, **kwargs)

    monkeypatch.setattr(saving, "save", save)
    summary = train(built(checkpoint__every_steps=4, epochs=1, eval__at_end=False), Folder(tmp_path), [steps])
    assert 5 in steps.during_write
    assert steps.newest[5] is None  # not whole yet
    assert [saved.step for saved in listed(tmp_path / "checkpoints")] == [4, 8]
    assert summary.checkpoint == str(tmp_path / "checkpoints" / "step-00000008.pt")
    assert summary.seconds["checkpoint_write"] > 0


def test_a_checkpoint_has_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that follow while it is written do not change it."""
    trained(tmp_path / "expected", checkpoint__every_steps=3, checkpoint__keep=0)
    monkeypatch.setattr(saving, "save", _slowly(checkpoint.save))
    trained(tmp_path / "slow", checkpoint__every_steps=3, checkpoint__keep=0)
    for saved in listed(tmp_path / "slow" / "checkpoints"):
        state, expected = load(saved), load(tmp_path / "expected" / "checkpoints" / saved.path.name)
        for name, value in expected["model"].items():
            assert torch.equal(state["model"][name], value), (saved.step, name)
        assert state["progress"] == expected["progress"]


def test_a_failed_write_stops_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 6:
            raise RunError("the checkpoint of step 6 could not be saved; earlier ones are intact")
        return checkpoint.save(folder, step, *args, **kwargs)

    monkeypatch.setattr(saving, "save", fail)
    recorder = Recorder()
    with pytest.raises(RunError, match="step 6 could not be saved"):
        train(built(checkpoint__every_steps=3), Folder(tmp_path), [recorder])
    assert latest(tmp_path / "checkpoints").step == 3
    assert recorder.events["step"][-1].step < 9


def test_a_write_that_fails_at_the_end_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        raise RunError("no room")

    monkeypatch.setattr(saving, "save", fail)
    with pytest.raises(RunError, match="no room"):
        trained(tmp_path, epochs=1, checkpoint__every_epochs=None)


def test_an_interrupt_waits_for_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "save", _slowly(checkpoint.save))

    class PressCtrlC(Observer):
        def on_step(self, event: StepEnd) -> None:
            if event.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    summary = train(built(), Folder(tmp_path), [PressCtrlC()])
    assert summary.status == "interrupted" and latest(tmp_path / "checkpoints").step == 5


def test_a_failing_run_names_the_checkpoint_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "save", _slowly(checkpoint.save))
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=7:UNRECOVERABLE")
    with pytest.raises(RunError, match=r"step-00000006\.pt"):
        trained(tmp_path, checkpoint__every_steps=6)


def test_the_planned_size_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    for number, changes in enumerate(
        (
            {"optimizer": {"_target_": "poptorch.optim.SGD", "lr": 0.1}},
            {"gradient_accumulation": 2},
            {"optimizer": {"_target_": "poptorch.optim.Adam", "lr": 0.1}, "precision": "16.16"},
        )
    ):
        run, _, _ = trained(
            tmp_path / str(number), model={"_target_": "run_toys.Net", "width": 20000}, epochs=1, **changes
        )
        written = latest(tmp_path / str(number) / "checkpoints").path.stat().st_size
        assert run.plan.saving is not None
        assert run.plan.saving.checkpoint_bytes == pytest.approx(written, rel=0.03)
        assert run.plan.saving.saves == 1 and run.plan.saving.free_bytes


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_time_limit_ends_a_wait_for_a_worker_that_hangs(tmp_path: Path, mode: str) -> None:
    run = built(
        data={"_target_": "run_toys.Hanging", "hangs_at": 21},
        loader__workers=1,
        loader__mode=mode,
        loader__shuffle=False,
        eval__every_epochs=None,
    )
    begun = time.monotonic()
    summary = train(run, Folder(tmp_path), [], deadline=begun + 1.0)
    assert time.monotonic() - begun < 60 and summary.status == "interrupted"
    assert 0 < summary.step <= 5 and load(latest(Folder(tmp_path)))["progress"]["step"] == summary.step
