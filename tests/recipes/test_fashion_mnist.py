from pathlib import Path

import pytest
import torch
from torch import nn

from ipurun.cli.main import main
from ipurun.config.compose import one
from ipurun.recipes.fashion_mnist.dataset import splits
from ipurun.recipes.fashion_mnist.model import ClothesNet

SAME_FORMAT = Path(__file__).parents[2] / "recipes" / "mnist" / "data"


def test_the_layers_are_those_of_the_porting_tutorial():
    layers = [layer for layer in ClothesNet().modules() if list(layer.parameters(recurse=False))]
    assert [type(layer) for layer in layers] == [nn.Conv2d, nn.Conv2d, nn.GroupNorm, nn.Linear, nn.Linear]
    first, second, norm, hidden, last = layers
    assert (first.in_channels, first.out_channels, first.kernel_size) == (1, 5, (3, 3))
    assert (second.in_channels, second.out_channels, second.kernel_size) == (5, 12, (5, 5))
    assert (norm.num_groups, norm.num_channels) == (3, 12)
    # 28 -> 26 (3x3) -> 13 (pool) -> 9 (5x5)
    assert (hidden.in_features, hidden.out_features) == (12 * 9 * 9, 100)
    assert (last.in_features, last.out_features) == (100, 10)
    assert ClothesNet()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_the_settings_are_those_of_the_porting_tutorial():
    config = one(["+recipe=fashion_mnist"]).config
    assert config.optimizer == {"_target_": "poptorch.optim.SGD", "lr": 0.001, "momentum": 0.9}
    assert (config.micro_batch_size, config.epochs) == (16, 5)


def test_pixels_range_from_minus_one_to_one():
    images = splits(root=str(SAME_FORMAT))["train"].images
    assert (images.min(), images.max()) == (-1, 1)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_without_data_it_says_where_to_get_them(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert main([command, "+recipe=fashion_mnist"]) == 2
    message = capsys.readouterr().err
    assert "fashion_mnist does not include data" in message
    assert "data.download=true" in message
    assert "data.root=FOLDER" in message
    assert "zalandoresearch/fashion-mnist" in message
    assert list(tmp_path.iterdir()) == []
