"""CIFAR-10 in its binary and its pickled format."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ipurun.datasets.folder import check_folder
from ipurun.errors import ConfigError, Problem

__all__ = ["ADVICE", "ColourImages", "load_splits"]

ADVICE = (
    "get cifar-10-binary.tar.gz or cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it "
    "and pass data.root=FOLDER; or leave data.root out for made-up images"
)

_FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
_FOLDERS = ("", "cifar-10-batches-bin", "cifar-10-batches-py")
_PIXELS = 3 * 32 * 32
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)
_PICKLED_NAMES = frozenset(
    (
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    )
)


class ColourImages(Dataset):
    """Colour images of 32 x 32 and their labels, stored as bytes and normalised on access."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy())
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.notes: Tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
        return (self.images[index].float() / 255 - mean) / std, self.labels[index]


def load_splits(root: Path) -> Dict[str, ColourImages]:
    """Return the training and the test split of a folder, or of the unpacked archive in it.

    Raises:
        ConfigError: If the folder is missing or incomplete, or a file has another format.
    """
    names = [name for group in _FILES.values() for name in group]
    check_folder(root, names, _find, ending=".bin", advice=ADVICE)
    return {split: _load(root, group) for split, group in _FILES.items()}


def _find(root: Path, name: str) -> Optional[Path]:
    candidates = [root / folder / file for folder in _FOLDERS for file in (name + ".bin", name)]
    return next((path for path in candidates if path.is_file()), None)


def _load(root: Path, names: Tuple[str, ...]) -> ColourImages:
    parts: List[Tuple[np.ndarray, np.ndarray]] = []
    for name in names:
        path = _find(root, name)
        assert path is not None  # load_splits has checked
        parts.append(_read_binary(path) if path.suffix == ".bin" else _read_pickled(path))
    return ColourImages(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def _read_binary(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    content = np.frombuffer(path.read_bytes(), np.uint8)
    if not content.size or content.size % (_PIXELS + 1):
        raise ConfigError(_broken(path, f"{content.size} bytes are not a multiple of the {_PIXELS + 1}-byte records"))
    records = content.reshape(-1, _PIXELS + 1)
    return records[:, 1:], records[:, 0]


def _read_pickled(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = np.asarray(content[b"data"], np.uint8), np.asarray(content[b"labels"], np.uint8)
        return pixels.reshape(len(labels), _PIXELS), labels
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(_broken(path, f"{type(error).__name__}: {error}")) from error


class _ArraysOnly(pickle.Unpickler):
    """Reads only arrays and plain values, since a pickle could otherwise run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLED_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR-10 file does")
        return super().find_class(module, name)


def _broken(path: Path, reason: str) -> Problem:
    return Problem("a data file cannot be read", where=str(path), seen=reason, fix=ADVICE)
