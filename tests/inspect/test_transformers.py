"""Real models of transformers at toy size: traced, split, and equal to plain torch."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from run_harness import built, config

from ipurun.inspect.batch_items import as_call
from ipurun.inspect.trace import trace_model

transformers = pytest.importorskip("transformers")

LENGTH, VOCAB = 8, 30
SIZES = {
    "BertConfig": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "GPT2Config": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH},
}
NO_DROPOUT = {
    "BertConfig": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "GPT2Config": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
MODELS = {
    "BertForPreTraining": ("BertConfig", {"bert.encoder.layer.1": 1, "cls": 0}),
    "BertForSequenceClassification": ("BertConfig", {"bert.encoder.layer.1": 1}),
    "GPT2LMHeadModel": ("GPT2Config", {"transformer.h.1": 1, "lm_head": 0}),
}


def keys_of(model: str, **changes: Any) -> Dict[str, Any]:
    kind = MODELS[model][0]
    settings = {"_target_": f"transformers.{kind}", "vocab_size": VOCAB, **SIZES[kind], **NO_DROPOUT[kind]}
    tokens = {"shape": [LENGTH], "dtype": "int64", "high": VOCAB}
    sample: List[Dict[str, Any]] = [
        {"name": "input_ids", **tokens},
        {"name": "attention_mask", "shape": [LENGTH], "dtype": "int64", "low": 1, "high": 2},
        {"name": "labels", **tokens},
    ]
    if model == "BertForPreTraining":
        sample.append({"name": "next_sentence_label", "shape": [], "dtype": "int64", "high": 2})
    if model == "BertForSequenceClassification":
        sample[-1] = {"name": "labels", "shape": [], "dtype": "int64", "high": 2}
    return {
        "model": {"_target_": f"transformers.{model}", "config": settings},
        "data": {"_target_": "ipurun.datasets.synthetic.splits", "sample": sample, "train_samples": 32},
        "sample": sample,
        "loss__name": None,
        "metrics": {},
        "optimizer": {"_target_": "poptorch.optim.SGD", "lr": 0.1},
        "micro_batch_size": 2,
        "gradient_accumulation": 5,
        "inference__device_iterations": 3,
        "loader__shuffle": False,
        **changes,
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_split_model_trains_as_in_plain_torch(model: str) -> None:
    run = built(**keys_of(model, pipeline__blocks=MODELS[model][1]))
    plain = getattr(transformers, model)(run.user_model.config)
    plain.load_state_dict(run.user_model.state_dict())
    plain.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    run.train_loader.start()
    run.enter_training()
    batches = run.train_loader.epoch()
    for _ in range(2):
        batch = next(batches)
        loss = run.training_model(**as_call(batch)[1])
        optimizer.zero_grad()
        micro_batches = ({key: items[first : first + 2] for key, items in batch.items()} for first in range(0, 10, 2))
        expected = torch.stack([plain(**items).loss for items in micro_batches]).mean()
        expected.backward()
        optimizer.step()
        assert float(loss) / 5 == pytest.approx(expected.item(), rel=1e-4)  # the five losses come back as their sum
    run.enter_inference()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(run.user_model.state_dict()[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_large_sizes_are_traced_without_memory(model: str) -> None:
    keys = keys_of(model)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 4096}
    keys["model"]["config"].update(
        sizes if "hidden_size" in keys["model"]["config"] else {"n_embd": 1024, "n_layer": 8}
    )
    profile = trace_model(config(**keys))
    assert profile.refused == "" and profile.unsupported == ()
    # Four projections and two linear layers of four times the width in each of the layers.
    layers = sum(parameter.elements for parameter in profile.parameters if ".0." in parameter.name) * 8
    assert layers == pytest.approx(8 * 12 * 1024**2, rel=0.01)


def test_layers_dropped_at_random_are_reported() -> None:
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}
    keys = keys_of("GPT2LMHeadModel")
    target = {"_target_": "transformers.OPTConfig", "vocab_size": VOCAB, "word_embed_proj_dim": 16, **settings}
    keys["model"] = {"_target_": "transformers.OPTForCausalLM", "config": target}
    assert "modeling_opt.py" in trace_model(config(**keys)).refused
