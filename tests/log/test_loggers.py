from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest

from ipurun.errors import ConfigError
from ipurun.log.csv import CsvLogger
from ipurun.log.jsonl import JsonlLogger
from ipurun.log.tensorboard import TensorBoardLogger
from ipurun.log.wandb import WandbLogger
from ipurun.training.events import EvalEnd, RunStart, StepEnd, Summary

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


def test_tensorboard_gets_scalars_by_split(
    tmp_path: Path, step: Callable[..., StepEnd], summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: List[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]  # a fake package
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    logger = TensorBoardLogger(tmp_path)
    logger.on_step(step())
    logger.on_eval(EVAL)
    logger.on_end(summary)
    assert written[0] == str(tmp_path / "tensorboard")
    assert ("train/loss", 2.3025, 8) in written and ("test/accuracy", 0.75, 8) in written
    assert written[-1] == "closed"


def test_wandb_gets_config_and_metrics(
    tmp_path: Path, step: Callable[..., StepEnd], summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: List[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)),
        finish=lambda exit_code: calls.append(exit_code),
    )
    module = ModuleType("wandb")
    module.init = lambda **arguments: calls.append(arguments) or run  # type: ignore[attr-defined]  # a fake package
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tmp_path / "config.yaml").write_text("devices: 8\n")
    logger = WandbLogger(tmp_path, project="mine", mode="offline")
    logger.on_start(RunStart("digits", str(tmp_path), 0, 64))
    logger.on_eval(EVAL)
    logger.on_end(summary)
    assert calls[0]["project"] == "mine" and calls[0]["config"] == {"devices": 8}
    assert calls[1] == ({"test/loss": 0.5, "test/accuracy": 0.75}, 8)
    assert calls[2] == 0


@pytest.mark.parametrize(
    ("logger", "module", "extra"),
    [
        (TensorBoardLogger, "torch.utils.tensorboard", "ipurun[tensorboard]"),
        (WandbLogger, "wandb", "ipurun[wandb]"),
    ],
)
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: Any, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        logger(tmp_path)
    assert extra in str(caught.value)
