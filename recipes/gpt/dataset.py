"""A text, character by character."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Optional, Tuple

import torch
from torch.utils.data import Dataset

from ipurun.errors import ConfigError

__all__ = ["CHARACTERS", "CharacterWindows", "decode", "encode", "read_text", "splits"]

# The newline and all printable ASCII: 96 characters, the same for every text.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
_UNKNOWN = CHARACTERS.index("?")
_NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}

_TEXT = Path(__file__).parent / "data" / "alice.txt"
_TEXT_NOTE = (
    "data: the opening chapters of Alice's Adventures in Wonderland, which ship with ipurun; "
    "set data.file=TEXT for another text"
)
_TRAIN_SHARE = 0.9


class CharacterWindows(Dataset):
    """Windows of a text: their characters, and the character after each of them.

    Args:
        tokens: The text as numbers.
        sequence_length: Characters per window.
        stride: Characters between the beginnings of two windows.
        notes: Remarks for the user.
    """

    def __init__(self, tokens: torch.Tensor, sequence_length: int, stride: int, notes: Tuple[str, ...] = ()) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.stride = stride
        self.notes = notes

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - self.sequence_length - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        piece = self.tokens[index * self.stride :][: self.sequence_length + 1]
        return piece[:-1], piece[1:]


def encode(text: str) -> torch.Tensor:
    """Return the numbers of the characters of a text; characters outside ASCII become question marks."""
    return torch.tensor([_NUMBERS.get(character, _UNKNOWN) for character in text])


def decode(tokens: torch.Tensor) -> str:
    """Return the text of character numbers."""
    return "".join(CHARACTERS[number] for number in tokens.tolist())


def read_text(file: Optional[str] = None) -> str:
    """Return the text of a UTF-8 file, or the one that ships with ipurun.

    Raises:
        ConfigError: If the file cannot be read.
    """
    path = Path(file).expanduser() if file else _TEXT
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the text cannot be read",
            where=f"data.file={file}",
            seen=str(error),
            fix="pass a text file in UTF-8, or leave data.file out for the text that ships with ipurun",
        ) from error


def splits(sequence_length: int, file: Optional[str] = None) -> Dict[str, CharacterWindows]:
    """Split a text: the first nine tenths for training, the rest for evaluation.

    Args:
        sequence_length: Characters per sample.
        file: A text file in UTF-8. None: the text that ships with ipurun.

    Returns:
        ``train``, a piece from every character on, and ``eval``, pieces that do not overlap.

    Raises:
        ConfigError: If the file cannot be read or is too short.
    """
    tokens = encode(read_text(file))
    border = int(len(tokens) * _TRAIN_SHARE)
    if len(tokens) - border <= sequence_length:
        raise ConfigError(
            f"the text is too short for sequences of {sequence_length} characters",
            where=f"data.file={file}" if file else str(_TEXT),
            seen=f"{len(tokens)} characters, of which {len(tokens) - border} are for evaluation",
            fix=f"pass a text of {10 * (sequence_length + 1)} characters or more, or a smaller model.max_positions",
        )
    notes = () if file else (_TEXT_NOTE,)
    return {
        "train": CharacterWindows(tokens[:border], sequence_length, 1, notes),
        "eval": CharacterWindows(tokens[border:], sequence_length, sequence_length),
    }
