"""Finding the loss of a training model."""

import copy

import pytest
import torch
from executor_models import assert_trains_like_torch
from torch import nn
from torch.nn import functional

import ipurun.emulator as poptorch


class _Model(nn.Module):
    """A linear layer and a function of its output and a target."""

    def __init__(self, finish):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.finish = finish

    def forward(self, x, target):
        return self.finish(self.layer(x), target)


FLOATS = torch.linspace(-1.0, 1.0, 6).reshape(2, 3)
SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
CLASSES = torch.tensor([0, 2])

LOSSES = {
    "l1": (functional.l1_loss, FLOATS),
    "mse": (functional.mse_loss, FLOATS),
    "smooth_l1": (functional.smooth_l1_loss, FLOATS),
    "cross_entropy": (functional.cross_entropy, CLASSES),
    "nll": (lambda y, t: functional.nll_loss(functional.log_softmax(y, 1), t), CLASSES),
    "bce": (lambda y, t: functional.binary_cross_entropy(torch.sigmoid(y), t.abs().clamp(max=1)), FLOATS),
    "bce_logits": (lambda y, t: functional.binary_cross_entropy_with_logits(y, t.abs()), FLOATS),
    "kl_div": (lambda y, t: functional.kl_div(functional.log_softmax(y, 1), t.softmax(1)), FLOATS),
    "poisson": (functional.poisson_nll_loss, FLOATS.abs()),
    "hinge": (functional.hinge_embedding_loss, SIGNS),
    "soft_margin": (functional.soft_margin_loss, SIGNS),
    "cosine": (lambda y, t: functional.cosine_embedding_loss(y, t, torch.ones(2)), FLOATS),
    "margin_ranking": (lambda y, t: functional.margin_ranking_loss(y, t, SIGNS.to(y.device)), FLOATS),
    "triplet": (lambda y, t: functional.triplet_margin_loss(y, t, -t), FLOATS),
    "module": (nn.MSELoss(reduction="sum"), FLOATS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_functions_of_torch_are_found(name):
    function, target = LOSSES[name]
    torch.manual_seed(0)
    assert_trains_like_torch(_Model(function), (torch.randn(2, 4), target), steps=2)


@pytest.mark.parametrize(
    "finish",
    [
        lambda y, t: {"deep": [(y, {"loss": functional.mse_loss(y, t)})]},
        lambda y, t: (functional.mse_loss(y, t), y),
        lambda y, t: functional.mse_loss(y, t) * 1.0,
    ],
    ids=["nested", "first", "used afterwards"],
)
def test_the_loss_may_be_anywhere_in_the_result(finish):
    torch.manual_seed(0)
    model = _Model(finish)
    reference = copy.deepcopy(model.layer)
    x = torch.randn(2, 4)
    functional.mse_loss(reference(x), FLOATS).backward()
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))(x, FLOATS)
    torch.testing.assert_close(model.layer.weight, reference.weight - 0.5 * reference.weight.grad)


def _weight_after_one_step(finish, scale_of_gradient):
    torch.manual_seed(0)
    model = _Model(finish)
    reference = copy.deepcopy(model.layer)
    x = torch.randn(2, 4)
    scale_of_gradient(reference(x)).backward()
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(x, FLOATS)
    torch.testing.assert_close(model.layer.weight, reference.weight - 0.1 * reference.weight.grad)


def test_identity_loss_around_other_losses_is_the_loss():
    def finish(y, target):
        parts = functional.mse_loss(y, target) + 5 * functional.l1_loss(y, target)
        return poptorch.identity_loss(parts, reduction="mean")

    _weight_after_one_step(finish, lambda y: functional.mse_loss(y, FLOATS) + 5 * functional.l1_loss(y, FLOATS))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_identity_loss_reduces(reduction):
    _weight_after_one_step(
        lambda y, t: poptorch.identity_loss((y - t) ** 2, reduction=reduction),
        lambda y: getattr((y - FLOATS) ** 2, reduction)(),
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_part_of_the_loss_is_a_one_element_vector(reduction):
    def finish(y, target):
        part = poptorch.identity_loss(y - target, reduction=reduction)
        squared = 5 * part * part
        return part, squared, poptorch.identity_loss(squared, reduction="mean")

    torch.manual_seed(0)
    model = _Model(finish)
    x = torch.randn(2, 4)
    part = getattr(model.layer(x) - FLOATS, reduction)().detach()
    results = poptorch.trainingModel(model)(x, FLOATS)
    assert [tuple(result.shape) for result in results] == [(1,), (1,), ()]
    for result, expected in zip(results, [part, 5 * part**2, 5 * part**2]):
        torch.testing.assert_close(result.reshape(()), expected)
    shapes = [tuple(result.shape) for result in poptorch.inferenceModel(model)(x, FLOATS)]
    assert shapes == [(), (), ()]


def test_a_part_of_the_loss_that_is_not_reduced_keeps_its_shape():
    def finish(y, target):
        part = poptorch.identity_loss(y - target, reduction="none")
        return part, poptorch.identity_loss(part * part, reduction="sum")

    part, loss = poptorch.trainingModel(_Model(finish))(torch.randn(2, 4), FLOATS)
    assert tuple(part.shape) == (2, 3)
    assert tuple(loss.shape) == ()


def test_a_loss_that_no_result_depends_on_is_ignored():
    def finish(y, target):
        functional.l1_loss(y, target)
        return functional.mse_loss(y, target)

    _weight_after_one_step(finish, lambda y: functional.mse_loss(y, FLOATS))


def test_no_loss_is_an_error():
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        poptorch.trainingModel(_Model(lambda y, t: (y - t).sum()))(torch.randn(2, 4), FLOATS)


@pytest.mark.parametrize(
    "finish",
    [
        lambda y, t: functional.mse_loss(y, t) + functional.l1_loss(y, t),
        lambda y, t: (functional.mse_loss(y, t), functional.l1_loss(y, t)),
    ],
    ids=["added", "both returned"],
)
def test_several_losses_are_an_error(finish):
    with pytest.raises(poptorch.Error, match="Multiple independent losses found in graph"):
        poptorch.trainingModel(_Model(finish))(torch.randn(2, 4), FLOATS)


def test_a_loss_of_several_elements_is_an_error():
    model = _Model(lambda y, t: functional.mse_loss(y, t, reduction="none"))
    with pytest.raises(poptorch.Error, match="must be a scalar tensor"):
        poptorch.trainingModel(model)(torch.randn(2, 4), FLOATS)


def test_class_weights_are_refused():
    model = _Model(lambda y, t: functional.cross_entropy(y, t, weight=torch.ones(3)))
    with pytest.raises(poptorch.Error, match="weight"):
        poptorch.trainingModel(model)(torch.randn(2, 4), CLASSES)


def test_losses_are_ordinary_operations_in_inference():
    model = _Model(lambda y, t: functional.mse_loss(y, t) + functional.l1_loss(y, t))
    x = torch.randn(2, 4)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x, FLOATS), model(x, FLOATS).detach())
