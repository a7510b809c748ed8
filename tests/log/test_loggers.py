from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest

from ipurun.errors import ConfigError
from ipurun.log.csv import CsvLogger
from ipurun.log.jsonl import JsonlLogger
from ipurun.log.mlflow import MlflowLogger
from ipurun.log.tensorboard import TensorBoardLogger
from ipurun.log.tracking import DroppedIfFailing, Record, Tracker
from ipurun.log.wandb import WandbLogger
from ipurun.training.events import EvalEnd, Observer, Observers, RolledBack, RunFailed, RunStart, StepEnd, Summary

EVAL = EvalEnd(8, 0.25, "test", {"loss": 0.5, "accuracy": 0.75}, 100, 0.2, "accuracy", True)


def _records(path: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_a_line_for_each_logged_step_and_evaluation(
    tmp_path: Path, step: Callable[..., StepEnd], summary: Summary
) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.on_step(step(metrics={"accuracy": 0.25}))
    logger.on_step(step(step=16, logged=False))
    logger.on_eval(EVAL)
    logger.on_end(summary)
    train, test = _records(path)
    assert (train["split"], train["step"], train["loss"], train["accuracy"]) == ("train", 8, 2.3025, 0.25)
    assert train["samples_per_second"] == 51234.4 and train["lr"] == 0.05
    assert (test["split"], test["step"], test["accuracy"], test["is_best"]) == ("test", 8, 0.75, True)


def test_a_nan_loss_leaves_valid_json(tmp_path: Path, step: Callable[..., StepEnd]) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.on_step(step(loss=float("nan")))
    logger.flush()

    def refuse(word: str) -> None:
        raise ValueError(word)

    assert json.loads(path.read_text(), parse_constant=refuse)["loss"] == "nan"


def test_a_resumed_run_does_not_log_a_step_twice(tmp_path: Path, step: Callable[..., StepEnd]) -> None:
    path = tmp_path / "metrics.jsonl"
    killed = JsonlLogger(path)
    for number in (8, 16, 24):
        killed.on_step(step(step=number))
    killed.flush()
    with path.open("ab") as stream:
        stream.write(b'{"step": 9, \xff\xfe}\n{"step": 32, "lo')  # a damaged line, and one cut off by a kill
    resumed = JsonlLogger(path)
    resumed.on_start(RunStart("digits", str(tmp_path), 16, 64, "step-16.pt"))
    resumed.on_step(step(step=24))
    resumed.flush()
    assert [record["step"] for record in _records(path)] == [8, 16, 24]


def test_csv_rows_fit_every_split(tmp_path: Path, step: Callable[..., StepEnd], summary: Summary) -> None:
    for _ in range(2):  # the second one appends to the file of the first
        logger = CsvLogger(tmp_path)
        logger.on_step(step())
        logger.on_eval(EVAL)
        logger.on_end(summary)
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {"step": "8", "epoch": "0.25", "split": "test", "name": "accuracy", "value": "0.75"} in rows
    assert {"step": "8", "epoch": "0.25", "split": "train", "name": "lr", "value": "0.05"} in rows
    assert len([row for row in rows if row["name"] == "accuracy"]) == 2


def test_csv_drops_the_rows_of_repeated_steps(tmp_path: Path, step: Callable[..., StepEnd]) -> None:
    killed = CsvLogger(tmp_path)
    for number in (8, 16):
        killed.on_step(step(step=number))
    with (tmp_path / "metrics.csv").open("a") as stream:
        stream.write("24,0.5,tra")  # cut off by a kill
    resumed = CsvLogger(tmp_path)
    resumed.on_start(RunStart("digits", str(tmp_path), 8, 64, "step-8.pt"))
    for number in (16, 24):
        resumed.on_step(step(step=number))
    resumed.on_rollback(RolledBack(16, "step-16.pt", "NaN"))
    resumed.on_step(step(step=24))
    with (tmp_path / "metrics.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["name"] == "loss"]
    assert [row["step"] for row in rows] == ["8", "16", "24"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a config that names a secret."""
    (tmp_path / "config.yaml").write_text(
        "devices: 8\noptimizer:\n  lr: 0.1\nlogger:\n  mine:\n    api_key: ${oc.env:SOME_KEY}\nsample: [1, 2]\n"
    )
    (tmp_path / "origins.yaml").write_text("optimizer.lr: x.yaml:1\nsample: x.yaml:2\nlogger.mine.api_key: y\n")
    return tmp_path


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> List[Any]:
    """A look-alike of TensorBoard, and what it was given."""
    written: List[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: Any = None) -> None:
            written.append((folder, purge_step))
            self.file_writer = SimpleNamespace(add_summary=written.append)

        def __getattr__(self, name: str) -> Any:
            return lambda *values: written.append((name, *values))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]  # a fake package
    parts = ModuleType("torch.utils.tensorboard.summary")
    parts.hparams = lambda *values: [values]  # type: ignore[attr-defined]  # a fake package
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", parts)
    return written


def test_tensorboard_gets_scalars_by_split_and_hyperparameters(
    folder: Path, step: Callable[..., StepEnd], summary: Summary, tensorboard: List[Any]
) -> None:
    logger = TensorBoardLogger(folder)
    logger.on_start(RunStart("digits", str(folder), 0, 64))
    logger.on_step(step())
    logger.on_eval(replace(EVAL, matrices={"confusion_matrix": [[3, 1], [0, 4]]}))
    logger.on_end(summary)
    assert tensorboard[0] == (str(folder / "tensorboard"), None)
    config = tensorboard[1]
    assert config[:2] == ("add_text", "config") and "api_key: ${oc.env:SOME_KEY}" in config[2]
    assert ("add_scalar", "train/loss", 2.3025, 8) in tensorboard
    assert ("add_scalar", "test/accuracy", 0.75, 8) in tensorboard
    chosen = {"optimizer.lr": 0.1, "logger.mine.api_key": "${oc.env:SOME_KEY}"}
    assert (chosen, {"test/loss": 0.5, "test/accuracy": 0.75}) in tensorboard
    table = "| | 0 | 1 |\n|---|---|---|\n| **0** | 3 | 1 |\n| **1** | 0 | 4 |"
    assert ("add_text", "test/confusion_matrix", table, 8) in tensorboard
    assert tensorboard[-1] == ("close",)


def test_tensorboard_drops_the_steps_that_are_repeated(folder: Path, tensorboard: List[Any]) -> None:
    logger = TensorBoardLogger(folder, log_dir="elsewhere")
    logger.on_start(RunStart("digits", str(folder), 16, 64, "step-16.pt"))
    logger.on_rollback(RolledBack(8, "step-8.pt", "NaN"))
    assert [entry for entry in tensorboard if entry[0] == "elsewhere"] == [("elsewhere", 17), ("elsewhere", 9)]


def test_wandb_keeps_one_run_over_resumes(folder: Path, summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: List[Any] = []
    run = SimpleNamespace(
        id="abc123",
        log=calls.append,
        finish=lambda exit_code: calls.append(exit_code),
        define_metric=lambda *names, **how: None,
    )
    module = ModuleType("wandb")
    module.init = lambda **arguments: calls.append(arguments) or run  # type: ignore[attr-defined]  # a fake package
    monkeypatch.setitem(sys.modules, "wandb", module)
    logger = WandbLogger(folder, project="mine", mode="offline")
    logger.on_start(RunStart("digits", str(folder), 0, 64))
    logger.on_eval(EVAL)
    logger.on_end(summary)
    first = calls[0]
    assert (first["project"], first["mode"], first["id"], first["resume"]) == ("mine", "offline", None, None)
    assert first["config"]["devices"] == 8 and first["config"]["logger"]["mine"]["api_key"] == "${oc.env:SOME_KEY}"
    assert calls[1] == {"test/loss": 0.5, "test/accuracy": 0.75, "step": 8}
    assert calls[2] == 0
    assert json.loads((folder / "wandb_run.json").read_text()) == {"id": "abc123", "sent": {"test": 8}}
    resumed = WandbLogger(folder)
    resumed.on_start(RunStart("digits", str(folder), 8, 64, "step-8.pt"))
    assert (calls[3]["id"], calls[3]["resume"]) == ("abc123", "allow")
    resumed.on_failure(RunFailed(9, "a bad day"))
    assert calls[4] == 1  # the exit code: nothing else ends the run there


class _Service(Tracker):
    """A tracker whose service is a list, which outlives the process that sends."""

    def __init__(self, folder: Path, received: List[Record]) -> None:
        super().__init__(folder, "service")
        self.received = received

    def open_run(self, event: RunStart, known: Any) -> str:
        return known or "f00"

    def send(self, records: Sequence[Record]) -> None:
        self.received += records

    def close_run(self, status: str) -> None:
        raise AssertionError("the tests of records do not end runs")


def _process(folder: Path, received: List[Record], start: RunStart) -> Observers:
    """Return the loggers of a process, in the order of a run."""
    observers = Observers([_Service(folder, received), JsonlLogger(folder / "metrics.jsonl")])
    observers.on_start(start)
    return observers


def _steps(received: Sequence[Record]) -> List[Any]:
    return [(record.split, record.step, record.values["loss"]) for record in received]


def test_a_tracker_gets_repeated_steps_once(tmp_path: Path, step: Callable[..., StepEnd]) -> None:
    received: List[Record] = []
    killed = _process(tmp_path, received, RunStart("digits", str(tmp_path), 0, 64))
    for number in (8, 16, 24, 32):
        killed.on_step(step(step=number, loss=1 / number))
        if number == 24:
            killed.on_eval(replace(EVAL, step=24))  # and what came before it was sent; step 32 was not
    assert _steps(received)[-1] == ("test", 24, 0.5)
    resumed = _process(tmp_path, received, RunStart("digits", str(tmp_path), 8, 64, "step-8.pt"))
    for number in (16, 24, 32):
        resumed.on_step(step(step=number, loss=1 / number))
    resumed.on_eval(replace(EVAL, step=24))
    resumed.flush()
    assert sorted(_steps(received)) == [("test", 24, 0.5), *(("train", n, 1 / n) for n in (8, 16, 24, 32))]


def test_what_a_killed_service_may_have_lost_is_sent_again(tmp_path: Path, step: Callable[..., StepEnd]) -> None:
    received: List[Record] = []
    for start in (RunStart("digits", str(tmp_path), 0, 64), RunStart("digits", str(tmp_path), 8, 64, "step-8.pt")):
        tracker = _Service(tmp_path, received)
        tracker.is_written_at_once = False
        tracker.on_start(start)
        tracker.on_step(step(step=16))
        tracker.flush()
    assert [record.step for record in received] == [16, 16]
    tracker.confirm()
    last = _Service(tmp_path, received)
    last.on_start(RunStart("digits", str(tmp_path), 8, 64, "step-8.pt"))
    last.on_step(step(step=16))
    last.flush()
    assert len(received) == 2


def test_records_before_a_checkpoint_are_sent_again_unless_many_followed(
    tmp_path: Path, step: Callable[..., StepEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Service, "is_written_at_once", False)
    now = [1000.0]
    monkeypatch.setattr("ipurun.log.tracking.time.monotonic", lambda: now[0])
    received: List[Record] = []
    killed = _process(tmp_path, received, RunStart("digits", str(tmp_path), 0, 20000))
    for number in range(1, 2001):
        now[0] += 0.5 if number <= 1000 else 0.01
        killed.on_step(step(step=number, loss=float("nan") if number == 1990 else 1 / number))
        if number == 1900:
            matrices = {"confusion_matrix": ((3, 1), (0, 4))}
            killed.on_eval(replace(EVAL, step=number, matrices=matrices))
    killed.flush()
    (known,) = json.loads((tmp_path / "service_run.json").read_text())["sent"].values()
    assert 500 < known < 1000  # more than a minute and 64 kB before the end
    lost = [record for record in received if record.step > known]
    received.clear()
    resumed = _process(tmp_path, received, RunStart("digits", str(tmp_path), 1995, 20000, "step-1995.pt"))
    assert [(r.split, r.step) for r in received] == [(r.split, r.step) for r in lost if r.step <= 1995]
    by_place = {(record.split, record.step): record for record in received}
    assert by_place["train", 1950].values["loss"] == 1 / 1950 and by_place["test", 1900].values == EVAL.metrics
    assert math.isnan(by_place["train", 1990].values["loss"])
    assert by_place["train", 1950].values.keys() == lost[0].values.keys()
    assert by_place["test", 1900].matrices == {"confusion_matrix": [[3, 1], [0, 4]]}
    resumed.on_step(step(step=1996, loss=1 / 1996))
    resumed.flush()
    assert received[-1].step == 1996


def test_a_logger_that_was_dropped_gets_after_a_resume_what_it_missed(
    tmp_path: Path, step: Callable[..., StepEnd]
) -> None:
    received: List[Record] = []
    first = _process(tmp_path, received, RunStart("digits", str(tmp_path), 0, 64))
    first.on_step(step(step=8))
    first.flush()
    missed = JsonlLogger(tmp_path / "metrics.jsonl")  # the only one left
    missed.on_step(step(step=16))
    missed.on_eval(replace(EVAL, step=16))
    _process(tmp_path, received, RunStart("digits", str(tmp_path), 16, 64, "step-16.pt"))
    assert [(record.split, record.step) for record in received] == [("train", 8), ("train", 16), ("test", 16)]


def test_a_tracker_shows_both_attempts_where_they_differ(tmp_path: Path, step: Callable[..., StepEnd]) -> None:
    received: List[Record] = []
    run = _process(tmp_path, received, RunStart("digits", str(tmp_path), 0, 64))
    for number in (8, 16, 24):
        run.on_step(step(step=number, loss=1 / number))
    run.flush()
    run.on_rollback(RolledBack(8, "step-8.pt", "the loss became nan"))
    run.on_step(step(step=16, loss=1 / 16))
    run.on_step(step(step=24, loss=0.5))
    run.flush()
    assert _steps(received) == [("train", 8, 1 / 8), ("train", 16, 1 / 16), ("train", 24, 1 / 24), ("train", 24, 0.5)]


def test_mlflow_keeps_one_run_over_resumes(
    folder: Path, step: Callable[..., StepEnd], summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: List[Any] = []
    made = {"create_run": SimpleNamespace(info=SimpleNamespace(run_id="f00")), "create_experiment": "7"}

    class Client:
        def __init__(self, tracking_uri: Any) -> None:
            calls.append(tracking_uri)

        def __getattr__(self, name: str) -> Any:
            return lambda *values, **named: calls.append((name, *values, *named.values())) or made.get(name)

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    entities.Param = lambda *values: values  # type: ignore[attr-defined]  # a fake package
    entities.Metric = lambda name, value, time, step: (name, value, step)  # type: ignore[attr-defined]  # the same
    module.MlflowClient, module.entities = Client, entities  # type: ignore[attr-defined]  # the same
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    uri = f"sqlite:///{folder}/new/mlflow.db"
    for begun in (RunStart("digits", str(folder), 0, 64), RunStart("digits", str(folder), 8, 64, "step-8.pt")):
        logger = MlflowLogger(folder, tracking_uri=uri)
        logger.on_start(begun)
        logger.on_step(step())
        logger.on_eval(EVAL)
        logger.on_end(summary)
    assert calls.count(uri) == 2 and (folder / "new").is_dir()
    assert len([call for call in calls if call[0] == "create_run"]) == 1
    assert ("update_run", "f00", "RUNNING") in calls and calls[-1] == ("set_terminated", "f00", "FINISHED")
    logged = [entry for call in calls if call[0] == "log_batch" for entry in call[2]]
    assert ("optimizer.lr", "0.1") in logged and ("logger.mine.api_key", "${oc.env:SOME_KEY}") in logged
    assert logged.count(("train/loss", 2.3025, 8)) == 1 and ("test/accuracy", 0.75, 8) in logged
    logger.on_failure(RunFailed(9, "a bad day"))
    assert calls[-1] == ("set_terminated", "f00", "FAILED")


@pytest.mark.parametrize(
    ("logger", "module", "extra"),
    [
        (TensorBoardLogger, "torch.utils.tensorboard", "ipurun[tensorboard]"),
        (WandbLogger, "wandb", "ipurun[wandb]"),
        (MlflowLogger, "mlflow", "ipurun[mlflow]"),
    ],
)
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: Any, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        logger(tmp_path)
    assert extra in str(caught.value)


def test_a_matrix_is_recorded_by_rows(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.on_eval(replace(EVAL, matrices={"confusion_matrix": [[3, 1], [0, 4]]}))
    assert _records(tmp_path / "metrics.jsonl")[0]["confusion_matrix"] == [[3, 1], [0, 4]]


def test_a_logger_that_fails_is_dropped_with_one_warning(step: Callable[..., StepEnd], summary: Summary) -> None:
    received: List[str] = []

    class Failing(Observer):
        def on_step(self, event: StepEnd) -> None:
            received.append("step")

        def on_eval(self, event: EvalEnd) -> None:
            raise ConnectionError("no route to host")

        def on_end(self, event: Summary) -> None:
            received.append("end")

    warnings: List[str] = []
    logger = DroppedIfFailing("mine", Failing(), warnings.append)
    logger.on_step(step())
    logger.on_eval(EVAL)
    logger.on_eval(EVAL)
    logger.on_end(summary)
    assert received == ["step"]
    assert warnings == ["`logger.mine` failed in on_eval and is dropped: ConnectionError: no route to host"]


class _Unreachable(Tracker):
    """A tracker whose service is away while records are sent."""

    ended: Tuple[str, ...] = ()

    def open_run(self, event: RunStart, known: Any) -> str:
        return "f00"

    def send(self, records: Sequence[Record]) -> None:
        raise ConnectionError("no route to host")

    def close_run(self, status: str) -> None:
        self.ended += (status,)


@pytest.mark.parametrize("sends", ["on_eval", "on_end"])
def test_a_tracker_that_was_dropped_ends_its_run_with_the_training(
    tmp_path: Path, step: Callable[..., StepEnd], summary: Summary, sends: str
) -> None:
    warnings: List[str] = []
    tracker = _Unreachable(tmp_path, "service")
    logger = DroppedIfFailing("mine", tracker, warnings.append)
    logger.on_start(RunStart("digits", str(tmp_path), 0, 64))
    tracker._sent_at = math.inf  # no step is sent before the end
    logger.on_step(step())
    if sends == "on_eval":
        logger.on_eval(EVAL)
        assert tracker.ended == ()
    logger.on_end(summary)
    assert tracker.ended == ("done",) and len(warnings) == 1 and sends in warnings[0]
    failing = DroppedIfFailing("mine", tracker, warnings.append)
    failing.on_eval(EVAL)
    failing.on_failure(RunFailed(9, "a bad day"))
    failing.on_failure(RunFailed(9, "a bad day"))
    assert tracker.ended == ("done", "failed")


def test_every_kind_of_event_is_passed_on() -> None:
    events = [name for name in vars(Observer) if name.startswith("on_")] + ["flush"]
    assert all(name in vars(DroppedIfFailing) for name in events)
