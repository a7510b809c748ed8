"""A callback that draws digits and what the model takes them for, at each evaluation."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch

from ipurun import Callback
from ipurun.training.events import EvalEnd

__all__ = ["DigitGrid", "draw_grid", "write_png"]

# Three by five pixels for each digit, row by row.
_DIGITS = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip
_RIGHT = torch.tensor([0, 200, 0], dtype=torch.uint8)
_WRONG = torch.tensor([255, 0, 0], dtype=torch.uint8)


class DigitGrid(Callback):
    """Draws the first samples of the evaluated split to ``digits/step-00000400.png`` in the run folder.

    The predicted digit is in the corner of each: green if it is right, red if it is wrong.

    Args:
        rows: Rows of the grid.
        columns: Its columns.
        scale: Width of a pixel of the samples.
    """

    def __init__(self, rows: int = 8, columns: int = 8, scale: int = 2) -> None:
        self.rows = rows
        self.columns = columns
        self.scale = scale

    def on_eval(self, event: EvalEnd) -> None:
        data = self.run.data[event.split]
        samples = [data[index] for index in range(min(len(data), self.rows * self.columns))]
        images = torch.stack([image for image, _ in samples])
        with torch.no_grad():
            predicted = self.run.plain_model()(images).argmax(dim=1)
        right = predicted == torch.stack([torch.as_tensor(label) for _, label in samples])
        file = self.run.folder / "digits" / f"step-{event.step:08d}.png"
        file.parent.mkdir(exist_ok=True)
        write_png(file, draw_grid(images[:, 0], predicted, right, self.columns, self.scale))
        self.run.note(f"digits at step {event.step}: {int((~right).sum())} of {len(samples)} wrong, in {file}")


def draw_grid(
    images: torch.Tensor, predicted: torch.Tensor, right: torch.Tensor, columns: int, scale: int
) -> torch.Tensor:
    """Return a picture (height x width x RGB) of grey images with the predicted digits in their corners."""
    grey = images - images.amin(dim=(1, 2), keepdim=True)
    grey = (255 * grey / grey.amax(dim=(1, 2), keepdim=True).clamp(min=1e-9)).to(torch.uint8)
    large = grey.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    height, width = large.shape[1] + 1, large.shape[2] + 1  # a line between two images
    picture = torch.full((-(-len(images) // columns) * height, columns * width, 3), 64, dtype=torch.uint8)
    for index, image in enumerate(large):
        cell = picture[index // columns * height :, index % columns * width :][: height - 1, : width - 1]
        cell[:] = image.unsqueeze(2)
        ink = torch.tensor([pixel == "1" for pixel in _DIGITS[int(predicted[index]) % 10]]).reshape(5, 3)
        ink = ink.repeat_interleave(scale, dim=0).repeat_interleave(scale, dim=1)
        cell[: ink.shape[0], : ink.shape[1]][ink] = _RIGHT if right[index] else _WRONG
    return picture


def write_png(file: Path, picture: torch.Tensor) -> None:
    """Write a picture (height x width x RGB, bytes) as a PNG file."""
    height, width, _ = picture.shape
    lines = b"".join(b"\0" + row.numpy().tobytes() for row in picture)  # filter 0: bytes as they are
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
