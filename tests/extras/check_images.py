"""Image folders with PNG and JPEG files, read by Pillow."""

import io
import tarfile

import numpy as np
import torch
from PIL import Image

from ipurun.datasets.images import splits
from ipurun.datasets.shards import splits as shards


def test_png_and_jpeg_are_read(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    for name, kind in (("a", "png"), ("b", "jpg")):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "train" / name / f"x.{kind}")
    found = splits(str(tmp_path), image_size=8, mean=[0.0], std=[1.0])["train"]
    expected = torch.from_numpy(pixels[:, 2:10].copy()).permute(2, 0, 1) / 255
    torch.testing.assert_close(found[0][0], expected)
    assert found[1][0].shape == (3, 8, 8) and found[1][1] == 1


def test_images_in_shards(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "png")
    with tarfile.open(tmp_path / "t-0.tar", "w") as archive:
        for name, part in (("0.png", content.getvalue()), ("0.cls", b"3")):
            member = tarfile.TarInfo(name)
            member.size = len(part)
            archive.addfile(member, io.BytesIO(part))
    image, label = next(iter(shards(str(tmp_path / "t-*.tar"))["train"]))
    assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1)) and int(label) == 3
