"""`plan` and `validate`: they report everything and change nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, List

import pytest

from ipurun.cli.main import main


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _plan_json(capsys: Any, *argv: str) -> Any:
    assert main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_shows_numbers_notes_and_calls(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "devices=8", "device_iterations=4", "micro_batch_size=10"]) == 0
    lines: List[str] = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert lines[0] == "plan of mnist"
    assert "8 IPUs = 8 replicas x 1 IPU, 1 stage" in text
    assert "micro-batch 10 x device_iterations 4 x accumulation 1 x replicas 8 = 320 samples per host call" in text
    assert "12 host calls, 48 weight updates, 160 samples dropped" in text  # 4,000 = 12 * 320 + 160
    assert "evaluation test: 4 host calls for 1,000 samples, 280 padded, 0 dropped" in text  # 1,000 = 4 * 320 - 280
    assert "optimizer  AdamW: variable lr, weight_decay; constant betas, eps, loss_scaling" in text
    assert "5,000-digit subset" in text
    assert "  opts.deviceIterations(4)  # device_iterations" in lines


def test_planning_touches_nothing(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist"]) == 0
    assert list(Path().iterdir()) == []


def test_json_is_one_document(capsys: Any) -> None:
    plan = _plan_json(capsys, "+recipe=mnist", "devices=4", "device_iterations=5", "gradient_accumulation=2")
    assert plan["devices"] == {"total": 4, "per_replica": 1, "replicas": 4, "idle": 0}
    micro = plan["training"]["micro_batch_size"]
    assert plan["training"]["samples_per_update"] == micro * 2 * 4
    assert plan["training"]["samples_per_call"] == micro * 2 * 4 * 5
    assert "opts.Training.gradientAccumulation(2)  # gradient_accumulation" in plan["poptorch"]
    assert plan["evaluation"] == {
        "split": "test",
        "samples": 1000,
        "host_calls": -(-1000 // plan["inference"]["samples_per_call"]),
        "padded_samples": -1000 % plan["inference"]["samples_per_call"],
        "dropped_samples": 0,
    }
    assert plan["optimizer"]["variable"] == ["lr", "weight_decay"] and "betas" in plan["optimizer"]["constant"]


def test_a_model_that_prints_does_not_spoil_json(capsys: Any) -> None:
    Path("noisy.py").write_text(
        "import os, torch\n"
        "print('imported')\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(784, 10)\n"
        "        print('made')\n"
    )
    argv = ["+recipe=mnist", "~model", "+model._target_=noisy.Net"]
    assert main(["plan", *argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["parameters"] == 7850
    assert "imported" in captured.err and "made" in captured.err


def test_every_point_of_a_sweep_is_planned(capsys: Any) -> None:
    plans = _plan_json(capsys, "-m", "+recipe=mnist", "device_iterations=1,8")
    assert [plan["training"]["device_iterations"] for plan in plans] == [1, 8]


def test_problems_of_several_rooms_come_together(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "devices=3", "loss.name=NoSuchLoss", "engine=cpu"]) == 2
    assert "NoSuchLoss" in capsys.readouterr().err


def test_a_problem_of_several_points_is_reported_once(capsys: Any) -> None:
    assert main(["plan", "-m", "+recipe=mnist", "devices=3", "seed=1,2,3,4,5"]) == 2
    text = capsys.readouterr().err
    assert text.count("must be a power of two") == 1
    assert "sweep points seed=1; seed=2; seed=3; and 2 more" in " ".join(text.split())


def test_validate_says_ok(capsys: Any) -> None:
    assert main(["validate", "+recipe=mnist", "devices=8"]) == 0
    assert capsys.readouterr().out == "+recipe=mnist devices=8: ok\n"
    assert list(Path().iterdir()) == []


def test_validate_checks_several_and_names_those_that_fail(capsys: Any) -> None:
    assert main(["validate", "mnist", "fashion_mnist"]) == 2
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["+recipe=mnist: ok", "+recipe=fashion_mnist: not ok"]
    assert "`data.root` is not set" in captured.err


def test_validate_answers_scripts(capsys: Any) -> None:
    assert main(["validate", "-m", "+recipe=mnist", "devices=1,3", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [config["ok"] for config in document["configs"]] == [True, False]
    assert "power of two" in document["configs"][1]["problems"][0]["what"]


def test_validate_finds_what_only_a_run_needs(capsys: Any) -> None:
    Path("runs").touch()
    assert main(["validate", "+recipe=mnist", "+logger.mine._target_=nowhere.Logger", "resume=runs/x"]) == 2
    text = capsys.readouterr().err
    assert "`logger.mine._target_`" in text and "cannot be made" in text and "is not a run folder" in text


def test_validate_makes_a_large_model_without_its_memory(capsys: Any) -> None:
    Path("large_net.py").write_text(
        "from torch import nn\n"
        "made_on = []\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(10000, 10000)\n"
        "        made_on.append(self.weight.device.type)\n"
    )
    words = ["model._target_=large_net.Net", "data=synthetic", "sample=[{shape: [10000]}]", "loss.name=MSELoss"]
    assert main(["validate", *words]) == 0
    assert set(sys.modules["large_net"].made_on) == {"meta"}
