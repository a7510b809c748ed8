"""Training on the executor, compared with hand-written torch loops."""

import copy

import pytest
import torch
from executor_models import Classifier, assert_trains_like_torch, images, options
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ipurun.emulator as poptorch


@pytest.mark.parametrize(("device_iterations", "accumulation", "replicas"), [(1, 1, 1), (2, 3, 2), (3, 1, 2)])
@pytest.mark.parametrize("reduction", [poptorch.ReductionType.Mean, poptorch.ReductionType.Sum])
def test_a_call_is_device_iterations_of_accumulated_and_reduced_updates(
    device_iterations, accumulation, replicas, reduction
):
    rows = 4
    torch.manual_seed(1)
    model = Classifier()
    reference = copy.deepcopy(model)
    opts = options(device_iterations, accumulation, replicas)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor = poptorch.trainingModel(model, opts, optimizer)
    x, labels = images(rows * device_iterations * accumulation * replicas)

    logits, loss = executor(x, labels)

    by_hand = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    parts = accumulation * replicas
    divisor = parts if reduction == poptorch.ReductionType.Mean else 1
    last = []
    for update in range(device_iterations):
        by_hand.zero_grad()
        last = []
        for part in range(parts):
            start = (update * parts + part) * rows
            result = reference(x[start : start + rows], labels[start : start + rows])
            (result[1] / divisor).backward()
            last.append(result)
        by_hand.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
    kept = last[-replicas:]
    torch.testing.assert_close(logits, torch.cat([r[0] for r in kept]).detach(), rtol=1e-4, atol=1e-5)
    expected_loss = torch.stack([r[1] for r in kept]).detach()
    torch.testing.assert_close(loss, expected_loss if replicas > 1 else expected_loss[0], rtol=1e-4, atol=1e-5)


def test_batch_norm_uses_micro_batches_and_updates_its_statistics_for_each():
    rows, accumulation = 4, 3
    torch.manual_seed(2)
    model = Classifier(nn.BatchNorm2d(4))
    reference = copy.deepcopy(model)
    executor = poptorch.trainingModel(
        model, options(accumulation=accumulation), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    x, labels = images(rows * accumulation)
    executor(x, labels)
    by_hand = torch.optim.SGD(reference.parameters(), lr=0.1)
    for part in range(accumulation):
        (reference(x[part * rows :][:rows], labels[part * rows :][:rows])[1] / accumulation).backward()
    by_hand.step()
    trained = model.state_dict()
    assert trained.pop("norm.num_batches_tracked") == 0  # an integer buffer is a constant on the device
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 11)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden)[0])
        logits = self.output(hidden)
        return {"logits": logits, "loss": functional.cross_entropy(logits.transpose(1, 2), tokens)}


class _Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 6, batch_first=True)
        self.output = nn.Linear(6, 2)

    def forward(self, x):
        logits = self.output(self.layer(x)[0][:, -1])
        return logits, functional.mse_loss(logits, x[:, 0, :2])


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        logits = self.output(self.embedding(tokens))
        return functional.cross_entropy(logits.view(-1, 7), tokens.view(-1))


class _TripledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 3  # deliberately not the derivative


class _Gradients(nn.Module):
    """No-grad regions, detached paths, a custom function, in-place operations, a counter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        with torch.no_grad():
            fixed = self.second(x)
        hidden = _TripledGradient.apply(self.first(x)) + fixed + self.second(x).detach()
        hidden = hidden + torch.exp(self.second(hidden)).tanh()
        hidden[:, 0] = hidden[:, 1] * 2
        copied = hidden.clone()
        copied.mul_(2.0).relu_()
        return poptorch.identity_loss((copied**2).mean(), reduction="none")


class _Aliases(nn.Module):
    """In-place writes to views of views and to new tensors, a gradient used in forward, a hook."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        turned = hidden.view(2, 2, -1).transpose(0, 1).contiguous()
        turned[0] += 1
        turned.reshape(-1)[::2].mul_(3)
        fresh = torch.zeros(4, 4)
        fresh += hidden
        fresh[0] = hidden[1]
        fresh.t().add_(1)
        inner = torch.autograd.grad((self.other(hidden) ** 2).sum(), hidden, create_graph=True)[0]
        recomputed = checkpoint(lambda h: torch.tanh(self.other(h)) * h, hidden, use_reentrant=False)
        return functional.mse_loss(turned.sum() + fresh + inner + recomputed, x)


@pytest.mark.parametrize(
    ("build", "sample"),
    [
        (_Attention, lambda: torch.randint(0, 11, (3, 5))),
        (lambda: _Recurrent(nn.LSTM), lambda: torch.randn(3, 5, 4)),
        (lambda: _Recurrent(nn.GRU), lambda: torch.randn(3, 5, 4)),
        (_Tied, lambda: torch.randint(0, 7, (3, 5))),
        (_Gradients, lambda: torch.randn(3, 4)),
        (_Aliases, lambda: torch.randn(4, 4)),
    ],
    ids=["attention", "lstm", "gru", "tied", "gradients", "aliases"],
)
def test_models_train_like_torch(build, sample):
    torch.manual_seed(3)
    assert_trains_like_torch(build(), (sample(),))


def test_frozen_parameters_keep_their_values():
    model = Classifier()
    model.conv.weight.requires_grad_(False)
    before = model.conv.weight.detach().clone()
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    executor(*images(4))
    assert torch.equal(model.conv.weight, before)
    assert not torch.equal(model.conv.bias, torch.zeros(4))


def test_an_optimizer_of_other_tensors_raises_a_key_error():
    executor = poptorch.trainingModel(Classifier(), optimizer=torch.optim.SGD(Classifier().parameters(), lr=0.1))
    with pytest.raises(KeyError):
        executor(*images(4))


def test_host_gradients_stay_empty_and_compile_has_no_side_effects():
    model = Classifier(nn.BatchNorm2d(4))
    before = copy.deepcopy(model.state_dict())
    generator_state = torch.get_rng_state()
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x, labels = images(4)
    copied = x.clone()
    executor.compile(x, labels)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert torch.equal(x, copied)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
