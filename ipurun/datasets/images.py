"""Folders of images: a subfolder for each class."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from ipurun.errors import ConfigError

__all__ = ["IMAGE_ENDINGS", "ImageFolder", "decode_image", "splits"]

IMAGE_ENDINGS = (".npy", ".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
_SPLITS = {"train": ("train", "training"), "eval": ("eval", "val", "valid", "validation"), "test": ("test", "testing")}


class ImageFolder(Dataset):
    """Images by class, read when they are needed and scaled to one size: an IPU compiles for one shape.

    Args:
        files: The images.
        labels: The class number of each.
        classes: The names of the classes.
        image_size: Height and width. The shorter side is scaled to it, the middle of the longer one is taken.
        in_channels: 3 for colours, 1 for grey.
        mean: Mean of each channel on a scale of 0 to 1, subtracted.
        std: Standard deviation of each channel, divided by.
        notes: Remarks for the user.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: Sequence[int],
        classes: Sequence[str],
        image_size: int,
        in_channels: int = 3,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        notes: Tuple[str, ...] = (),
    ) -> None:
        # As arrays rather than lists of objects, which every worker process would copy as it counts references.
        self._files = np.array([os.fsencode(file) for file in files])
        self._labels = np.array(labels, np.int64)
        self.classes = tuple(classes)
        self.image_size = image_size
        self.in_channels = in_channels
        self._mean = torch.tensor(list(mean)).reshape(-1, 1, 1)
        self._std = torch.tensor(list(std)).reshape(-1, 1, 1)
        self.notes = notes

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        file = os.fsdecode(bytes(self._files[index]))
        with open(file, "rb") as stream:
            image = decode_image(stream.read(), file).float() / 255
        image = (_with_channels(_squared(image, self.image_size), self.in_channels) - self._mean) / self._std
        return image, int(self._labels[index])


def splits(
    root: Optional[str],
    image_size: int = 224,
    in_channels: int = 3,
    eval_share: float = 0.1,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
) -> Dict[str, ImageFolder]:
    """Return the splits of a folder of images.

    Args:
        root: A folder with a subfolder for each class, or with ``train`` and ``val`` or ``test`` that have these.
        image_size: Height and width to scale to.
        in_channels: 3 for colours, 1 for grey.
        eval_share: Part of each class for evaluation where there is no folder for it.
        mean: Mean of each channel; by default ImageNet's.
        std: Standard deviation of each channel.

    Raises:
        ConfigError: If the folder is missing, has no images, or its splits have different classes.
    """
    if not root:
        raise ConfigError("`data.root` is not set", fix="data.root=FOLDER", key="data.root")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigError("`data.root` is not a folder", where=f"data.root={root}", seen=str(folder), key="data.root")
    if in_channels not in (1, 3):
        raise ConfigError("`data.in_channels` is not 1 or 3", seen=str(in_channels), key="data.in_channels")
    parts = {
        name: next((folder / word for word in words if (folder / word).is_dir()), None)
        for name, words in _SPLITS.items()
    }
    if in_channels == 1 and len(mean) == 3:
        mean, std = [sum(mean) / 3], [sum(std) / 3]

    def made(files: Sequence[Path], labels: Sequence[int], classes: Sequence[str]) -> ImageFolder:
        return ImageFolder(files, labels, classes, image_size, in_channels, mean, std)

    if parts["train"] is None:
        files, labels, classes = _listed(folder)
        chosen = _part_of_each_class(labels, eval_share)
        found = {
            "train": made(*_where(files, labels, chosen, False), classes),
            "eval": made(*_where(files, labels, chosen, True), classes),
        }
    else:
        found, classes = {}, []
        for name, place in parts.items():
            if place is None:
                continue
            files, labels, of_split = _listed(place)
            classes = classes or of_split
            if of_split != classes:
                differing = ", ".join(sorted(set(of_split) ^ set(classes)))
                fix = "give every split the same subfolders"
                raise ConfigError("splits have different classes", where=str(place), seen=differing, fix=fix)
            found[name] = made(files, labels, classes)
    total = len(found["train"])
    found["train"].notes = (f"data: {total:,} images for training in {len(classes)} classes",)
    return found


def decode_image(content: bytes, name: str) -> torch.Tensor:
    """Return an image as channels x height x width of bytes.

    Arrays (``.npy``, height x width or height x width x channels) and PPM and PGM files need no package.

    Raises:
        ValueError: The file is not an image.
        ConfigError: It needs a package that is not installed.
    """
    if content[:6] == b"\x93NUMPY":
        array = np.load(io.BytesIO(content), allow_pickle=False)
    elif content[:2] in (b"P5", b"P6"):
        array = _decode_pnm(content, name)
    else:
        array = _decode_with_pillow(content, name)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise ValueError(f"{name} is an array of {array.dtype} with the shape {array.shape}, not an image of bytes")
    pixels = torch.from_numpy(np.array(array))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def _decode_pnm(content: bytes, name: str) -> np.ndarray:
    words: List[bytes] = []
    at = 0
    while len(words) < 4:
        end = at
        while end < len(content) and not content[end : end + 1].isspace():
            end += 1
        if content[at:end].startswith(b"#"):
            end = content.find(b"\n", at) % (len(content) + 1)
        elif end > at:
            words.append(content[at:end])
        at = end + 1
        if at > len(content):
            raise ValueError(f"{name} is cut off")
    width, height, largest = (int(word) for word in words[1:])
    channels = 3 if words[0] == b"P6" else 1
    size = width * height * channels
    if largest != 255 or len(content) - at < size:
        raise ValueError(f"{name} is not a whole image of bytes")
    pixels = np.frombuffer(content, np.uint8, size, at)
    return pixels.reshape(height, width, 3) if channels == 3 else pixels.reshape(height, width)


def _decode_with_pillow(content: bytes, name: str) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            "reading PNG, JPEG and other images needs a package that is not installed",
            where=name,
            seen=str(error),
            fix="pip install 'ipurun[images]', or store the images as .npy or .ppm",
            key="data.root",
        ) from error
    with Image.open(io.BytesIO(content)) as image:
        grey = image.mode in ("1", "L", "I", "F", "I;16")
        return np.asarray(image.convert("L" if grey else "RGB"))


def _squared(image: torch.Tensor, size: int) -> torch.Tensor:
    height, width = image.shape[1:]
    if (height, width) == (size, size):
        return image
    factor = size / min(height, width)
    scaled_to = (max(size, round(height * factor)), max(size, round(width * factor)))
    if scaled_to != (height, width):
        image = functional.interpolate(image[None], size=scaled_to, mode="bilinear", antialias=True)[0]
    top, left = (image.shape[1] - size) // 2, (image.shape[2] - size) // 2
    return image[:, top : top + size, left : left + size].contiguous()


def _with_channels(image: torch.Tensor, channels: int) -> torch.Tensor:
    if image.shape[0] == channels:
        return image
    return image.expand(3, -1, -1) if channels == 3 else image[:3].mean(dim=0, keepdim=True)


def _listed(folder: Path) -> Tuple[List[Path], List[int], List[str]]:
    """Return the images below a folder, their classes, and the names of the classes, all in the order of names."""
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    files: List[Path] = []
    labels: List[int] = []
    for number, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)
        files += found
        labels += [number] * len(found)
    if not files:
        seen = f"{len(classes)} subfolders without a file that ends in {', '.join(IMAGE_ENDINGS)}"
        fix = "give every class a subfolder with its images"
        raise ConfigError("`data.root` has no images", where=str(folder), seen=seen, fix=fix, key="data.root")
    return files, labels, classes


def _part_of_each_class(labels: Sequence[int], share: float) -> np.ndarray:
    """Return which images are for evaluation: every n-th of each class, the same in every run."""
    if not 0 < share < 1:
        raise ConfigError("`data.eval_share` is not between 0 and 1", seen=str(share), key="data.eval_share")
    chosen: np.ndarray = np.zeros(len(labels), bool)
    numbers = np.array(labels)
    for label in np.unique(numbers):
        places = np.flatnonzero(numbers == label)
        counts = np.floor(np.arange(1, len(places) + 1) * share + 1e-9)
        chosen[places] = np.diff(counts, prepend=0.0) > 0
    return chosen


def _where(
    files: Sequence[Path], labels: Sequence[int], chosen: np.ndarray, wanted: bool
) -> Tuple[List[Path], List[int]]:
    places = np.flatnonzero(chosen == wanted)
    return [files[place] for place in places], [labels[place] for place in places]
