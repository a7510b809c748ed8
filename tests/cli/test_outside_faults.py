"""Faults of packages, of the environment and of users' code are reported as what they are, not as ipurun's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipurun.cli.common import guarded
from ipurun.cli.main import main

WITHOUT = """
import sys
sys.modules[{absent!r}] = None  # Python then says that there is no such module
from ipurun.cli.main import console
console()
"""

CODE = """
import torch
from torch import nn

def __getattr__(name):
    if name == "Lazy":
        raise RuntimeError("Failed to import own_code.lazy because of: no module named sentencepiece")
    raise AttributeError(name)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

class Raises(Net):
    def __init__(self):
        raise RuntimeError("out of luck")

class BadNotes(Net):
    @property
    def notes(self):
        raise RuntimeError("out of luck")

class Samples:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((4,), index / 16), index % 2

class BadItems(Samples):
    def __getitem__(self, index):
        raise RuntimeError("out of luck")

class BadLength(Samples):
    def __len__(self):
        raise RuntimeError("out of luck")

def bad_collate(samples):
    raise RuntimeError("out of luck")

def bad_schedule(total_steps=0):
    raise RuntimeError("out of luck")

class BadLoss(nn.Module):
    def forward(self, output, target):
        raise RuntimeError("out of luck")

class BadMetric:
    def __init__(self): pass
    def reset(self): pass
    def update(self, outputs, targets): raise RuntimeError("out of luck")
    def compute(self): return 0.0

def two_splits():
    return Samples(), Samples()
"""

RECIPE = """\
# @package _global_
model: {_target_: own_code.Net}
data: {_target_: own_code.Samples}
loss: {name: CrossEntropyLoss}
micro_batch_size: 4
max_steps: 1
engine: cpu
cache: {enabled: false}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    Path("own_code.py").write_text(CODE)
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/own.yaml").write_text(RECIPE)


def error_of(*words: str, **environment: str) -> str:
    """Return the output of a command as one line."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("absent", "words", "distribution"),
    [
        ("torch", ["train", "+recipe=own"], "torch"),
        ("torch", ["exec", "own_code.py"], "torch"),
        ("hydra", ["plan", "+recipe=own"], "hydra-core"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    absent: str, words: Any, distribution: str
) -> None:
    Path("without.py").write_text(WITHOUT.format(absent=absent))
    text = error_of("without.py", *words)
    assert f"error: the package `{absent}` is not installed" in text
    assert f"-m pip install {distribution}" in text
    assert "inside ipurun" not in text


@pytest.mark.parametrize("words", [["train", "+recipe=own"], ["exec", "own_code.py"]])
def test_a_log_level_that_poptorch_does_not_know(words: Any) -> None:
    text = error_of("-m", "ipurun", *words, POPTORCH_LOG_LEVEL="LOUD")
    assert "`POPTORCH_LOG_LEVEL` cannot be `LOUD`" in text and "WARN" in text
    assert "inside ipurun" not in text


@pytest.mark.parametrize(
    "words",
    [
        ["model._target_=own_code.Raises"],
        ["model._target_=own_code.BadNotes"],
        ["data._target_=own_code.BadItems"],
        ["data._target_=own_code.BadLength"],
        ["loader.collate=own_code.bad_collate"],
        ["+schedule._target_=own_code.bad_schedule"],
        ["loss.name=own_code.BadLoss"],
        ["data._target_=own_code.two_splits", "+metrics.bad._target_=own_code.BadMetric"],
    ],
)
def test_code_of_the_user_that_raises_is_shown_with_its_line(words: Any, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "+recipe=own", *words]) in (1, 2)
    text = " ".join(capsys.readouterr().err.split())
    assert "out of luck" in text and "own_code.py:" in text
    assert "inside ipurun" not in text


def test_an_attribute_that_a_package_fails_to_import(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "+recipe=own", "model._target_=own_code.Lazy"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "`model._target_`: importing `Lazy` from own_code failed" in text and "sentencepiece" in text
    assert "from own_code import Lazy" in text


def test_a_fault_of_a_package_names_the_package(capsys: pytest.CaptureFixture) -> None:
    import yaml

    assert guarded(functools.partial(yaml.safe_load, "a: ]"), "ls", []) == 1
    text = capsys.readouterr().err
    assert "the package `yaml` failed" in text and "inside ipurun" not in text


def test_a_fault_of_ipurun_is_to_be_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("ipurun.engine.check_environment", None)
    assert main(["train", "+recipe=own"]) == 1
    text = capsys.readouterr().err
    assert "inside ipurun" in text and "report it" in text


def test_an_interrupt_that_makes_a_library_fail_is_an_interrupt() -> None:
    """omegaconf, for one, reads a variable in `finally` that an interrupt kept it from setting."""

    def command() -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("the library did not expect that")

    with pytest.raises(KeyboardInterrupt):
        guarded(command, "train", [])
