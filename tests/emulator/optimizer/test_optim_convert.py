"""Conversion of optimizers: supported classes, constant and variable values, changes after compilation."""

import logging

import pytest
import torch
from optim_harness import Device

from ipurun.emulator import optim
from ipurun.emulator._optimizer.convert import AttributeTracker, convert, forces_running_mean
from ipurun.emulator.poptorch_core import Error


@pytest.fixture
def params():
    return [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_default_poptorch_equals_default_torch(params, name):
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    assert convert(ours(params, lr=0.1)) == convert(theirs(params, lr=0.1))


def test_unsupported_class(params):
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        convert(torch.optim.Adagrad(params))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, optim.Adam, optim.AdamW])
def test_amsgrad_is_refused(params, make):
    with pytest.raises(ValueError, match="amsgrad"):
        convert(make(params, amsgrad=True))


def test_values_must_be_numbers(params):
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(AssertionError, match="lr"):
        convert(optimizer)


def test_betas_must_be_a_pair(params):
    optimizer = torch.optim.Adam(params, lr=0.1)
    optimizer.param_groups[0]["betas"] = 0.9
    with pytest.raises(AssertionError, match="betas"):
        convert(optimizer)


def test_centered_must_agree(params):
    groups = [{"params": params, "centered": True}, {"params": [torch.nn.Parameter(torch.ones(1))]}]
    with pytest.raises(AssertionError, match="centered"):
        convert(torch.optim.RMSprop(groups))


def test_subclass_is_mapped_with_a_warning(params, caplog):
    class Mine(torch.optim.AdamW):
        pass

    with caplog.at_level(logging.WARNING):
        converted = convert(Mine(params))
    assert "Mine is a subclass of AdamW" in caplog.text
    assert "Poptorch does not run Python optimizer code directly" in caplog.text
    assert converted == convert(torch.optim.AdamW(params))
    assert converted != convert(torch.optim.Adam(params))


def test_torch_adamw_does_not_warn(params, caplog):
    with caplog.at_level(logging.WARNING):
        convert(torch.optim.AdamW(params))
    assert not caplog.records


@pytest.mark.parametrize(
    ("optimizer_class", "arguments", "name", "is_const"),
    [
        (torch.optim.SGD, {"lr": 0.1}, "lr", False),
        (torch.optim.SGD, {"lr": 0.1}, "momentum", True),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum", False),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "nesterov", True),
        (torch.optim.Adam, {"weight_decay": 0.01}, "weight_decay", False),
        (torch.optim.AdamW, {"weight_decay": 0.01}, "weight_decay", True),
        (torch.optim.AdamW, {"weight_decay": 0.0}, "weight_decay", False),
        (torch.optim.Adam, {"eps": 1e-8}, "eps", True),
        (torch.optim.Adam, {"eps": 1e-7}, "eps", False),
        (torch.optim.Adam, {"betas": (0.5, 0.5)}, "betas", True),
        (torch.optim.RMSprop, {"alpha": 0.5}, "alpha", True),
        (optim.Adam, {}, "lr", True),
        (optim.Adam, {"lr": 0.001}, "lr", False),
        (optim.Adam, {"betas": (0.9, 0.999)}, "betas", False),
        (optim.LAMB, {"max_weight_norm": 3.0}, "max_weight_norm", False),
        (optim.LAMB, {"lr": 0.1}, "max_weight_norm", True),
    ],
)
def test_constness(params, optimizer_class, arguments, name, is_const):
    converted = convert(optimizer_class(params, **arguments))
    assert converted.defaults[name][1] is is_const
    assert converted.groups[0][name][1] is is_const


def test_marks_determine_constness(params):
    optimizer = optim.SGD(params, lr=0.1)
    assert optimizer.variable_attrs.isConstant("momentum")
    optimizer.variable_attrs.markAsVariable("momentum")
    optimizer.variable_attrs.markAsVariable("loss_scaling")
    optimizer.variable_attrs.markAsConstant("lr")
    converted = convert(optimizer)
    assert converted.groups[0]["momentum"] == (0, False)
    assert converted.groups[0]["lr"] == (0.1, True)
    assert converted.attributes["loss_scaling"] == (1.0, False)
    with pytest.raises(AssertionError, match="frequency"):
        optimizer.variable_attrs.markAsVariable("frequency")


def test_automatic_loss_scaling_makes_it_variable(params):
    optimizer = optim.SGD(params, lr=0.1)
    assert convert(optimizer).attributes["loss_scaling"][1]
    assert not convert(optimizer, automatic_loss_scaling=True).attributes["loss_scaling"][1]


def test_velocity_scaling_is_a_group_value_when_combined(params):
    combined = convert(optim.SGD(params, lr=0.1, use_combined_accum=True, velocity_scaling=4.0))
    assert combined.groups[0]["velocity_scaling"] == (4.0, False)
    assert "velocity_scaling" not in convert(optim.SGD(params, lr=0.1)).groups[0]


def test_half_accumulators_force_the_running_mean(params):
    assert forces_running_mean(optim.Adam(params, accum_type=torch.float16))
    assert not forces_running_mean(optim.Adam(params))
    assert not forces_running_mean(torch.optim.Adam(params))
    combined = optim.SGD(params, lr=0.1, accum_type=torch.float16, use_combined_accum=True)
    assert not forces_running_mean(combined)


class TestReplacement:
    def test_variable_values_can_change(self):
        device = Device(lambda p: optim.SGD(p, lr=0.0, loss_scaling=2.0))
        before = {name: w.clone() for name, w in device.weights.items()}
        device.feed(before)
        assert torch.equal(device.weights["bias"], before["bias"])
        device.send(lr=0.5, loss_scaling=4.0)
        assert device.compiled.loss_scaling == 4.0
        device.feed({name: 4.0 * w for name, w in before.items()})
        torch.testing.assert_close(device.weights["bias"], 0.5 * before["bias"])

    def test_new_loss_scaling_keeps_the_velocity(self):
        plain = Device(lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
        scaled = Device(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=2.0))
        plain.train(2)
        scaled.train(2)
        scaled.send(loss_scaling=32.0)
        expected = plain.train(2)["weight"]
        torch.testing.assert_close(scaled.train(2)["weight"], expected)

    @pytest.mark.parametrize(
        ("make", "change"),
        [
            (lambda p: optim.Adam(p, lr=0.1), {"eps": 1e-3}),
            (lambda p: optim.Adam(p, lr=0.1), {"loss_scaling": 2.0}),
            (lambda p: optim.Adam(p), {"lr": 0.5}),
            (lambda p: optim.SGD(p, lr=0.1), {"momentum": 0.5}),
            (lambda p: torch.optim.SGD(p, lr=0.1), {"weight_decay": 0.5}),
            (lambda p: optim.Adam(p, lr=0.1), {"max_grad_norm": 1.0}),
            (lambda p: optim.Adam(p, lr=0.1), {"accum_type": torch.float16}),
            (lambda p: optim.SGD(p, lr=0.1, momentum=0.5), {"velocity_accum_type": torch.float16}),
            (lambda p: optim.RMSprop(p, lr=0.1), {"use_tf_variant": True}),
        ],
    )
    def test_constants_cannot_change(self, make, change):
        device = Device(make)
        with pytest.raises(Error, match=next(iter(change)).replace("velocity_", "")):
            device.send(**change)

    def test_accumulator_types_are_free_without_momentum(self):
        Device(lambda p: optim.SGD(p, lr=0.1)).send(accum_type=torch.float16)

    def test_dampening_is_not_compared(self):
        device = Device(lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
        device.send(dampening=0.5)

    def test_type_and_groups_are_fixed(self):
        device = Device(lambda p: optim.SGD(p, lr=0.1))
        with pytest.raises(Error, match="type"):
            device.compiled.update(convert(optim.Adam(device.host, lr=0.1)))
        with pytest.raises(Error, match="per group"):
            device.compiled.update(convert(optim.SGD(device.host[:1], lr=0.1)))
        device = Device(lambda p: optim.SGD(p, lr=0.1, momentum=0.5))
        combined = optim.SGD(device.host, lr=0.1, momentum=0.5, use_combined_accum=True)
        with pytest.raises(Error, match="use_combined_accum"):
            device.compiled.update(convert(combined))


@pytest.mark.parametrize(
    ("name", "value", "message"), [("loss_scaling", 0.0, "be 0"), ("max_grad_norm", float("nan"), "NaN")]
)
def test_values_that_the_backend_refuses(name, value, message):
    with pytest.raises(Error, match=message):
        Device(lambda p: optim.SGD(p, lr=0.1, **{name: value}))


class TestTracker:
    def test_warns_once_about_new_attributes(self, params, caplog):
        tracker = AttributeTracker()
        optimizer = optim.SGD(params, lr=0.1)
        optimizer.known = 1
        convert(optimizer, tracker)
        assert not caplog.records
        optimizer.unknown = 1
        optimizer.param_groups[0]["initial_lr"] = 0.1
        convert(optimizer, tracker)
        assert "Ignoring unexpected optimizer attribute in SGD optimizer: 'unknown'" in caplog.text
        assert "Ignoring unexpected group 0 attribute in SGD optimizer: 'initial_lr'" in caplog.text
        caplog.clear()
        convert(optimizer, tracker)
        assert not caplog.records

    def test_relaxed_does_not_warn(self, params, caplog):
        tracker = AttributeTracker(relaxed=True)
        optimizer = optim.SGD(params, lr=0.1)
        convert(optimizer, tracker)
        optimizer.unknown = 1
        with caplog.at_level(logging.WARNING):
            convert(optimizer, tracker)
        assert not caplog.records

    def test_switching_from_torch_to_poptorch_does_not_warn(self, params, caplog):
        tracker = AttributeTracker()
        convert(torch.optim.Adam(params), tracker)
        convert(optim.Adam(params), tracker)
        assert not caplog.records


def test_log_lines(caplog):
    with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
        Device(lambda p: optim.SGD(p, lr=0.01, loss_scaling=2.0, weight_decay=0.0))
    graph, group = caplog.messages
    assert graph.startswith("Updating graph optimizer with SGD")
    assert "defaultLearningRate=0.01, " in graph
    assert "defaultVelocityScaling=2, " in graph
    assert "defaultMomentum=0 (const), " in graph
    assert "accumType=float32, firstOrderMomentumAccumType=float32" in graph
    assert graph.endswith("lossScaling=2")
    assert group.startswith("Updating group 0 optimizer with SGD")
    assert "weightDecay=0, " in group
