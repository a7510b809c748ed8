"""After capture, the graph is compared with the module and refused if results differ."""

import pytest
import torch

import ipurun.emulator as poptorch
from ipurun.emulator._run import compile as compiling


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        return poptorch.identity_loss((x * self.weight).sum(), reduction="none")


def plain(options):
    return options


def rounding(options):
    options.Precision.enableStochasticRounding(True)
    return options


def exceptions(options):
    options.Precision.enableFloatingPointExceptions(True)
    return options


def forward_of_another_model(node):
    return not node.is_backward and node.name == "mul"


def backward_of_another_model(node):
    return node.is_backward and node.name == "mul"


@pytest.mark.parametrize("prepare", [plain, rounding, exceptions])
@pytest.mark.parametrize("is_spoilt", [forward_of_another_model, backward_of_another_model])
def test_a_graph_that_computes_something_else_is_refused(monkeypatch, prepare, is_spoilt):
    spoilt = []

    def spoil(graph, mode):
        for node in filter(is_spoilt, graph.nodes):
            node.op = torch.ops.aten.sub.Tensor
            spoilt.append(node)

    monkeypatch.setattr(compiling, "add_recomputation", spoil)
    model = poptorch.trainingModel(Scaled(), prepare(poptorch.Options()))
    with pytest.raises(poptorch.Error, match="does not compute"):
        model(torch.tensor([5.0, 7.0]))
    assert spoilt


@pytest.mark.parametrize("prepare", [plain, rounding, exceptions])
def test_a_graph_that_computes_the_same_is_used(prepare):
    model = poptorch.trainingModel(Scaled(), prepare(poptorch.Options()))
    assert model(torch.tensor([5.0, 7.0])).item() == 31.0


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x)[0].pow(2).mean(), reduction="none")


@pytest.mark.parametrize("prepare", [rounding, exceptions])
def test_layers_of_an_lstm_train_the_same_however_the_graph_is_run(prepare):
    losses = []
    for options in (poptorch.Options(), prepare(poptorch.Options())):
        torch.manual_seed(0)
        model = Recurrent()
        training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.5))
        losses.append([training(torch.linspace(-1, 1, 24).view(2, 4, 3)).item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]
