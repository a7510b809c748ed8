import pytest
import torch
from recipe_runs import assert_learns, assert_same_training, parameters_of
from torch.nn import functional

from ipurun.config.compose import one
from ipurun.datasets.synthetic import parse_sample
from ipurun.errors import ConfigError
from ipurun.recipes.bert.dataset import SPECIAL, SentencePairs, Vocabulary, sentences_of, splits
from ipurun.recipes.bert.encoder import SelfAttention
from ipurun.recipes.bert.model import IGNORED, BertForPretraining

PAD, UNKNOWN, CLASSIFY, SEPARATE, MASK = range(5)
SMALL = {
    "vocab_size": 20,
    "max_positions": 12,
    "sequence_length": 12,
    "mask_tokens": 3,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "dropout": 0.0,
}


@pytest.mark.parametrize(("option", "published"), [("bert_base", 110_106_428), ("bert_large", 336_226_108)])
def test_sizes_are_the_published_ones(option, published):
    assert parameters_of(option) == published


def test_attention_equals_torch_without_the_padding():
    torch.manual_seed(0)
    attention = SelfAttention(16, 4, 0.0)
    hidden, mask = torch.randn(2, 6, 16), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    query, key, value = (
        layer(hidden).view(2, 6, 4, 4).transpose(1, 2) for layer in (attention.query, attention.key, attention.value)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask.bool()[:, None, None, :])
    torch.testing.assert_close(attention(hidden, mask), mixed.transpose(1, 2).reshape(2, 6, 16))


def pretraining_batch(**changes):
    torch.manual_seed(0)
    batch = {
        "input_ids": torch.randint(5, 20, (2, 12)),
        "token_type_ids": torch.tensor([[0] * 6 + [1] * 6] * 2),
        "attention_mask": torch.ones(2, 12, dtype=torch.int64),
        "masked_positions": torch.tensor([[1, 4, 0], [2, 7, 9]]),
        "next_sentence_label": torch.tensor([0, 1]),
        "labels": torch.tensor([[5, 6, IGNORED], [7, 8, 9]]),
    }
    return {**batch, **changes}


def test_the_loss_is_the_sum_for_masked_words_and_next_sentence():
    batch = pretraining_batch()
    words, follows, loss = BertForPretraining(**SMALL)(**batch)
    assert (words.shape, follows.shape) == ((2, 3, 20), (2, 2))
    chances = words.log_softmax(-1)
    masked = [(0, 0, 5), (0, 1, 6), (1, 0, 7), (1, 1, 8), (1, 2, 9)]
    words_loss = -sum(chances[place] for place in masked) / 5
    follows_loss = -(follows.log_softmax(-1)[0, 0] + follows.log_softmax(-1)[1, 1]) / 2
    torch.testing.assert_close(loss, words_loss + follows_loss)


def test_words_are_scored_at_the_masked_positions():
    model = BertForPretraining(**SMALL)
    here = model(**pretraining_batch())[0]
    there = model(**pretraining_batch(masked_positions=torch.tensor([[4, 1, 0], [9, 2, 7]])))[0]
    torch.testing.assert_close(here[0, 0], there[0, 1])
    torch.testing.assert_close(here[1], there[1][[1, 2, 0]])
    assert not torch.allclose(here[0, 0], here[0, 1])


def test_padding_changes_nothing():
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[:, 10:] = 0
    batch = pretraining_batch(attention_mask=mask)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, 10:] = PAD
    model = BertForPretraining(**SMALL)
    torch.testing.assert_close(model(**batch)[2], model(**other)[2])


def test_the_head_shares_its_weight_with_the_embedding():
    model = BertForPretraining(**SMALL)
    assert model.predictions.decoder.weight is model.embeddings.word_embeddings.weight


def test_incompatible_sizes_are_refused():
    with pytest.raises(ValueError, match="in ascending order"):
        BertForPretraining(sequence_length=1024)
    with pytest.raises(ValueError, match="768 cannot be divided among 5 heads"):
        BertForPretraining(num_heads=5)


def test_words_are_numbered_by_frequency():
    words = [word for sentence in sentences_of("It's late. A cat; a cat, a dog!") for word in sentence]
    assert words == ["it's", "late", ".", "a", "cat", ";", "a", "cat", ",", "a", "dog", "!"]
    vocabulary = Vocabulary(words, size=len(SPECIAL) + 2)
    assert vocabulary.words == (*SPECIAL, "a", "cat")
    assert vocabulary.encode(["cat", "dog", "a"]) == [6, UNKNOWN, 5]


def restored(sample):
    """Return the words of a sample before masking."""
    words = sample["input_ids"].clone()
    count = int((sample["labels"] != IGNORED).sum())
    words[sample["masked_positions"][:count]] = sample["labels"][:count]
    return words.tolist()


def test_a_sample_is_two_stretches_of_text_with_padding():
    # Sentences are numbered consecutively, so that the following one can be recognised.
    sentences = [[5 + 3 * index, 6 + 3 * index, 7 + 3 * index] for index in range(40)]
    data = SentencePairs(sentences, vocab_size=125, sequence_length=18, mask_tokens=4, length=200, seed=0)
    labels = []
    for index in range(200):
        sample = data[index]
        words, kinds, mask = restored(sample), sample["token_type_ids"].tolist(), sample["attention_mask"].tolist()
        length = sum(mask)
        assert mask == [1] * length + [0] * (18 - length)
        assert words[length:] == [PAD] * (18 - length)
        middle = words.index(SEPARATE)
        assert words[0] == CLASSIFY and words[length - 1] == SEPARATE
        assert kinds == [0] * (middle + 1) + [1] * (length - middle - 1) + [0] * (18 - length)
        first, second = words[1:middle], words[middle + 1 : length - 1]
        assert first == list(range(first[0], first[0] + len(first)))
        follows = second[0] == first[-1] + 1
        labels.append(int(sample["next_sentence_label"]))
        assert labels[-1] == int(not follows)
    assert 70 < sum(labels) < 130


def test_masks_follow_the_bert_paper():
    data = splits(vocab_size=2048, sequence_length=64, mask_tokens=10)["train"]
    kinds = {"masked": 0, "kept": 0, "other": 0}
    for index in range(400):
        sample = data[index]
        count = int((sample["labels"] != IGNORED).sum())
        assert 1 <= count <= 10
        assert count == min(10, round(int(sample["attention_mask"].sum()) * 0.15))
        for place, label in zip(sample["masked_positions"][:count], sample["labels"][:count]):
            assert label >= len(SPECIAL)
            seen = sample["input_ids"][place]
            kinds["masked" if seen == MASK else "kept" if seen == label else "other"] += 1
    total = sum(kinds.values())
    assert 0.75 < kinds["masked"] / total < 0.85
    assert 0.06 < kinds["kept"] / total < 0.14
    assert 0.06 < kinds["other"] / total < 0.14


def test_samples_depend_only_on_index_and_seed():
    arguments = {"vocab_size": 2048, "sequence_length": 32, "mask_tokens": 5}
    again = splits(**arguments)["train"][7]
    for name, value in splits(**arguments)["train"][7].items():
        assert torch.equal(value, again[name])
    other = splits(**arguments, seed=1)["train"][7]
    assert not torch.equal(other["input_ids"], again["input_ids"])


def test_impossible_data_are_refused_at_once(tmp_path):
    (tmp_path / "short.txt").write_text("One. Two. Three.", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        splits(vocab_size=3, sequence_length=4, mask_tokens=1, file=str(tmp_path / "short.txt"))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("model", ["bert_tiny", "bert_large"])
def test_the_declared_sample_matches_the_data(model):
    config = one(["+recipe=bert", f"model={model}"]).config
    declared = parse_sample(config.sample)
    arguments = {name: value for name, value in config.data.items() if name != "_target_"}
    real = splits(**arguments)["train"][0]
    assert [item.name for item in declared] == list(real)
    assert [(item.shape, item.dtype) for item in declared] == [(tuple(v.shape), v.dtype) for v in real.values()]
    assert real["input_ids"].max() < config.model["vocab_size"]


def loss_of(model, batch):
    return model(**batch)[2]


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("strategy", ["pipelined", "sharded"])
def test_training_with_the_head_on_the_first_ipu_equals_plain_torch(strategy):
    layout = ["pipeline.layers_per_ipu=[1,1]", "pipeline.head_ipu=0", f"pipeline.strategy={strategy}"]
    sizes = ["model.hidden_size=16", "model.vocab_size=200", "micro_batch_size=2", "gradient_accumulation=5"]
    assert_same_training(["+recipe=bert", *layout, *sizes], loss_of)


@pytest.mark.usefixtures("empty_folder")
def test_it_learns_words():
    assert_learns(["+recipe=bert"], steps=60, falls_by=1.0)
