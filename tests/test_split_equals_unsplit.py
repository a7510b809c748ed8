"""Models split over IPUs in every possible way compute the same as on one IPU, in training and inference."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Dict, List, Tuple

import pytest
import torch

from ipurun import engine as engines
from ipurun.build import build_run
from ipurun.config.compose import one
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.model_and_data import inspect
from ipurun.planning import make_plan
from ipurun.planning.plan import Plan

COMMON = (
    "devices=auto",
    "gradient_accumulation=9",
    "device_iterations=1",
    "inference.device_iterations=5",
    "micro_batch_size=2",
    "seed=3",
    "cache.enabled=false",
    "loader.shuffle=false",
)

RECIPES: Dict[str, Tuple[str, ...]] = {
    "mnist": (),
    "fashion_mnist": ("data=synthetic",),
    "resnet": ("model.width=2", "model.image_size=8", "data=synthetic"),
    "gpt": ("model.num_layers=3", "model.hidden_size=16", "model.max_positions=8", "data=synthetic"),
    "bert": ("model.num_layers=3", "model.hidden_size=16", "model.vocab_size=50", "data=synthetic"),
    "vit": ("model.num_layers=3", "model.hidden_size=16", "data=synthetic"),
}

SPLITS: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "mnist": {
        "pipelined": ("pipeline.split=[fc1]",),
        "sharded": ("pipeline.split=[fc1]", "pipeline.strategy=sharded"),
        "serial": ("pipeline.split=[fc1]", "pipeline.strategy=serial_phased"),
        "parallel": ("pipeline.split=[fc1]", "pipeline.strategy=parallel_phased"),
    },
    "fashion_mnist": {
        "pipelined": ("pipeline.split=[body,head]", "pipeline.auto_round=true"),
        "sharded": ("pipeline.split=[body.2]", "pipeline.strategy=sharded"),
        "serial": ("pipeline.split=[body,head.3]", "pipeline.strategy=serial_phased"),
        "parallel": (
            "pipeline.phases=[stem,{blocks:body,ipu:1},{blocks:[head],ipu:0}]",
            "pipeline.strategy=parallel_phased",
        ),
    },
    "resnet": {
        "pipelined": ("pipeline.layers=[layer1,layer2,layer3,layer4]", "pipeline.layers_per_ipu=[2,-1,1,2]"),
        "sharded": ("pipeline.split=[layer1/1/conv2,layer3,fc]", "pipeline.strategy=sharded"),
        "serial": (
            "pipeline.strategy=serial_phased",
            "pipeline.phases=[[conv1,layer1],[layer2,layer3],[layer4]]",
            "pipeline.liveness=OffChipAfterFwd",
        ),
        "parallel": (
            "pipeline.strategy=parallel_phased",
            "pipeline.phases=[layer1,layer2,[{blocks:layer3,ipu:0},{blocks:layer4,ipu:2}]]",
            "pipeline.auto_round=true",
        ),
    },
    "gpt": {
        "pipelined": (
            "pipeline.layers_per_ipu=[0,1,1,1]",
            "recompute.every=block",
            "memory.serialize={lm_head:2,wte:3}",
        ),
        "sharded": ("pipeline.layers_per_ipu=[1,2]", "pipeline.strategy=sharded", "pipeline.head_ipu=0"),
        "serial": (
            'pipeline.blocks={"h.*": {id: "layer{}"}}',
            "pipeline.phases=[first,layer0,'layer[12]',lm_head]",
            "pipeline.strategy=serial_phased",
        ),
        "parallel": (
            "pipeline.phases=[wte,h.0,[h.1,h.2],h.2.mlp,lm_head]",
            "pipeline.strategy=parallel_phased",
        ),
    },
    "bert": {
        "pipelined": ("pipeline.layers_per_ipu=[0,-1,-1,-1]", "pipeline.head_ipu=0"),
        "sharded": (
            "pipeline.stages=[[embeddings],{blocks:['encoder.layer.*'],ipu:1},{blocks:[pooler],ipu:0}]",
            "pipeline.strategy=sharded",
        ),
        "serial": ("pipeline.layers_per_ipu=[1,1,1]", "pipeline.strategy=serial_phased"),
        "parallel": (
            "pipeline.layers_per_ipu=[1,-1]",
            "pipeline.strategy=parallel_phased",
            "pipeline.head_ipu=0",
            "memory.overlap_io=accumulation_loop",
            "memory.io_tiles=32",
        ),
    },
    "vit": {
        "pipelined": ("pipeline.split=['blocks.*']", "pipeline.auto_stage=auto_increment"),
        "sharded": ('pipeline.blocks={"re:blocks[.](1|2)": {ipu: 1, id: last}}', "pipeline.strategy=sharded"),
        "serial": ("pipeline.split=[blocks.1,head]", "pipeline.strategy=serial_phased"),
        "parallel": ("pipeline.split=[blocks.1,head]", "pipeline.strategy=parallel_phased"),
    },
}

# Tables of 57 and 50 rows, which no number of parts below divides, and heads that share them.
TABLES: Dict[str, Tuple[str, ...]] = {
    "gpt": ("pipeline.layers_per_ipu=[0,1,1,1]", "memory.serialize={wte: [2,2]}"),
    "gpt sharded": ("pipeline.layers_per_ipu=[1,2]", "memory.serialize={lm_head: [1,3]}", "pipeline.strategy=sharded"),
    "bert": (
        "pipeline.layers_per_ipu=[0,1,1,1]",
        "memory.serialize={embeddings.word_embeddings: [2,0,1]}",
        "recompute.every=block",
    ),
}

# Published layouts, at a width that a CPU can train and in a precision in which numbers can be compared.
_NARROW = ("model.hidden_size=16", "model.num_heads=2", "data=synthetic")
_EXACT = (
    "precision=32",
    "stochastic_rounding=false",
    "loss_scaling=1",
    "optimizer.accum_type=float32",
    "global_batch_size=null",
)
PRESETS: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "bert_large_4ipu": ("bert", ("model=bert_large", *_NARROW, "model.vocab_size=50")),
    "gpt2_medium_4ipu": ("gpt", ("model=gpt2_medium", *_NARROW, "model.vocab_size=48", "model.max_positions=8")),
    "vit_base_4ipu": ("vit", ("model=vit_base", *_NARROW, "model.image_size=32")),
    "mnist_2ipu": ("mnist", ()),
}


@dataclass(frozen=True)
class Numbers:
    """The results of a run."""

    plan: Plan
    losses: List[float]
    weights: Dict[str, torch.Tensor]
    outputs: torch.Tensor
    evaluated: torch.Tensor


@functools.lru_cache(maxsize=None)
def numbers(recipe: str, *overrides: str) -> Numbers:
    """Run two weight updates, then one inference call with the trained weights."""
    config = one([f"+recipe={recipe}", "engine=cpu", *COMMON, *overrides]).config
    engine = engines.load("cpu")
    made = inspect(config, engine)
    run = build_run(config, make_plan(config, made.facts), made, engine)
    run.train_loader.start()
    batches = run.train_loader.epoch()
    run.enter_training()
    losses = []
    for _ in range(2):
        args, kwargs = as_call(next(batches))
        losses.append(float(torch.as_tensor(run.training_model(*args, **kwargs)).float().mean()))
    run.enter_inference()
    batch, _ = next(iter(run.eval_loaders[str(run.eval_split)]))
    args, kwargs = as_call(batch)
    result = run.inference_model(*args, **kwargs)
    weights = {name: tensor.clone() for name, tensor in run.user_model.state_dict().items()}
    run.close()
    return Numbers(run.plan, losses, weights, result[0], result[-1])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("strategy", ["pipelined", "sharded", "serial", "parallel"])
def test_split_equals_unsplit(recipe: str, strategy: str) -> None:
    whole = numbers(recipe, *RECIPES[recipe])
    split = numbers(recipe, *RECIPES[recipe], *SPLITS[recipe][strategy])
    _assert_equal(split, whole)


@pytest.mark.parametrize("preset", PRESETS)
def test_published_layouts_equal_unsplit(preset: str) -> None:
    recipe, words = PRESETS[preset]
    whole = numbers(recipe, "pipeline=none", *words, *_EXACT)
    split = numbers(recipe, f"pipeline={preset}", *words, *_EXACT)
    _assert_equal(split, whole)


@pytest.mark.parametrize("case", TABLES)
def test_tables_on_several_ipus_equal_unsplit(case: str) -> None:
    recipe = case.partition(" ")[0]
    words = (*RECIPES[recipe], "gradient_accumulation=18", "inference.device_iterations=10")
    split = numbers(recipe, *words, *TABLES[case])
    _assert_equal(split, numbers(recipe, *words))
    assert any(".part" in placement.module and placement.ipu for placement in split.plan.placements)


def _assert_equal(split: Numbers, whole: Numbers) -> None:
    assert whole.plan.devices.per_replica == 1
    assert split.plan.placements
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert split.weights.keys() == whole.weights.keys()
    for name, weight in whole.weights.items():
        torch.testing.assert_close(split.weights[name], weight, rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(split.outputs, whole.outputs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(split.evaluated, whole.evaluated, rtol=1e-3, atol=1e-4)


def test_two_updates_change_the_weights() -> None:
    """Otherwise equal weights would prove nothing."""
    config = one(["+recipe=gpt", "engine=cpu", *COMMON, *RECIPES["gpt"]]).config
    untrained = inspect(config, engines.load("cpu")).model.state_dict()
    trained = numbers("gpt", *RECIPES["gpt"]).weights
    assert any((trained[name] - untrained[name]).abs().max() > 1e-4 for name in untrained)
