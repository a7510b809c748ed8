"""Recomputation repeats operations without changing results."""

import copy

import pytest
import torch
from executor_models import options
from torch import nn
from torch.nn import functional

import ipurun.emulator as poptorch


class _Chain(nn.Module):
    """Tanh layers, whose results the backward pass needs, with an optional checkpoint after the second."""

    def __init__(self, checkpoint=False, stages=1):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.checkpoint = checkpoint
        self.stages = stages

    def forward(self, x):
        target = x
        for index, layer in enumerate(self.layers):
            poptorch.Block.start(f"{index}", ipu_id=index * self.stages // 4)
            x = torch.tanh(layer(x))
            if self.checkpoint and index == 1:
                x = poptorch.recomputationCheckpoint(x)
        return x, functional.mse_loss(x, target)


def _tanh_runs(executor):
    """Return the numbers of forward and recomputed tanh operations in the compiled model."""
    nodes = [node for node in executor._executable.graph.nodes if node.name == "tanh"]
    recomputed = [node for node in nodes if node.is_recomputed]
    return len(nodes) - len(recomputed), len(recomputed)


def _train(model, mode=None, accumulation=1):
    opts = options(accumulation=accumulation)
    if mode is not None:
        opts._Popart.set("autoRecomputation", mode)
    reference = copy.deepcopy(model.layers)
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2 * accumulation, 4, generator=torch.Generator().manual_seed(0))
    executor(x)
    by_hand = torch.optim.SGD(reference.parameters(), lr=0.1)
    y = x
    for layer in reference:
        y = torch.tanh(layer(y))
    functional.mse_loss(y, x).backward()
    by_hand.step()
    for parameter, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.detach(), expected.detach())
    return executor


def test_nothing_is_recomputed_by_default():
    assert _tanh_runs(_train(_Chain())) == (4, 0)
    assert _tanh_runs(_train(_Chain(checkpoint=True))) == (4, 0)


def test_recompute_all_repeats_everything_except_checkpoints():
    assert _tanh_runs(_train(_Chain(), mode=4)) == (4, 4)
    assert _tanh_runs(_train(_Chain(checkpoint=True), mode=4)) == (4, 3)


def test_standard_keeps_products():
    executor = _train(_Chain(), mode=1)
    names = {node.name for node in executor._executable.graph.nodes if node.is_recomputed}
    assert "tanh" in names
    assert "addmm" not in names


def test_a_pipelined_model_keeps_the_inputs_of_its_stages():
    executor = _train(_Chain(stages=2), accumulation=4)
    forward, recomputed = _tanh_runs(executor)
    assert forward == 4
    assert recomputed == 3  # the second stage begins with the kept result of the second layer


def test_checkpoints_pass_values_through():
    x = torch.ones(2)
    assert poptorch.recomputationCheckpoint(x) is x
    with pytest.raises(ValueError, match="tensors"):
        poptorch.recomputationCheckpoint(1)


def test_forward_may_create_constants():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                hidden = torch.max(self.first(x), torch.tensor(torch.finfo(x.dtype).min, device=x.device)).tanh()
            with poptorch.Block("second", ipu_id=1):
                return poptorch.identity_loss(self.second(hidden).tanh().square(), reduction="mean")

    model, x = Clamped(), torch.randn(3, 4)
    inner = torch.tanh(nn.functional.linear(x, model.first.weight, model.first.bias))
    expected = nn.functional.linear(inner, model.second.weight, model.second.bias).tanh().square().mean()
    gradient = torch.autograd.grad(expected, model.first.weight)[0]
    before = model.first.weight.detach().clone()
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(3)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.5))
    executor(x.repeat(3, 1))
    torch.testing.assert_close(model.first.weight.detach(), before - 0.5 * gradient, rtol=1e-4, atol=1e-6)
