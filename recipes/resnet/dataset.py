"""CIFAR-10, or made-up images without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from ipurun.datasets.resized import resized
from ipurun.errors import ConfigError
from ipurun.recipes.resnet.cifar import ADVICE, load_splits

__all__ = ["MadeUpImages", "splits"]

_CIFAR_CLASSES = 10
_PATTERN_SIZE = 4
_NOISE = 4.0
_MADE_UP_LENGTHS = {"train": 20000, "test": 1000}
_MADE_UP_NOTE = (
    "data: made-up images, a colour pattern per class with noise, because data.root is not set; "
    "accuracies say nothing about real images. For CIFAR-10, " + ADVICE.split("; or")[0]
)


class MadeUpImages(Dataset):
    """Noisy images of a pattern per class: as fast as random data, but with something to learn.

    Args:
        length: Number of images.
        image_size: Their height and width.
        in_channels: Their channels.
        num_classes: Number of patterns.
        seed: Seed of the noise; the patterns are always the same.
        notes: Remarks for the user.
    """

    def __init__(
        self,
        length: int,
        image_size: int,
        in_channels: int,
        num_classes: int,
        seed: int,
        notes: Tuple[str, ...] = (),
    ) -> None:
        self.length = length
        self.image_size = image_size
        self.seed = seed
        self.notes = notes
        shape = (num_classes, in_channels, _PATTERN_SIZE, _PATTERN_SIZE)
        self.patterns = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        label = index % len(self.patterns)
        size = (self.image_size, self.image_size)
        pattern = functional.interpolate(self.patterns[label][None], size=size, mode="bilinear", align_corners=False)[0]
        # A large odd factor keeps the streams of neighbouring seeds apart.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        noise = torch.randn(pattern.shape, generator=generator)
        return pattern + _NOISE * noise, torch.tensor(label)


def splits(
    root: Optional[str] = None, image_size: int = 32, in_channels: int = 3, num_classes: int = 10, seed: int = 0
) -> Dict[str, Any]:
    """Return the training and the test images.

    Args:
        root: Folder with CIFAR-10's files, binary or pickled. None: made-up images, with a note.
        image_size: Height and width of the images; CIFAR-10's 32 x 32 are scaled to it.
        in_channels: Channels of the images.
        num_classes: Number of classes; at least 10 for CIFAR-10.
        seed: Seed of made-up images.

    Returns:
        ``train`` and ``test``, whose items are a normalised image and its class.

    Raises:
        ConfigError: If `root` is missing or incomplete, or the model has too few classes.
    """
    if root is not None:
        if num_classes < _CIFAR_CLASSES:
            raise ConfigError(
                "`data.num_classes` is below the 10 classes of CIFAR-10",
                seen=str(num_classes),
                fix="model.num_classes=10",
            )
        loaded = load_splits(Path(root).expanduser())
        return {name: resized(data, image_size, in_channels) for name, data in loaded.items()}
    return {
        name: MadeUpImages(length, image_size, in_channels, num_classes, seed=seed + number, notes=(_MADE_UP_NOTE,))
        for number, (name, length) in enumerate(_MADE_UP_LENGTHS.items())
    }
