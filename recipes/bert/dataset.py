"""Pairs of sentences from a text, with masked words."""

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

__all__ = ["SPECIAL", "SentencePairs", "Vocabulary", "encode_single", "sentences_of", "splits"]

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PAD, _UNKNOWN, _CLASSIFY, _SEPARATE, _MASK = range(len(SPECIAL))

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]")
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+")
_MASKED_SHARE = 0.15
_TRAIN_SHARE = 0.9
# Training has the size of BERT-large's published global batch; pairs and masks differ from sample to sample.
_LENGTHS = {"train": 65536, "eval": 512}
_TEXT_NOTE = (
    "data: sentences of Alice's Adventures in Wonderland, whose opening chapters ship with ipurun; "
    "set data.file=TEXT for another text"
)


class Vocabulary:
    """The special tokens and the most frequent words of a text, numbered."""

    def __init__(self, words: Sequence[str], size: int) -> None:
        counts = Counter(words)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        self.words = (*SPECIAL, *ranked[: max(0, size - len(SPECIAL))])
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Sequence[str]) -> List[int]:
        """Return the numbers of words; unknown words become ``[UNK]``."""
        return [self._numbers.get(word, _UNKNOWN) for word in words]


class SentencePairs(Dataset):
    """Two passages of text, of which the second follows the first half of the time, with some words masked.

    A sample depends only on its index and the seed.

    Args:
        sentences: The numbers of the words of each sentence.
        vocab_size: Number of different words.
        sequence_length: Length of a sample, including padding.
        mask_tokens: Places for masked words in a sample.
        length: Number of samples.
        seed: Seed of pairs and masks.
        notes: Remarks for the user.
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
        available = self.sequence_length - 3
        first, following = self._passage(draw.randrange(len(self.sentences)), max(1, available // 2))
        second_start = following
        if following == len(self.sentences) or draw.random() < 0.5:
            second_start = draw.randrange(len(self.sentences))
        second, _ = self._passage(second_start, available - len(first))
        return first, second, second_start != following

    def _passage(self, start: int, max_words: int) -> Tuple[List[int], int]:
        """Return as many whole sentences as fit, the first one cut if it is too long, and the index of the next."""
        words = list(self.sentences[start][:max_words])
        after = start + 1
        while after < len(self.sentences) and len(words) + len(self.sentences[after]) <= max_words:
            words += self.sentences[after]
            after += 1
        return words, after

    def _mask(self, words: List[int], draw: random.Random) -> Tuple[List[int], List[int]]:
        """Mask some words in place; return their positions and the words."""
        known = [place for place, word in enumerate(words) if word >= len(SPECIAL)]
        # Without a masked word the loss of a sample would be NaN.
        maskable = known or [place for place, word in enumerate(words) if word == _UNKNOWN]
        count = min(self.mask_tokens, max(1, round(len(words) * _MASKED_SHARE)), len(maskable))
        positions = sorted(draw.sample(maskable, count))
        labels = [words[place] for place in positions]
        for place in positions:
            chance = draw.random()
            # One in ten is kept and one in ten becomes another word, so that the model has to look at all words.
            if chance < 0.8:
                words[place] = _MASK
            elif chance < 0.9:
                words[place] = draw.randrange(len(SPECIAL), self.vocab_size)
        return positions, labels


def sentences_of(text: str) -> List[List[str]]:
    """Split a text into sentences of lower-case words; punctuation marks are words."""
    found = (_WORD.findall(sentence.lower()) for sentence in _SENTENCE.split(text))
    return [words for words in found if words]


def encode_single(words: Sequence[int], sequence_length: int) -> Dict[str, torch.Tensor]:
    """Return one sentence as the inputs of an encoder, cut or padded to a length."""
    tokens = [_CLASSIFY, *words[: sequence_length - 2], _SEPARATE]
    padding = [0] * (sequence_length - len(tokens))
    return {
        "input_ids": torch.tensor(tokens + [_PAD] * len(padding)),
        "token_type_ids": torch.zeros(sequence_length, dtype=torch.int64),
        "attention_mask": torch.tensor([1] * len(tokens) + padding),
    }


def splits(
    vocab_size: int, sequence_length: int, mask_tokens: int, file: Optional[str] = None, seed: int = 0
) -> Dict[str, SentencePairs]:
    """Return sentence pairs from a text: the first nine tenths for training, the rest for evaluation.

    Args:
        vocab_size: Size of the model's vocabulary; rarer words become ``[UNK]``.
        sequence_length: Length of a sample.
        mask_tokens: Places for masked words in a sample.
        file: A text file in UTF-8. None: the text that ships with ipurun.
        seed: Seed of pairs and masks.

    Returns:
        ``train`` and ``eval``, whose items are the arguments of the model by name.

    Raises:
        ConfigError: If the file cannot be read, or the text or the sequences are too short.
    """
    sentences = sentences_of(read_text(file))
    wrong = _problems(len(sentences), vocab_size, sequence_length, file)
    if wrong:
        raise ConfigError(wrong)
    border = int(len(sentences) * _TRAIN_SHARE)
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
        what = f"`data.vocab_size` must be {least_words} or more"
        problems.append(Problem(what, seen=str(vocab_size), fix="model.vocab_size=2048"))
    if sequence_length < 8:
        what = "`data.sequence_length` must be 8 or more"
        problems.append(Problem(what, seen=str(sequence_length), fix="model.sequence_length=64"))
    return problems
