"""The step on the device: which item is the target, which output the loss reads, what comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_toys import Net
from torch import nn

from ipurun import emulator
from ipurun.config.schema import LossConfig
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import leading_rows, map_tensors, pick, split_target, target_of, with_loss
from ipurun.inspect.loss import ModelWithLoss, check_loss, make_loss
from ipurun.inspect.model import stop_caching


def _loss(name: Any = "CrossEntropyLoss", **keys: Any) -> LossConfig:
    made = LossConfig(name=name)
    for key, value in keys.items():
        setattr(made, key, value)
    return made


def _step(model: nn.Module, config: LossConfig, returns_output: bool = False) -> ModelWithLoss:
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
    assert torch.equal(_step(model, _loss(name))(X, Y), expected)


def test_output_beside_the_loss() -> None:
    model = Net()
    output, loss = _step(model, _loss(), returns_output=True)(X, Y)
    assert torch.equal(output, model(X)) and loss.dim() == 0


def test_arguments_of_the_loss() -> None:
    model = Net()
    step = _step(model, _loss(args={"ignore_index": 0}))
    assert torch.equal(step(X, Y), nn.functional.cross_entropy(model(X), Y, ignore_index=0))


def test_target_by_index_and_by_name() -> None:
    model = Net()
    expected = nn.functional.cross_entropy(model(X), Y)
    assert torch.equal(_step(model, _loss(target="0"))(Y, X), expected)
    assert torch.equal(_step(model, _loss())(x=X, labels=Y), expected)
    assert torch.equal(_step(model, _loss(target="kind"))(x=X, kind=Y), expected)


def test_output_by_index_and_by_name() -> None:
    model = TwoOutputs()
    assert _step(model, _loss(output="1"))(X, Y) == nn.functional.cross_entropy(model.out(X), Y)
    model = TwoOutputs(named=True)
    assert _step(model, _loss(output="scores"))(X, Y) == nn.functional.cross_entropy(model.out(X), Y)


def test_a_custom_loss_is_reduced() -> None:
    model = Net()
    values = (1 - model(X).gather(1, Y.unsqueeze(1)).squeeze(1)).abs()
    for reduction, expected in (("mean", values.mean()), ("sum", values.sum())):
        step = _step(model, _loss("run_toys.margin", reduction=reduction))
        assert torch.allclose(step(X, Y), expected)


def test_losses_poptorch_does_not_know_go_through_identity_loss() -> None:
    assert make_loss(_loss("HuberLoss"), emulator).reduction == "mean"
    assert make_loss(_loss("MSELoss"), emulator).reduction is None
    assert make_loss(_loss("huber_loss"), emulator).reduction == "mean"
    assert make_loss(_loss("binary_cross_entropy_with_logits"), emulator).reduction is None
    assert make_loss(_loss("run_toys.margin"), emulator).reduction == "mean"


def test_model_with_its_own_loss_gets_the_whole_batch() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return {"logits": x, "loss": y.float().mean()}

    step = ModelWithLoss(Own(), None, _loss(None), returns_output=False)
    assert step(X, Y) == Y.float().mean()
    step = ModelWithLoss(Own(), None, _loss(None), returns_output=True)
    assert set(step(X, Y)) == {"logits", "loss"}


def test_the_model_keeps_its_names() -> None:
    step = _step(Net(), _loss())
    assert {name for name, _ in step.named_parameters()} == {f"model.{name}" for name, _ in Net().named_parameters()}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (_loss("CrossEntropyLos"), "no loss `CrossEntropyLos`"),
        (_loss("Linear"), "no loss `Linear`"),
        (_loss("nowhere.loss"), "nowhere"),
        (_loss("CrossEntropyLoss", args={"ignore_indx": 1}), "ignore_indx"),
        (_loss("run_toys.margin", args={"strength": 1}), "strength"),
        (_loss(None, args={"ignore_index": 1}), "no loss is"),
    ],
)
def test_wrong_losses(config: LossConfig, part: str) -> None:
    (problem,) = check_loss(config)
    assert part in problem.what


def test_right_losses() -> None:
    for config in (_loss(), _loss(None), _loss("mse_loss"), _loss("run_toys.margin", args={"power": 2})):
        assert check_loss(config) == []


def test_a_missing_item_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="the keys a, b"):
        split_target((), {"a": 1, "b": 2}, None)
    with pytest.raises(ConfigError, match="2 items by position"):
        split_target((1, 2), {}, "5")
    assert target_of({"a": 1}, None) is None


def test_a_batch_of_one_item_is_its_own_target() -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert torch.allclose(_step(Same(), _loss("MSELoss"))(X), X.square().mean())


@pytest.mark.parametrize(("output", "shown"), [(None, "NoneType"), (3.5, "float"), ((), "an empty tuple")])
def test_a_model_that_returns_no_tensor_is_told_so(output: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"the model returns {shown}"):
        pick(output, None)


def test_picking_from_outputs() -> None:
    t = torch.zeros(1)
    assert pick(t, None) is t and pick((1, t), None, loss=True) is t and pick({"loss": t, "x": 1}, None, loss=True) is t
    assert pick({"loss": 1, "logits": t}, None) is t and pick((t, 1), None) is t
    assert pick({"loss": 1, "other": t}, None) is t
    for output, which in ((t, "3"), ((1, 2), "5"), ({"a": 1}, "b")):
        with pytest.raises(ConfigError, match=r"loss\.output"):
            pick(output, which)


def test_mapping_keeps_containers() -> None:
    nested = {"a": [torch.ones(2), 3], "b": (torch.ones(1),)}
    doubled = map_tensors(lambda t: t * 2, nested)
    assert isinstance(doubled["b"], tuple) and doubled["a"][1] == 3 and doubled["a"][0].tolist() == [2, 2]
    assert leading_rows({"n": torch.tensor(3), "x": torch.zeros(6, 2)}) == 6


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
    step = ModelWithLoss(model, None, _loss(None), returns_output, emulator.identity_loss)
    expected = model(X, Y)
    optimizer = emulator.optim.SGD(step.parameters(), lr=0.5)
    weights = model.out.weight.detach().clone()
    gradient = torch.autograd.grad(expected["loss"], model.out.weight)[0]
    result = emulator.trainingModel(step, optimizer=optimizer)(x=X, labels=Y)
    loss = result["loss"] if returns_output else result
    assert torch.allclose(loss, expected["loss"].detach())
    assert torch.allclose(model.out.weight, weights - 0.5 * gradient, atol=1e-6)


@pytest.mark.parametrize("output", [(1.0, 2.0), [1.0, 2.0], {"loss": 2.0, "other": 1.0}])
def test_replacing_the_loss_keeps_the_structure(output: Any) -> None:
    new = torch.tensor(7.0)
    changed = with_loss(output, None, new)
    assert type(changed) is type(output) and len(changed) == 2
    assert pick(changed, None, loss=True) is new and pick(output, None, loss=True) == 2.0


def test_forward_hears_that_it_is_captured() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if not torch.jit.is_tracing() and mask.all():
                return self.out(x)
            return self.out(x * mask)

    model, mask = Asks(), torch.tensor([1.0, 0.0, 1.0, 1.0])
    step = ModelWithLoss(model, make_loss(_loss(), emulator), _loss(), returns_output=True)
    output, _ = emulator.inferenceModel(step)(X, mask.expand(5, 4), Y)
    assert torch.allclose(output, model.out(X * mask), atol=1e-6)
    assert not torch.jit.is_tracing()


def test_a_model_that_takes_the_answer_for_more_hears_the_other_one() -> None:
    class TakesSizesForTensors(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.ceil(x.shape[0] / 2) if torch.jit.is_tracing() else x.shape[0]
            return x * rows

    step = ModelWithLoss(TakesSizesForTensors(), None, _loss(None), returns_output=True)
    model = emulator.inferenceModel(step)
    step.answer.attempt(lambda: model.compile(X))
    assert torch.equal(model(X), X * 5)


def test_a_model_that_fails_either_way_fails_as_it_did_first() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("when told" if torch.jit.is_tracing() else "when not")

    step = ModelWithLoss(Fails(), None, _loss(None), returns_output=True)
    with pytest.raises(ValueError, match="when told"):
        step.answer.attempt(lambda: step(X))


def test_caches_for_generating_are_switched_off() -> None:
    part = nn.Linear(2, 2)
    part.config = SimpleNamespace(use_cache=True)
    model = nn.Sequential(part, nn.ReLU())
    model.config = SimpleNamespace(hidden_size=2)
    assert stop_caching(model) and part.config.use_cache is False
    assert not stop_caching(model)
