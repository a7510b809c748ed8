"""MNIST: all digits from a folder or the network, or the 5,000 that ship with ipurun."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Optional

from ipurun.datasets.download import MNIST, cached_folder, fetch
from ipurun.datasets.idx import LabelledImages, load_splits

__all__ = ["splits"]

MEAN = 0.1307
STD = 0.3081
SUBSET = Path(__file__).parent / "data"
SUBSET_NOTE = (
    "data: the 5,000-digit subset of MNIST that ships with ipurun (4,000 to train, 1,000 to test); "
    "set data.root=FOLDER or data.download=true for all 70,000"
)


def splits(root: Optional[str] = None, download: bool = False) -> Dict[str, LabelledImages]:
    """Return the training and the test digits.

    Args:
        root: Folder with MNIST's four IDX files, gzipped or not; it must be complete unless `download` is set.
        download: Fetch missing files; without a root, into the user's cache folder.

    Returns:
        ``train`` and ``test``, whose items are a normalised 1 x 28 x 28 image and its digit.

    Raises:
        ConfigError: If `root` is missing or incomplete, or the download fails.
    """
    if download:
        folder = fetch(MNIST, Path(root).expanduser() if root else cached_folder(MNIST))
    elif root is not None:
        folder = Path(root).expanduser()
    else:
        return load_splits(SUBSET, mean=MEAN, std=STD, notes=(SUBSET_NOTE,))
    return load_splits(folder, mean=MEAN, std=STD, advice=MNIST.advice)
