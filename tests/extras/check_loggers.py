"""Loggers and metrics with the real clients: TensorBoard, W&B offline, MLflow in a local store, torchmetrics."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torchmetrics

import ipurun
from ipurun.cli.main import main

ONE_EPOCH = ["+recipe=mnist", "hydra.run.dir=run", "log_every_steps=10", "data._target_=small_digits.splits"]
CODE = """
from torch.utils.data import Subset
from ipurun.recipes.mnist.dataset import splits as all_digits
def splits(api_key=None, **arguments):
    lengths = {"train": 400, "test": 100}
    return {name: Subset(data, range(lengths[name])) for name, data in all_digits(**arguments).items()}
"""


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    (tmp_path / "small_digits.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SOME_KEY", "hunter2-secret")


def _train(*words):
    assert main(["train", *ONE_EPOCH, *words, "--quiet"]) == 0


def _resume(*words):
    assert main(["train", "resume=run", *words, "--quiet"]) == 0


def _scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_over_a_resume():
    _train("logger=tensorboard", "epochs=1", "checkpoint.every_steps=20", "+metrics.confusion_matrix={}")
    _as_after_a_kill("step-00000040")  # the steps after 20 are repeated
    _resume("epochs=2")
    found = _scalars("run/tensorboard")
    assert [event.step for event in found.Scalars("train/loss")] == list(range(10, 81, 10))
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    expected = [record["accuracy"] for record in records if record["split"] == "test"]
    assert [event.value for event in found.Scalars("test/accuracy")] == pytest.approx(expected)
    assert (
        "config/text_summary" in found.Tags()["tensors"]
        and "test/confusion_matrix/text_summary" in found.Tags()["tensors"]
    )
    parameters = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"optimizer.lr" in parameters


def _as_after_a_kill(newest):
    """Leave the checkpoints and the folder as if the run had been killed after its newest checkpoint."""
    for file in Path("run/checkpoints").glob(f"{newest}.*"):
        file.unlink()
    Path("run/summary.json").unlink()


def _wandb_records(file):
    """Yield the records of an offline file of wandb: blocks of 32 kB with pieces of records, after a header of 7."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, piece = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        piece += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(piece)
            piece = b""
            yield record


def _wandb_history(file):
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in _wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def _expected_losses(split="train"):
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["split"] == split}


def test_wandb_offline_keeps_its_id_over_a_resume_and_no_step_twice():
    _train("logger=wandb", "epochs=2", "checkpoint.every_steps=20", "log_every_steps=6")
    first = json.loads(Path("run/wandb_run.json").read_text())["id"]
    _as_after_a_kill("step-00000080")
    _resume()
    assert json.loads(Path("run/wandb_run.json").read_text())["id"] == first
    files = sorted(Path("run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{first}"}
    rows = [row for file in files for row in _wandb_history(file)]
    for split in ("train", "test"):
        losses = [(row["step"], row[f"{split}/loss"]) for row in rows if f"{split}/loss" in row]
        expected = _expected_losses(split)
        assert [step for step, _ in losses] == sorted(expected) and dict(losses) == pytest.approx(expected)


SLOW = """
import time
from ipurun import Callback
class Slow(Callback):
    def on_step(self, event):
        time.sleep(0.01)
"""


def test_wandb_offline_has_every_step_after_a_kill_and_a_resume():
    Path("slow.py").write_text(SLOW)
    words = ["logger=wandb", "epochs=6", "log_every_steps=1", "checkpoint.every_steps=10", "devices=1"]
    words += ["+callbacks.slow._target_=slow.Slow", "--quiet"]
    # Its own service of wandb, not the one of this process, which would outlive it.
    alone = {name: value for name, value in os.environ.items() if "_WANDB" not in name and name != "WANDB_SERVICE"}
    process = subprocess.Popen([sys.executable, "-m", "ipurun", "train", *ONE_EPOCH, *words], env=alone)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not _has_steps(60):
        time.sleep(0.05)
    assert process.poll() is None  # it is killed in the middle
    process.kill()
    process.wait()
    _resume()
    files = sorted(Path("run/wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    found = {row["step"]: row["train/loss"] for file in files for row in _wandb_history(file) if "train/loss" in row}
    assert found == pytest.approx(_expected_losses())


def _has_steps(number):
    file = Path("run/metrics.jsonl")
    return file.exists() and len(file.read_text().splitlines()) > number


def test_mlflow_keeps_its_run_over_a_resume_and_no_step_twice():
    import mlflow

    words = ["runs_dir=mine", "+metrics.confusion_matrix={}", "checkpoint.every_steps=20", "log_every_steps=6"]
    _train("logger=mlflow", "epochs=2", *words)
    _as_after_a_kill("step-00000080")
    _resume()
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mine/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mnist").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["optimizer.lr"] == "0.002"
    for split in ("train", "test"):
        found = [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, f"{split}/loss")]
        expected = _expected_losses(split)
        assert sorted(step for step, _ in found) == sorted(expected) and dict(found) == pytest.approx(expected)
    assert not Path("mlruns").exists() and list(Path("mine/mlflow_files").rglob("confusion_matrix-*.json"))


FAILING = """
from ipurun import Callback
class Failing(Callback):
    def on_eval(self, event):
        raise ValueError("a bad day")
"""


def test_a_failed_run_ends_in_every_service_and_the_next_run_is_a_new_one(capsys):
    import mlflow

    Path("failing.py").write_text(FAILING)
    words = ["logger=[tensorboard,wandb,mlflow]", "epochs=1", "runs_dir=mine"]
    assert main(["train", *ONE_EPOCH, *words, "+callbacks.failing._target_=failing.Failing", "--quiet"]) == 1
    capsys.readouterr()
    assert main(["train", *ONE_EPOCH, *words, "hydra.run.dir=next", "--quiet"]) == 0
    first, second = (json.loads(Path(folder, "wandb_run.json").read_text()) for folder in ("run", "next"))
    assert first["id"] != second["id"] and first["sent"]["train"] == 40
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mine/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("mnist").experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {"mnist/run": "FAILED", "mnist/next": "FINISHED"}
    assert [event.step for event in _scalars("run/tensorboard").Scalars("train/loss")] == [10, 20, 30, 40]


def test_a_dropped_logger_still_ends_its_run_in_the_service(monkeypatch, capsys):
    import mlflow

    def away(client, *values, metrics=(), **named):
        if any(metric.step > 20 for metric in metrics):
            raise ConnectionError("no route to host")
        return log_batch(client, *values, metrics=metrics, **named)

    log_batch = mlflow.MlflowClient.log_batch
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", away)
    assert main(["train", *ONE_EPOCH, "logger=mlflow", "epochs=1", "runs_dir=mine", "checkpoint.every_steps=20"]) == 0
    assert "`logger.mlflow` failed in" in capsys.readouterr().out
    client = mlflow.MlflowClient(f"sqlite:///{Path.cwd()}/mine/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mnist").experiment_id])
    assert run.info.status == "FINISHED"
    assert [entry.step for entry in client.get_metric_history(run.info.run_id, "train/loss")] == [10, 20]


def test_several_at_once_and_no_secret_in_any():
    _train("logger=[csv,tensorboard,wandb,mlflow]", "epochs=1", "runs_dir=mine", "+data.api_key=${oc.env:SOME_KEY}")
    written = [file for place in ("run", "mine") for file in Path(place).rglob("*") if file.is_file()]
    names = " ".join(map(str, written))
    assert all(part in names for part in ("metrics.csv", "tfevents", ".wandb", "mlflow.db"))
    assert not [file for file in written if b"hunter2-secret" in file.read_bytes()]


def test_a_logger_that_cannot_write_does_not_stop_training(capsys):
    Path("blocked").write_text("a file where TensorBoard wants a folder")
    words = ["logger=[csv,tensorboard]", "+logger.tensorboard.log_dir=blocked/here", "epochs=1"]
    assert main(["train", *ONE_EPOCH, *words]) == 0
    assert "`logger.tensorboard` failed in on_start and is dropped" in capsys.readouterr().out
    assert "accuracy" in Path("run/metrics.csv").read_text()


def test_torchmetrics_by_name_per_class_and_as_a_matrix():
    metrics = {
        "auroc": {"task": "multiclass", "num_classes": 10},
        "recall": {"task": "multiclass", "num_classes": 10, "average": None},
        "ConfusionMatrix": {"task": "multiclass", "num_classes": 10},
        "multiclass_precision": {"num_classes": 10},
    }
    keys = {
        "data": {"_target_": "small_digits.splits"},
        "epochs": 1,
        "metrics": metrics,
        "device_iterations": 2,
        "devices": 2,
    }
    ipurun.train("mnist", overrides=["hydra.run.dir=run"], quiet=True, **keys)
    found = ipurun.evaluate("run", quiet=True)
    predicted = ipurun.predict("run", columns=["target"], quiet=True)
    outputs, targets = predicted.outputs, predicted.columns["target"]
    recall = torchmetrics.functional.recall(outputs, targets, task="multiclass", num_classes=10, average="none")
    assert [found.metrics[f"recall/{number}"] for number in range(10)] == pytest.approx(recall.tolist())
    area = torchmetrics.functional.auroc(outputs, targets, task="multiclass", num_classes=10)
    assert found.metrics["auroc"] == pytest.approx(float(area))
    precision = torchmetrics.classification.MulticlassPrecision(num_classes=10)(outputs, targets)
    assert found.metrics["multiclass_precision"] == pytest.approx(float(precision))
    matrix = torchmetrics.functional.confusion_matrix(outputs, targets, task="multiclass", num_classes=10)
    assert torch.equal(torch.tensor(found.matrices["ConfusionMatrix"]), matrix)
