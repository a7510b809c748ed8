"""Batches by name: lists, shapes that vary, and models that skip layers at random."""

import pytest
import torch
from torch import nn

import ipurun
from ipurun.cli.main import main
from ipurun.inspect.data import check_sample, check_shapes


class Rows(torch.utils.data.Dataset):
    def __init__(self, growth=0):
        self.growth = growth

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"inputs": torch.ones(4 + index * self.growth), "labels": torch.tensor([1.0])}


class Speech(nn.Module):
    """Compares a random number with its layerdrop before each layer, as speech models of transformers do."""

    def __init__(self, layerdrop=0.5):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layerdrop = layerdrop

    def forward(self, inputs, labels):
        for layer in self.layers:
            if torch.rand([]) < self.layerdrop:
                continue
            inputs = layer(inputs)
        return {"loss": ((inputs.sum(dim=1, keepdim=True) - labels) ** 2).mean()}


def test_lists_of_numbers_are_refused():
    (problem,) = check_sample({"input_ids": [1, 2, 3], "label": 1})
    assert "default_data_collator" in problem.fix
    assert check_sample({"input_ids": torch.ones(3), "label": 1}) == []


def test_shapes_that_vary_are_refused_with_the_longest():
    collate = torch.utils.data.default_collate
    assert check_shapes(Rows(), Rows()[0], collate) == []
    (problem,) = check_shapes(Rows(growth=1), Rows(growth=1)[0], collate)
    assert problem.seen == "samples of shape [4], [6], [8], [10]"
    assert "length=10" in problem.fix


def test_no_layer_is_dropped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=test_named_batches.Speech", "data._target_=test_named_batches.Rows", "max_steps=4"]
    assert main(["train", *words, "hydra.run.dir=run", "cache.enabled=false"]) == 0
    assert "layerdrop is off" in capsys.readouterr().out
    torch.manual_seed(0)
    start, end = Speech(), ipurun.load("run").model
    for before, after in zip(start.parameters(), end.parameters()):
        assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("word", "expected"), [("16", "16.32"), ("16-mixed", "16.32"), ("16-true", "16.16"), ("half", "16.16")]
)
def test_precision_takes_the_words_of_lightning(tmp_path, monkeypatch, capsys, word, expected):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=test_named_batches.Speech", "data._target_=test_named_batches.Rows"]
    assert main(["plan", *words, f"precision={word}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"precision {expected}" in shown
    assert ("precision=16.16 still gives" in shown) == (word == "16")


def test_an_old_run_keeps_the_meaning_of_16(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=test_named_batches.Speech", "data._target_=test_named_batches.Rows", "--quiet"]
    assert main(["train", *words, "hydra.run.dir=run", "max_steps=2", "precision=16.16"]) == 0
    file = tmp_path / "run/config.yaml"
    text = file.read_text(encoding="utf-8")
    assert "precision: '16.16'" in text
    file.write_text(text.replace("precision: '16.16'", "precision: '16'"), encoding="utf-8")
    assert main(["train", "resume=run", "max_steps=4", "--quiet"]) == 0
    assert "precision: '16.16'" in file.read_text(encoding="utf-8")
