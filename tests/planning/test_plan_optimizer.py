import pytest
import torch
from torch import nn

from ipurun import emulator
from ipurun.api.calls import construct
from ipurun.planning.optimizer import changeable


def optimizer(**values):
    return {"optimizer": {"_target_": "poptorch.optim.SGD", "lr": 0.1, **values}}


def test_only_what_was_set_is_passed(plan_of):
    call = plan_of(optimizer(momentum=0.9, weight_decay=None)).optimizer
    assert (call.path, dict(call.kwargs), call.chain) == ("poptorch.optim.SGD", {"lr": 0.1, "momentum": 0.9}, ())


def test_a_bare_name_is_from_poptorch(plan_of):
    assert plan_of({"optimizer": {"_target_": "LAMB", "lr": 1}}).optimizer.path == "poptorch.optim.LAMB"


def test_a_learning_rate_that_was_not_passed_stays_variable(plan_of):
    call = plan_of({"optimizer": {"_target_": "poptorch.optim.AdamW"}}).optimizer
    assert [(mark.path, mark.args) for mark in call.chain] == [("variable_attrs.markAsVariable", ("lr",))]


def test_variable_and_constant(plan_of):
    call = plan_of(optimizer(momentum=0.9, variable=["weight_decay"], constant="momentum")).optimizer
    assert [(mark.path, mark.args[0]) for mark in call.chain] == [
        ("variable_attrs.markAsVariable", "weight_decay"),
        ("variable_attrs.markAsConstant", "momentum"),
    ]
    assert set(call.kwargs) == {"lr", "momentum"}


def test_values_in_the_types_poptorch_takes(plan_of):
    keys = {
        "optimizer": {
            "_target_": "poptorch.optim.AdamW",
            "lr": 1,
            "betas": [0.8, 0.9],
            "accum_type": "float16",
            "bias_correction": False,
        }
    }
    kwargs = plan_of(keys).optimizer.kwargs
    assert kwargs["lr"] == 1.0
    assert isinstance(kwargs["lr"], float)
    assert kwargs["betas"] == (0.8, 0.9)
    assert str(kwargs["accum_type"]) == "torch.float16"
    assert kwargs["bias_correction"] is False


def test_torch_optimizers_are_passed_as_they_are(plan_of):
    call = plan_of({"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "nesterov": True}}).optimizer
    assert (call.path, dict(call.kwargs), call.chain) == ("torch.optim.SGD", {"lr": 0.1, "nesterov": True}, ())


def test_the_default_is_that_of_poptorch(plan_of):
    call = plan_of({}).optimizer
    assert (call.path, dict(call.kwargs)) == ("poptorch.optim.SGD", {"lr": 0.01})


def test_groups(plan_of, problems_of):
    groups = [{"match": ["*.bias", "norm"], "weight_decay": 0}]
    group = plan_of(optimizer(weight_decay=0.1, groups=groups)).parameter_groups[0]
    assert (group.match, dict(group.values)) == (("*.bias", "norm"), {"weight_decay": 0.0})
    assert "accum_type" in problems_of(optimizer(groups=[{"match": "x", "accum_type": "float16"}]))[0].what
    assert "match" in problems_of(optimizer(groups=[{"lr": 1}]))[0].what


class TestLossScaling:
    def test_is_passed_to_the_optimizer(self, plan_of, composed):
        assert plan_of({**optimizer(), "loss_scaling": 128}).optimizer.kwargs["loss_scaling"] == 128.0
        assert "loss_scaling" not in plan_of(optimizer()).optimizer.kwargs

    def test_the_key_wins_over_the_argument(self, plan_of):
        plan = plan_of({**optimizer(loss_scaling=2.0), "loss_scaling": 128})
        assert plan.optimizer.kwargs["loss_scaling"] == 128.0
        assert any("loss_scaling wins" in note for note in plan.notes)

    def test_automatic(self, plan_of, composed):
        keys = {**optimizer(accum_type="float16"), "loss_scaling": "auto", "precision": "16"}
        assert composed(keys)._Popart.options["automaticLossScalingSettings.enabled"] is True
        assert "loss_scaling" not in plan_of(keys).optimizer.kwargs

    @pytest.mark.parametrize(
        ("keys", "fix"),
        [
            ({"loss_scaling": "auto"}, "optimizer.accum_type=float16"),
            ({"loss_scaling": "auto", "replication.reduction": "sum"}, "replication.reduction=mean"),
            ({"loss_scaling": 0}, "loss_scaling=1024"),
            ({"loss_scaling": "high"}, "loss_scaling=1024"),
        ],
    )
    def test_impossible_values_are_refused(self, problems_of, keys, fix):
        assert problems_of({**optimizer(), **keys})[0].fix == fix

    def test_torch_optimizers_have_none(self, problems_of):
        keys = {"optimizer": {"_target_": "torch.optim.Adam"}, "loss_scaling": 2}
        assert "needs an optimizer from poptorch.optim" in problems_of(keys)[0].what

    def test_float16_without_it_is_noted(self, plan_of):
        def warned(keys):
            return any("underflow" in note for note in plan_of({**optimizer(), **keys}).notes)

        assert warned({"precision": "16"})
        assert warned({"precision": "16.32"})
        assert not warned({"precision": "16", "loss_scaling": 64})
        assert not warned({})


@pytest.mark.parametrize(
    ("node", "what", "fix"),
    [
        ({"_target_": "poptorch.optim.SGDD"}, "no `SGDD`", "poptorch.optim.SGD"),
        ({"_target_": "poptorch.optim.SGD", "momentun": 0.9}, "`momentun`", "optimizer.momentum=0.9"),
        ({"_target_": "poptorch.optim.SGD", "momentum": "much"}, "a number", ""),
        ({"_target_": "poptorch.optim.RMSprop", "max_grad_norm": 1.0}, "cannot clip", "AdamW"),
        ({"_target_": "poptorch.optim.LAMB", "max_grad_norm": 1.0}, "cannot clip", "AdamW"),
        ({"_target_": "torch.optim.SGD", "lr": 1, "max_grad_norm": 1.0}, "cannot clip", "AdamW"),
        ({"_target_": "torch.optim.Adagrad"}, "PopTorch cannot run", "poptorch.optim.Adam"),
        ({"_target_": "poptorch.optim.Adam", "amsgrad": True}, "amsgrad", "optimizer.amsgrad=false"),
        ({"_target_": "poptorch.optim.Adam", "betas": [0.9]}, "two numbers", "[0.9,0.999]"),
        ({"_target_": "poptorch.optim.Adam", "accum_type": "int8"}, "a dtype", "optimizer.accum_type=float16"),
        ({"_target_": "poptorch.optim.Adam", "variable": ["momentum"]}, "cannot mark", ""),
        ({"_target_": "poptorch.optim.Adam", "variable": ["lr"], "constant": ["lr"]}, "variable and constant", ""),
        ({"_target_": "torch.optim.Adam", "constant": ["eps"]}, "need an optimizer from poptorch", ""),
        ({"lr": 0.1}, "no `_target_`", "optimizer._target_="),
    ],
)
def test_bad_optimizers_are_refused(problems_of, node, what, fix):
    problem = problems_of({"optimizer": node})[0]
    assert what in problem.what
    assert fix in problem.fix


def test_a_scheduled_learning_rate_cannot_be_constant(problems_of):
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1}
    assert "`lr`" in problems_of({**optimizer(constant=["lr"]), "schedule": schedule})[0].what


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_values_that_no_optimizer_takes_are_refused(problems_of, name, value):
    (problem,) = problems_of(optimizer(**{name: value}))
    assert problem.what == f"`optimizer.{name}` must be a number of at least 0"
    assert problem.fix == f"optimizer.{name}={'0.001' if name == 'lr' else '0'}"


def test_sgd_without_a_learning_rate_is_refused(problems_of):
    (problem,) = problems_of(optimizer(lr=None))
    assert problem.what == "`optimizer.lr` is not set, but poptorch.optim.SGD needs it"


@pytest.mark.parametrize(
    "keys",
    [
        {"_target_": "poptorch.optim.SGD", "lr": 0.1, "momentum": 0.9, "loss_scaling": 8.0},
        {"_target_": "poptorch.optim.SGD", "lr": 0.1, "variable": ["weight_decay"], "constant": ["lr"]},
        {"_target_": "poptorch.optim.Adam"},
        {"_target_": "poptorch.optim.AdamW", "lr": 0.1, "betas": [0.8, 0.9], "max_grad_norm": 1.0},
        {"_target_": "poptorch.optim.LAMB", "lr": 0.1, "eps": 1e-6},
        {"_target_": "poptorch.optim.RMSprop", "lr": 0.1, "alpha": 0.9},
    ],
)
def test_changeable_values_are_those_that_the_engine_makes_variable(plan_of, keys):
    plan = plan_of({"optimizer": keys})
    made = construct(plan.optimizer, emulator, [nn.Parameter(torch.zeros(1))])
    found = changeable(plan.optimizer)
    assert found["variable"] and not any(made.variable_attrs.isConstant(name) for name in found["variable"])
    assert found["constant"] and all(made.variable_attrs.isConstant(name) for name in found["constant"])
    assert "max_grad_norm" not in keys or "max_grad_norm" in found["constant"]


def test_values_of_other_classes_are_not_judged(plan_of):
    assert changeable(plan_of({"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}).optimizer) is None
