import pickle

import numpy as np
import pytest
import torch
from recipe_runs import assert_learns, assert_same_training, checked_sample, parameters_of
from torch import nn
from torch.nn import functional

from ipurun.config.compose import one
from ipurun.errors import ConfigError
from ipurun.inspect.targets import arguments_of
from ipurun.recipes.resnet.dataset import splits
from ipurun.recipes.resnet.model import BasicBlock, Bottleneck, ResNet

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@pytest.mark.parametrize(
    ("option", "published"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
    ],
)
def test_sizes_are_the_published_ones(option, published):
    assert parameters_of(option) == published


def test_modules_are_named_as_in_torchvision():
    names = dict(ResNet(50, width=8).named_parameters())
    assert [name for name in names if not name.startswith("layer")] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "fc.weight",
        "fc.bias",
    ]
    first = [f"{kind}{number}.weight" for number in (1, 2, 3) for kind in ("conv", "bn")]
    expected = {f"layer1.0.{name}" for name in [*first, "downsample.0.weight", "downsample.1.weight"]}
    assert {name for name in names if name.startswith("layer1.0.") and name.endswith("weight")} == expected
    assert names["layer4.2.conv3.weight"].shape == (8 * 8 * 4, 8 * 8, 1, 1)


@pytest.mark.parametrize(("size", "before_the_first_stage"), [(32, 32), (224, 56)])
def test_the_stem_keeps_the_size_of_small_pictures(size, before_the_first_stage):
    model = ResNet(18, image_size=size, width=4, num_classes=7)
    seen = []
    model.layer1.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    assert model(torch.zeros(1, 3, size, size)).shape == (1, 7)
    assert seen == [(1, 4, before_the_first_stage, before_the_first_stage)]


@pytest.mark.parametrize("stride", [1, 2])
def test_a_basic_block_is_two_convolutions_beside_a_shortcut(stride):
    torch.manual_seed(0)
    block = BasicBlock(4, 4, stride, nn.BatchNorm2d).eval()
    features = torch.randn(2, 4, 6, 6)
    change = functional.conv2d(features, block.conv1.weight, stride=stride, padding=1)
    change = functional.conv2d(block.bn1(change).relu(), block.conv2.weight, padding=1)
    kept = (
        features
        if stride == 1
        else block.downsample[1](functional.conv2d(features, block.downsample[0].weight, stride=2))
    )
    torch.testing.assert_close(block(features), (block.bn2(change) + kept).relu())


def test_a_bottleneck_strides_in_its_middle():
    block = Bottleneck(8, 2, 2, nn.BatchNorm2d)
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]
    assert block(torch.zeros(1, 8, 6, 6)).shape == (1, 8, 3, 3)


def test_group_norm_normalises_each_picture_separately():
    torch.manual_seed(0)
    pictures = torch.randn(4, 3, 32, 32)
    model = ResNet(18, image_size=32, width=4, norm="group")
    assert list(model.buffers()) == []
    torch.testing.assert_close(model(pictures)[:1], model(pictures[:1]))


@pytest.mark.parametrize(
    ("arguments", "message"), [({"depth": 19}, "depth 19 is not one of 18"), ({"norm": "layer"}, "batch")]
)
def test_unknown_kinds_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResNet(**arguments)


def test_without_a_root_pictures_are_synthetic_with_a_note():
    data = splits(image_size=16, num_classes=3)
    image, label = data["train"][4]
    assert (image.shape, label) == ((3, 16, 16), 1)
    assert torch.equal(image, splits(image_size=16, num_classes=3)["train"][4][0])
    assert not torch.equal(image, data["train"][1][0])
    assert not torch.equal(image, data["test"][4][0])
    [note] = data["train"].notes
    assert "made-up images" in note and "data.root=FOLDER" in note


def cifar_pixels(batch):
    """Return three records of a batch: labels, and pixels that encode picture, colour and row."""
    labels = np.array([batch, 7, 9], np.uint8)
    pixels = np.arange(3 * 3072).reshape(3, 3072) // 32 % 251
    return labels, pixels.astype(np.uint8)


def write_binary(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        labels, pixels = cifar_pixels(number)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())


def write_pickled(folder):
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        labels, pixels = cifar_pixels(number)
        content = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("write", [write_binary, write_pickled])
@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin", "cifar-10-batches-py"])
def test_cifar_is_read_in_both_formats(tmp_path, write, below):
    write(tmp_path / "root" / below)
    data = splits(root=str(tmp_path / "root"))
    assert data["train"].labels.tolist() == [label for batch in range(5) for label in (batch, 7, 9)]
    assert data["test"].labels.tolist() == [5, 7, 9]
    image, label = data["test"][1]
    # The second picture's second colour, third row: 3072 + 1024 + 64 pixels on.
    value = (3072 + 1024 + 64) // 32 % 251 / 255
    assert image[1, 2, 0] == pytest.approx((value - 0.4822) / 0.2435, rel=1e-4)
    assert (image.shape, label, data["train"].notes) == ((3, 32, 32), 7, ())


def test_cifar_is_scaled_to_the_model(tmp_path):
    write_binary(tmp_path / "root")
    assert splits(root=str(tmp_path / "root"), image_size=64)["train"][0][0].shape == (3, 64, 64)
    with pytest.raises(ConfigError, match="below the 10 classes"):
        splits(root=str(tmp_path / "root"), num_classes=3)


def test_a_root_that_is_missing_or_incomplete_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        splits(root=str(tmp_path / "nowhere"))
    write_binary(tmp_path / "root")
    (tmp_path / "root" / "data_batch_3.bin").unlink()
    with pytest.raises(ConfigError, match="is missing 1 of the 6 data files") as caught:
        splits(root=str(tmp_path / "root"))
    assert "missing data_batch_3" in str(caught.value)
    assert "cs.toronto.edu" in str(caught.value)


def test_a_broken_file_is_an_error(tmp_path):
    write_binary(tmp_path / "root")
    (tmp_path / "root" / "test_batch.bin").write_bytes(b"too short")
    with pytest.raises(ConfigError, match="9 bytes are not a multiple of the 3073-byte records"):
        splits(root=str(tmp_path / "root"))


class Harmful:
    def __reduce__(self):
        return print, ("code of a stranger",)


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    write_pickled(tmp_path / "root")
    (tmp_path / "root" / "test_batch").write_bytes(pickle.dumps({b"data": Harmful()}))
    with pytest.raises(ConfigError, match=r"names builtins\.print"):
        splits(root=str(tmp_path / "root"))
    assert capsys.readouterr().out == ""


def smoothed_cross_entropy_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def test_the_recipe_warms_up_smooths_labels_and_exempts_norms_from_decay():
    config = one(["+recipe=resnet"]).config
    assert config.schedule["warmup_steps"] == 15 and config.loss.args == {"label_smoothing": 0.1}
    assert config.optimizer["no_decay"] == "norms_and_biases"


@pytest.mark.parametrize("model", ["resnet_tiny", "resnet50"])
def test_the_declared_sample_matches_the_data(model):
    config = one(["+recipe=resnet", f"model={model}"]).config
    arguments = arguments_of(config.data)
    declared = checked_sample(config, splits(**arguments)["train"][0])
    assert declared[1].high == config.model["num_classes"] == arguments["num_classes"]


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("strategy", ["pipelined", "sharded"])
def test_training_over_several_ipus_equals_plain_torch(strategy):
    layout = ["pipeline.split=[layer3]", f"pipeline.strategy={strategy}"]
    sizes = ["model.image_size=16", "model.width=4", "micro_batch_size=4", "gradient_accumulation=3"]
    assert_same_training(["+recipe=resnet", *layout, *sizes], smoothed_cross_entropy_of)


@pytest.mark.usefixtures("empty_folder")
def test_it_learns_patterns():
    # Of three kinds of small pictures it knows most after 60 steps, whatever the seed: the loss falls by 0.84 to 1.1.
    assert_learns(["+recipe=resnet", "model.image_size=16", "model.num_classes=3"], steps=60, falls_by=0.4)
