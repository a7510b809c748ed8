"""`ipurun selftest --layers`: a model layer by layer, and the first layer that differs."""

import json
import sys
from pathlib import Path

import pytest
import torch

import ipurun.emulator
from ipurun.cli.main import main

MNIST = ["selftest", "engine=cpu", "+recipe=mnist", "data=synthetic", "--layers"]
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.shared = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)
        self.dropout = dropout

    def forward(self, words):
        x = self.words(words).mean(1)
        x = self.act(self.shared(self.act(self.shared(x))))
        x = nn.functional.dropout(x, self.dropout, self.training)
        return self.head(self.drop(self.norm(x)) * self.scale)
"""
OWN = [
    "model._target_=net.Net",
    "data=synthetic",
    "sample=[{shape: [5], dtype: int64, high: 11}, {shape: [], dtype: int64, high: 3}]",
    "loss.name=CrossEntropyLoss",
    "micro_batch_size=6",
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    Path("net.py").write_text(MODEL)


def spoil(monkeypatch, change):
    """Let a function change the model and the optimizer that the emulator trains."""
    right = ipurun.emulator.trainingModel

    def wrong(model, options=None, optimizer=None):
        change(model, optimizer)
        return right(model, options, optimizer)

    monkeypatch.setattr(ipurun.emulator, "trainingModel", wrong)


def last_line(text):
    return [line for line in text.splitlines() if line.startswith(("all ", "the first "))][-1]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision=16"],
        ["precision=16.32"],
        ["devices=4", "pipeline.split=[fc1]", "gradient_accumulation=8", "device_iterations=2", "precision=16"],
    ],
    ids=" ".join,
)
def test_mnist_agrees_with_plain_torch(capsys, words):
    assert main([*MNIST, *words, "--quiet"]) == 0
    assert last_line(capsys.readouterr().out) == "all 11 outputs and 8 gradients agree"
    assert list(Path().glob("*.json")) == []


def test_an_own_model_may_have_integer_inputs_call_a_layer_twice_and_write_in_place(capsys):
    assert main(["selftest", "engine=cpu", *OWN, "--layers"]) == 0
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    order = ["words", "shared", "act", "shared #2", "act #2", "norm", "drop", "head", "(loss)"]
    assert [name for name in shown if name in order] == order
    assert shown.index("head.weight") < shown.index("shared.weight") < shown.index("words.weight")
    assert "scale" in shown


def test_the_first_wrong_layer_is_named(capsys, monkeypatch):
    def change(model, optimizer):
        model.get_submodule("model.conv2.0").register_forward_hook(lambda module, args, output: output * 1.001)

    spoil(monkeypatch, change)
    assert main([*MNIST, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"].startswith("the first layer that differs is `conv2.0`: its output is off by 1.0e-03")
    wrong = [layer["name"] for layer in document["layers"] if not layer["agrees"]]
    assert wrong[0] == "conv2.0" and "fc2" in wrong and "conv1.2" not in wrong
    report = json.loads(Path(document["report"]).read_text())
    assert report["layers"] == document["layers"] and "poptorch.optim.SGD" in report["config"]
    first = next(layer for layer in report["layers"] if layer["name"] == "conv2.0")["sides"]
    assert first["found"]["norm"] == pytest.approx(1.001 * first["expected"]["norm"], rel=1e-5)


def test_a_wrong_gradient_is_named_by_its_layer(capsys, monkeypatch):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def change(model, optimizer):
        layer = model.get_submodule("model.fc1.1")
        layer.register_forward_hook(lambda module, args, output: Doubled.apply(output))

    spoil(monkeypatch, change)
    assert main([*MNIST, "--quiet"]) == 1
    text = capsys.readouterr().out
    assert last_line(text).startswith("the first layer that differs is `fc1.1`: outputs agree, the gradient of its ")
    assert "fc2.weight" not in text and "report: ipurun-selftest-" in text


def test_random_numbers_are_refused(capsys):
    assert main(["selftest", "engine=cpu", *OWN, "+model.dropout=0.5", "--layers"]) == 2
    assert "the model draws random numbers" in capsys.readouterr().err


def test_a_failure_is_written_to_the_file_to_send(capsys, monkeypatch):
    def change(model, optimizer):
        raise RuntimeError("no such tile")

    spoil(monkeypatch, change)
    assert main([*MNIST]) == 1
    (report,) = Path().glob("ipurun-selftest-*.json")
    message = capsys.readouterr().err
    assert "no such tile" in message and str(report) in message
    assert "no such tile" in json.loads(report.read_text())["error"]


def test_a_config_is_needed(capsys):
    assert main(["selftest", "--layers"]) == 2
    assert "no model" in capsys.readouterr().err
