"""Sentences of a text with the answer to one question: does somebody say this, or is it told?

The quotation marks are the labels and are taken away, so that only the words are left to go by.
"""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch.utils.data import Dataset

from ipurun.errors import ConfigError
from ipurun.recipes.bert.dataset import encode_single, sentences_of, vocabulary_of
from ipurun.recipes.gpt.dataset import read_text

__all__ = ["Sentences", "labelled_sentences", "splits"]

# A quotation ends with a punctuation mark, unlike the apostrophe of `the others' names`.
_QUOTATION = re.compile(r"(?<!\w)'(.+?[,.!?;:-])'(?!\w)|“(.+?)”", re.DOTALL)
_FEWEST_WORDS = 4
_EVERY = 5  # one paragraph in five is for evaluation
_TEXT_NOTE = (
    "data: sentences of Alice's Adventures in Wonderland, spoken or told; set data.file=TEXT for another text with "
    "quotation marks"
)


class Sentences(Dataset):
    """Sentences and their classes.

    Args:
        words: The numbers of the words of each sentence.
        labels: 1 for direct speech, 0 for the rest.
        sequence_length: Length of a sample, including padding.
        notes: Remarks for the user.
    """

    def __init__(
        self, words: Sequence[Sequence[int]], labels: Sequence[int], sequence_length: int, notes: Tuple[str, ...] = ()
    ) -> None:
        self.words = words
        self.labels = labels
        self.sequence_length = sequence_length
        self.notes = notes

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        sample = encode_single(self.words[index], self.sequence_length)
        return {**sample, "labels": torch.tensor(self.labels[index])}


def labelled_sentences(paragraph: str) -> Iterator[Tuple[List[str], int]]:
    """Yield the sentences of a paragraph with 1 for direct speech and 0 for the rest, without quotation marks."""
    position = 0
    parts: List[Tuple[str, int]] = []
    for found in _QUOTATION.finditer(paragraph):
        parts += [(paragraph[position : found.start()], 0), (found[1] or found[2], 1)]
        position = found.end()
    for text, label in [*parts, (paragraph[position:], 0)]:
        for words in sentences_of(text):
            if len(words) >= _FEWEST_WORDS:
                yield words, label


def splits(vocab_size: int, sequence_length: int, file: Optional[str] = None) -> Dict[str, Sentences]:
    """Return labelled sentences of a text, with the vocabulary that `bert` makes from it.

    Args:
        vocab_size: Size of the model's vocabulary.
        sequence_length: Length of a sample; longer sentences are cut.
        file: A text file in UTF-8. None: the text that ships with ipurun.

    Returns:
        ``train`` and ``eval``, whose items are the arguments of the model by name, and `labels`.

    Raises:
        ConfigError: If the file cannot be read, or has hardly any quotation.
    """
    text = read_text(file)
    vocabulary, _ = vocabulary_of(sentences_of(text), vocab_size)
    parts: Dict[str, List[Tuple[List[str], int]]] = {"train": [], "eval": []}
    for number, paragraph in enumerate(text.split("\n\n")):
        parts["eval" if number % _EVERY == 0 else "train"] += labelled_sentences(paragraph)
    for name, found in parts.items():
        if {label for _, label in found} != {0, 1}:
            raise ConfigError(
                f"the text has no sentences of both kinds for `{name}`",
                where=f"data.file={file}",
                seen=f"{len(found)} sentences, {sum(label for _, label in found)} in quotation marks",
                fix="pass a longer text with speech in ' ' or in typographic quotation marks",
            )
    notes = () if file else (_TEXT_NOTE,)
    return {
        name: Sentences(
            [vocabulary.encode(words) for words, _ in found], [label for _, label in found], sequence_length, notes
        )
        for name, found in parts.items()
    }
