import struct
import zlib
from pathlib import Path

import pytest
import torch
from recipe_runs import checked_sample

import ipurun
from ipurun.config.compose import one
from ipurun.errors import ConfigError
from ipurun.recipes.mnist.dataset import splits
from ipurun.recipes.mnist.digit_grid import draw_grid
from ipurun.recipes.mnist.model import DigitNet

SUBSET = Path(__file__).parents[2] / "recipes" / "mnist" / "data"


def test_without_a_root_the_subset_is_used_with_a_note():
    data = splits()
    assert (len(data["train"]), len(data["test"])) == (4000, 1000)
    counts = torch.bincount(data["test"].labels)
    assert counts.tolist() == [100] * 10
    [note] = data["train"].notes
    assert "5,000-digit subset" in note
    assert "data.download=true" in note


def test_digits_are_normalised_to_mean_zero_and_deviation_one():
    images = splits()["train"].images
    assert abs(images.mean()) < 0.05
    assert abs(images.std() - 1) < 0.05


def test_a_given_root_is_used_without_a_note(tmp_path):
    data = splits(root=str(SUBSET))
    assert len(data["train"]) == 4000
    assert data["train"].notes == ()


def test_a_given_root_that_is_missing_or_incomplete_is_an_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        splits(root=str(tmp_path / "nowhere"))
    assert f"data.root={tmp_path / 'nowhere'}" in str(caught.value)
    with pytest.raises(ConfigError, match="is missing 4 of the 4 data files"):
        splits(root=str(tmp_path))


def test_download_fills_the_given_root(tmp_path):
    for path in SUBSET.glob("*.gz"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert len(splits(root=str(tmp_path), download=True)["test"]) == 1000


def test_the_declared_sample_matches_the_data():
    declared = checked_sample(one(["+recipe=mnist"]).config, splits()["train"][0])
    assert (splits()["train"].labels.min(), splits()["train"].labels.max()) == (0, declared[1].high - 1)


def test_eight_ipus_with_32_device_iterations_make_a_whole_step():
    config = one(["+recipe=mnist", "devices=8", "device_iterations=32"]).config
    samples_per_call = config.micro_batch_size * 32 * 8 * (config.gradient_accumulation or 1)
    assert samples_per_call <= len(splits()["train"])


def test_the_model_returns_one_score_per_class():
    assert DigitNet(channels=4, hidden=8)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_a_grid_of_predicted_digits_is_drawn_at_each_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["callbacks=digit_grid", "callbacks.digit_grid.rows=2", "callbacks.digit_grid.columns=3"]
    result = ipurun.train("mnist", max_steps=2, eval={"max_samples": 10}, overrides=words, quiet=True)
    data = (result.folder / "digits" / "step-00000002.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3 * 57, 2 * 57)
    start = data.index(b"IDAT")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    assert len(zlib.decompress(data[start + 4 : start + 4 + length])) == 2 * 57 * (1 + 3 * 3 * 57)


def test_right_digits_are_green_and_wrong_ones_red():
    ones, digits = torch.ones(2, 10, 10), torch.tensor([1, 7])
    picture = draw_grid(ones, digits, torch.tensor([True, False]), columns=2, scale=1)
    assert picture.shape == (11, 22, 3)
    assert picture[0, 1].tolist() == [0, 200, 0] and picture[0, 11].tolist() == [255, 0, 0]
