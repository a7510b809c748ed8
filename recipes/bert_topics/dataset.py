"""A made language with four topics: paragraphs for pretraining, and a few labelled sentences.

Which topic a word belongs to is nowhere written: it shows only in the words that occur near it. The labelled sentences
use one word in four; those for evaluation use the others. So a model that has not read the paragraphs cannot know them.
"""

from __future__ import annotations

import random
from typing import Dict, List, Sequence, Tuple

import torch
from torch.utils.data import Dataset

from ipurun.recipes.bert.dataset import SentencePairs, Vocabulary, encode_single

__all__ = ["TOPICS", "LabelledSentences", "paragraphs", "pretraining_splits", "splits"]

_NOUNS = {
    "kitchen": "bowl butter dough fork kettle oven pan spoon",
    "harbour": "anchor boat deck ferry mast pier rope sail",
    "garden": "bee bush fence hedge lawn path rose spade",
    "school": "book chalk class desk globe lesson pencil teacher",
}
_VERBS = {
    "kitchen": "boils chops mixes stirs",
    "harbour": "floats hauls loads tows",
    "garden": "blooms digs grows mows",
    "school": "asks learns reads writes",
}
TOPICS = tuple(_NOUNS)
_ADJECTIVES = ["big", "dark", "new", "old", "red", "small"]
_ADVERBS = ["now", "often", "rarely", "slowly"]
_LABELLED = 4  # one word in four occurs in labelled sentences
_SENTENCES_OF_PARAGRAPH = 8
_PARAGRAPHS = 1500
_LENGTHS = {"train": 65536, "eval": 512}
_LABELLED_SENTENCES = {"train": 128, "eval": 400}
_NOTE = "data: sentences of a made language with four topics, which ipurun generates"


class LabelledSentences(Dataset):
    """Sentences and the numbers of their topics.

    Args:
        sentences: The numbers of the words of each sentence.
        labels: The number of its topic in `TOPICS`.
        sequence_length: Length of a sample, including padding.
        notes: Remarks for the user.
    """

    def __init__(
        self, sentences: Sequence[Sequence[int]], labels: Sequence[int], sequence_length: int, notes: Tuple[str, ...]
    ) -> None:
        self.sentences = sentences
        self.labels = labels
        self.sequence_length = sequence_length
        self.notes = notes

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        sample = encode_single(self.sentences[index], self.sequence_length)
        return {**sample, "labels": torch.tensor(self.labels[index])}


def paragraphs(count: int, seed: int) -> List[List[List[str]]]:
    """Return paragraphs of sentences of words; all sentences of a paragraph have the same topic."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        topic = draw.choice(TOPICS)
        words = (_NOUNS[topic].split(), _VERBS[topic].split())
        made.append([_sentence(draw, *words) for _ in range(_SENTENCES_OF_PARAGRAPH)])
    return made


def pretraining_splits(
    vocab_size: int, sequence_length: int, mask_tokens: int, seed: int = 0
) -> Dict[str, SentencePairs]:
    """Return pairs of passages with masked words, for the recipe `bert`.

    Args:
        vocab_size: Size of the model's vocabulary.
        sequence_length: Length of a sample.
        mask_tokens: Places for masked words in a sample.
        seed: Seed of pairs and masks; the text is always the same.
    """
    vocabulary = _vocabulary(vocab_size)
    parts = {}
    for number, (name, length) in enumerate(_LENGTHS.items()):
        made = paragraphs(_PARAGRAPHS if name == "train" else _PARAGRAPHS // 10, seed=number)
        sentences = [vocabulary.encode(words) for paragraph in made for words in paragraph]
        arguments = (sentences, len(vocabulary), sequence_length, mask_tokens, length, seed + number, (_NOTE,))
        parts[name] = SentencePairs(*arguments)
    return parts


def splits(vocab_size: int, sequence_length: int) -> Dict[str, LabelledSentences]:
    """Return labelled sentences; no noun and no verb of ``eval`` occurs in ``train``.

    Args:
        vocab_size: Size of the model's vocabulary.
        sequence_length: Length of a sample; longer sentences are cut.

    Returns:
        ``train`` and ``eval``, whose items are the arguments of the model by name, and `labels`.
    """
    vocabulary = _vocabulary(vocab_size)
    parts = {}
    for seed, (name, count) in enumerate(_LABELLED_SENTENCES.items(), 10):
        draw = random.Random(seed)
        labels = [number % len(TOPICS) for number in range(count)]
        sentences = [_sentence(draw, *_words_of(TOPICS[label], name == "train")) for label in labels]
        encoded = [vocabulary.encode(words) for words in sentences]
        parts[name] = LabelledSentences(encoded, labels, sequence_length, (_NOTE,))
    return parts


def _words_of(topic: str, labelled: bool) -> Tuple[List[str], List[str]]:
    """Return the nouns and verbs that labelled sentences use, or the others."""
    nouns, verbs = (
        [word for number, word in enumerate(words.split()) if (number % _LABELLED == 0) == labelled]
        for words in (_NOUNS[topic], _VERBS[topic])
    )
    return nouns, verbs


def _sentence(draw: random.Random, nouns: Sequence[str], verbs: Sequence[str]) -> List[str]:
    """Return a sentence such as `the old kettle boils slowly near the white cup .`"""
    words = ["the", draw.choice(_ADJECTIVES), draw.choice(nouns), draw.choice(verbs)]
    if draw.random() < 0.5:
        words.append(draw.choice(_ADVERBS))
    words += [draw.choice(("near", "with", "behind")), "the", draw.choice(_ADJECTIVES), draw.choice(nouns), "."]
    return words


def _vocabulary(size: int) -> Vocabulary:
    return Vocabulary([word for paragraph in paragraphs(200, seed=0) for words in paragraph for word in words], size)
