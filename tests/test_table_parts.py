"""Embeddings and heads that `memory.serialize` splits over IPUs, as modules and in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

import ipurun
from ipurun.errors import ConfigError
from ipurun.table_parts import parts_by_table, split_tables, tables_by_word

GPT = ["+recipe=gpt", "data=synthetic", "model.num_layers=2", "model.hidden_size=16", "model.max_positions=8"]
GPT += ["model.vocab_size=57", "micro_batch_size=2", "gradient_accumulation=9", "cache.enabled=false", "engine=cpu"]
SPLIT = ["pipeline.layers_per_ipu=[1,1]", "memory.serialize={wte: [2,1]}", "pipeline.strategy=sharded"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=5)
        self.again = self.table
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight
        self.other = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.other(self.table(tokens) + self.again(tokens)))


def test_parts_compute_the_same_and_keep_the_names_of_the_weights() -> None:
    model, whole = Tied(), Tied()
    tokens = torch.randint(0, 7, (3, 5))
    split_tables(model, {"table": [2, 0, 1]})
    assert parts_by_table(model) == {"table": (0, 0, 2), "head": (0, 0, 2)}
    assert [part.weight.shape[0] for part in (model.table.part0, model.table.part1, model.table.part2)] == [3, 2, 2]
    assert model.head.part2.weight is model.table.part2.weight
    assert model.state_dict().keys() == whole.state_dict().keys()
    model.load_state_dict(whole.state_dict())
    torch.testing.assert_close(model(tokens), whole(tokens))
    for net in (model, whole):
        net(tokens).sin().sum().backward()
    gradient = torch.cat([model.table.part0.weight.grad, model.table.part1.weight.grad, model.table.part2.weight.grad])
    torch.testing.assert_close(gradient, whole.table.weight.grad)
    whole.load_state_dict(model.state_dict())
    assert torch.equal(whole.table.weight, model.table.weight)


def test_a_missing_weight_is_reported_by_torch() -> None:
    model = Tied()
    split_tables(model, {"head": [1, 1]})
    state = {name: value for name, value in Tied().state_dict().items() if not name.startswith("table")}
    with pytest.raises(RuntimeError, match=r"table\.part0\.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    ("serialize", "message"),
    [
        ({"table": [0, 0]}, "the number of parts on each IPU"),
        ({"table": [1, -1]}, "the number of parts on each IPU"),
        ({"table": [4, 4]}, "7 rows; 8 parts"),
        ({"tabel": [1, 1]}, "has no such module"),
        ({"conv": [1, 1]}, "a Conv1d"),
        ({"table": [1, 1], "head": [0, 2]}, "share one weight, but are split differently"),
    ],
)
def test_lists_that_cannot_be(serialize: Dict[str, Any], message: str) -> None:
    model = Tied()
    model.conv = nn.Conv1d(2, 2, 1)
    with pytest.raises(ConfigError, match=message):
        split_tables(model, serialize)


def _trained(folder: str, words: List[str]) -> Any:
    return ipurun.train(overrides=[*GPT, *words, f"hydra.run.dir={folder}"], quiet=True)


def test_weights_are_loaded_with_and_without_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = _trained("whole", ["max_steps=2"])
    split = _trained("split", [*SPLIT, "max_steps=2"])
    assert split.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-4)
    weights = split.load().model.state_dict()
    for name, value in whole.load().model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)
    frozen = ["max_steps=1", "optimizer.lr=0", "optimizer.weight_decay=0"]
    for name, words in {"from_split": [], "from_whole": SPLIT}.items():
        source = "split" if name == "from_split" else "whole"
        again = _trained(name, [*words, *frozen, f"init_from={source}"])
        assert again.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-4)


def test_a_split_run_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    straight = _trained("straight", [*SPLIT, "max_steps=4"])
    _trained("half", [*SPLIT, "max_steps=2"])
    resumed = _trained("half", [*SPLIT, "max_steps=4", "resume=half"])
    expected = straight.load().model.state_dict()
    for name, value in resumed.load().model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline.strategy=serial_phased", "pipeline.layers_per_ipu=[1,1]"], "phased execution cannot"),
        (["memory.serialize={wte: two}"], r"the parts on each IPU as in \[2, 2\]"),
    ],
)
def test_configs_that_cannot_split_a_table(words: List[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ipurun.plan(overrides=[*GPT, "memory.serialize={wte: [1,1]}", *words])


def test_the_plan_counts_each_part_on_its_ipu() -> None:
    words = [*GPT, "model.vocab_size=50257", "model.hidden_size=768", "pipeline.strategy=sharded"]
    plan = ipurun.plan(overrides=[*words, "pipeline.layers_per_ipu=[1,1]", "memory.serialize={wte: [1,3]}"])
    first, second = plan.estimate.training.estimate.ipus
    assert second.weights - first.weights == pytest.approx(50257 * 768 * 4 / 2, rel=0.01)


class OfTransformers(Tied):
    """Names its tables as models of transformers do."""

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class WithoutWords(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_tables_are_found_where_the_model_names_them() -> None:
    assert tables_by_word(OfTransformers()) == {"input_embeddings": "table", "output_embeddings": "head"}
    inside = nn.Sequential(nn.Linear(2, 2), OfTransformers())
    assert tables_by_word(inside) == {"input_embeddings": "1.table", "output_embeddings": "1.head"}
    assert tables_by_word(WithoutWords()) == {}
    model = OfTransformers()
    split_tables(model, {"output_embeddings": [0, 2]})
    assert parts_by_table(model) == {"table": (1, 1), "head": (1, 1)}
