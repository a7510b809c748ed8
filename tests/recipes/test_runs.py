"""Shipped recipes, run on the CPU engine through the command line."""

import json
import sys
from pathlib import Path

import pytest

from ipurun.cli.main import main

CONF = Path(__file__).parents[2] / "conf"
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))
SAME_FORMAT = Path(__file__).parents[2] / "recipes" / "mnist" / "data"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    # A command puts the working folder there; the next test has another one.
    monkeypatch.setattr(sys, "path", list(sys.path))


def summary():
    """Return the summary of the only run in this folder."""
    [file] = Path("runs").rglob("summary.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_on_synthetic_data(recipe):
    sizes = ["data.train_samples=64", "data.eval_samples=32"]
    assert main(["train", f"+recipe={recipe}", "data=synthetic", *sizes, "max_steps=2", "--quiet"]) == 0
    assert summary()["step"] == 2


def test_mnist_learns_its_digits():
    """Without overrides the recipe takes twice as long and ends at about 97.5%."""
    assert main(["train", "+recipe=mnist", "epochs=2", "--quiet"]) == 0
    assert summary()["metrics"]["accuracy"] > 0.93


def test_mnist_makes_a_whole_step_on_eight_ipus_with_32_device_iterations():
    words = ["devices=8", "device_iterations=32", "max_steps=32", "eval.at_end=false"]
    assert main(["train", "+recipe=mnist", *words, "--quiet"]) == 0
    assert summary()["step"] == 32


def test_fashion_mnist_trains_on_files_of_its_format():
    words = [f"data.root={SAME_FORMAT}", "max_steps=2", "eval.max_samples=32"]
    assert main(["train", "+recipe=fashion_mnist", *words, "--quiet"]) == 0
    assert summary()["step"] == 2


def test_a_copy_of_mnist_runs_its_own_code(capsys):
    assert main(["cp", "mnist", "copied_digits"]) == 0
    model = Path("copied_digits/model.py")
    model.write_text(model.read_text().replace("channels: int = 16", "channels: int = 3"))
    assert main(["plan", "+recipe=copied_digits"]) == 0
    # conv 1-3 (78), conv 3-6 (456), linear 96-64 (6,208), linear 64-10 (650)
    assert "7,392 parameters" in capsys.readouterr().out
    assert main(["train", "+recipe=copied_digits", "max_steps=1", "eval.max_samples=10", "--quiet"]) == 0
    assert summary()["step"] == 1
