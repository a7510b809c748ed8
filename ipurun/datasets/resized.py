"""Labelled images, scaled to another size."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["resized"]


class ResizedImages(Dataset):
    """A map-style data set of (image, label) with its images scaled and its channels repeated.

    Args:
        data: The original data, with images of channels x height x width.
        image_size: Height and width to scale to.
        in_channels: Channels to return; a multiple of those of the images.
    """

    def __init__(self, data: Any, image_size: int, in_channels: int) -> None:
        self.data = data
        self.image_size = image_size
        self.in_channels = in_channels
        self.notes: Tuple[str, ...] = tuple(getattr(data, "notes", ()))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, Any]:
        image, label = self.data[index]
        if image.shape[1:] != (self.image_size, self.image_size):
            size = (self.image_size, self.image_size)
            image = functional.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0]
        return image.repeat(self.in_channels // image.shape[0], 1, 1), label


def resized(data: Any, image_size: int, in_channels: int) -> Any:
    """Return the data with images of another size or number of channels; unchanged if both are right.

    Raises:
        ValueError: If the number of channels is not a multiple of the images'.
    """
    channels, height, width = data[0][0].shape
    if in_channels % channels:
        raise ValueError(f"images with {channels} channels cannot be expanded to {in_channels}")
    if (channels, height, width) == (in_channels, image_size, image_size):
        return data
    return ResizedImages(data, image_size, in_channels)
