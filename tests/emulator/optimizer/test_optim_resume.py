"""Training that is saved and resumed with PopTorch's API computes what it computes without interruption."""

import io

import pytest
import torch
from torch import nn

from ipurun import emulator as poptorch
from ipurun.emulator import optim

STEPS = 6
HALF = torch.float16
# Values that float32 cannot hold exactly: a resumed run reads float32, so an uninterrupted one must use float32 too.
OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.07, "weight_decay": 0.013, "dampening": 0.3}, {}),
    "SGD momentum": (optim.SGD, {"lr": 0.07, "momentum": 0.9, "weight_decay": 0.013, "dampening": 0.1}, {}),
    "SGD nesterov": (optim.SGD, {"lr": 0.07, "momentum": 0.9, "weight_decay": 0.013}, {"nesterov": True}),
    "SGD combined": (
        optim.SGD,
        {"lr": 0.07, "momentum": 0.9, "weight_decay": 0.013, "velocity_scaling": 1.7},
        {"use_combined_accum": True},
    ),
    "Adam": (optim.Adam, {"lr": 0.003, "betas": (0.9, 0.97), "eps": 1e-7, "weight_decay": 0.013}, {}),
    "AdamW": (optim.AdamW, {"lr": 0.003, "betas": (0.9, 0.97), "eps": 1e-7, "weight_decay": 0.013}, {}),
    "AdamW half": (
        optim.AdamW,
        {"lr": 0.003, "betas": (0.9, 0.97), "weight_decay": 0.013},
        {"accum_type": HALF, "first_order_momentum_accum_type": HALF, "second_order_momentum_accum_type": HALF},
    ),
    "Adam clipped": (optim.Adam, {"lr": 0.003, "betas": (0.9, 0.97)}, {"max_grad_norm": 0.03}),
    "RMSprop": (optim.RMSprop, {"lr": 0.003, "alpha": 0.97, "eps": 1e-7, "weight_decay": 0.013}, {}),
    "RMSprop momentum": (optim.RMSprop, {"lr": 0.003, "alpha": 0.97, "momentum": 0.9}, {"centered": True}),
    "RMSprop as TensorFlow": (optim.RMSprop, {"lr": 0.003, "alpha": 0.97, "momentum": 0.9}, {"use_tf_variant": True}),
    "LAMB": (optim.LAMB, {"lr": 0.003, "betas": (0.9, 0.97), "weight_decay": 0.013, "max_weight_norm": 1.3}, {}),
    "LAMB no bias": (optim.LAMB, {"lr": 0.003, "betas": (0.9, 0.97)}, {"bias_correction": False}),
}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x, label):
        return nn.functional.cross_entropy(self.second(torch.tanh(self.first(x))), label)


def make_optimizer(model, name, *, variable, loss_scaling=3.3):
    kind, values, fixed = OPTIMIZERS[name]
    groups = [
        {"params": model.first.parameters(), "lr": 0.011},
        {"params": [model.second.weight]},  # the last bias is in no group and uses the defaults
    ]
    optimizer = kind(groups, **values, **fixed, loss_scaling=loss_scaling)
    if not variable:
        for attribute in [*values, "loss_scaling"]:
            optimizer.variable_attrs.markAsConstant(attribute)
    return optimizer


def make_training(name, *, variable, accumulation=1, model=None):
    model = TwoLayers() if model is None else model
    optimizer = make_optimizer(model, name, variable=variable)
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    return model, optimizer, poptorch.trainingModel(model, options, optimizer)


def batches(accumulation):
    generator = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        rows = 2 * accumulation
        yield torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "constant"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_is_exact(name, variable, accumulation):
    arguments = {"variable": variable, "accumulation": accumulation}
    model, _, training = make_training(name, **arguments)
    for batch in batches(accumulation):
        training(*batch)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    model, optimizer, training = make_training(name, **arguments)
    half_way = list(batches(accumulation))[: STEPS // 2]
    for batch in half_way:
        training(*batch)
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    training.destroy()

    model, optimizer, training = make_training(name, **arguments)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for batch in list(batches(accumulation))[STEPS // 2 :]:
        training(*batch)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW"])
def test_state_stored_with_earlier_names_resumes_too(name):
    first, optimizer, training = make_training(name, variable=True)
    given = list(batches(1))
    for batch in given[:3]:
        training(*batch)
    saved = saved_and_loaded(optimizer.state_dict())
    weights = saved_and_loaded(first.state_dict())
    for key in ("ipu_state", "ipu_param"):
        saved[key] = {_earlier(entry): tensor for entry, tensor in saved[key].items()}
    for batch in given[3:]:
        training(*batch)

    second, optimizer, training = make_training(name, variable=True)
    second.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for batch in given[3:]:
        training(*batch)
    for resumed, straight in zip(second.state_dict().values(), first.state_dict().values()):
        assert torch.equal(resumed, straight)


def test_the_state_of_torch_optimizers_can_be_read_and_written():
    """An extra of the emulator: PopTorch does not expose this state."""

    def make_torch_training():
        model = TwoLayers()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        return model, poptorch.trainingModel(model, poptorch.Options(), optimizer)

    first, training = make_torch_training()
    given = list(batches(1))
    for batch in given[:3]:
        training(*batch)
    saved = saved_and_loaded({"model": first.state_dict(), "device": optim.read_device_state(training)})
    for batch in given[3:]:
        training(*batch)

    second, training = make_torch_training()
    second.load_state_dict(saved["model"])
    training.compile(*given[0])
    optim.write_device_state(training, saved["device"])
    for batch in given[3:]:
        training(*batch)
    for resumed, straight in zip(second.state_dict().values(), first.state_dict().values()):
        assert torch.equal(resumed, straight)


def _earlier(name):
    head, separator, parameter = name.rpartition("___")
    return name if not separator or parameter == "FLOAT" else f"{head}___model.{parameter}"


class Nested(nn.Module):
    """Has both `lin.weight` and `model.lin.weight`: the earlier name of the one is the name of the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.lin = nn.Linear(3, 3, bias=False)
        self.model = nn.ModuleDict({"lin": nn.Linear(3, 3, bias=False)})

    def forward(self, x):
        return poptorch.identity_loss(self.model["lin"](self.lin(x)).square(), "mean")


@pytest.mark.parametrize("rename", [_earlier, lambda name: name], ids=["earlier names", "names"])
def test_earlier_names_are_distinguished_from_those_of_a_module_called_model(rename):
    def training_of():
        model = Nested()
        optimizer = optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        return optimizer, poptorch.trainingModel(model, optimizer=optimizer)

    optimizer, training = training_of()
    training(torch.ones(1, 3))
    saved = optimizer.state_dict()
    for key in ("ipu_state", "ipu_param"):
        saved[key] = {rename(entry): tensor for entry, tensor in saved[key].items()}
    training(torch.ones(1, 3))
    expected = optimizer.state_dict()["ipu_state"]
    assert set(expected) == {"Accl1___lin.weight", "Accl1___model.lin.weight"}

    optimizer, training = training_of()
    optimizer.load_state_dict(saved)
    training(torch.ones(1, 3))
    resumed = optimizer.state_dict()["ipu_state"]
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_half_precision_resumes_exactly_with_stochastic_rounding():
    """Every random number of an update comes from the streams that `rng_state` describes."""

    def made():
        model = TwoLayers().half()
        options = poptorch.Options().randomSeed(4)
        options.Precision.enableStochasticRounding(True)
        options.Training.setAutomaticLossScaling(True)
        optimizer = make_optimizer(model, "AdamW half", variable=True)
        return model, optimizer, poptorch.trainingModel(model, options, optimizer)

    given = [(x.half(), label) for x, label in batches(1)]
    straight, _, training = made()
    for batch in given:
        training(*batch)
    first, optimizer, training = made()
    for batch in given[:3]:
        training(*batch)
    weights, state = saved_and_loaded((first.state_dict(), optimizer.state_dict()))
    random_state = training.rng_state
    second, optimizer, training = made()
    second.load_state_dict(weights)
    optimizer.load_state_dict(state)
    training.compile(*given[3])
    training.rng_state = random_state
    for batch in given[3:]:
        training(*batch)
    for resumed, expected in zip(second.state_dict().values(), straight.state_dict().values()):
        assert torch.equal(resumed, expected)


def test_a_weight_with_two_names_is_stored_under_the_first():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5)
            self.head.weight = self.embedding.weight

        def forward(self, words):
            return nn.functional.cross_entropy(self.head(self.embedding(words)), words)

    model = Tied()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    training(torch.tensor([1, 2]))
    names = {name.rpartition("___")[2] for name in optimizer.state_dict()["ipu_state"]}
    assert names == {"embedding.weight", "head.bias"}


def test_the_device_computes_with_float32_values():
    """A beta of 0.999 is a float32 on the device: its square root cannot come from the double."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return poptorch.identity_loss((self.weight * x).sum(), "sum")

    optimizer = optim.Adam([weight], lr=0.0, betas=(0.9, 0.999))
    training = poptorch.trainingModel(Sum(), optimizer=optimizer)
    training(torch.tensor([[1.0, 1.0]]))
    second_moment = optimizer.state_dict()["ipu_state"]["Accl2___weight"]
    assert torch.equal(second_moment, (1 - torch.tensor(0.999)).expand(2))
