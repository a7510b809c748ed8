"""State dictionaries, pickling and the constructors of poptorch's optimizers."""

import copy
import inspect
import logging
import pickle

import pytest
import torch
from optim_harness import Device

from ipurun.emulator import optim

ALL = [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB]


def connected(device):
    device.optimizer._connect(device.compiled.read_state)
    return device


@pytest.mark.parametrize("make", ALL)
def test_no_device_state_before_compilation(make):
    state = make([torch.nn.Parameter(torch.ones(1))], lr=0.1).state_dict()
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None
    assert state["param_groups"][0]["lr"] == 0.1


def test_names_and_values_of_plain_sgd():
    device = connected(Device(lambda p: optim.SGD(p, lr=0.05, weight_decay=0.025, loss_scaling=0.75)))
    state = device.optimizer.state_dict()
    assert state["ipu_state"] == {}
    parameters = state["ipu_param"]
    assert set(parameters) == {
        "scaledLearningRate0___specific___weight",
        "scaledLearningRate0___specific___bias",
        "weightDecayScaleFactor0___specific___weight",
        "weightDecayScaleFactor0___specific___bias",
        "lossScaling_FLOAT",
    }
    assert parameters["scaledLearningRate0___specific___bias"].item() == pytest.approx(0.05 / 0.75)
    decay = parameters["weightDecayScaleFactor0___specific___bias"].item()
    assert decay == pytest.approx(1 - 0.05 * 0.025)
    assert parameters["lossScaling_FLOAT"].item() == 0.75


@pytest.mark.parametrize("make", ALL[1:])
def test_names_and_values_of_the_other_optimizers(make):
    device = connected(Device(lambda p: make(p, lr=0.05, weight_decay=0.025)))
    before = device.optimizer.state_dict()
    assert before["ipu_param"]["learningRate___specific___bias"].item() == pytest.approx(0.05)
    assert before["ipu_param"]["weightDecay___specific___bias"].item() == pytest.approx(0.025)
    assert "Accl1___weight" in before["ipu_state"]
    device.train(1)
    device.optimizer._mark_device_newer()
    after = device.optimizer.state_dict()
    name = "Accl1___weight"
    assert not torch.equal(before["ipu_state"][name], after["ipu_state"][name])


def test_constants_do_not_appear():
    state = Device(lambda p: optim.Adam(p)).compiled.read_state()
    assert state["ipu_param"] == {}
    assert set(state["ipu_state"]) == {
        f"{kind}___{name}" for kind in ("Accl1", "Accl2", "Step") for name in ("weight", "bias")
    }


def test_accumulators_appear_with_accumulation():
    device = Device(lambda p: optim.SGD(p, lr=0.1), accumulation=2)
    accumulator = device.compiled.read_state()["ipu_state"]["Accum___weight"]
    assert torch.equal(accumulator, torch.zeros(4, 3))


def test_parameters_without_a_group_share_the_default_names():
    device = Device(lambda p: optim.Adam(p[:1], lr=0.1), group_of={"weight": 0})
    assert set(device.compiled.read_state()["ipu_param"]) == {
        "learningRate___specific___weight",
        "learningRate___default___FLOAT",
    }


def test_combined_velocity_starts_from_the_decay():
    device = Device(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5, use_combined_accum=True, velocity_scaling=4.0)
    )
    stored = device.compiled.read_state()["ipu_state"]["Accl___bias"]
    torch.testing.assert_close(stored, 0.5 * 4.0 * device.weights["bias"])


@pytest.mark.parametrize("make", ALL)
def test_writing_and_reading_back(make, caplog):
    device = Device(lambda p: make(p, lr=0.1))
    state = device.compiled.read_state()
    for tensors in state.values():
        for name in tensors:
            tensors[name] = torch.rand_like(tensors[name]) + 1
    device.compiled.write_state(state)
    back = device.compiled.read_state()
    for key, tensors in state.items():
        for name, tensor in tensors.items():
            assert torch.equal(back[key][name], tensor)
    assert not caplog.records


def test_missing_entries_keep_the_values_of_the_device(caplog):
    device = Device(lambda p: optim.Adam(p, lr=0.1))
    device.train(2)
    state = device.compiled.read_state()
    kept = state["ipu_state"].pop("Accl1___bias")
    device.compiled.write_state(state)
    assert "Accl1___bias" in caplog.text
    assert torch.equal(device.compiled.read_state()["ipu_state"]["Accl1___bias"], kept)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=4.0),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
        lambda p: optim.Adam(p, lr=0.1),
        lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
        lambda p: optim.LAMB(p, lr=0.1),
    ],
)
def test_resuming_equals_continuing(make):
    straight = Device(make)
    straight.train(4)
    first = connected(Device(make))
    first.train(2)
    saved = pickle.loads(pickle.dumps(first.optimizer.state_dict()))
    second = Device(make, weights={name: w.clone() for name, w in first.weights.items()})
    second.optimizer.load_state_dict(saved)
    second.compiled.write_state(second.optimizer._take_state_to_upload())
    second.train(2)
    for name, weight in straight.weights.items():
        assert torch.equal(second.weights[name], weight)


class TestTraffic:
    def test_reads_once_then_uses_the_cache(self, caplog):
        device = Device(lambda p: optim.Adam(p, lr=0.1))
        reads = []
        device.optimizer._connect(lambda: reads.append(1) or device.compiled.read_state())
        with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
            device.optimizer.state_dict()
            assert "Using cached" not in caplog.text
            device.optimizer.state_dict()
        assert "Using cached optimiser state dict" in caplog.text
        assert len(reads) == 1
        device.optimizer._mark_device_newer()
        device.optimizer.state_dict()
        assert len(reads) == 2

    def test_loaded_state_is_visible_before_it_is_uploaded(self):
        device = connected(Device(lambda p: optim.Adam(p, lr=0.1)))
        state = device.optimizer.state_dict()
        state["ipu_param"]["learningRate___specific___bias"] = torch.tensor(0.25)
        device.optimizer.load_state_dict(state)
        seen = device.optimizer.state_dict()["ipu_param"]["learningRate___specific___bias"]
        assert seen.item() == 0.25
        assert device.optimizer._take_state_to_upload() is not None
        assert device.optimizer._take_state_to_upload() is None

    def test_disconnecting_reads_the_state_first(self):
        device = connected(Device(lambda p: optim.Adam(p, lr=0.1)))
        device.train(1)
        device.optimizer._disconnect()
        assert device.optimizer.get_state_dict()["ipu_state"]["Step___bias"].item() == 1.0

    def test_setter_without_device(self):
        optimizer = optim.Adam([torch.nn.Parameter(torch.ones(1))])
        assert not optimizer.has_state()
        with pytest.raises(RuntimeError):
            optimizer.set_state_dict({})
        optimizer.set_state_dict({"ipu_state": {"Step___w": torch.ones(())}, "ipu_param": {}})
        assert optimizer.has_state()
        assert optimizer.get_state_dict()["ipu_state"]["Step___w"].item() == 1.0


def test_states_of_torch_are_refused():
    parameters = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded onto the IPU"):
        optim.Adam(parameters).load_state_dict(torch.optim.Adam(parameters).state_dict())
    with pytest.raises(KeyError):
        optim.Adam(parameters).load_state_dict({})


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("make", ALL)
def test_copies_keep_attributes_and_state(make, duplicate):
    device = connected(Device(lambda p: make(p, lr=0.1, loss_scaling=3.0, accum_type=torch.float16)))
    twin = duplicate(device.optimizer)
    assert twin.loss_scaling == 3.0
    assert twin.accum_type == torch.float16
    assert not twin.variable_attrs.isConstant("loss_scaling")
    assert set(twin.state_dict()["ipu_param"]) == set(device.optimizer.state_dict()["ipu_param"])
    twin.variable_attrs.markAsConstant("loss_scaling")
    assert not device.optimizer.variable_attrs.isConstant("loss_scaling")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (optim.SGD, "velocity_accum_type"),
        (optim.Adam, "accum_type"),
        (optim.LAMB, "first_order_momentum_accum_type"),
        (optim.RMSprop, "second_order_momentum_accum_type"),
    ],
)
def test_accumulator_types_are_checked(make, name):
    with pytest.raises(AssertionError, match=name):
        make([torch.nn.Parameter(torch.ones(1))], lr=0.1, **{name: torch.float64})


def test_velocity_scaling_alone_is_ignored(caplog):
    optimizer = optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, velocity_scaling=2.0)
    assert "velocity_scaling" in caplog.text
    assert "velocity_scaling" not in optimizer.param_groups[0]


def test_lamb_max_weight_norm_defaults_to_65500():
    optimizer = optim.LAMB([torch.nn.Parameter(torch.ones(1))], max_weight_norm=None)
    assert optimizer.defaults["max_weight_norm"] == 65500.0


@pytest.mark.parametrize("make", ALL)
def test_none_selects_the_default(make):
    parameters = [torch.nn.Parameter(torch.ones(1))]
    nothing = {name: None for name in inspect.signature(make).parameters if name not in ("params", "lr", "kwargs")}
    explicit, implicit = make(parameters, lr=0.1, **nothing), make(parameters, lr=0.1)
    assert explicit.defaults == implicit.defaults
    assert explicit.variable_attrs._variable_attributes == ["lr"]
