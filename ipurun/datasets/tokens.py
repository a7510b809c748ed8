"""Tokens of a language model in memory-mapped files, which may be larger than the memory of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch.utils.data import Dataset

from ipurun.datasets.download import counter
from ipurun.datasets.folder import numbered_files
from ipurun.errors import ConfigError
from ipurun.files import replacing

__all__ = ["TokenWindows", "splits", "text_pieces", "write_tokens"]

_TYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")


class TokenWindows(Dataset):
    """Windows of token files: their tokens, and the token after each of them.

    Only the pages of the files that a window touches are read. A window does not cross the border of two files.

    Args:
        files: Files ``.npy`` with one dimension, or raw numbers in any other file.
        sequence_length: Tokens per window.
        stride: Tokens between the beginnings of two windows.
        dtype: Type of the numbers in raw files.
        vocab_size: Tokens that the model knows; a larger one is an error. None: not checked.
        share: Part of each file to use, from and to, between 0 and 1.
        notes: Remarks for the user.

    Raises:
        ConfigError: If a file is missing, has other content or is too short.
    """

    def __init__(
        self,
        files: Sequence[Path],
        sequence_length: int,
        stride: Optional[int] = None,
        dtype: str = "uint16",
        vocab_size: Optional[int] = None,
        share: Tuple[float, float] = (0.0, 1.0),
        notes: Tuple[str, ...] = (),
    ) -> None:
        self.files = [Path(file) for file in files]
        self.sequence_length = sequence_length
        self.stride = stride or sequence_length
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.share = share
        self.notes = notes
        self._open: Dict[int, np.ndarray] = {}
        windows = [self._windows_of(number) for number in range(len(self.files))]
        self._ends = np.cumsum(windows)
        if not self._ends[-1]:
            raise ConfigError(
                f"the token files are too short for windows of {sequence_length} tokens",
                where=", ".join(map(str, self.files[:3])),
                seen=f"{self.num_tokens} tokens",
                fix="a smaller model.max_positions, or more tokens",
                key="data.sequence_length",
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the part of the files that is used."""
        return sum(len(self._tokens(number)) for number in range(len(self.files)))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = (index - (int(self._ends[number - 1]) if number else 0)) * self.stride
        piece = torch.from_numpy(self._tokens(number)[first : first + self.sequence_length + 1].astype(np.int64))
        if self.vocab_size is not None and not 0 <= int(piece.min()) <= int(piece.max()) < self.vocab_size:
            wrong = int(piece.max()) if int(piece.max()) >= self.vocab_size else int(piece.min())
            raise ValueError(f"{self.files[number]} has the token {wrong}; the model knows {self.vocab_size} tokens")
        return piece[:-1], piece[1:]

    def __getstate__(self) -> Dict[str, Any]:
        return {**vars(self), "_open": {}}  # each process maps the files itself

    def _windows_of(self, number: int) -> int:
        return max(0, (len(self._tokens(number)) - self.sequence_length - 1) // self.stride + 1)

    def _tokens(self, number: int) -> np.ndarray:
        if number not in self._open:
            whole = _mapped(self.files[number], self.dtype)
            first, last = (int(len(whole) * place) for place in self.share)
            # As a plain array, which maps the file as well: slices of a memmap take many times as long.
            self._open[number] = whole[first:last].view(np.ndarray)
        return self._open[number]


def splits(
    file: Union[str, Sequence[str], None],
    sequence_length: int,
    eval_file: Union[str, Sequence[str], None] = None,
    eval_share: float = 0.01,
    stride: Optional[int] = None,
    dtype: str = "uint16",
    vocab_size: Optional[int] = None,
) -> Dict[str, TokenWindows]:
    """Return training and evaluation windows of token files.

    Args:
        file: A file, a list of files, or numbered files by pattern: ``train-{000..127}.bin`` or ``train-*.npy``.
        sequence_length: Tokens per sample.
        eval_file: Files for evaluation. None: the last part of each training file.
        eval_share: Size of that part.
        stride: Tokens between the beginnings of two training samples; None: `sequence_length`.
        dtype: Type of the numbers in raw files (not ``.npy``).
        vocab_size: Tokens that the model knows.

    Raises:
        ConfigError: If a file is missing, has other content or is too short.
    """
    if dtype not in _TYPES:
        raise ConfigError("`data.dtype` is not a type of tokens", seen=dtype, known=", ".join(_TYPES), key="data.dtype")
    if not 0 < eval_share < 1:
        raise ConfigError("`data.eval_share` is not between 0 and 1", seen=str(eval_share), key="data.eval_share")
    files = numbered_files(file, "data.file")
    others = None if eval_file is None else numbered_files(eval_file, "data.eval_file")
    border = 1.0 if others is not None else 1 - eval_share
    train = TokenWindows(files, sequence_length, stride, dtype, vocab_size, (0.0, border))
    train.notes = (f"data: {train.num_tokens:,} tokens for training in {len(files)} memory-mapped files",)
    if others is not None:
        return {"train": train, "eval": TokenWindows(others, sequence_length, None, dtype, vocab_size)}
    return {"train": train, "eval": TokenWindows(files, sequence_length, None, dtype, vocab_size, (border, 1.0))}


def write_tokens(
    path: Path, pieces: Iterable[np.ndarray], dtype: str = "uint16", total: Optional[int] = None, unit: str = "tokens"
) -> int:
    """Write tokens piece by piece to a raw file, atomically, with a counter on standard error.

    Args:
        path: The file.
        pieces: Arrays of tokens; only one is in memory at a time.
        dtype: Type of the numbers.
        total: Number of tokens if known.
        unit: What is counted.

    Returns:
        The number of tokens.

    Raises:
        ValueError: A token does not fit the type.
    """
    written, largest = 0, np.iinfo(dtype).max
    with counter(f"writing {path.name}", total, unit) as advance, replacing(path) as stream:
        for piece in pieces:
            if len(piece) and not 0 <= int(piece.min()) <= int(piece.max()) <= largest:
                raise ValueError(f"tokens from {piece.min()} to {piece.max()} do not fit {dtype}")
            stream.write(memoryview(np.ascontiguousarray(piece.astype(dtype))).cast("B"))
            written += len(piece)
            advance(len(piece))
    return written


def _mapped(path: Path, dtype: str) -> np.ndarray:
    try:
        if path.suffix == ".npy":
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            found = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise _unreadable(path, f"an array of {found.dtype} with the shape {found.shape}, not a row of whole numbers")
    return found


def _unreadable(path: Path, seen: str) -> ConfigError:
    fix = "write_tokens of ipurun.datasets.tokens makes such files; data.dtype names the type of raw ones"
    return ConfigError("a token file cannot be read", where=str(path), seen=seen, fix=fix, key="data.file")


def text_pieces(path: Path, characters: int = 1 << 20) -> Iterator[str]:
    """Yield a UTF-8 text piece by piece."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        yield from iter(lambda: stream.read(characters), "")
