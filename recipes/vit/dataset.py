"""MNIST's digits in the size that a vision transformer wants."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ipurun.datasets.resized import resized
from ipurun.recipes.mnist.dataset import splits as mnist_splits

__all__ = ["splits"]


def splits(
    root: Optional[str] = None, download: bool = False, image_size: int = 28, in_channels: int = 1
) -> Dict[str, Any]:
    """The training and the test digits.

    Args:
        root: Folder with MNIST's four IDX files, gzipped or not. None: the 5,000 digits that ship with ipurun.
        download: Fetch what `root` lacks; without a root, into the user's cache folder.
        image_size: Height and width of the pictures; digits are 28 x 28, and scaled to others.
        in_channels: Colours of the pictures; the digits' grey is repeated.

    Returns:
        ``train`` and ``test``, whose items are a normalised picture and its digit.

    Raises:
        ConfigError: `root` is missing or incomplete.
        RunError: The download failed.
    """
    return {name: resized(data, image_size, in_channels) for name, data in mnist_splits(root, download).items()}
