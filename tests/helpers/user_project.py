"""A user's project: a module with a model and data, and the recipe `tiny` that names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_NET = """
import os, signal, time
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.inner(x)
"""

_RECIPE = """\
# @package _global_
model: {_target_: MODULE.Net}
data: {_target_: MODULE.splits}
loss: {name: CrossEntropyLoss}
optimizer: {_target_: poptorch.optim.SGD, lr: 0.1}
metrics: {accuracy: {_target_: ipurun.metrics.Accuracy}}
micro_batch_size: 4
engine: cpu
cache: {enabled: false}
"""


def enter_project(folder: Path, patch: pytest.MonkeyPatch, module: str, code: str, keys: str = "") -> None:
    """Write a project into a folder and make it the working folder.

    Args:
        folder: The folder.
        patch: Undoes the changes to the process.
        module: Name of the module, which has a `Net` and the code.
        code: Has a function `splits` that returns the data.
        keys: Further lines of the recipe.
    """
    patch.chdir(folder)
    patch.setattr(sys, "path", [str(folder), *sys.path])
    patch.delitem(sys.modules, module, raising=False)
    Path(f"{module}.py").write_text(_NET + code)
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/tiny.yaml").write_text(_RECIPE.replace("MODULE", module) + keys)
