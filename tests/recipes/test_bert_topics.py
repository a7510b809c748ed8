import json
from pathlib import Path

import torch

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.recipes.bert.dataset import SPECIAL
from ipurun.recipes.bert_topics.dataset import TOPICS, paragraphs, pretraining_splits, splits


def test_a_paragraph_has_one_topic_and_every_topic_has_its_words():
    made = paragraphs(400, seed=0)
    nouns = {words[2] for paragraph in made for words in paragraph}
    together = {noun: set() for noun in nouns}
    for paragraph in made:
        for words in paragraph:
            together[words[2]] |= {sentence[2] for sentence in paragraph}
    assert len(nouns) == 32 and len({frozenset(words) for words in together.values()}) == len(TOPICS)


def test_words_of_the_evaluation_have_no_label_in_training_but_are_in_the_text():
    parts = splits(vocab_size=128, sequence_length=32)
    assert {name: len(part) for name, part in parts.items()} == {"train": 128, "eval": 400}
    seen = {number for sentence in parts["train"].sentences for number in (sentence[2], sentence[3])}
    asked = {number for sentence in parts["eval"].sentences for number in (sentence[2], sentence[3])}
    text = pretraining_splits(vocab_size=128, sequence_length=32, mask_tokens=5)["train"]
    assert not seen & asked
    assert asked <= {number for sentence in text.sentences for number in sentence} - set(range(len(SPECIAL)))


def test_samples_are_padded_and_hold_every_class():
    part = splits(vocab_size=128, sequence_length=16)["train"]
    sample = part[3]
    assert all(sample[name].shape == (16,) for name in ("input_ids", "token_type_ids", "attention_mask"))
    assert sample["input_ids"][0] == 2 and set(part.labels) == {0, 1, 2, 3}


def test_it_starts_from_a_run_of_bert(empty_folder):
    sizes = ["model.hidden_size=16", "model.num_heads=2", "cache=off", "--quiet", "eval.max_samples=16"]
    assert main(["train", "+recipe=bert", "model=bert_micro", "data=topic_pairs", "max_steps=2", *sizes]) == 0
    words = ["+recipe=bert_topics", "init_from=runs/bert", "max_steps=8", "unfreeze.encoder=4"]
    assert main(["train", *words, *sizes]) == 0
    [pretrained] = Path("runs/bert").glob("*/checkpoints")
    [folder] = Path("runs/bert_topics").glob("*/")
    before, after = load(latest(pretrained))["model"], load(latest(folder / "checkpoints"))["model"]
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(after[name], before[name])  # frozen
    assert not torch.equal(after["encoder.layer.0.output.weight"], before["encoder.layer.0.output.weight"])
    record = json.loads((folder / "initial_weights.json").read_text())
    assert sorted(record["not_loaded"]) == ["classifier.bias", "classifier.weight"]
    assert record["loaded"][name] == name and "predictions.dense.weight" in record["left_over"]
