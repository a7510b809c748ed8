"""Presets against the published numbers."""

import pytest

from ipurun.config.compose import one

# Recipe, model, preset -> layers per IPU, micro-batch, samples per weight update of one replica or all.
PUBLISHED = {
    ("bert", "bert_base", "bert_base_4ipu"): ([0, 4, 4, 4], 32, 65536),
    ("bert", "bert_large", "bert_large_4ipu"): ([3, 7, 7, 7], 8, 65536),
    ("bert", "bert_demo", "bert_demo_4ipu"): ([0, 1, 1, 1], 1, 16),
    ("gpt", "gpt2_small", "gpt2_small_4ipu"): ([0, 4, 4, 4], 1, 128),
    ("gpt", "gpt2_medium", "gpt2_medium_4ipu"): ([1, 7, 8, 8], 1, 512),
    ("gpt", "gpt2_medium", "gpt2_medium_8ipu"): ([0, 3, 3, 3, 3, 4, 4, 4], 1, 8192),
    ("gpt", "gpt2_large", "gpt2_large_16ipu"): ([0, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 2], 1, 8192),
    ("vit", "vit_base", "vit_base_4ipu"): ([3, 3, 3, 3], 17, 2040),
}


@pytest.mark.parametrize(("recipe", "model", "preset"), list(PUBLISHED))
def test_a_preset_has_the_published_numbers(recipe, model, preset):
    layers, micro_batch, global_batch = PUBLISHED[recipe, model, preset]
    point = one([f"+recipe={recipe}", f"model={model}", f"pipeline={preset}"])
    config = point.config
    assert point.problems == ()
    assert config.pipeline.layers_per_ipu == layers
    assert sum(layers) == config.model["num_layers"]
    assert config.micro_batch_size == micro_batch
    assert (config.global_batch_size or config.micro_batch_size * config.gradient_accumulation) == global_batch
    assert config.precision == "16.16"
    shares = config.memory.available_proportion
    assert not isinstance(shares, list) or len(shares) == len(layers)
    stages = len(layers) + (config.pipeline.head_ipu == 0)
    assert config.inference.device_iterations == stages
    for factor in config.memory.serialize.values():
        assert config.model["vocab_size"] % factor == 0


def test_resnet50_is_replicated_sixteen_times():
    config = one(["+recipe=resnet", "model=resnet50", "pipeline=resnet50_replicated"]).config
    assert config.devices * config.micro_batch_size * config.gradient_accumulation == 16416
    assert config.pipeline.split == []


def test_a_preset_keeps_its_settings_with_another_optimizer():
    config = one(["+recipe=bert", "model=bert_large", "pipeline=bert_large_4ipu", "optimizer=adam"]).config
    # The learning rate is that of conf/optimizer/adam.yaml; the recipe's own is for AdamW.
    assert config.optimizer == {"_target_": "poptorch.optim.Adam", "lr": 0.001, "accum_type": "float16"}


def test_micro_batches_of_large_models_are_small_without_a_preset():
    sizes = {model: one(["+recipe=gpt", f"model={model}"]).config.micro_batch_size for model in ("gpt_tiny", "gpt2_xl")}
    assert sizes == {"gpt_tiny": 16, "gpt2_xl": 1}
