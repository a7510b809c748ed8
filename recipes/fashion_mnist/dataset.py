"""Fashion-MNIST, in the same file format as MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Optional

from ipurun.datasets.download import FASHION_MNIST, cached_folder, fetch
from ipurun.datasets.idx import LabelledImages, load_splits
from ipurun.errors import ConfigError

__all__ = ["splits"]

# The porting tutorial maps pixels to -1..1.
MEAN = 0.5
STD = 0.5


def splits(root: Optional[str] = None, download: bool = False) -> Dict[str, LabelledImages]:
    """Return the training and the test images.

    Args:
        root: Folder with the four IDX files, gzipped or not.
        download: Fetch missing files; without a root, into the user's cache folder.

    Returns:
        ``train`` and ``test``, whose items are a normalised 1 x 28 x 28 image and its class.

    Raises:
        ConfigError: If the root is not set, missing or incomplete, or the download fails.
    """
    if download:
        folder = fetch(FASHION_MNIST, Path(root).expanduser() if root else cached_folder(FASHION_MNIST))
    elif root:
        folder = Path(root).expanduser()
    else:
        raise ConfigError("`data.root` is not set, and fashion_mnist does not include data", fix=FASHION_MNIST.advice)
    return load_splits(folder, mean=MEAN, std=STD, advice=FASHION_MNIST.advice)
