"""Random models, options and optimizers compared with a loop in plain torch: losses, weights and buffers.

Each seed is one case: two or three layers of `LAYERS`, a split of the batch, a reduction, an optimizer, an output mode,
and two calls with different learning rates. The loop does not use the emulator.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipurun.emulator as poptorch

STEPS, FEATURES, ROWS = 3, 4, 2


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


class _Layer(nn.Module):
    """A linear layer followed by another operation."""

    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.then = then

    def forward(self, x):
        return self.then(self, x, self.linear(x))


def _write_through_views(layer, x, y):
    y = y * 1.0
    y[:, 0] = y[:, 0] * 2 + x[:, 1]
    y.view(-1)[::2].add_(0.5)
    return y


def _follow_the_mean(layer, x, y):
    with torch.no_grad():
        layer.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
    return y - layer.mean


def _attend(layer, x, y):
    return x + torch.einsum("bts,bsf->btf", (y @ x.transpose(1, 2)).softmax(-1), y)


def _tie_and_detach(layer, x, y):
    return layer.linear(torch.tanh(y)) * x.detach().sigmoid() + y.detach()


LAYERS = {
    "plain": lambda: _Layer(lambda layer, x, y: torch.tanh(y)),
    "views": lambda: _Layer(_write_through_views),
    "buffer": lambda: _Layer(_follow_the_mean),
    "attention": lambda: _Layer(_attend),
    "tied": lambda: _Layer(_tie_and_detach),
    "custom": lambda: _Layer(lambda layer, x, y: _Straight.apply(4 * y) / 4 + x),
    "mixes rows": lambda: _Layer(lambda layer, x, y: y - y.mean(0, keepdim=True) + y.cumsum(0)),
    "picks": lambda: _Layer(lambda layer, x, y: y.gather(1, x.argsort(1)) + y.max(1, keepdim=True)[0]),
    "norm": lambda: nn.LayerNorm(FEATURES),
    "batch norm": lambda: nn.BatchNorm1d(STEPS),
    "products": lambda: _Layer(lambda layer, x, y: torch.stack([y[:, : t + 1].prod(1) for t in range(STEPS)], 1)),
}
WRITE_BUFFERS = ("buffer",)

# Each optimizer of PopTorch with the equivalent one of torch.
OPTIMIZERS = {
    "sgd": (poptorch.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "combined sgd": (poptorch.optim.SGD, torch.optim.SGD, {"momentum": 0.5, "weight_decay": 0.1}),
    "adam": (poptorch.optim.Adam, torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}),
    "adamw": (poptorch.optim.AdamW, torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}),
    "rmsprop": (poptorch.optim.RMSprop, torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-1, "momentum": 0.5}),
}


class _Model(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.layers = nn.Sequential(*[LAYERS[name]() for name in names])

    def forward(self, x, labels):
        logits = self.layers(x).mean(1)
        return logits, functional.cross_entropy(logits, labels)


class _Case:
    def __init__(self, seed):
        choose = random.Random(seed)
        self.names = choose.sample(sorted(LAYERS), choose.choice([2, 3]))
        self.iterations, self.accumulation = choose.choice([1, 2]), choose.choice([1, 2, 4])
        self.replicas = choose.choice([1, 2])
        self.mean = choose.random() < 0.5
        self.mode = choose.choice(["All", "Final", "Sum"])
        self.optimizer = choose.choice(sorted(OPTIMIZERS))
        self.loss_scaling = choose.choice([1.0, 64.0])
        self.runs = [
            (iteration, step, replica)
            for iteration in range(self.iterations)
            for step in range(self.accumulation)
            for replica in range(self.replicas)
        ]

    def options(self):
        options = poptorch.Options().deviceIterations(self.iterations).replicationFactor(self.replicas)
        options.outputMode(getattr(poptorch.OutputMode, self.mode))
        options.broadcastBuffers(not any(name in WRITE_BUFFERS for name in self.names))
        reduction = poptorch.ReductionType.Mean if self.mean else poptorch.ReductionType.Sum
        options.Training.gradientAccumulation(self.accumulation).accumulationAndReplicationReductionType(reduction)
        return options

    def optimizers(self, model, reference):
        on_device, in_torch, values = OPTIMIZERS[self.optimizer]
        extra = {"use_combined_accum": True} if self.optimizer == "combined sgd" else {}
        return (
            on_device(model.parameters(), lr=0.02, loss_scaling=self.loss_scaling, **values, **extra),
            in_torch(reference.parameters(), lr=0.02, **values),
        )

    def collect(self, results):
        """Return the result of a call from one output of every run."""
        last = (self.iterations - 1, self.accumulation - 1)
        if self.mode == "Sum":
            parts = [sum(results[run] for run in self.runs if run[2] == replica) for replica in range(self.replicas)]
        else:
            parts = [results[run] for run in self.runs if self.mode == "All" or run[:2] == last]
        joined = torch.stack(parts) if parts[0].dim() == 0 else torch.cat(parts)
        return joined.squeeze(0) if len(parts) == 1 and parts[0].dim() == 0 else joined


def _call_in_torch(case, model, optimizer, buffers, x, labels):
    """Run one call: every replica has separate buffers, and an update follows each iteration."""
    logits, losses = {}, {}
    divisor = case.accumulation * case.replicas if case.mean else 1
    for number, run in enumerate(case.runs):
        rows = slice(number * ROWS, (number + 1) * ROWS)
        model.load_state_dict(buffers[run[2]], strict=False)
        output, loss = model(x[rows], labels[rows])
        (loss / divisor).backward()
        buffers[run[2]] = {name: tensor.clone() for name, tensor in model.named_buffers()}
        logits[run], losses[run] = output.detach(), loss.detach()
        if run[1:] == (case.accumulation - 1, case.replicas - 1):
            optimizer.step()
            optimizer.zero_grad()
    return case.collect(logits), case.collect(losses)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_case_trains_like_torch(seed):
    case = _Case(seed)
    torch.manual_seed(seed)
    model, reference = _Model(case.names), _Model(case.names)
    reference.load_state_dict(model.state_dict())
    optimizer, in_torch = case.optimizers(model, reference)
    buffers = [{name: tensor.clone() for name, tensor in model.named_buffers()} for _ in range(case.replicas)]
    training = poptorch.trainingModel(model, case.options(), optimizer)
    for learning_rate in (0.02, 0.005):
        x = torch.randn(ROWS * len(case.runs), STEPS, FEATURES)
        labels = torch.randint(0, FEATURES, (len(x),))
        optimizer.param_groups[0]["lr"] = in_torch.param_groups[0]["lr"] = learning_rate
        training.setOptimizer(optimizer)
        got = training(x, labels)
        expected = _call_in_torch(case, reference, in_torch, buffers, x, labels)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    trained = model.state_dict()
    floats = {name: buffer for name, buffer in buffers[0].items() if buffer.is_floating_point()}
    for name, tensor in [*reference.named_parameters(), *floats.items()]:
        torch.testing.assert_close(trained[name], tensor.detach(), rtol=1e-3, atol=1e-4, msg=f"{name} of {vars(case)}")
    training.destroy()
