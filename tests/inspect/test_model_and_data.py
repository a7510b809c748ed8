"""Inspection: the facts of a model and its data, and all problems of a config at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_harness import config, inspected
from run_toys import Net, Stream
from torch import nn

from ipurun import engine
from ipurun.errors import ConfigError
from ipurun.inspect.facts import Purpose
from ipurun.inspect.model import stop_caching
from ipurun.inspect.model_and_data import facts_without_data, inspect
from ipurun.inspect.sampling import seeded


def test_facts() -> None:
    facts = inspected(config(data={"_target_": "run_toys.triple"})).facts
    assert (facts.engine, facts.available_ipus, facts.train_samples) == ("cpu", None, 32)
    assert facts.split_samples == {"train": 32, "eval": 8, "test": 6} and facts.eval_split == "eval"
    assert facts.module_names == ("first", "drop", "second")
    assert facts.parameters == 4 * 8 + 8 + 8 * 3 + 3
    assert facts.written_buffers == () and facts.returns_loss is False


class NoForward(nn.Module):
    pass


class NoLoss(nn.Module):
    """A model whose `forward` takes the target and returns something else than a loss."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.layer, self.returns = nn.Linear(4, 3), returns

    def forward(self, x: Any, target: Any) -> Any:
        output = self.layer(x)
        loss = nn.functional.cross_entropy(output, target, reduction="none")
        kinds = {"output": output, "target": (output, target), "mapping": {"logits": output}, "loss": (output, loss)}
        return kinds[self.returns]


def problem_of(**keys: Any) -> Any:
    with pytest.raises(ConfigError) as caught:
        inspected(config(**keys))
    (problem,) = caught.value.problems
    return problem


def test_a_model_without_forward_is_found() -> None:
    problem = problem_of(model={"_target_": f"{__name__}.NoForward"})
    assert problem.what == "`model`: NoForward has no `forward`"
    assert problem.fix.startswith("define forward(self, ...) in NoForward")


@pytest.mark.parametrize(
    ("model", "seen"),
    [
        ({"_target_": "run_toys.Net"}, "too many positional arguments"),
        ({"_target_": f"{__name__}.NoLoss", "returns": "output"}, "a tensor of shape [2, 3]"),
        ({"_target_": f"{__name__}.NoLoss", "returns": "target"}, "torch.int64"),
        ({"_target_": f"{__name__}.NoLoss", "returns": "mapping"}, "it has logits"),
    ],
)
def test_a_model_without_a_loss_is_found(model: Any, seen: str) -> None:
    problem = problem_of(model=model, loss__name=None)
    assert problem.what == "the model has no loss: `loss.name` is not set, and forward does not return one"
    assert seen in problem.seen
    assert "loss.name=CrossEntropyLoss" in problem.fix and "return (output, loss) from forward" in problem.fix


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("data", ["Stream", "PlainIterable", "ShuffledStream"])
def test_a_model_without_a_loss_is_found_with_a_stream(data: str, purpose: Purpose) -> None:
    settings = config(data={"_target_": f"run_toys.{data}"}, model={"_target_": "run_toys.Net"}, loss__name=None)
    with pytest.raises(ConfigError, match="the model has no loss"):
        inspect(settings, engine.load("cpu"), purpose)


class OnceOnly:
    """An iterator: it can be read once."""

    def __init__(self) -> None:
        self.left = iter(Stream(8))

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.left)


class CountingStream(Stream):
    """Changes its own state when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        return super().__iter__()


def test_the_trial_leaves_a_stream_to_the_run() -> None:
    own_loss = {"model": {"_target_": "run_toys.OwnLossNet"}, "loss__name": None}
    data = inspected(config(data={"_target_": f"{__name__}.OnceOnly"}, **own_loss)).splits["train"]
    assert len(list(data)) == 8
    data = inspected(config(data={"_target_": f"{__name__}.CountingStream"}, **own_loss)).splits["train"]
    assert data.begun == 0


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("returns", ["output", "loss"])
def test_large_models_are_tried_without_memory(monkeypatch: Any, purpose: Purpose, returns: str) -> None:
    monkeypatch.setattr("ipurun.inspect.model.LARGEST_TRIED", 1)
    monkeypatch.setattr("ipurun.inspect.model_and_data.LARGEST_TRIED", 1)
    settings = config(model={"_target_": f"{__name__}.NoLoss", "returns": returns}, loss__name=None)
    if returns == "loss":
        inspect(settings, engine.load("cpu"), purpose)
        return
    with pytest.raises(ConfigError, match="the model has no loss"):
        inspect(settings, engine.load("cpu"), purpose)


def test_a_model_may_return_a_loss_for_each_sample() -> None:
    inspected(config(model={"_target_": f"{__name__}.NoLoss", "returns": "loss"}, loss__name=None))


def test_a_stream_has_no_length() -> None:
    facts = inspected(config(data={"_target_": "run_toys.Stream"})).facts
    assert facts.train_samples is None


def test_samples_are_counted_as_the_sampler_draws_them() -> None:
    assert inspected(config(loader__sampler={"_target_": "run_toys.EveryOther"})).facts.train_samples == 16
    batches = {"_target_": "torch.utils.data.BatchSampler", "drop_last": True}
    facts = inspected(config(loader__batch_sampler=batches, micro_batch_size=5)).facts
    assert facts.train_samples == 30


def test_batch_norm_writes_no_buffer() -> None:
    facts = inspected(config(model={"_target_": "run_toys.NormNet"})).facts
    assert (facts.written_buffers, facts.batch_norms) == ((), 1)


def test_buffers_that_forward_writes_are_found_and_restored() -> None:
    subject = inspected(config(model={"_target_": "run_toys.CountingNet"}))
    assert subject.facts.written_buffers == ("calls", "row")
    assert subject.model.calls.item() == 0 and subject.model.training


def test_the_trial_does_not_disturb_random_states() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    inspected(config(model={"_target_": "run_toys.CountingNet"}))
    assert torch.equal(torch.rand(2), expected)


def test_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(99)
    first = inspected(config(seed=4)).model.state_dict()
    with seeded(4):
        expected = Net().state_dict()
    assert all(torch.equal(first[name], expected[name]) for name in expected)


def test_a_model_is_inspected_without_its_data() -> None:
    facts = facts_without_data(config(data={}), engine.load("cpu"))
    assert facts.train_samples is None and facts.parameters == sum(p.numel() for p in Net().parameters())


def test_all_problems_are_reported_together() -> None:
    wrong = config(
        model={"_target_": "run_toys.Net", "widht": 3},
        data={"_target_": "run_toys.Pionts"},
        loss__name="CrossEntropyLos",
        optimizer={"_target_": "poptorch.optim.SDG"},
        schedule={"_target_": "ipurun.schedules.cosin"},
        metrics={"accuracy": {"ignor": 1}},
        loader__collate="run_toys.nothing",
    )
    with pytest.raises(ConfigError) as caught:
        inspected(wrong)
    text = str(caught.value)
    for part in ("widht", "Pionts", "CrossEntropyLos", "SDG", "cosin", "ignor", "nothing"):
        assert part in text
    assert len(caught.value.problems) == 7


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": {}}, "no model"),
        ({"data": {}}, "no data"),
        ({"model": {"_target_": "run_toys.pair"}}, "did not return a torch.nn.Module"),
        ({"data": {"_target_": "run_toys.Points", "length": 0}}, "is empty"),
        ({"data": {"_target_": "run_toys.pair", "evaluation": 0}}, "split `eval` of the data is empty"),
        ({"eval__split": "tset"}, "tset"),
        ({"monitor": "acc"}, "monitor=acc"),
        ({"checkpoint__best": "acc"}, "checkpoint.best=acc"),
        ({"metrics": {"accuracy": {"on": ["train"]}}, "monitor": "accuracy"}, "monitor=accuracy"),
    ],
)
def test_single_problems(changes: Any, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inspected(config(**changes))
    assert len(caught.value.problems) == 1 and part in str(caught.value)


def test_failures_of_model_and_data_are_both_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        inspected(config(model={"_target_": "run_toys.Net", "width": -1}, data={"_target_": "run_toys.no_data"}))
    assert len(caught.value.problems) == 2


def test_caches_for_text_generation_are_switched_off() -> None:
    part = nn.Linear(2, 2)
    part.config = SimpleNamespace(use_cache=True)
    model = nn.Sequential(part, nn.ReLU())
    model.config = SimpleNamespace(hidden_size=2)
    assert stop_caching(model) and part.config.use_cache is False
    assert not stop_caching(model)
