"""A model with its loss: which item is the target, which output the loss reads, what is returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_toys import Net
from torch import nn

from ipurun import emulator
from ipurun.config.schema import LossConfig
from ipurun.inspect.loss import ModelWithLoss, check_loss, make_loss


def _loss(name: Any = "CrossEntropyLoss", **keys: Any) -> LossConfig:
    made = LossConfig(name=name)
    for key, value in keys.items():
        setattr(made, key, value)
    return made


def _wrapped(model: nn.Module, config: LossConfig, returns_output: bool = False) -> ModelWithLoss:
    return ModelWithLoss(model, make_loss(config, emulator), config, returns_output)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1])


class TwoOutputs(nn.Module):
    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.named = named

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.out(x), x.sum()
        return {"hidden": second, "scores": first} if self.named else (second, first)


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "cross_entropy", "torch.nn.CrossEntropyLoss"])
def test_losses_by_name(name: str) -> None:
    model = Net()
    expected = nn.functional.cross_entropy(model(X), Y)
    assert torch.equal(_wrapped(model, _loss(name))(X, Y), expected)


def test_output_is_returned_with_the_loss() -> None:
    model = Net()
    output, loss = _wrapped(model, _loss(), returns_output=True)(X, Y)
    assert torch.equal(output, model(X)) and loss.dim() == 0


def test_arguments_of_the_loss() -> None:
    model = Net()
    wrapped = _wrapped(model, _loss(args={"ignore_index": 0}))
    assert torch.equal(wrapped(X, Y), nn.functional.cross_entropy(model(X), Y, ignore_index=0))


def test_target_by_index_and_by_name() -> None:
    model = Net()
    expected = nn.functional.cross_entropy(model(X), Y)
    assert torch.equal(_wrapped(model, _loss(target="0"))(Y, X), expected)
    assert torch.equal(_wrapped(model, _loss())(x=X, labels=Y), expected)
    assert torch.equal(_wrapped(model, _loss(target="kind"))(x=X, kind=Y), expected)


def test_output_by_index_and_by_name() -> None:
    model = TwoOutputs()
    assert _wrapped(model, _loss(output="1"))(X, Y) == nn.functional.cross_entropy(model.out(X), Y)
    model = TwoOutputs(named=True)
    assert _wrapped(model, _loss(output="scores"))(X, Y) == nn.functional.cross_entropy(model.out(X), Y)


def test_a_custom_loss_is_reduced() -> None:
    model = Net()
    values = (1 - model(X).gather(1, Y.unsqueeze(1)).squeeze(1)).abs()
    for reduction, expected in (("mean", values.mean()), ("sum", values.sum())):
        wrapped = _wrapped(model, _loss("run_toys.margin", reduction=reduction))
        assert torch.allclose(wrapped(X, Y), expected)


def test_losses_unknown_to_poptorch_use_identity_loss() -> None:
    assert make_loss(_loss("HuberLoss"), emulator).reduction == "mean"
    assert make_loss(_loss("MSELoss"), emulator).reduction is None
    assert make_loss(_loss("huber_loss"), emulator).reduction == "mean"
    assert make_loss(_loss("binary_cross_entropy_with_logits"), emulator).reduction is None
    assert make_loss(_loss("run_toys.margin"), emulator).reduction == "mean"


def test_model_with_its_own_loss_gets_the_whole_batch() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"logits": x, "loss": y.float().mean()}

    wrapped = ModelWithLoss(Own(), None, _loss(None), returns_output=False)
    assert wrapped(X, Y) == Y.float().mean()
    wrapped = ModelWithLoss(Own(), None, _loss(None), returns_output=True)
    assert set(wrapped(X, Y)) == {"logits", "loss"}


def test_parameters_keep_their_names() -> None:
    wrapped = _wrapped(Net(), _loss())
    assert {name for name, _ in wrapped.named_parameters()} == {f"model.{name}" for name, _ in Net().named_parameters()}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (_loss("CrossEntropyLos"), "no loss `CrossEntropyLos`"),
        (_loss("Linear"), "no loss `Linear`"),
        (_loss("nowhere.loss"), "nowhere"),
        (_loss("CrossEntropyLoss", args={"ignore_indx": 1}), "ignore_indx"),
        (_loss("run_toys.margin", args={"strength": 1}), "strength"),
        (_loss(None, args={"ignore_index": 1}), "`loss.name` is not"),
    ],
)
def test_wrong_losses(config: LossConfig, part: str) -> None:
    (problem,) = check_loss(config)
    assert part in problem.what


def test_right_losses() -> None:
    for config in (_loss(), _loss(None), _loss("mse_loss"), _loss("run_toys.margin", args={"power": 2})):
        assert check_loss(config) == []


def test_a_batch_of_one_item_is_its_own_target() -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert torch.allclose(_wrapped(Same(), _loss("MSELoss"))(X), X.square().mean())


class TwoLosses(nn.Module):
    """Adds up the losses of two tasks itself, as the pretraining models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.out(x)
        loss = nn.functional.cross_entropy(scores, labels) + nn.functional.cross_entropy(-scores, labels)
        return {"loss": loss, "logits": scores}


@pytest.mark.parametrize("returns_output", [False, True])
def test_the_sum_of_a_models_own_losses_is_the_loss(returns_output: bool) -> None:
    model = TwoLosses()
    wrapped = ModelWithLoss(model, None, _loss(None), returns_output, emulator.identity_loss)
    expected = model(X, Y)
    optimizer = emulator.optim.SGD(wrapped.parameters(), lr=0.5)
    weights = model.out.weight.detach().clone()
    gradient = torch.autograd.grad(expected["loss"], model.out.weight)[0]
    result = emulator.trainingModel(wrapped, optimizer=optimizer)(x=X, labels=Y)
    loss = result["loss"] if returns_output else result
    assert torch.allclose(loss, expected["loss"].detach())
    assert torch.allclose(model.out.weight, weights - 0.5 * gradient, atol=1e-6)


def test_is_tracing_is_true_while_forward_is_captured() -> None:
    class ReadsFlag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if not torch.jit.is_tracing() and mask.all():
                return self.out(x)
            return self.out(x * mask)

    model, mask = ReadsFlag(), torch.tensor([1.0, 0.0, 1.0, 1.0])
    wrapped = ModelWithLoss(model, make_loss(_loss(), emulator), _loss(), returns_output=True)
    output, _ = emulator.inferenceModel(wrapped)(X, mask.expand(5, 4), Y)
    assert torch.allclose(output, model.out(X * mask), atol=1e-6)
    assert not torch.jit.is_tracing()


def test_a_model_that_fails_while_is_tracing_is_true_is_captured_with_false() -> None:
    class ExpectsTensorSizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.ceil(x.shape[0] / 2) if torch.jit.is_tracing() else x.shape[0]
            return x * rows

    wrapped = ModelWithLoss(ExpectsTensorSizes(), None, _loss(None), returns_output=True)
    model = emulator.inferenceModel(wrapped)
    wrapped.tracing_flag.retry(lambda: model.compile(X))
    assert torch.equal(model(X), X * 5)


def test_a_model_that_fails_both_ways_raises_its_first_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("first error" if torch.jit.is_tracing() else "second error")

    wrapped = ModelWithLoss(Fails(), None, _loss(None), returns_output=True)
    with pytest.raises(ValueError, match="first error"):
        wrapped.tracing_flag.retry(lambda: wrapped(X))
