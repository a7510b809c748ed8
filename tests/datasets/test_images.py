"""Folders of images."""

import sys

import numpy as np
import pytest
import torch
from run_harness import Folder, trained

from ipurun.checkpoint import latest
from ipurun.datasets.images import decode_image, splits
from ipurun.errors import ConfigError


def _ppm(array):
    height, width = array.shape[:2]
    kind = b"P6" if array.ndim == 3 else b"P5"
    return kind + b"\n# made by hand\n%d %d\n255\n" % (width, height) + array.tobytes()


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def test_images_without_a_package_for_them(pixels):
    assert torch.equal(decode_image(_ppm(pixels), "x.ppm"), torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(decode_image(_ppm(pixels[..., 0].copy()), "x.pgm"), torch.from_numpy(pixels[None, :, :, 0]))
    with pytest.raises(ValueError, match="not a whole image"):
        decode_image(_ppm(pixels)[:-1], "x.ppm")
    with pytest.raises(ValueError, match="cut off"):
        decode_image(b"P6\n3 ", "x.ppm")


def test_a_png_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"ipurun\[images\]"):
        decode_image(b"\x89PNG\r\n", "x.png")


def test_classes_are_subfolders_and_shapes_are_one(tmp_path, pixels):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for number in range(10):
            image = pixels[:, : 6 + number % 4] if label else pixels[..., 0].copy()
            content = _ppm(np.ascontiguousarray(image))
            (tmp_path / name / f"{number}.{'ppm' if label else 'pgm'}").write_bytes(content)
    found = splits(str(tmp_path), image_size=6, eval_share=0.2, mean=[0.5], std=[0.25])
    assert (len(found["train"]), len(found["eval"])) == (16, 4)
    assert found["train"].classes == ("cat", "dog") and [found["eval"][i][1] for i in range(4)] == [0, 0, 1, 1]
    assert {found["train"][index][0].shape for index in range(16)} == {torch.Size([3, 6, 6])}
    # Image 0 of the dogs is 6 x 6: neither scaled nor cut.
    image, label = next(found["train"][index] for index in range(16) if found["train"][index][1] == 1)
    expected = (torch.from_numpy(pixels[:, :6].copy()).permute(2, 0, 1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(image, expected)
    smaller = splits(str(tmp_path), image_size=3, in_channels=1)["train"][12][0]
    assert smaller.shape == (1, 3, 3)


def test_folders_for_splits(tmp_path, pixels):
    for place in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / place).mkdir(parents=True)
        np.save(tmp_path / place / "x.npy", pixels)
    assert {name: len(split) for name, split in splits(str(tmp_path), 4).items()} == {"train": 2, "eval": 2}
    (tmp_path / "val/c").mkdir()
    with pytest.raises(ConfigError, match="different classes"):
        splits(str(tmp_path), 4)
    with pytest.raises(ConfigError, match="no images"):
        splits(str(tmp_path / "val/c"), 4)
    with pytest.raises(ConfigError, match="not a folder"):
        splits(str(tmp_path / "nowhere"), 4)


def test_a_run_resumed_in_the_middle_equals_a_whole_one(tmp_path):
    for label in range(3):
        (tmp_path / f"data/{label}").mkdir(parents=True)
        for number in range(10):
            pixels = np.random.default_rng([label, number]).integers(0, 256, (2, 2), np.uint8)
            np.save(tmp_path / f"data/{label}/{number}.npy", pixels)
    layers = [{"_target_": "torch.nn.Flatten"}, {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 3}]
    keys = {
        "model": {"_target_": "torch.nn.Sequential", "_args_": layers},
        "data": {"_target_": "ipurun.datasets.images.splits", "root": str(tmp_path / "data"), "in_channels": 1},
    }
    keys["data"]["image_size"] = 2
    whole, _, _ = trained(tmp_path / "whole", max_steps=10, **keys)
    trained(tmp_path / "half", max_steps=4, **keys)
    newest = latest(Folder(tmp_path / "half"))
    resumed, _, _ = trained(tmp_path / "half", resume_from=newest, max_steps=10, loader__workers=2, **keys)
    expected = whole.user_model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.user_model.state_dict().items())
