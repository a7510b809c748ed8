"""Frozen parameters: what is trained when, against plain torch, and across a resume on either side of an unfreeze."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from run_harness import Folder, Recorder, built, config, inspected
from run_toys import Points
from torch.nn import functional

from ipurun.checkpoint import listed
from ipurun.errors import ConfigError
from ipurun.inspect.trace import trace_model
from ipurun.planning import make_plan
from ipurun.training.loop import train

ADAM: Dict[str, Any] = {"_target_": "poptorch.optim.Adam", "lr": 0.02}
EXPONENTIAL = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.9}


def _assert_equal(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_frozen_parameters_stay_and_have_no_optimizer_state(tmp_path: Path) -> None:
    run = built(optimizer=ADAM, freeze=["first"], devices=2)
    before = copy.deepcopy(run.user_model.state_dict())
    train(run, Folder(tmp_path), [])
    after = run.user_model.state_dict()
    _assert_equal(
        {name: after[name] for name in after if name.startswith("first")},
        {name: value for name, value in before.items() if name.startswith("first")},
    )
    assert not torch.equal(after["second.weight"], before["second.weight"])
    state = run.optimizer.state_dict()["ipu_state"]
    assert state and all("second" in name for name in state)


def _plain_torch(model: torch.nn.Module, unfreeze_at: int, every: int) -> Dict[str, torch.Tensor]:
    """Train `second` from the start and `first` after some updates, with new optimizer state for it."""
    points = Points(32)
    model.first.requires_grad_(False)
    optimizer = torch.optim.Adam(model.second.parameters(), lr=0.02)
    rate = 0.02
    for update in range(16):
        if update == unfreeze_at:
            model.first.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.first.parameters())})
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.9 ** (update // every * every)
        place = update * 4 % 32
        optimizer.zero_grad()
        functional.cross_entropy(model(points.x[place : place + 4]), points.y[place : place + 4]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("device_iterations", [1, 4])
def test_unfreezing_equals_plain_torch(tmp_path: Path, device_iterations: int) -> None:
    run = built(
        optimizer=ADAM,
        schedule=EXPONENTIAL,
        freeze=["first"],
        unfreeze={"first": 7},
        loader__shuffle=False,
        device_iterations=device_iterations,
    )
    expected = _plain_torch(copy.deepcopy(run.user_model), 7 if device_iterations == 1 else 8, device_iterations)
    seen = Recorder()
    train(run, Folder(tmp_path), [seen])
    found = run.user_model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=name)
    assert [event.mode for event in seen.events["compile_start"]].count("training") == 2


OPTIMIZERS: List[Dict[str, Any]] = [
    {**ADAM, "weight_decay": 0.1, "no_decay": "norms_and_biases", "groups": [{"match": "second", "lr": 0.05}]},
    {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["poptorch", "torch"])
def test_resume_on_either_side_of_an_unfreeze_is_exact(tmp_path: Path, optimizer: Dict[str, Any]) -> None:
    changes: Dict[str, Any] = {
        "optimizer": optimizer,
        "schedule": EXPONENTIAL,
        "model": {"_target_": "run_toys.Net", "dropout": 0.3},
        "data": {"_target_": "run_toys.EpochPoints", "shift": 0.1},
        "freeze": ["first"],
        "unfreeze": {"first.weight": 6, "first.bias": 10},
        "checkpoint__every_steps": 2,
        "checkpoint__keep": 0,
        "devices": 2,
        "device_iterations": 2,
        "epochs": 4,
        "eval__every_steps": 4,
    }
    folder, straight = Folder(tmp_path), built(**changes)
    train(straight, folder, [])
    expected = straight.user_model.state_dict()
    steps = [checkpoint.step for checkpoint in listed(folder)]
    assert steps == [2, 4, 6, 8, 10, 12, 14, 16]
    for checkpoint in listed(folder)[:-1]:
        resumed = built(**changes)
        train(resumed, Folder(tmp_path / str(checkpoint.step)), [], resume_from=checkpoint)
        _assert_equal(resumed.user_model.state_dict(), expected)


def test_the_plan_says_what_is_frozen_and_that_the_model_is_compiled_again() -> None:
    settings = config(freeze=["**"], unfreeze={"second": 3}, device_iterations=2, model={"_target_": "run_toys.Net"})
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        built(settings)
    settings = config(freeze=["*.bias", "first"], unfreeze={"first.*": 3}, device_iterations=2)
    plan = make_plan(settings, inspected(settings).facts)
    assert [(part.elements, part.until_step) for part in plan.frozen] == [(40, 4), (3, None)]
    assert any("trained after step 4; the model is compiled again" in note for note in plan.notes)
    assert plan.parameters == 64


def test_frozen_parameters_count_neither_gradients_nor_state_in_an_estimate() -> None:
    settings = config(freeze=["first"], sample=[{"shape": [4]}, {"shape": [], "dtype": "int64", "high": 3}])
    trainable = {parameter.name: parameter.trainable for parameter in trace_model(settings).parameters}
    assert trainable == {"first.weight": False, "first.bias": False, "second.weight": True, "second.bias": True}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"freeze": ["frist"]}, "`freeze` names `frist`"),
        ({"freeze": ["first"], "unfreeze": {"second": 5}}, "no such parameter"),
        ({"freeze": ["first"], "unfreeze": {"first": "soon"}}, "takes a step"),
        ({"unfreeze": {"first": 5}}, "`freeze` is not"),
    ],
)
def test_wrong_names_and_steps_are_reported(changes: Dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        built(**changes)


def test_an_unfreeze_after_the_end_is_noted() -> None:
    notes = built(freeze=["first"], unfreeze={"first": 500}).plan.notes
    assert any("never trained, because the run ends at step 16" in note for note in notes)
