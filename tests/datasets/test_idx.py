import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ipurun.datasets.idx import FILES, load_splits, read_idx
from ipurun.errors import ConfigError


def idx_bytes(array: np.ndarray) -> bytes:
    """The IDX format as MNIST's page describes it: two zeros, type 8, rank, sizes, then the bytes."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_set(root: Path, train: int = 3, test: int = 2, zipped: bool = True) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("test", test)):
        images = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2) * 5
        labels = np.arange(count, dtype=np.uint8)
        for name, array in zip(FILES[split], (images, labels)):
            content = idx_bytes(array)
            if zipped:
                (root / (name + ".gz")).write_bytes(gzip.compress(content))
            else:
                (root / name).write_bytes(content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_array_is_read_as_it_was_written(tmp_path, suffix):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    path = tmp_path / ("some-idx3-ubyte" + suffix)
    path.write_bytes(gzip.compress(idx_bytes(array)) if suffix else idx_bytes(array))
    np.testing.assert_array_equal(read_idx(path), array)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "does not have the header of an IDX file"),
        (b"\x89PNG....", "does not have the header of an IDX file"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 9, 1, 2]), "2 bytes of data instead of 9"),
    ],
)
def test_a_file_of_another_format_is_named_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_a_gzip_file_cut_short_is_an_error_and_not_a_traceback(tmp_path):
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.arange(200, dtype=np.uint8)))[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_idx(path)


@pytest.mark.parametrize("layout", ["", "raw", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [True, False])
def test_both_splits_are_read_and_normalised(tmp_path, layout, zipped):
    write_set(tmp_path / layout, zipped=zipped)
    splits = load_splits(tmp_path, mean=0.1, std=0.5)
    assert {name: len(split) for name, split in splits.items()} == {"train": 3, "test": 2}
    image, label = splits["train"][2]
    expected = (torch.tensor([[[40.0, 45.0], [50.0, 55.0]]]) / 255 - 0.1) / 0.5
    torch.testing.assert_close(image, expected)
    assert (label.dtype, int(label)) == (torch.int64, 2)


def test_a_missing_root_and_an_incomplete_one_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"`data\.root` is not a folder"):
        load_splits(tmp_path / "nowhere", mean=0, std=1)
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ConfigError) as caught:
        load_splits(tmp_path, mean=0, std=1, advice="fetch them")
    message = str(caught.value)
    assert "is missing 1 of the 4 data files" in message
    assert "missing t10k-labels-idx1-ubyte" in message
    assert "fetch them" in message


def test_images_and_labels_of_different_length_are_refused(tmp_path):
    write_set(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.zeros(5, np.uint8))))
    with pytest.raises(ConfigError, match="do not match"):
        load_splits(tmp_path, mean=0, std=1)
