"""Labelled pictures of one size, given out in another."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch.nn import functional
from torch.utils.data import Dataset

__all__ = ["ResizedImages", "resized"]


class ResizedImages(Dataset):
    """A map-style data set of (image, label) with its images scaled and its colours repeated.

    Args:
        data: Its images are channels x height x width.
        image_size: Height and width to scale to.
        in_channels: Colours to give out; a multiple of those that the images have.
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
    """The data with images of another size or number of colours; the data themselves where both are right.

    Raises:
        ValueError: The colours cannot be repeated to give so many.
    """
    channels, height, width = data[0][0].shape
    if in_channels % channels:
        raise ValueError(f"pictures of {channels} colours cannot be given out with {in_channels}")
    if (channels, height, width) == (in_channels, image_size, image_size):
        return data
    return ResizedImages(data, image_size, in_channels)
