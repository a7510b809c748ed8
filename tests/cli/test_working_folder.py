"""Folders and files of the working folder that have the names of installed packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

SHADOWED = ("torch", "yaml", "hydra", "omegaconf", "rich", "numpy")
OF_PYTHON = ("random", "token", "types", "typing", "json", "queue")

CODE = """
import random  # Python's
import poptorch
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), index / 16), index % 2
"""

RECIPE = """\
# @package _global_
model: {_target_: beside.Net}
data: {_target_: beside.Samples}
loss: {name: CrossEntropyLoss}
micro_batch_size: 4
max_steps: 1
cache: {enabled: false}
"""


@pytest.fixture(autouse=True)
def _shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder full of clones and files whose names are taken, and a recipe with its code."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in SHADOWED:
        Path(name).mkdir()
        Path(name, "__init__.py").write_text(f"raise RuntimeError('./{name} was imported')\n")
    Path("poptorch/python").mkdir(parents=True)  # as the root of a clone looks
    Path("ipurun/ipurun").mkdir(parents=True)
    Path("beside.py").write_text(CODE)
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/own.yaml").write_text(RECIPE)
    program = "from ipurun.cli.main import console\nif __name__ == '__main__':\n    console()\n"
    Path("../command").write_text(program)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)


def shadow_python() -> None:
    for name in OF_PYTHON:
        Path(f"{name}.py").write_text(f"raise RuntimeError('./{name}.py was imported')\n")


def run(start: List[str], *words: str) -> Any:
    return subprocess.run([sys.executable, *start, *words], capture_output=True, text=True, check=False)


AS_SCRIPT = ["../command"]  # as pip's scripts: their own folder is on the path, the working folder is not
AS_MODULE = ["-m", "ipurun"]


def test_a_run_and_a_sweep_take_the_installed_packages() -> None:
    shadow_python()
    for words in (["plan", "+recipe=own"], ["train", "+recipe=own"], ["train", "-m", "+recipe=own", "seed=1,2"]):
        done = run(AS_SCRIPT, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 points finished" in done.stdout


def test_python_m_takes_the_installed_packages() -> None:
    os.rename("ipurun", "clone")  # Python itself would take it for the program
    done = run(AS_MODULE, "train", "-m", "+recipe=own", "seed=1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 points finished" in done.stdout


def test_an_empty_part_of_pythonpath_is_not_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename("ipurun", "clone")
    # As scripts write it that extend a variable that was not set.
    monkeypatch.setenv("PYTHONPATH", os.pathsep + os.path.join(os.getcwd(), "conf"))
    done = run(AS_SCRIPT, "train", "+recipe=own")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_processes_of_the_loader_take_the_installed_packages(strategy: str) -> None:
    done = run(AS_SCRIPT, "train", "+recipe=own", f"loader.mode={strategy}", "loader.workers=1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_exec_searches_where_python_does(tmp_path: Path) -> None:
    program = tmp_path / "programs" / "program.py"
    program.parent.mkdir()
    (program.parent / "helper.py").touch()
    program.write_text(
        "import sys, helper, poptorch, random\n"
        "assert poptorch.__name__ == 'ipurun.emulator', poptorch\n"
        f"assert sys.path[0] == {str(program.parent)!r}, sys.path\n"
        "import os; assert os.getcwd() not in sys.path and '' not in sys.path, sys.path\n"
    )
    os.rename("ipurun", "clone")
    shadow_python()
    done = run(AS_SCRIPT, "exec", str(program))
    assert done.returncode == 0, done.stderr


def test_another_clone_that_is_installed_lends_no_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with a clone on PYTHONPATH and an editable install of another one: a finder knows where `ipurun.config` is."""
    other = tmp_path / "other" / "config"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the other clone was imported')\n")
    finder = (
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Editable:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, [{str(other.parent)!r}]) if name == 'ipurun.config' else None\n"
        "sys.meta_path.append(Editable)\n"
    )
    command = Path("../command")
    command.write_text(finder + command.read_text())
    done = run(AS_SCRIPT, "plan", "+recipe=own")
    assert done.returncode == 0, done.stdout + done.stderr
