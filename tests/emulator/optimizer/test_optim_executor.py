"""Optimizers of a training model: which values are sent to the device and read back, and when."""

import copy
import logging

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.emulator import optim

NO_BIAS_LAMB = "LAMBNoBias"
MAKERS = {
    "SGD": optim.SGD,
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "RMSprop": optim.RMSprop,
    "LAMB": optim.LAMB,
    NO_BIAS_LAMB: lambda params, **arguments: optim.LAMB(params, bias_correction=False, **arguments),
}
NATIVE = "poptorch:cpp"


class Classifier(torch.nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(layers)])
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, label):
        out = self.layers(x)
        return out, self.loss(out, label)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 6, generator=generator), torch.tensor([1, 4])


@pytest.fixture
def model():
    torch.manual_seed(42)
    return Classifier()


@pytest.mark.parametrize("name", MAKERS)
def test_trains_once_the_learning_rate_is_sent(model, batch, name):
    optimizer = MAKERS[name](model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    losses = [training(*batch)[1].item() for _ in range(3)]
    assert losses == losses[:1] * 3
    optimizer.param_groups[0]["lr"] = 0.05
    assert training(*batch)[1].item() == losses[0]
    training.setOptimizer(optimizer)
    for _ in range(40):
        loss = training(*batch)[1].item()
    assert loss < 0.5 * losses[0]


@pytest.mark.parametrize("name", MAKERS)
def test_equals_stepping_on_the_host(model, batch, name):
    host = copy.deepcopy(model)
    host_optimizer = MAKERS[name](host.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, optimizer=MAKERS[name](model.parameters(), lr=0.01))
    for _ in range(4):
        host_optimizer.zero_grad()
        expected = host(*batch)[1]
        expected.backward()
        host_optimizer.step()
        loss = training(*batch)[1]
        torch.testing.assert_close(loss.reshape(()), expected.detach())
    for weight, expected in zip(model.parameters(), host.parameters()):
        torch.testing.assert_close(weight.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_groups_change_one_by_one(batch):
    torch.manual_seed(0)
    model = Classifier(layers=2)

    def optimizer(first, second):
        groups = [
            {"params": model.layers[0].parameters(), "lr": first},
            {"params": model.layers[1].parameters(), "lr": second},
        ]
        return optim.SGD(groups, lr=0.1)

    before = [weight.detach().clone() for weight in model.parameters()]
    training = poptorch.trainingModel(model, optimizer=optimizer(0.0, 0.0))
    training(*batch)
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters())] == [True] * 4
    training.setOptimizer(optimizer(0.1, 0.0))
    training(*batch)
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters())] == [False, False, True, True]
    training.setOptimizer(optimizer(0.0, 0.1))
    training(*batch)
    assert [torch.equal(a, b) for a, b in zip(before, model.parameters())] == [False] * 4


@pytest.mark.parametrize("name", MAKERS)
def test_a_learning_rate_set_while_detached_reaches_the_device_at_attach(model, batch, name):
    other = copy.deepcopy(model)
    results = []
    for trained, detaches in ((model, True), (other, False)):
        optimizer = MAKERS[name](trained.parameters(), lr=0.01)
        training = poptorch.trainingModel(trained, optimizer=optimizer)
        training(*batch)
        if detaches:
            training.detachFromDevice()
        optimizer.param_groups[0]["lr"] = 0.03
        training.setOptimizer(optimizer)
        if detaches:
            training.attachToDevice()
        results.append([training(*batch)[1].item() for _ in range(2)])
    assert results[0] == results[1]
    for weight, expected in zip(model.parameters(), other.parameters()):
        assert torch.equal(weight, expected)


class TestState:
    def test_filled_by_compilation(self, model, batch):
        optimizer = optim.SGD(model.parameters(), lr=0.05, weight_decay=0.025, loss_scaling=0.75)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        assert optimizer.state_dict()["ipu_state"] is None
        training.compile(*batch)
        parameters = optimizer.state_dict()["ipu_param"]
        rate = parameters["scaledLearningRate0___specific___layers.0.bias"]
        assert rate.item() == pytest.approx(0.05 / 0.75)
        assert parameters["lossScaling_FLOAT"].item() == 0.75

    @pytest.mark.parametrize("name", MAKERS)
    @pytest.mark.parametrize("incomplete", [True, False])
    def test_loaded_values_are_merged_at_the_next_run(self, model, batch, name, incomplete):
        optimizer = MAKERS[name](model.parameters(), lr=0.0)
        optimizer.variable_attrs._variable_attributes = list(optimizer.variable_attrs._allowed_attributes)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training.compile(*batch)
        state = optimizer.state_dict()
        removed_name = removed = None
        if incomplete:
            removed_name = next(iter(state["ipu_param"]))
            removed = state["ipu_param"].pop(removed_name)
        for tensors in (state["ipu_param"], state["ipu_state"]):
            for key, tensor in tensors.items():
                tensors[key] = torch.rand_like(tensor)
        optimizer.load_state_dict(state)
        seen = optimizer.state_dict()
        assert set(seen["ipu_param"]) == set(state["ipu_param"])
        training(*batch)
        after = optimizer.state_dict()
        for key, tensor in state["ipu_param"].items():
            assert torch.equal(after["ipu_param"][key], tensor)
        if incomplete:
            assert torch.equal(after["ipu_param"][removed_name], removed)
        for key, tensor in state["ipu_state"].items():
            assert not torch.allclose(after["ipu_state"][key], tensor)

    def test_continues_in_another_model(self, model, batch):
        optimizer = optim.Adam(model.parameters())
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training(*batch)
        saved = optimizer.state_dict()
        training.destroy()
        again = optim.Adam(model.parameters())
        again.load_state_dict(saved)
        poptorch.trainingModel(model, optimizer=again).compile(*batch)
        for name, tensor in again.state_dict()["ipu_state"].items():
            assert torch.equal(tensor, saved["ipu_state"][name])

    @pytest.mark.filterwarnings("ignore:Detected call of")  # step() is never called: the device updates
    def test_checkpoint_keeps_the_scheduled_rate(self, model, batch):
        optimizer = optim.Adam(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training(*batch)
        scheduler.step()
        training.setOptimizer(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        fresh = optim.Adam(model.parameters(), lr=0.1)
        fresh.load_state_dict(saved)
        training.setOptimizer(fresh)
        training(*batch)
        state = fresh.state_dict()
        assert state["param_groups"][0]["lr"] == 0.5
        assert state["ipu_param"]["learningRate___specific___layers.0.bias"].item() == 0.5
        assert state["ipu_state"]["Step___layers.0.bias"].item() == 2.0

    def test_detaching_reads_it(self, model, batch, caplog):
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training(*batch)
        with caplog.at_level(logging.DEBUG, logger=NATIVE):
            training.detachFromDevice()
        assert "Writing optimiser state tensors from IPU to host." in caplog.text
        saved = optimizer.state_dict()
        assert saved["ipu_state"]["Step___layers.0.bias"].item() == 1.0
        optimizer.load_state_dict(saved)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger=NATIVE):
            training.attachToDevice()
        assert "Writing optimiser state tensors from host to IPU memory" in caplog.text

    def test_offline_has_none(self, model, batch):
        optimizer = optim.SGD(model.parameters(), lr=0.0)
        options = poptorch.Options().useOfflineIpuTarget()
        poptorch.trainingModel(model, options, optimizer=optimizer).compile(*batch)
        assert optimizer.state_dict()["ipu_state"] is None

    def test_torch_optimizers_get_none(self, model, batch):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training(*batch)
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
        assert all(weight.grad is None for weight in model.parameters())


class TestSetOptimizer:
    def test_equal_values_are_not_sent(self, model, batch, caplog):
        training = poptorch.trainingModel(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
        training(*batch)
        with caplog.at_level(logging.DEBUG, logger=NATIVE):
            training.setOptimizer(optim.Adam(model.parameters(), lr=0.1))
        assert "optimizer with" not in caplog.text
        with caplog.at_level(logging.DEBUG, logger=NATIVE):
            training.setOptimizer(optim.Adam(model.parameters(), lr=0.2))
        assert "Updating graph optimizer with Adam" in caplog.text
        assert "Updating group 0 optimizer with Adam" in caplog.text

    def test_constants_are_refused(self, model, batch):
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training(*batch)
        optimizer.param_groups[0]["eps"] = 0.5
        with pytest.raises(poptorch.Error, match="eps"):
            training.setOptimizer(optimizer)

    def test_replaced_object_continues_from_the_device_state(self, model, batch):
        first = optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, optimizer=first)
        training(*batch)
        second = optim.Adam(model.parameters(), lr=0.1)
        training.setOptimizer(second)
        training(*batch)
        assert first.state_dict()["ipu_state"]["Step___layers.0.bias"].item() == 1.0
        assert second.state_dict()["ipu_state"]["Step___layers.0.bias"].item() == 2.0

    def test_half_accumulators_choose_the_running_mean(self, model, batch):
        options = poptorch.Options()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Post)
        optimizer = optim.Adam(model.parameters(), lr=0.1, accum_type=torch.float16)
        training = poptorch.trainingModel(model, options, optimizer)
        training.compile(*batch)
        chosen = training.options.Training.meanAccumulationAndReplicationReductionStrategy
        assert chosen == poptorch.MeanReductionStrategy.Running

    def test_half_accumulators_after_compilation_are_refused(self, model, batch):
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, optimizer=optimizer)
        training.compile(*batch)
        optimizer.accum_type = torch.float16
        with pytest.raises(ValueError, match="already compiled"):
            training.setOptimizer(optimizer)

    def test_tensors_of_another_model(self, model, batch):
        stranger = torch.nn.Parameter(torch.ones(1))
        training = poptorch.trainingModel(model, optimizer=optim.SGD([*model.parameters(), stranger], lr=0.1))
        with pytest.raises(KeyError):
            training(*batch)


@pytest.mark.parametrize("use_combined_accum", [True, False])
def test_extra_attributes_are_ignored_with_one_warning(batch, caplog, use_combined_accum):
    model = Classifier(layers=2)
    groups = [{"params": layer.parameters()} for layer in model.layers]
    optimizer = optim.SGD(groups, lr=0.01, loss_scaling=2.0, use_combined_accum=use_combined_accum)
    optimizer.early = 1
    training = poptorch.trainingModel(model, optimizer=optimizer)
    training(*batch)
    assert "unexpected" not in caplog.text
    optimizer.step = 0
    optimizer.param_groups[1]["initial_lr"] = 0.1
    training.setOptimizer(optimizer)
    assert "unexpected optimizer attribute" in caplog.text
    assert "unexpected group 1 attribute" in caplog.text
    caplog.clear()
    optimizer.loss_scaling = 3.0
    training.setOptimizer(optimizer)
    assert "unexpected" not in caplog.text
