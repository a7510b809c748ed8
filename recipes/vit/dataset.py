"""MNIST's digits, scaled to the image size of a vision transformer."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ipurun.datasets.resized import resized
from ipurun.recipes.mnist.dataset import splits as mnist_splits

__all__ = ["splits"]


def splits(
    root: Optional[str] = None, download: bool = False, image_size: int = 28, in_channels: int = 1
) -> Dict[str, Any]:
    """Return the training and the test digits.

    Args:
        root: Folder with MNIST's four IDX files, gzipped or not. None: the 5,000 digits that ship with ipurun.
        download: Fetch missing files; without a root, into the user's cache folder.
        image_size: Height and width of the images; the digits' 28 x 28 are scaled to it.
        in_channels: Channels of the images; the digits' grey is repeated.

    Returns:
        ``train`` and ``test``, whose items are a normalised image and its digit.

    Raises:
        ConfigError: If `root` is missing or incomplete, or the download fails.
    """
    return {name: resized(data, image_size, in_channels) for name, data in mnist_splits(root, download).items()}
