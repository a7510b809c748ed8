"""Custom ops of a config: Python functions on the CPU engine, shared libraries on an IPU."""

from __future__ import annotations

import ctypes.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ipurun.cli.main import main
from ipurun.config.schema import CustomOpsConfig
from ipurun.engine import Engine
from ipurun.inspect.model_and_data import load_custom_ops

CODE = """
import poptorch
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, x, target):
        (cube,) = poptorch.custom_op([x * self.weight], "Cube", "com.acme", 1, example_outputs=[x])
        return cube, poptorch.identity_loss(((cube - target) ** 2).mean(), reduction="none")

def cube(x):
    return x ** 3

def data():
    return {"train": [(torch.tensor([1.0]), torch.tensor([8.0 - 4.0]))] * 4}
"""
RECIPE = """
# @package _global_
model: {_target_: custom_net.Net}
data: {_target_: custom_net.data}
optimizer: {_target_: poptorch.optim.SGD, lr: 0.001}
micro_batch_size: 1
epochs: 1
max_steps: 1
loss: {output: "1"}
custom_ops:
  libraries: [build/libcube.so]
  cpu: {"com.acme/Cube": custom_net.cube}
"""


@pytest.fixture
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf/recipe").mkdir(parents=True)
    Path("custom_net.py").write_text(CODE.replace("import poptorch", "import ipurun.emulator as poptorch"))
    Path("conf/recipe/cubed.yaml").write_text(RECIPE)


@pytest.mark.usefixtures("_recipe")
def test_the_cpu_engine_computes_the_op_with_the_function(capsys: Any) -> None:
    assert main(["train", "+recipe=cubed", "--json"]) == 0
    # One sample: (2x)^3 = 8 against 4, squared.
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(16.0)


@pytest.mark.usefixtures("_recipe")
@pytest.mark.parametrize(
    ("word", "what"),
    [
        ('custom_ops.cpu={"Cube": custom_net.cube}', "names ops as DOMAIN/NAME"),
        ('custom_ops.cpu={"com.acme/Cube": custom_net.cub}', "cub"),
        ('custom_ops.cpu={"com.acme/Cube": {backward: custom_net.cube}}', "takes the function"),
    ],
)
def test_a_missing_function_is_one_problem(word: str, what: str, capsys: Any) -> None:
    assert main(["validate", "+recipe=cubed", word]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and what in error


def test_libraries_are_loaded_on_an_ipu() -> None:
    engine = Engine(SimpleNamespace(), "ipu", "test")  # type: ignore[arg-type]  # no name of it is needed
    there = ctypes.util.find_library("c")
    problems = load_custom_ops(CustomOpsConfig(libraries=[str(there), "build/libnone.so"]), engine)
    assert [problem.what for problem in problems] == ["`custom_ops.libraries` cannot be loaded"]
    assert "libnone.so" in problems[0].seen
