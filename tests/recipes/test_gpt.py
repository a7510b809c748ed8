import pytest
import torch
from recipe_runs import assert_learns, assert_same_training, checked_sample, parameters_of
from torch.nn import functional

import ipurun
from ipurun import engine as engines
from ipurun.config.compose import one
from ipurun.errors import ConfigError
from ipurun.recipes.gpt import sample
from ipurun.recipes.gpt.dataset import CHARACTERS, decode, encode, splits
from ipurun.recipes.gpt.loss import next_token_loss
from ipurun.recipes.gpt.model import GPT, CausalSelfAttention
from ipurun.recipes.gpt.sample import generate, next_scores

SMALL = {"vocab_size": 11, "max_positions": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "dropout": 0.0}


@pytest.mark.parametrize(
    ("option", "published"),
    [
        ("gpt2_small", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_sizes_are_the_published_ones(option, published):
    assert parameters_of(option) == published


def test_gpt3_is_made_without_memory():
    # Weights of a layer (12 d^2) with their biases and norms (13 d), both embeddings and the last norm.
    width, layers = 12288, 96
    expected = layers * (12 * width**2 + 13 * width) + (50257 + 2048) * width + 2 * width
    assert parameters_of("gpt3_175b") == expected
    assert round(expected / 1e9) == 175


def test_attention_equals_torch():
    torch.manual_seed(0)
    attention = CausalSelfAttention(16, 4, 0.0)
    hidden = torch.randn(3, 7, 16)
    query, key, value = (part.view(3, 7, 4, 4).transpose(1, 2) for part in attention.c_attn(hidden).split(16, dim=-1))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = attention.c_proj(mixed.transpose(1, 2).reshape(3, 7, 16))
    torch.testing.assert_close(attention(hidden), expected)


def test_a_position_does_not_depend_on_later_ones():
    torch.manual_seed(0)
    model = GPT(**SMALL)
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any()


def test_the_head_shares_its_weight_with_the_embedding():
    model = GPT(**SMALL)
    assert model.lm_head.weight is model.wte.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="16 cannot be divided among 3 heads"):
        GPT(hidden_size=16, num_heads=3)


def test_the_loss_is_the_mean_over_all_positions():
    scores = torch.zeros(2, 3, 4)
    scores[0, 0, 1] = 1.0
    tokens = torch.tensor([[1, 0, 0], [0, 0, 0]])
    sure = -torch.log(torch.e ** torch.tensor(1.0) / (torch.e ** torch.tensor(1.0) + 3))
    assert next_token_loss(scores, tokens) == pytest.approx((sure.item() + 5 * torch.log(torch.tensor(4.0))) / 6)


def test_each_character_is_followed_by_the_next():
    data = splits(16)
    text = decode(data["train"].tokens)
    characters, following = data["train"][100]
    assert decode(characters) == text[100:116]
    assert decode(following) == text[101:117]
    assert decode(data["eval"][1][0]) == decode(data["eval"].tokens)[16:32]


def test_samples_cover_the_text_exactly():
    data = splits(16)
    for split in data.values():
        assert all(len(item) == 16 for item in split[len(split) - 1])
        with pytest.raises(IndexError):
            split[len(split)]
    assert len(data["train"]) == len(data["train"].tokens) - 16


def test_the_text_that_ships_has_no_unknown_characters_and_is_named():
    data = splits(16)
    assert "?" in CHARACTERS
    text = decode(torch.cat([data["train"].tokens, data["eval"].tokens]))
    assert text.startswith("ALICE'S ADVENTURES IN WONDERLAND\n")
    assert "Alice's Adventures" in data["train"].notes[0]


def test_non_ascii_characters_become_question_marks():
    assert decode(encode("caf\u00e9 \u2014 ok\n")) == "caf? ? ok\n"


def test_another_text_is_read_without_a_note(tmp_path):
    (tmp_path / "own.txt").write_text("abc " * 100, encoding="utf-8")
    data = splits(8, file=str(tmp_path / "own.txt"))
    assert decode(data["train"][0][0]) == "abc abc "
    assert data["train"].notes == ()


def test_a_text_that_is_missing_or_too_short_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.file=.*nowhere"):
        splits(8, file=str(tmp_path / "nowhere"))
    (tmp_path / "short.txt").write_text("abc", encoding="utf-8")
    with pytest.raises(ConfigError, match="too short for sequences of 8 characters"):
        splits(8, file=str(tmp_path / "short.txt"))


@pytest.mark.parametrize("model", ["gpt_tiny", "gpt2_xl"])
def test_the_declared_sample_matches_the_data(model):
    config = one(["+recipe=gpt", f"model={model}"]).config
    declared = checked_sample(config, splits(config.data["sequence_length"])["train"][0])
    assert declared[0].high >= len(CHARACTERS)


def loss_of(model, batch):
    return next_token_loss(model(batch[0]), batch[1])


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    "layout",
    [
        ["pipeline=gpt_tiny_4ipu"],
        ["pipeline.layers_per_ipu=[2,1]", "pipeline.head_ipu=0", "pipeline.strategy=sharded"],
        ["pipeline.split=[h.0,h.2]", "pipeline.strategy=serial_phased"],
    ],
    ids=["pipelined", "sharded", "phased"],
)
def test_training_over_several_ipus_equals_plain_torch(layout):
    sizes = ["model.max_positions=16", "model.hidden_size=32", "micro_batch_size=2", "gradient_accumulation=9"]
    assert_same_training(["+recipe=gpt", *layout, *sizes], loss_of)


@pytest.mark.usefixtures("empty_folder")
def test_it_learns_to_write():
    assert_learns(["+recipe=gpt"], steps=60, falls_by=1.2)


def test_text_is_written_at_each_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["eval.every_steps=2", "eval.max_samples=8", "callbacks.text_samples.length=5", "averaging.every_calls=1"]
    result = ipurun.train("gpt", max_steps=4, threads=1, overrides=words, quiet=True)
    written = sorted((result.folder / "samples").iterdir())
    assert [file.name for file in written] == ["step-00000002.txt", "step-00000004.txt"]
    assert all(file.read_text().startswith("Alice ") and len(file.read_text()) == 12 for file in written)
    assert "ema_perplexity" in result.metrics
    assert written[0].read_text() != written[1].read_text()


def test_a_model_that_knows_too_few_characters_writes_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data=synthetic", "model.vocab_size=32", "model.max_positions=16", "model.hidden_size=16"]
    result = ipurun.train("gpt", max_steps=1, threads=1, overrides=[*words, "eval.max_samples=8"], quiet=True)
    assert "no text is written: there are 96 characters" in (result.folder / "log.txt").read_text()
    assert not (result.folder / "samples").exists()


def test_text_is_written_with_one_shape_and_beyond_the_window(monkeypatch):
    torch.manual_seed(0)
    model = GPT(**SMALL).eval()
    shapes = set()

    def scores_of(tokens, position):
        shapes.add((tuple(tokens.shape), tuple(position.shape)))
        return executor(tokens, position)

    executor = next_scores(model, engines.load("cpu"))
    found = list(generate(scores_of, [3, 1], 12, 8, temperature=0))
    # The same, written by plain torch with sequences of any length.
    written = [3, 1]
    for _ in range(12):
        with torch.no_grad():
            written.append(int(model(torch.tensor([written[-8:]]))[0, -1].argmax()))
    assert found == written[2:] and shapes == {((1, 8), (1,))}


def test_draws_follow_the_scores_the_seed_and_top_k():
    def scores_of(tokens, position):
        return torch.log(torch.tensor([[0.5, 0.25, 0.2, 0.05]]))

    drawn = torch.tensor(list(generate(scores_of, [0], 2000, 4, temperature=1.0)))
    shares = drawn.bincount(minlength=4) / 2000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.2, 0.05]), atol=0.04, rtol=0)
    best = torch.tensor(list(generate(scores_of, [0], 300, 4, temperature=1.0, top_k=2)))
    assert set(best.tolist()) == {0, 1}
    assert list(generate(scores_of, [0], 50, 4, seed=1)) == list(generate(scores_of, [0], 50, 4, seed=1))


def test_the_script_continues_a_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ipurun.train("gpt", max_steps=2, overrides=["hydra.run.dir=run"], eval={"max_samples": 4}, quiet=True)
    assert sample.main(["run", "--prompt", "Alice", "--length", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Alice") and len(text) == len("Alice") + 20 + 1
    assert sample.main(["run", "--length", "0"]) == 2
    assert "`--length` cannot be `0`" in capsys.readouterr().err
