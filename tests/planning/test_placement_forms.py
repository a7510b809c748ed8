"""Every form of a placement, and the blocks, stages and strategies that follow from it."""

import pytest
from trees import gpt, resnet, traced

from ipurun.inspect.facts import Facts, UserBlock
from ipurun.planning.placement.order import block_at_calls

ENOUGH = {"gradient_accumulation": 64, "pipeline.auto_round": True}


def blocks(plan):
    return [(placement.module, placement.ipu) for placement in plan.placements]


def strategy(plan):
    call = next(call for call in plan.training_options if call.path == "setExecutionStrategy")
    return call.args[0]


@pytest.mark.parametrize("known", [gpt(tied=False), traced(gpt(tied=False))], ids=["untraced", "traced"])
@pytest.mark.parametrize(
    ("counts", "expected", "stages"),
    [
        ([3, 3], [("h.3", 1)], 2),
        ([0, 6], [("h.0", 1)], 2),
        ([0, 2, 2, 2], [("h.0", 1), ("h.2", 2), ("h.4", 3)], 4),
        ([-1, -1, -1], [("h.2", 1), ("h.4", 2)], 3),
        ([1, -1, -1, -1], [("h.1", 1), ("h.2", 2), ("h.4", 3)], 4),  # 5 layers over 3 IPUs: 1, 2 and 2
        ([0, -1], [("h.0", 1)], 2),
        ([6], [], 1),
        ([-1], [], 1),
    ],
)
def test_layers_per_ipu(plan_of, known, counts, expected, stages):
    plan = plan_of({"pipeline.layers_per_ipu": counts, **ENOUGH}, facts=known)
    assert blocks(plan) == expected
    assert (plan.devices.per_replica, plan.stages) == (len(counts), stages)


def test_all_layers_over_a_number_of_ipus(plan_of):
    plan = plan_of({"pipeline.layers_per_ipu": [-1], "pipeline.ipus": 4, **ENOUGH}, facts=gpt(tied=False))
    assert blocks(plan) == [("h.1", 1), ("h.2", 2), ("h.4", 3)]


def test_layers_of_several_stacks(plan_of):
    keys = {"pipeline.layers": ["layer1", "layer2", "layer3", "layer4"], "pipeline.layers_per_ipu": [5, 6, 5], **ENOUGH}
    assert blocks(plan_of(keys, facts=resnet())) == [("layer2.2", 1), ("layer3.4", 2)]
    keys = {**keys, "pipeline.layers": "layer?.*"}
    assert blocks(plan_of(keys, facts=resnet())) == [("layer2.2", 1), ("layer3.4", 2)]


def test_several_stacks_are_named_in_the_order_of_the_model(problems_of):
    (problem,) = problems_of({"pipeline.layers_per_ipu": [8, 8], **ENOUGH}, facts=resnet())
    assert "pipeline.layers=[layer1,layer2,layer3,layer4] for all" in problem.fix


def test_the_head_may_return_to_the_embeddings_ipu(plan_of):
    keys = {"pipeline.layers_per_ipu": [0, 3, 3], "pipeline.embedding_ipu": 0, "pipeline.head_ipu": 0, **ENOUGH}
    for known in (gpt(), traced(gpt())):
        plan = plan_of(keys, facts=known)
        assert blocks(plan) == [("h.0", 1), ("h.3", 2), ("lm_head", 0)]
        assert (plan.stages, plan.devices.per_replica) == (4, 3)
        assert strategy(plan).args[0].name == "poptorch.AutoStage.AutoIncrement"


def test_ascending_ipus_number_the_stages(plan_of):
    plan = plan_of({"pipeline.layers_per_ipu": [3, 3], **ENOUGH}, facts=gpt(tied=False))
    assert strategy(plan).args[0].name == "poptorch.AutoStage.SameAsIpu"


def test_a_norm_before_the_head_stays_with_the_last_layer(plan_of):
    """As in the published GPT-2 and T5: only `lm_head` begins a block, so that `ln_f` runs where `h.5` does."""
    known = traced(gpt())
    plan = plan_of({"pipeline.layers_per_ipu": [0, 3, 3], "pipeline.head_ipu": 0, **ENOUGH}, facts=known)
    facts = Facts(engine="cpu", engine_version="", **known)
    ipus = {module: block.ipu if block else 0 for module, block in block_at_calls(plan.placements, facts)}
    assert (ipus["h.5"], ipus["ln_f"], ipus["lm_head"]) == (2, 2, 0)


def test_a_tied_head_follows_the_embedding(plan_of):
    plan = plan_of({"pipeline.layers_per_ipu": [0, 3, 3], **ENOUGH}, facts=gpt())
    assert blocks(plan)[-1] == ("lm_head", 0)
    assert any("wte.weight" in note and "one tensor" in note for note in plan.notes)
    embedding_elsewhere = {"pipeline.layers_per_ipu": [3, 3], "pipeline.embedding_ipu": 1, **ENOUGH}
    assert blocks(plan_of(embedding_elsewhere, facts=gpt())) == [("", 1), ("h.0", 0), ("h.3", 1)]


def test_embedding_and_head_may_be_named(plan_of):
    keys = {
        "pipeline.layers_per_ipu": [3, 3],
        "pipeline.embedding": "wpe",
        "pipeline.embedding_ipu": 1,
        "pipeline.head": ["ln_f", "lm_head"],
        "pipeline.head_ipu": 0,
        **ENOUGH,
    }
    plan = plan_of(keys, facts=traced(gpt(tied=False)))
    assert blocks(plan) == [("", 0), ("wpe", 1), ("h.0", 0), ("h.3", 1), ("ln_f", 0), ("lm_head", 0)]
    # wpe and h.0 begin on another IPU than what runs before; ln_f and lm_head are one stage
    assert plan.stages == 5
    assert [call.args for call in strategy(plan).args] == [
        ("first",),
        ("wpe",),
        ("h.0",),
        ("h.3",),
        ("ln_f", "lm_head"),
    ]


def test_blocks_with_one_id_are_one_block(plan_of):
    written = {"h.[1-4]": {"ipu": 1, "id": "layer{}"}, "re:(ln_f|lm_head)": {"ipu": 0, "id": "head"}}
    plan = plan_of({"pipeline.blocks": written, **ENOUGH}, facts=gpt())
    assert plan.stages == 3
    assert [call.args for call in strategy(plan).args] == [
        ("first",),
        ("layer1", "layer2", "layer3", "layer4"),
        ("head",),
    ]


@pytest.mark.parametrize(
    "written",
    [
        {"h.2": {"ipu": 1, "id": "B"}, "h.4": {"ipu": 2}},
        {"h.2": {"ipu_id": 1, "user_id": "B"}, "h.4": 2},
        {"h": {"2": {"ipu": 1, "id": "B"}, "4": {"ipu": 2}}},  # from pipeline.blocks.h.2.ipu=1
        [{"module": "h.2", "ipu": 1, "id": "B"}, {"layer_to_call": "h.4", "ipu_id": 2}],
    ],
)
def test_explicit_blocks(plan_of, written):
    plan = plan_of({"pipeline.blocks": written, **ENOUGH}, facts=gpt(tied=False))
    assert [(one.module, one.ipu, one.block_id) for one in plan.placements] == [("h.2", 1, "B"), ("h.4", 2, "h.4")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("layer{0}", ["layer3", "layer4"]),
        ("layer{}", ["layer3", "layer4"]),
        ("{index}@{ipu}", ["0@1", "1@1"]),
        ("<{name}>", ["<h.3>", "<h.4>"]),
    ],
)
def test_block_ids_by_template(plan_of, template, expected):
    keys = {"pipeline.blocks": {"h.[34]": {"ipu": 1, "id": template}}, **ENOUGH}
    assert [one.block_id for one in plan_of(keys, facts=gpt(tied=False)).placements] == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("h.*", ["h.0", "h.1"]),
        ("h.*.attn", ["h.0.attn", "h.1.attn"]),
        ("h/1/mlp", ["h.1.mlp"]),
        ("*.attn", ["h.0.attn", "h.1.attn"]),
        ("**.c_fc", ["h.0.mlp.c_fc", "h.1.mlp.c_fc"]),
        ("h.[!0]", ["h.1"]),
        ("w?e", ["wte", "wpe"]),
        (r"re:h\.\d+\.(attn|mlp)", ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"]),
    ],
)
def test_patterns(plan_of, pattern, expected):
    assert plan_of({"recompute.checkpoints": [pattern]}, facts=gpt(2)).recompute == tuple(expected)


def test_a_split_may_be_a_pattern(plan_of):
    plan = plan_of({"pipeline.split": ["h.[24]"], **ENOUGH}, facts=gpt(tied=False))
    assert blocks(plan) == [("h.2", 1), ("h.4", 2)]


def test_a_solved_split(plan_of, problems_of):
    keys = {"pipeline.split": "auto", **ENOUGH}
    plan = plan_of(keys, facts={**gpt(tied=False), "solved_split": ("h.1", "h.4")})
    assert blocks(plan) == [("h.1", 1), ("h.4", 2)]
    assert "auto" in problems_of(keys, facts=gpt(tied=False))[0].what


def test_stages(plan_of, composed):
    keys = {
        "pipeline.stages": [["wte", "h.0"], {"blocks": ["h.1", "h.[23]"], "ipu": 1}, {"blocks": "lm_head", "ipu": 0}],
        **ENOUGH,
    }
    plan = plan_of(keys, facts=gpt())
    assert [(one.module, one.ipu) for one in plan.placements] == [
        ("", 0),
        ("wte", 0),
        ("h.0", 0),
        ("h.1", 1),
        ("h.2", 1),
        ("h.3", 1),
        ("lm_head", 0),
    ]
    assert (plan.stages, plan.devices.per_replica) == (3, 2)
    made = composed(keys, facts=gpt())._execution_strategy
    assert made.stage("first").blocks == ("first", "wte", "h.0")
    assert made.stage("h.2").blocks == ("h.1", "h.2", "h.3")


def test_stages_of_named_blocks(composed):
    keys = {
        "pipeline.strategy": "sharded",
        "pipeline.blocks": {"h.*": {"id": "layer{}"}, "lm_head": {"id": "head", "ipu": 0}},
        "pipeline.stages": ["first", ["layer0", "layer1"], "layer[2-5]", "head"],
        "pipeline.auto_round": True,
    }
    made = composed(keys, facts=gpt())._execution_strategy
    assert type(made).__name__ == "ShardedExecution"
    assert made.stage("layer4").blocks == ("layer2", "layer3", "layer4", "layer5")


def test_phases(plan_of, composed):
    keys = {
        "pipeline.strategy": "parallel_phased",
        "pipeline.phases": ["wte", ["h.0", "h.1"], [{"blocks": "h.2", "ipu": 0}, {"blocks": ["h.3"], "ipu": 2}], "h.4"],
        "pipeline.auto_round": True,
    }
    plan = plan_of(keys, facts=gpt(tied=False))
    assert dict(blocks(plan)) == {"": 0, "wte": 0, "h.0": 1, "h.1": 1, "h.2": 0, "h.3": 2, "h.4": 1}
    made = composed(keys, facts=gpt(tied=False))._execution_strategy
    assert [len(made.phase(number).stages) for number in range(4)] == [1, 1, 2, 1]


def test_layers_per_ipu_are_phases_under_phased_execution(plan_of):
    keys = {"pipeline.layers_per_ipu": [2, 2, 2], "pipeline.strategy": "serial_phased"}
    plan = plan_of(keys, facts=gpt())
    assert blocks(plan) == [("", 0), ("h.2", 0), ("h.4", 0)]
    assert plan.devices.per_replica == 1
    assert len(strategy(plan).args) == 3


def test_inference_may_have_other_layers_per_ipu(plan_of):
    keys = {"pipeline.layers_per_ipu": [0, 2, 2, 2], "inference.layers_per_ipu": [2, 4], **ENOUGH}
    plan = plan_of(keys, facts=gpt())
    assert [(one.module, one.ipu) for one in plan.inference_placements] == [("h.2", 1), ("lm_head", 0)]
    assert (plan.stages, plan.inference_stages, plan.inference.device_iterations) == (5, 3, 3)


def test_blocks_in_the_models_code_are_kept_and_shown(plan_of):
    from ipurun.log.plan_text import calls_text

    own = (UserBlock("h.3", 1, "own"), UserBlock(None, 2, "late", 20))
    plan = plan_of(ENOUGH, facts={**traced(gpt(tied=False)), "user_blocks": own})
    assert (plan.placements, plan.user_blocks) == ((), own)
    assert (plan.devices.per_replica, plan.stages) == (3, 3)
    shown = "\n".join(calls_text(plan))
    assert "block 'own' on IPU 1 begins at h.3, in the model's own code" in shown
    assert "block 'late' on IPU 2 begins in forward" in shown


def test_blocks_in_the_models_code_without_an_ipu_are_numbered_in_order(plan_of):
    own = (UserBlock("h.3", None, "own"), UserBlock(None, None, "late", 20))
    plan = plan_of(ENOUGH, facts={**traced(gpt(tied=False)), "user_blocks": own})
    assert strategy(plan).args[0].name == "poptorch.AutoStage.AutoIncrement"
    assert (plan.devices.per_replica, plan.stages) == (3, 3)


def test_the_order_of_running_counts_not_that_of_definition(plan_of):
    facts = traced(gpt(2, tied=False), calls=["", "lm_head", "h.1", "h.1.mlp.c_fc", "h.0", "h.0.mlp.c_fc"])
    plan = plan_of({"pipeline.split": ["h.1", "h.0"], **ENOUGH}, facts=facts)
    assert strategy(plan).args[0].name == "poptorch.AutoStage.SameAsIpu"
    reverse = plan_of({"pipeline.split": ["h.0", "h.1"], **ENOUGH}, facts=facts)
    assert strategy(reverse).args[0].name == "poptorch.AutoStage.AutoIncrement"


def test_every_layer_is_a_checkpoint(plan_of):
    keys = {"recompute.every": "block", "recompute.mode": "recompute_all"}
    assert plan_of(keys, facts=gpt(3)).recompute == ("h.0", "h.1", "h.2")
    assert len(plan_of({**keys, "recompute.checkpoints": ["fc"]}, facts=resnet()).recompute) == 17


def test_ipus_left_idle_by_rounding_are_noted(plan_of):
    plan = plan_of({"pipeline.layers_per_ipu": [2, 2, 2], **ENOUGH}, facts=gpt(tied=False))
    assert (plan.devices.total, plan.devices.per_replica, plan.devices.idle) == (4, 3, 1)
    assert any("1 of 4" in note and "idle" in note for note in plan.notes)


def test_a_last_ipu_without_layers_is_for_the_head(plan_of):
    """As in the published configs of mT5 and wav2vec2: [0, 8, 8, 0]."""
    plan = plan_of({"pipeline.layers_per_ipu": [3, 3, 0], "pipeline.auto_round": True, **ENOUGH}, facts=gpt(tied=False))
    assert blocks(plan) == [("h.3", 1), ("lm_head", 2)]


def test_a_number_of_parts_for_a_table_that_the_model_names(plan_of):
    names = {"module_names": ("wte", "head"), "module_kinds": {"wte": "Embedding", "head": "Linear"}}
    keys = {"memory.serialize": {"input_embeddings": 2, "output_embeddings": 4}}
    plan = plan_of(keys, facts={**names, "tables": {"input_embeddings": "wte"}})
    assert [(layer.module, layer.factor) for layer in plan.serialized] == [("wte", 2)]
    assert any("the model has no output embeddings" in note for note in plan.notes)
