"""Autograd during a capture, and its traces afterwards."""

import copy
import gc

import pytest
import torch
from executor_models import assert_trains_like_torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipurun.emulator as poptorch


class _Looking(nn.Module):
    """Applies a function to the result of a layer and records the autograd attributes of its result."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function
        self.seen = []

    def forward(self, x):
        result = self.function(self.layer(x))
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        self.seen.append((tensor.is_leaf, tensor.requires_grad))
        return result


OPS = {
    "torch": torch.relu,
    "nop": poptorch.nop,
    "identity_loss": lambda x: poptorch.identity_loss(x, "sum"),
    "for_loop": lambda x: poptorch.for_loop(2, lambda y: y + 1, [x]),
    "cond": lambda x: poptorch.cond(x.sum() > 0, lambda y: y + 1, [x], lambda y: y - 1, [x]),
    "cpu": lambda x: poptorch.CPU(lambda y: y * 5, "times_five")(x),
    "dynamic_slice": lambda x: poptorch.dynamic_slice(x, 0, torch.tensor([0]), 2, 1),
    "checkpoint": lambda x: poptorch.recomputationCheckpoint([x]),
}


@pytest.mark.parametrize("name", OPS)
def test_inference_models_can_read_autograd_attributes(name):
    model = _Looking(OPS[name])
    result = poptorch.inferenceModel(model)(torch.randn(2, 3))
    assert model.seen == [(False, True)]
    tensor = result[0] if isinstance(result, (list, tuple)) else result
    assert not tensor.requires_grad


def test_an_op_without_gradient_is_not_a_leaf_in_inference():
    model = _Looking(lambda x: poptorch.ctc_beam_search_decoder(x.reshape(2, 1, 3), torch.tensor([2]), 0, 2, 1))
    poptorch.inferenceModel(model)(torch.randn(2, 3))
    assert model.seen == [(False, True)]


class _Remembering(nn.Module):
    """Writes the result of a layer to a buffer and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(2))
        self.plain = torch.zeros(2)

    def forward(self, x):
        y = self.layer(x)
        self.last.copy_(y[0])
        self.plain += y[0]
        return y, poptorch.identity_loss(y, "sum")


@pytest.mark.parametrize("wrap", [poptorch.inferenceModel, poptorch.trainingModel])
def test_tensors_that_forward_writes_have_no_history_afterwards(wrap):
    model = _Remembering()
    x = torch.ones(1, 2)
    expected = model.layer(x)[0].detach()
    executor = wrap(model)
    executor(x)
    executor.copyWeightsToHost()
    torch.testing.assert_close(model.last.detach(), expected)
    for tensor in (model.last, model.plain):
        assert tensor.is_leaf and not tensor.requires_grad
    assert model.plain.tolist() == [0.0, 0.0]
    executor.destroy()
    copy.deepcopy(model)


class _Checkpointed(nn.Module):
    """Two layers, the second with torch's checkpointing."""

    def __init__(self, probability, **how):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(probability))
        self.loss = nn.MSELoss()
        self.how = how

    def forward(self, x, target):
        hidden = self.first(x)
        out = checkpoint(self.second, hidden, **self.how) if self.how else self.second(hidden)
        return out, self.loss(out, target)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_models_train_like_torch(use_reentrant):
    torch.manual_seed(0)
    model = _Checkpointed(0.0, use_reentrant=use_reentrant)
    assert_trains_like_torch(model, (torch.randn(3, 4), torch.randn(3, 4)), steps=3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_does_not_change_random_numbers(use_reentrant):
    torch.manual_seed(0)
    plain = _Checkpointed(0.5)
    checkpointed = _Checkpointed(0.5, use_reentrant=use_reentrant)
    checkpointed.load_state_dict(plain.state_dict())
    x, target = torch.randn(3, 4), torch.randn(3, 4)
    for model in (plain, checkpointed):
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, poptorch.Options().randomSeed(3), optimizer)
        for _ in range(2):
            executor(x, target)
    torch.testing.assert_close(checkpointed.state_dict(), plain.state_dict())


class _GarbageInBackward(torch.autograd.Function):
    """The identity; its backward leaves the gradient in a cycle that only garbage collection frees."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        def same(depth):
            return grad if depth == 0 else same(depth - 1)

        return same(1)


class _Littering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))
        self.loss = nn.MSELoss()

    def forward(self, x, target):
        for layer in self.layers:
            x = _GarbageInBackward.apply(layer(x))
        return x, self.loss(x, target)


@pytest.mark.parametrize("allocations", [20, 59, 200])
def test_garbage_is_not_collected_while_capturing(allocations):
    torch.manual_seed(0)
    thresholds = gc.get_threshold()
    gc.set_threshold(allocations, 5, 1000)
    try:
        assert_trains_like_torch(_Littering(), (torch.randn(3, 4), torch.randn(3, 4)), steps=1)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


class _HandsOverItsWeights(torch.autograd.Function):
    """A product whose backward pass returns the saved weights themselves."""

    @staticmethod
    def forward(ctx, first, second):
        ctx.save_for_backward(first, second)
        return (first * second).sum()

    @staticmethod
    def backward(ctx, grad):
        first, second = ctx.saved_tensors
        return second, first


class _Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.second = nn.Parameter(torch.tensor([3.0, 5.0]))

    def forward(self, x):
        return poptorch.identity_loss(_HandsOverItsWeights.apply(self.first, self.second) + 0 * x.sum(), "sum")


def test_a_gradient_that_is_a_weight_is_the_weight_before_the_update():
    model = _Product()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(1))
    torch.testing.assert_close(model.first.detach(), torch.tensor([1 - 0.3, 2 - 0.5]))
    torch.testing.assert_close(model.second.detach(), torch.tensor([3 - 0.1, 5 - 0.2]))


class _Forces(nn.Module):
    """An energy and its gradient with respect to the positions, computed in forward."""

    def __init__(self, mark):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.mark = mark

    def forward(self, positions):
        if self.mark:
            positions = positions.detach().requires_grad_()
        energy = (self.layer(positions) ** 2).sum()
        return energy, torch.autograd.grad(energy, positions if self.mark else self.layer.weight)[0]


def test_inference_models_may_compute_gradients_in_forward(monkeypatch):
    monkeypatch.setenv("POPTORCH_EMULATOR_STRICT", "0")
    model = _Forces(mark=True)
    inference = poptorch.inferenceModel(model)
    for positions in (torch.randn(2, 3), torch.randn(2, 3)):
        energy, gradient = inference(positions)
        expected = model(positions)
        torch.testing.assert_close(energy, expected[0].detach())
        torch.testing.assert_close(gradient, expected[1])


def test_a_gradient_of_an_unmarked_tensor_is_explained(monkeypatch):
    monkeypatch.setenv("POPTORCH_EMULATOR_STRICT", "0")
    with pytest.raises(poptorch.Error, match=r"requires_grad_\(\)"):
        poptorch.inferenceModel(_Forces(mark=False))(torch.randn(2, 3))


def _double_a_slice(z):
    z[:, 1:] *= 2
    return z.sum()


def _add_to_a_row(z):
    row, squares = z[1], z * z
    row.add_(1.0)
    return (squares + z).sum()


def _clear_the_end(z):
    squares = (z * z).sum()
    z.view(-1)[3:].zero_()
    return squares + z.sum()


# In-place writes through views with an offset, and the same values without writing.
WRITES_TO_SAVED = {
    "slice": (_double_a_slice, lambda z: z[:, 0].sum() + 2 * z[:, 1:].sum()),
    "row": (_add_to_a_row, lambda z: (z * z).sum() + z.sum()),
    "flat": (_clear_the_end, lambda z: (z * z).sum() + z.reshape(-1)[:3].sum()),
}


class _Writing(nn.Module):
    """Overwrites a tensor that the backward pass of `exp` needs."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 4))
        self.write = write

    def forward(self, x):
        return poptorch.identity_loss(self.write(torch.exp(x * self.weight)), "sum")


@pytest.mark.parametrize("name", WRITES_TO_SAVED)
def test_writing_to_saved_tensors_does_not_change_gradients(name):
    write, value = WRITES_TO_SAVED[name]
    model, x = _Writing(write), torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
    weight = model.weight.detach().clone().requires_grad_()
    expected = torch.autograd.grad(value(torch.exp(x * weight)), weight)[0]
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    training(x)
    torch.testing.assert_close(weight.detach() - model.weight.detach(), expected)


class _Transposed(torch.nn.Module):
    """Convolves and transposes, as speech models do: the gradient of gelu lies in memory differently from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(8, 32, 3, padding=1)

    def forward(self, sound):
        frames = torch.nn.functional.gelu(self.conv(sound)).permute(0, 2, 1)
        return poptorch.identity_loss((frames * frames).mean(), reduction="none")


def test_the_gradient_of_gelu_before_a_transpose_is_right():
    torch.manual_seed(0)
    model, sound = _Transposed(), torch.randn(4, 8, 64)
    weight = model.conv.weight.detach().double().requires_grad_()
    hidden = torch.nn.functional.conv1d(sound.double(), weight, model.conv.bias.detach().double(), padding=1)
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))  # gelu in other words: torch 2.0 garbles its gradient
    (hidden * hidden).mean().backward()
    before = model.conv.weight.detach().clone()
    training = poptorch.trainingModel(model, poptorch.Options(), torch.optim.SGD(model.parameters(), lr=1.0))
    training(sound)
    training.copyWeightsToHost()
    torch.testing.assert_close(before - model.conv.weight.detach(), weight.grad.float(), atol=1e-5, rtol=1e-3)
