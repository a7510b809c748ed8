"""The backend's option groupNormStridedChannelGrouping."""

import pytest
import torch

from ipurun import emulator as poptorch


def _options(strided):
    options = poptorch.Options()
    options._Popart.set("groupNormStridedChannelGrouping", strided)
    return options


@pytest.mark.parametrize("affine", [False, True])
def test_strided_groups_contain_every_nth_channel(affine):
    torch.manual_seed(0)
    model = torch.nn.GroupNorm(2, 6, affine=affine)
    if affine:
        torch.nn.init.normal_(model.weight)
        torch.nn.init.normal_(model.bias)
    x = torch.randn(3, 6, 4)
    expected = torch.empty_like(x)
    for first in range(2):
        group = x[:, first::2]
        mean = group.mean((1, 2), keepdim=True)
        variance = group.var((1, 2), unbiased=False, keepdim=True)
        expected[:, first::2] = (group - mean) / torch.sqrt(variance + model.eps)
    if affine:
        expected = expected * model.weight.detach()[:, None] + model.bias.detach()[:, None]
    torch.testing.assert_close(poptorch.inferenceModel(model, _options(True))(x), expected)


def test_without_the_option_groups_are_contiguous():
    torch.manual_seed(0)
    model = torch.nn.GroupNorm(2, 6)
    x = torch.randn(3, 6, 4)
    for options in (_options(False), poptorch.Options()):
        torch.testing.assert_close(poptorch.inferenceModel(model, options)(x), model(x).detach())


def test_strided_groups_are_trained():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.GroupNorm(2, 4)

        def forward(self, x):
            out = self.norm(x)
            return out, poptorch.identity_loss((out**2 * torch.arange(4.0)).sum(), "none")

    torch.manual_seed(0)
    x = torch.randn(5, 4)
    pairs = torch.stack([x[:, [0, 2]], x[:, [1, 3]]], 1)
    centred = pairs - pairs.mean(-1, keepdim=True)
    unit = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
    unit = torch.stack([unit[:, 0, 0], unit[:, 1, 0], unit[:, 0, 1], unit[:, 1, 1]], 1)
    model = Model()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, _options(True), optimizer)(x)
    weight_gradient = (2 * unit * unit * torch.arange(4.0)).sum(0)
    bias_gradient = (2 * unit * torch.arange(4.0)).sum(0)
    torch.testing.assert_close(model.norm.weight.detach(), 1 - 0.1 * weight_gradient)
    torch.testing.assert_close(model.norm.bias.detach(), -0.1 * bias_gradient)
