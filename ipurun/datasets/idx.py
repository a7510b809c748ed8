"""Labelled images in the IDX format of MNIST."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ipurun.datasets.folder import check_folder
from ipurun.errors import ConfigError, Problem

__all__ = ["FILES", "LabelledImages", "load_splits", "read_idx"]

FILES: Dict[str, Tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

_UNSIGNED_BYTE = 8
# torchvision puts the files in a subfolder of the root.
_SUBFOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")


class LabelledImages(TensorDataset):
    """Grey images and their labels, normalised in memory.

    Args:
        images: Pixels 0..255, shape N x H x W.
        labels: One class number per image.
        mean: Mean of the pixels, on a scale of 0 to 1.
        std: Standard deviation of the pixels, on the same scale.
        notes: Remarks for the user.
    """

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, mean: float, std: float, notes: Tuple[str, ...] = ()
    ) -> None:
        pixels = torch.from_numpy(images.astype(np.float32))
        self.images = pixels.div_(255).sub_(mean).div_(std).unsqueeze(1)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        super().__init__(self.images, self.labels)
        self.notes = notes


def read_idx(path: Path) -> np.ndarray:
    """Read the array of an IDX file of unsigned bytes, gzipped or not.

    Raises:
        ConfigError: If the file is truncated or has another format.
    """
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(_broken(path, str(error) or type(error).__name__)) from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise ConfigError(_broken(path, "it does not have the header of an IDX file of unsigned bytes"))
    header = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(content) - header != expected:
        raise ConfigError(_broken(path, f"{len(content) - header} bytes of data instead of {expected}"))
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _broken(path: Path, reason: str) -> Problem:
    return Problem(
        "a data file cannot be read",
        where=str(path),
        seen=reason,
        fix="delete the file and download it again, for example with data.download=true",
    )


def _find_file(root: Path, name: str) -> Optional[Path]:
    """Return a file below a root, gzipped or not, in MNIST's or torchvision's layout."""
    for subfolder in _SUBFOLDERS:
        for candidate in (root / subfolder / name, root / subfolder / (name + ".gz")):
            if candidate.is_file():
                return candidate
    return None


def load_splits(
    root: Path, *, mean: float, std: float, notes: Tuple[str, ...] = (), advice: str = ""
) -> Dict[str, LabelledImages]:
    """Return the training and the test split of a folder.

    Args:
        root: Folder with the four files of `FILES`.
        mean: Mean of the pixels, on a scale of 0 to 1.
        std: Standard deviation of the pixels.
        notes: Remarks for the user.
        advice: How to get missing files.

    Raises:
        ConfigError: If the folder is missing or incomplete, or its files do not match.
    """
    names = [name for pair in FILES.values() for name in pair]
    check_folder(root, names, _find_file, ending=".gz", advice=advice)
    return {split: _load_pair(root, pair, mean, std, notes) for split, pair in FILES.items()}


def _load_pair(root: Path, pair: Tuple[str, str], mean: float, std: float, notes: Tuple[str, ...]) -> LabelledImages:
    paths: List[Path] = [path for path in (_find_file(root, name) for name in pair) if path is not None]
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ConfigError(
            "images and labels do not match",
            where=str(root),
            seen=f"images of shape {images.shape}, labels of shape {labels.shape}",
            fix="put the four files of one data set in the folder",
        )
    return LabelledImages(images, labels, mean, std, notes)
