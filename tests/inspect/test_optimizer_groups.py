"""The optimizer: only set arguments, groups by parameter name, variable and constant values."""

from __future__ import annotations

import pytest
from run_harness import built, config, inspected

from ipurun.errors import ConfigError

SGD = "poptorch.optim.SGD"


def test_only_what_was_set_becomes_variable() -> None:
    optimizer = built(optimizer={"_target_": SGD, "lr": 0.1, "momentum": 0.9}).optimizer
    constants = {name: optimizer.variable_attrs.isConstant(name) for name in ("lr", "momentum", "weight_decay")}
    assert constants == {"lr": False, "momentum": False, "weight_decay": True}


def test_variable_and_constant_by_name() -> None:
    node = {"_target_": SGD, "lr": 0.1, "momentum": 0.9, "variable": ["weight_decay"], "constant": ["momentum"]}
    marks = built(optimizer=node).optimizer.variable_attrs
    assert marks.isConstant("momentum") and not marks.isConstant("weight_decay") and not marks.isConstant("lr")


def test_groups_by_pattern() -> None:
    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": ["first.*"], "lr": 0.5}]
    run = built(optimizer={"_target_": SGD, "lr": 0.1, "weight_decay": 0.3, "groups": groups})
    names = {id(parameter): name for name, parameter in run.user_model.named_parameters()}
    found = [
        ([names[id(p)] for p in group["params"]], group["lr"], group["weight_decay"])
        for group in run.optimizer.param_groups
    ]
    assert found == [
        (["second.weight"], 0.1, 0.3),
        (["first.bias", "second.bias"], 0.1, 0.0),
        (["first.weight"], 0.5, 0.3),
    ]


def test_a_pattern_must_match_a_parameter() -> None:
    node = {"_target_": SGD, "lr": 0.1, "groups": [{"match": "first.wieght", "lr": 0.2}]}
    with pytest.raises(ConfigError, match=r"first\.wieght") as caught:
        inspected(config(optimizer=node))
    assert "first.weight" in caught.value.problems[0].known


def test_a_pattern_means_the_same_as_in_a_pipeline() -> None:
    model = {"_target_": "run_toys.Deep"}
    node = {"_target_": SGD, "lr": 0.1, "groups": [{"match": "encoder.*.bias", "lr": 0.2}]}
    with pytest.raises(ConfigError, match=r"`encoder\.\*\*\.bias` for all 2") as caught:
        inspected(config(model=model, optimizer=node))
    assert caught.value.problems[0].key == "optimizer.groups.0"
    node["groups"] = [{"match": "encoder.**.bias", "lr": 0.2}]
    assert [len(group["params"]) for group in built(model=model, optimizer=node).optimizer.param_groups] == [2, 2]


def test_a_group_without_names_is_reported() -> None:
    node = {"_target_": SGD, "lr": 0.1, "groups": [{"match": None, "lr": 0.2}]}
    with pytest.raises(ConfigError, match="needs `match`"):
        built(optimizer=node)


def test_torch_optimizers() -> None:
    import torch

    assert isinstance(built(optimizer={"_target_": "torch.optim.AdamW", "lr": 0.1}).optimizer, torch.optim.AdamW)


def test_frozen_parameters_are_left_out() -> None:
    run = built(model={"_target_": "run_toys.HalfFrozen"})
    assert sum(len(group["params"]) for group in run.optimizer.param_groups) == 2


def test_a_model_without_parameters_is_reported() -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        built(model={"_target_": "torch.nn.Flatten"})


def test_wrong_arguments_are_found_by_inspection() -> None:
    with pytest.raises(ConfigError, match="momentm"):
        inspected(config(optimizer={"_target_": SGD, "lr": 0.1, "momentm": 0.9}))
