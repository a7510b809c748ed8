"""Write the characters of texts to a token file: ``python -m ipurun.recipes.gpt.tokenise TEXT... --out tokens.bin``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

import numpy as np

from ipurun.datasets.tokens import text_pieces, write_tokens
from ipurun.recipes.gpt.dataset import CHARACTERS

__all__ = ["main", "token_pieces"]

_UNKNOWN = CHARACTERS.index("?")
_NUMBERS = np.full(128, _UNKNOWN, np.uint8)
for _number, _character in enumerate(CHARACTERS):
    _NUMBERS[ord(_character)] = _number


def token_pieces(files: Sequence[Path]) -> Iterator[np.ndarray]:
    """Yield the tokens of texts piece by piece: the same numbers as `encode` gives, without the text in memory."""
    for file in files:
        for piece in text_pieces(file):
            codes = np.frombuffer(piece.encode("utf-32-le", "replace"), "<u4")
            yield np.where(codes < 128, _NUMBERS[np.minimum(codes, 127)], np.uint8(_UNKNOWN))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Write a token file."""
    parser = argparse.ArgumentParser(prog="python -m ipurun.recipes.gpt.tokenise", description=__doc__)
    parser.add_argument("texts", nargs="+", type=Path, help="text files in UTF-8")
    parser.add_argument("--out", required=True, type=Path, help="the token file, for data=tokens data.file=FILE")
    given = parser.parse_args(argv)
    files: List[Path] = given.texts
    try:
        # Bytes are the number of characters only for ASCII, but near enough for a bar.
        total = sum(file.stat().st_size for file in files)
        written = write_tokens(given.out, token_pieces(files), "uint16", total, "characters")
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{written:,} tokens in {given.out}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
