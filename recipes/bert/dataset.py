"""Pairs of sentences with masked words, drawn from a text."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch.utils.data import Dataset

from ipurun.errors import ConfigError, Problem
from ipurun.recipes.bert.model import IGNORED
from ipurun.recipes.gpt.dataset import read_text

__all__ = ["SPECIAL", "SentencePairs", "Vocabulary", "sentences_of", "splits"]

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PAD, _UNKNOWN, _CLASSIFY, _SEPARATE, _MASK = range(len(SPECIAL))

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]")
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+")
_MASKED_SHARE = 0.15
_TRAIN_SHARE = 0.9
# As many as the published global batch of BERT-large; pairs and masks differ from sample to sample.
_LENGTHS = {"train": 65536, "eval": 512}
_TEXT_NOTE = (
    "data: sentences of Alice's Adventures in Wonderland, whose opening chapters ship with ipurun; "
    "data.file=TEXT gives another text"
)


class Vocabulary:
    """The most frequent words of a text, numbered behind the special tokens."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        counts = Counter(words)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = (*SPECIAL, *ranked[: max(0, size - len(SPECIAL))])
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> List[int]:
        """The numbers of words; those that are not in the vocabulary become ``[UNK]``."""
        return [self._numbers.get(word, _UNKNOWN) for word in words]


class SentencePairs(Dataset):
    """Two stretches of text, the second following the first half of the time, with some of their words masked.

    A sample depends on its index and the seed alone.

    Args:
        sentences: Each as numbers.
        vocab_size: Numbers of words are below it.
        sequence_length: Length of a sample, padding included.
        mask_tokens: Places for masked words in a sample.
        length: Number of samples.
        seed: Seed of pairs and masks.
        notes: What the user should know about these data.
    """

    def __init__(
        self,
        sentences: Sequence[Sequence[int]],
        vocab_size: int,
        sequence_length: int,
        mask_tokens: int,
        length: int,
        seed: int,
        notes: Tuple[str, ...] = (),
    ) -> None:
        self.sentences = sentences
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.mask_tokens = mask_tokens
        self.length = length
        self.seed = seed
        self.notes = notes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        # A large odd factor keeps the streams of neighbouring seeds apart.
        draw = random.Random(self.seed * 1_000_003 + index)
        first, second, unrelated = self._pair(draw)
        words = [_CLASSIFY, *first, _SEPARATE, *second, _SEPARATE]
        positions, labels = self._mask(words, draw)
        padding = [0] * (self.sequence_length - len(words))
        unused = self.mask_tokens - len(positions)
        sample = {
            "input_ids": words + [_PAD] * len(padding),
            "token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1) + padding,
            "attention_mask": [1] * len(words) + padding,
            "masked_positions": positions + [0] * unused,
            "next_sentence_label": int(unrelated),
            "labels": labels + [IGNORED] * unused,
        }
        return {name: torch.tensor(values) for name, values in sample.items()}

    def _pair(self, draw: random.Random) -> Tuple[List[int], List[int], bool]:
        room = self.sequence_length - 3
        first, following = self._stretch(draw.randrange(len(self.sentences)), max(1, room // 2))
        second_start = following
        if following == len(self.sentences) or draw.random() < 0.5:
            second_start = draw.randrange(len(self.sentences))
        second, _ = self._stretch(second_start, room - len(first))
        return first, second, second_start != following

    def _stretch(self, start: int, room: int) -> Tuple[List[int], int]:
        """Whole sentences while there is room, the first of them cut where it is too long; and the next one."""
        words = list(self.sentences[start][:room])
        after = start + 1
        while after < len(self.sentences) and len(words) + len(self.sentences[after]) <= room:
            words += self.sentences[after]
            after += 1
        return words, after

    def _mask(self, words: List[int], draw: random.Random) -> Tuple[List[int], List[int]]:
        """Hide some words; where they were, and which."""
        known = [place for place, word in enumerate(words) if word >= len(SPECIAL)]
        # The loss of a sample that masks nothing would be no number.
        maskable = known or [place for place, word in enumerate(words) if word == _UNKNOWN]
        count = min(self.mask_tokens, max(1, round(len(words) * _MASKED_SHARE)), len(maskable))
        positions = sorted(draw.sample(maskable, count))
        labels = [words[place] for place in positions]
        for place in positions:
            chance = draw.random()
            # One in ten is left as it is and one in ten becomes another word, so that the model has to look at all.
            if chance < 0.8:
                words[place] = _MASK
            elif chance < 0.9:
                words[place] = draw.randrange(len(SPECIAL), self.vocab_size)
        return positions, labels


def sentences_of(text: str) -> List[List[str]]:
    """The sentences of a text as lists of words in lower case; punctuation marks are words."""
    found = (_WORD.findall(sentence.lower()) for sentence in _SENTENCE.split(text))
    return [words for words in found if words]


def splits(
    vocab_size: int, sequence_length: int, mask_tokens: int, file: Optional[str] = None, seed: int = 0
) -> Dict[str, SentencePairs]:
    """Sentence pairs from the first nine tenths of a text to train on, from the rest to evaluate.

    Args:
        vocab_size: Size of the model's vocabulary; rarer words become ``[UNK]``.
        sequence_length: Length of a sample.
        mask_tokens: Places for masked words in a sample.
        file: A text file in UTF-8. None: the text that ships with ipurun.
        seed: Seed of pairs and masks.

    Returns:
        ``train`` and ``eval``, whose items are the arguments of the model by name.

    Raises:
        ConfigError: The file cannot be read or is too short, or the sequences are.
    """
    sentences = sentences_of(read_text(file))
    border = int(len(sentences) * _TRAIN_SHARE)
    wrong = _problems(len(sentences), vocab_size, sequence_length, file)
    if wrong:
        raise ConfigError(wrong)
    vocabulary = Vocabulary([word for sentence in sentences[:border] for word in sentence], vocab_size)
    numbers = [vocabulary.encode(sentence) for sentence in sentences]
    parts = {"train": numbers[:border], "eval": numbers[border:]}
    notes = () if file else (_TEXT_NOTE,)
    return {
        name: SentencePairs(part, len(vocabulary), sequence_length, mask_tokens, _LENGTHS[name], seed + number, notes)
        for number, (name, part) in enumerate(parts.items())
    }


def _problems(sentences: int, vocab_size: int, sequence_length: int, file: Optional[str]) -> List[Problem]:
    problems = []
    least_words = len(SPECIAL) + 1
    if sentences < 20:
        problems.append(
            Problem(
                "the text is too short",
                where=f"data.file={file}",
                seen=f"{sentences} sentences",
                fix="pass a text of at least 20 sentences",
            )
        )
    if vocab_size < least_words:
        what = f"`data.vocab_size` has to be {least_words} or more"
        problems.append(Problem(what, seen=str(vocab_size), fix="model.vocab_size=2048"))
    if sequence_length < 8:
        what = "`data.sequence_length` has to be 8 or more"
        problems.append(Problem(what, seen=str(sequence_length), fix="model.sequence_length=64"))
    return problems
