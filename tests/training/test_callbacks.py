"""The user's own code in a run: events, requests, metrics, failures, and what must not change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Dict, List

import numpy
import pytest
import torch
from run_harness import Folder, Recorder, built, trained

import ipurun
from ipurun.checkpoint import latest, listed
from ipurun.errors import ConfigError, RunError
from ipurun.training.callbacks import Callback, make_callbacks
from ipurun.training.events import CheckpointSaved, EvalEnd, Observer, RunFailed, StepEnd, Summary
from ipurun.training.loop import train


def _train(folder: Path, callback: Callback, resume_from: Any = None, **changes: Any) -> tuple[Any, Summary, Recorder]:
    run, recorder = built(**changes), Recorder()
    summary = train(run, Folder(folder), [recorder], resume_from=resume_from, callbacks={"mine": callback})
    return run, summary, recorder


def _everything() -> Any:
    """Return a callback that keeps the names of all events."""
    seen: List[str] = []
    methods = {
        name: lambda self, *args, name=name: seen.append(name)
        for name in vars(Observer)
        if name.startswith("on_") or name == "flush"
    }
    made = type("Everything", (Callback,), methods)()
    made.seen = seen
    return made


def test_a_callback_receives_every_event(tmp_path: Path) -> None:
    callback = _everything()
    _train(tmp_path, callback, epochs=1)
    assert callback.seen[0] == "on_start" and callback.seen[-1] == "on_end"
    expected = {"on_start", "on_compile_start", "on_compile_end", "on_step", "on_eval", "on_checkpoint", "flush"}
    assert expected <= set(callback.seen)
    assert callback.seen.count("on_step") == 8


class _Asks(Callback):
    def on_step(self, event: StepEnd) -> None:
        if event.step == 6:
            self.run.evaluate()
            self.run.save()
        if event.step == 10:
            self.run.stop("seen enough")


def test_a_callback_asks_to_evaluate_save_and_stop(tmp_path: Path) -> None:
    off = {"eval__every_epochs": None, "checkpoint__every_epochs": None, "checkpoint__keep": 0}
    _, summary, recorder = _train(tmp_path, _Asks(), device_iterations=2, **off)
    assert [event.step for event in recorder.events["eval"]] == [6, 10]
    assert [checkpoint.step for checkpoint in listed(Folder(tmp_path))] == [6, 10]
    assert (summary.status, summary.step, summary.stop_reason) == ("done", 10, "callback mine: seen enough")


class _Reaches(Callback):
    def on_eval(self, event: EvalEnd) -> None:
        self.weights = {name: value.clone() for name, value in self.run.model.state_dict().items()}
        self.plain = self.run.plain_model()
        self.found = (self.run.plan.training.device_iterations, self.run.config.seed, self.run.optimizer, self.run.data)


def test_a_callback_reaches_model_optimizer_plan_and_data(tmp_path: Path) -> None:
    callback = _Reaches()
    run, _, _ = _train(tmp_path, callback, device_iterations=2, epochs=1, precision="16.16")
    for name, value in run.user_model.state_dict().items():
        assert torch.equal(callback.weights[name], value)
        assert torch.equal(callback.plain.state_dict()[name], value.float())
    assert callback.found == (2, 0, run.optimizer, run.splits)
    assert callback.plain(torch.zeros(1, 4)).shape == (1, 3) and not callback.plain.training


class _Adds(Callback):
    def on_step(self, event: StepEnd) -> None:
        self.run.add_metrics({"twice": 2 * event.step})

    def on_eval(self, event: EvalEnd) -> None:
        self.run.add_metrics({"distance": abs(event.step - 8)}, higher_is_better=False)


def test_metrics_of_a_callback_are_recorded_and_monitored(tmp_path: Path) -> None:
    keys = {"monitor": "distance", "callbacks": {"mine": {}}, "epochs": 3, "early_stopping__threshold": 0.0}
    _, summary, recorder = _train(tmp_path, _Adds(), log_every_steps=4, eval__every_steps=4, **keys)
    logged = [event for event in recorder.events["step"] if event.logged]
    assert [event.metrics for event in logged] == [{"twice": 8.0}, {"twice": 16.0}]
    assert [event.metrics["distance"] for event in recorder.events["eval"]] == [4.0, 0.0]
    assert (summary.best, summary.best_step, summary.metrics["distance"]) == (0.0, 8, 0.0)
    assert summary.stop_reason == "early stopping: distance reached 0"


class _Draws(Callback):
    """Uses all random generators, and counts."""

    def __init__(self) -> None:
        self.count = 0
        self.drawn: List[float] = []

    def on_step(self, event: StepEnd) -> None:
        self.count += 1
        self.drawn.append(random.random() + float(numpy.random.rand()) + float(torch.rand(1)))

    def on_eval(self, event: EvalEnd) -> None:
        self.run.plain_model()

    def state_dict(self) -> Dict[str, Any]:
        return {"count": self.count, "drawn": list(self.drawn)}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.drawn = state["count"], state["drawn"]


def test_a_callback_does_not_disturb_training_and_resumes_exactly(tmp_path: Path) -> None:
    keys = {"model": {"_target_": "run_toys.Net", "dropout": 0.3}, "device_iterations": 2}
    run, _, plain = trained(tmp_path / "without", **keys)
    straight = _Draws()
    with_callback, _, seen = _train(tmp_path / "with", straight, **keys)
    assert seen.losses == plain.losses
    assert torch.equal(run.user_model.first.weight, with_callback.user_model.first.weight)
    folder, first, second = tmp_path / "halves", _Draws(), _Draws()
    _train(folder, first, epochs=1, **keys)
    _train(folder, second, resume_from=latest(Folder(folder)), **keys)
    assert (second.count, second.drawn) == (straight.count, straight.drawn)


class _Fails(Callback):
    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, event: StepEnd) -> None:
        self.calls += 1
        if event.step == 3:
            raise ValueError("a bad day")


def test_a_callback_that_raises_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the callback `mine` failed in on_step") as caught:
        _train(tmp_path, _Fails())
    [problem] = caught.value.problems
    assert problem.seen == "ValueError: a bad day" and "on_callback_error=continue" in problem.fix
    assert problem.where.startswith(__file__)


def test_the_message_says_from_where_the_run_can_be_resumed(tmp_path: Path) -> None:
    class Late(Callback):
        def on_step(self, event: StepEnd) -> None:
            if event.step == 14:
                raise ValueError("late")

    with pytest.raises(RunError) as caught:
        _train(tmp_path, Late(), checkpoint__every_steps=4)
    assert "step-00000012.pt" in caught.value.problems[0].fix and "train resume=" in caught.value.problems[0].fix


EVENTS = [name for name in vars(Observer) if name.startswith("on_") or name == "flush"]
RAISED = [name for name in EVENTS if name not in ("on_note", "on_device_wait", "on_rollback", "on_failure")]


@pytest.mark.parametrize("event", RAISED)
def test_an_error_in_any_event_ends_the_run_or_only_the_callback(tmp_path: Path, event: str) -> None:
    def fail(self: Callback, *args: Any) -> None:
        raise ValueError("a bad day")

    failing = type("Failing", (Callback,), {event: fail})
    with pytest.raises(RunError, match=f"the callback `mine` failed in {event}"):
        _train(tmp_path / "stop", failing(), epochs=1)
    _, summary, recorder = _train(tmp_path / "continue", failing(), epochs=1, on_callback_error="continue")
    assert summary.status == "done"
    [note] = [entry for entry in recorder.events["note"] if entry.level == "warning"]
    assert f"`mine` failed in {event} and is not called again" in note.text


def test_a_failure_is_reported_to_all_and_an_error_in_that_changes_nothing(tmp_path: Path) -> None:
    failures: List[RunFailed] = []

    class Last(_Fails):
        def on_failure(self, event: RunFailed) -> None:
            failures.append(event)
            raise OSError("no disk")

        def flush(self) -> None:
            raise OSError("no disk")

    class Logger(Observer):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

        def on_failure(self, event: RunFailed) -> None:
            failures.append(event)

    logger = Logger()
    with pytest.raises(RunError, match="failed in on_step"):
        train(built(), Folder(tmp_path), [logger], callbacks={"mine": Last()})
    assert logger.flushed
    assert failures == [RunFailed(3, "the callback `mine` failed in on_step")] * 2


def test_a_callback_that_raises_is_dropped_on_request(tmp_path: Path) -> None:
    callback = _Fails()
    _, summary, recorder = _train(tmp_path, callback, on_callback_error="continue")
    assert summary.status == "done" and callback.calls == 3
    [note] = [event for event in recorder.events["note"] if event.level == "warning"]
    assert "`mine` failed in on_step and is not called again: ValueError: a bad day" in note.text


class _BadState(Callback):
    def state_dict(self) -> Dict[str, Any]:
        return {"when": Path("x")}


def test_a_state_that_a_checkpoint_cannot_hold_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="failed in state_dict"):
        _train(tmp_path, _BadState())


class _SeesCheckpoints(Callback):
    def __init__(self) -> None:
        self.paths: List[str] = []

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self.paths.append(event.path)


def test_targets_are_made_and_must_be_callbacks() -> None:
    made = make_callbacks({"mine": {"_target_": f"{__name__}._SeesCheckpoints"}})
    assert made["mine"].paths == [] and ipurun.Callback is Callback
    with pytest.raises(ConfigError, match=r"did not return an ipurun\.Callback"):
        make_callbacks({"mine": {"_target_": "run_toys.Points"}})


def test_without_callbacks_nothing_is_called_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipurun.training.callbacks.Callbacks.after_step", None)
    trained(tmp_path, epochs=1)
