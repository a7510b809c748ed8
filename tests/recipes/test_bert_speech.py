import json
from pathlib import Path

import pytest
import torch

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.errors import ConfigError
from ipurun.recipes.bert.dataset import splits as pretraining_splits
from ipurun.recipes.bert_speech.dataset import labelled_sentences, splits

TEXT = "'Well!' thought Alice to herself, 'after such a fall, I shall think nothing.' (Which was very likely true.)"


def test_quotation_marks_become_labels():
    assert [(" ".join(words), label) for words, label in labelled_sentences(TEXT)] == [
        ("thought alice to herself ,", 0),
        ("after such a fall , i shall think nothing .", 1),
        ("( which was very likely true . )", 0),
    ]
    assert [label for _, label in labelled_sentences("The two boys' hats were new, said the others.")] == [0]


def test_samples_are_cut_and_padded_and_hold_both_classes():
    parts = splits(vocab_size=2048, sequence_length=16)
    assert {name: len(part) for name, part in parts.items()} == {"train": 452, "eval": 96}
    sample = parts["train"][3]
    assert all(sample[name].shape == (16,) for name in ("input_ids", "token_type_ids", "attention_mask"))
    assert sample["input_ids"][0] == 2 and set(parts["eval"].labels) == {0, 1}


def test_the_vocabulary_is_that_of_pretraining():
    pretraining = pretraining_splits(vocab_size=300, sequence_length=64, mask_tokens=4)["train"]
    words = splits(vocab_size=300, sequence_length=64)["eval"].words
    assert max(number for sentence in words for number in sentence) < pretraining.vocab_size
    # The text begins with the same words in both.
    assert words[0][:4] == list(pretraining.sentences[0][:4])


def test_a_text_without_quotations_is_refused(tmp_path):
    (tmp_path / "plain.txt").write_text("Nobody says a word here. " * 40)
    with pytest.raises(ConfigError, match="both kinds"):
        splits(300, 16, file=str(tmp_path / "plain.txt"))


def test_it_starts_from_a_run_of_bert(empty_folder):
    sizes = ["model.hidden_size=16", "model.num_heads=2", "model.sequence_length=16", "cache=off", "--quiet"]
    short = ["model.mask_tokens=3", "max_steps=2", "eval.max_samples=16"]
    assert main(["train", "+recipe=bert", *sizes, *short]) == 0
    words = ["+recipe=bert_speech", "init_from=runs/bert", "max_steps=8", "unfreeze.encoder=4", "eval.max_samples=16"]
    assert main(["train", *words, *sizes]) == 0
    [pretrained] = Path("runs/bert").glob("*/checkpoints")
    [folder] = Path("runs/bert_speech").glob("*/")
    before, after = load(latest(pretrained))["model"], load(latest(folder / "checkpoints"))["model"]
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(after[name], before[name])  # frozen
    assert not torch.equal(after["encoder.layer.0.output.weight"], before["encoder.layer.0.output.weight"])
    record = json.loads((folder / "initial_weights.json").read_text())
    assert sorted(record["not_loaded"]) == ["classifier.bias", "classifier.weight"]
    assert record["loaded"][name] == name and "predictions.dense.weight" in record["left_over"]
