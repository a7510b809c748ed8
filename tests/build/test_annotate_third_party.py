"""Placement and marks on models of libraries that do not know PopTorch."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest
import torch
from run_harness import built, config, inspected
from torch import nn

from ipurun import engine
from ipurun.build import Run, build_run
from ipurun.errors import ConfigError
from ipurun.estimate.plan_estimate import auto_split
from ipurun.inspect.batch_items import as_call
from ipurun.planning import make_plan

MODELS = {
    "GPT2LMHeadModel": ("transformer.h", "lm_head"),
    "BertForSequenceClassification": ("bert.encoder.layer", "bert.pooler"),
    "TimmViT": ("blocks", "head"),
}


def keys_of(model: str, **changes: Any) -> Dict[str, Any]:
    return {
        "model": {"_target_": f"lookalikes.{model}"},
        "data": {"_target_": "lookalikes.tokens"},
        "gradient_accumulation": 9,
        "micro_batch_size": 1,
        "inference__device_iterations": 5,
        "metrics": {},
        "loader__shuffle": False,
        **changes,
    }


def two_updates(run: Run) -> Tuple[List[float], Dict[str, torch.Tensor], torch.Tensor]:
    run.train_loader.start()
    run.enter_training()
    batches = run.train_loader.epoch()
    losses = [float(run.training_model(*as_call(next(batches))[0])) for _ in range(2)]
    run.enter_inference()
    batch, _ = next(iter(run.eval_loaders["eval"]))
    output = run.inference_model(*as_call(batch)[0])[0]
    return losses, {name: tensor.clone() for name, tensor in run.user_model.state_dict().items()}, output


def assert_same(run: Run, model: str, **changes: Any) -> None:
    assert_same_as(run, built(**keys_of(model, **changes)))


def assert_same_as(run: Run, whole: Run) -> None:
    losses, weights, output = two_updates(run)
    expected_losses, expected_weights, expected_output = two_updates(whole)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(output, expected_output, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_layers_embedding_and_head_are_found(model: str) -> None:
    stack, head = MODELS[model]
    settings = config(**keys_of(model, pipeline__layers_per_ipu=[0, 2, 2], pipeline__head_ipu=0))
    settings.pipeline.auto_round = True
    plan = make_plan(settings, inspected(settings).facts)
    assert [(one.module, one.ipu) for one in plan.placements] == [(f"{stack}.0", 1), (f"{stack}.2", 2), (head, 0)]
    assert plan.stages == 4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", ["pipelined", "sharded"])
def test_split_models_compute_the_same(model: str, strategy: str) -> None:
    stack = MODELS[model][0]
    run = built(
        **keys_of(
            model,
            pipeline__layers_per_ipu=[1, 3],
            pipeline__head_ipu=0,
            pipeline__strategy=strategy,
            recompute__every="block",
            recompute__checkpoints=[stack.rpartition(".")[0] or stack],  # which returns a ModelOutput
        )
    )
    assert len(run.plan.recompute) == 5
    assert_same(run, model)


T5_BATCH = {"gradient_accumulation": 13, "inference__device_iterations": 7}


def t5_keys(counts: List[int], **model: Any) -> Dict[str, Any]:
    return {
        **keys_of("T5ForConditionalGeneration", **T5_BATCH),
        "model": {"_target_": "lookalikes.T5ForConditionalGeneration", **model},
        "pipeline__layers": ["encoder.block", "decoder.block"],
        "pipeline__layers_per_ipu": counts,
        "pipeline__auto_round": True,
    }


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 2, 1, 0], [0, 3, 1]])
def test_the_embedding_of_a_decoder_runs_where_its_weight_is(counts: List[int]) -> None:
    run = built(**t5_keys(counts))
    assert {one.module: one.ipu for one in run.plan.placements}["decoder.embed_tokens"] == 0
    note = "decoder.embed_tokens runs on IPU 0, because it shares its weight with encoder.embed_tokens"
    assert note in run.plan.notes
    assert_same(run, "T5ForConditionalGeneration", **T5_BATCH)


@pytest.mark.parametrize("ipus", [2, 4])
@pytest.mark.parametrize("one_module", [False, True])
def test_a_solved_split_keeps_all_uses_of_a_table_on_one_ipu(one_module: bool, ipus: int) -> None:
    model = {"_target_": "lookalikes.T5ForConditionalGeneration", "layers": 4, "one_module": one_module}
    keys = {**keys_of("T5ForConditionalGeneration", **T5_BATCH), "model": model}
    settings = config(**keys, pipeline__split="auto", pipeline__ipus=ipus)
    made = inspected(settings)
    settings, facts = auto_split(settings, made)
    plan = make_plan(settings, facts)
    placed = {one.module: one.ipu for one in plan.placements}
    assert plan.devices.per_replica == ipus
    assert placed.get("decoder", 0) == placed["lm_head"] == 0
    assert set(placed.values()) == set(range(ipus))
    run = build_run(settings, plan, made, engine.load("cpu"))
    assert_same_as(run, built(**keys))


def test_a_table_that_runs_twice_stays_on_one_ipu() -> None:
    settings = config(**t5_keys([1, 1, 1, 1], one_module=True))
    with pytest.raises(ConfigError, match="`shared` runs on IPUs"):
        make_plan(settings, inspected(settings).facts)


def test_serialised_layers_compute_the_same() -> None:
    serialize = {
        "lm_head": {"factor": 4, "mode": "output_channels"},
        "transformer.wte": 3,
        "transformer.h.*.mlp.c_fc": {"factor": 2, "mode": "reducing_dim"},
    }
    shares = {"transformer.h.0": 0.2, "lm_head": 0.3}
    model = "GPT2LMHeadModel"
    run = built(**keys_of(model, memory__serialize=serialize, memory__module_proportion=shares))
    assert len(run.plan.serialized) == 6
    assert sorted(run.plan.module_proportions) == ["lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    assert_same(run, model)


def test_a_serialised_embedding_gives_padding_no_gradient() -> None:
    model = "BertForSequenceClassification"
    assert_same(built(**keys_of(model, memory__serialize={"bert.embeddings": 4})), model)


def test_outputs_that_cannot_be_divided_are_computed_from_parts_of_the_inputs() -> None:
    run = built(**keys_of("TimmViT", memory__serialize={"head": 8}))  # 20 classes
    (layer,) = run.plan.serialized
    assert (layer.mode, layer.factor) == ("reducing_dim", 8)
    assert any("do not divide the 20 output channels of head" in note for note in run.plan.notes)
    assert_same(run, "TimmViT")


def test_all_marks_can_be_removed() -> None:
    run = built(
        **keys_of(
            "GPT2LMHeadModel",
            pipeline__layers_per_ipu=[1, 3],
            recompute__every="block",
            memory__serialize={"lm_head": 2, "transformer.wte": 2},
            memory__module_proportion={"transformer": 0.3},
            precision_rules={"transformer.ln_f": "32"},
        )
    )
    before = _marks(run.user_model)
    run.enter_training()
    assert _marks(run.user_model) != before
    run.annotations.remove()
    assert _marks(run.user_model) == before


def _marks(model: nn.Module) -> List[Tuple[str, int, int, bool]]:
    return [
        (name, len(module._forward_pre_hooks), len(module._forward_hooks), "forward" in vars(module))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("GPT2LMHeadModel", {"pipeline__split": ["transformer.h"]}, "a ModuleList is never called"),
        ("GPT2LMHeadModel", {"pipeline__split": ["transformer.h.2"]}, "are one tensor"),
        ("TimmViT", {"pipeline__split": ["head_dist"]}, "does not run in `forward`"),
        ("TimmViT", {"pipeline__split": ["blocks", "blocks.0"]}, "has no operations"),
        ("TimmViT", {"memory__serialize": {"norm": 2}}, "is not a linear layer or an embedding"),
        ("TimmViT", {"memory__serialize": {"head": 3}}, "3 parts do not divide the 20 output channels"),
    ],
)
def test_impossible_placements_are_reported_before_compiling(model: str, changes: Dict[str, Any], said: str) -> None:
    settings = config(**keys_of(model, pipeline__auto_round=True, **changes))
    with pytest.raises(ConfigError, match=said):
        make_plan(settings, inspected(settings).facts)


def test_a_block_may_begin_at_a_module_that_computes_nothing() -> None:
    run = built(**keys_of("TimmViT", pipeline__split=["fc_norm"]))
    assert run.plan.stages == 2
    assert_same(run, "TimmViT")


def test_modules_are_ordered_as_they_run_in_training() -> None:
    settings = config(**keys_of("AuxiliaryNet", pipeline__split=["body", "head", "aux"]))
    facts = inspected(settings).facts
    assert [call.module for call in facts.calls] == ["", "embed", "body", "head", "aux"]
    assert make_plan(settings, facts).stages == 4
