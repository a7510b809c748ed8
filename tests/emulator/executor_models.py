"""Small models shared by the tests of the executor, and hand-written torch loops to compare with."""

import copy

import torch
from torch import nn
from torch.nn import functional

import ipurun.emulator as poptorch


class Classifier(nn.Module):
    """A convolution, a norm and a linear layer; the loss when labels are given."""

    def __init__(self, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4) if norm is None else norm
        self.linear = nn.Linear(4 * 16, 3)

    def forward(self, x, labels=None):
        logits = self.linear(functional.relu(self.norm(self.conv(x))).flatten(1))
        if labels is None:
            return logits
        return logits, functional.cross_entropy(logits, labels)


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def images(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, 6, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def options(device_iterations=1, accumulation=1, replicas=1, **kwargs):
    opts = poptorch.Options()
    opts.deviceIterations(device_iterations)
    opts.replicationFactor(replicas)
    opts.Training.gradientAccumulation(accumulation)
    for setter, value in kwargs.items():
        getattr(opts, setter)(value)
    return opts


def last_loss(result):
    if isinstance(result, torch.Tensor):
        return result
    return result["loss"] if isinstance(result, dict) else result[-1]


def assert_trains_like_torch(model, inputs, steps=3, lr=0.05, tolerance=1e-5):
    """Train a model on the executor and a copy by hand, with one micro-batch per update."""
    reference = copy.deepcopy(model)
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=lr))
    optimizer = torch.optim.SGD(reference.parameters(), lr=lr)
    for step in range(steps):
        # Other values each time: the capture must not contain those of the first call.
        varied = [t * (1 + 0.1 * step) if t.is_floating_point() else t.roll(step, 0) for t in inputs]
        got = last_loss(executor(*varied))
        optimizer.zero_grad()
        expected = last_loss(reference(*varied))
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(got, expected.detach(), rtol=tolerance, atol=tolerance)
    expected_state = reference.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected_state[name], rtol=tolerance, atol=tolerance, msg=name)
    executor.destroy()
