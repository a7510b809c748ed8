import pytest
import trees

from ipurun.config.schema import PipelineConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.placement.layout import lay_out


def laid_out(facts, **keys):
    found = Findings()
    layout = lay_out(PipelineConfig(**keys), Facts("cpu", "emulator", **facts), found)
    assert not found.problems, found.problems
    return layout, found.notes


def test_each_named_module_begins_the_next_ipu(plan_of, composed):
    keys = {"pipeline.split": ["conv2", "body/1", "fc"], "gradient_accumulation": 7}
    plan = plan_of(keys)
    assert [(placement.module, placement.ipu) for placement in plan.placements] == [
        ("conv2", 1),
        ("body.1", 2),
        ("fc", 3),
    ]
    assert plan.inference_placements == plan.placements
    strategy = composed(keys)._execution_strategy
    assert type(strategy).__name__ == "PipelinedExecution"


def test_inference_may_have_another_split(plan_of):
    plan = plan_of({"pipeline.split": ["conv2", "body", "fc"], "gradient_accumulation": 7, "inference.split": []})
    assert plan.inference_placements == ()
    assert len(plan.placements) == 3
    assert plan.inference.device_iterations == 1


@pytest.mark.parametrize(
    ("name", "near"), [("fcc", "fc"), ("conv_2", "conv2"), ("body.1.nrom", "body.1.norm"), ("norm", "body.1.norm")]
)
def test_an_unknown_module_is_reported_with_the_nearest(problems_of, name, near):
    problem = problems_of({"pipeline.split": [name], "gradient_accumulation": 3})[0]
    assert f"`{name}`" in problem.what
    assert near in problem.known
    assert f"`{near}`" in problem.fix


def test_a_module_named_twice_is_refused(problems_of):
    keys = {"pipeline.split": ["fc", "fc"], "pipeline.auto_round": True, "gradient_accumulation": 8}
    assert "twice" in problems_of(keys)[0].what


def test_an_order_other_than_that_of_definition_is_noted(plan_of):
    keys = {"pipeline.split": ["fc", "body", "conv2"], "gradient_accumulation": 8}
    assert any("order" in note for note in plan_of(keys).notes)


def test_pipeline_ipus_counts_for_a_model_that_places_itself(plan_of, problems_of):
    plan = plan_of({"devices": 8, "pipeline.ipus": 4, "gradient_accumulation": 7})
    assert (plan.devices.per_replica, plan.devices.replicas, plan.placements) == (4, 2, ())
    assert plan.inference.device_iterations == 4
    assert problems_of({"pipeline.ipus": 4})[0].fix.startswith("gradient_accumulation=7")
    keys = {"pipeline.ipus": 4, "pipeline.split": ["fc"], "gradient_accumulation": 7}
    assert problems_of(keys)[0].fix == "pipeline.ipus=null"


@pytest.mark.parametrize(
    ("keys", "name", "mode"),
    [
        ({"pipeline.strategy": "sharded"}, "ShardedExecution", 1),
        ({"pipeline.strategy": "serial_phased"}, "SerialPhasedExecution", 2),
        ({"pipeline.strategy": "parallel_phased"}, "ParallelPhasedExecution", 2),
        ({"pipeline.auto_stage": "auto_increment", "gradient_accumulation": 3}, "PipelinedExecution", 0),
    ],
)
def test_strategies(composed, keys, name, mode):
    strategy = composed({"pipeline.split": ["fc"], **keys})._execution_strategy
    assert type(strategy).__name__ == name
    assert strategy.backendOptions()["execution_mode"] == mode


def test_serial_phases_run_on_one_ipu_and_cover_the_whole_model(plan_of, composed):
    keys = {
        "pipeline.split": ["body", "fc"],
        "pipeline.strategy": "serial_phased",
        "pipeline.liveness": "OffChipAfterFwd",
        "pipeline.separate_backward_phase": True,
    }
    plan = plan_of(keys)
    assert plan.devices.per_replica == 1
    assert [(placement.module, placement.ipu) for placement in plan.placements] == [("", 0), ("body", 0), ("fc", 0)]
    backend = composed(keys)._execution_strategy.backendOptions()
    assert backend == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "tensors_liveness": 1,
        "serial_phases_execution": True,
    }


def test_a_strategy_under_options_may_name_the_first_block(plan_of, composed):
    keys = {
        "pipeline.split": ["fc"],
        "options": {"setExecutionStrategy": {"ShardedExecution": ["first", "fc"]}},
    }
    plan = plan_of(keys)
    assert [(placement.module, placement.block_id) for placement in plan.placements] == [("", "first"), ("fc", "fc")]
    assert composed(keys)._execution_strategy.stage("first").blocks == ("first",)


def test_parallel_phases_alternate_between_two_ipus(plan_of):
    plan = plan_of({"pipeline.split": ["body", "fc"], "pipeline.strategy": "parallel_phased"})
    assert plan.devices.per_replica == 2
    assert [placement.ipu for placement in plan.placements] == [0, 1, 0]


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"pipeline.liveness": "AlwaysLive"}, "serial_phased"),
        ({"pipeline.strategy": "serial_phased"}, "pipeline.split=[MODULE"),
        (
            {
                "pipeline.strategy": "parallel_phased",
                "pipeline.split": ["fc"],
                "pipeline.liveness": "OffChipAfterEachPhase",
            },
            "pipeline.liveness=OffChipAfterFwd",
        ),
    ],
)
def test_phased_settings_that_do_not_fit_are_refused(problems_of, keys, fix):
    if "pipeline.split" not in keys and "pipeline.strategy" not in keys:
        keys = {**keys, "pipeline.split": ["fc"], "gradient_accumulation": 3}
    assert fix in problems_of(keys)[0].fix


def test_recomputation(plan_of, composed, problems_of):
    keys = {"recompute.checkpoints": ["body.*", "fc"], "recompute.mode": "recompute_all"}
    assert plan_of(keys).recompute == ("body.0", "body.1", "fc")
    assert composed(keys)._Popart.options["autoRecomputation"] == 4
    assert "layer*" in problems_of({"recompute.checkpoints": ["layer*"]})[0].what


def test_precision_rules_match_modules(plan_of, problems_of):
    plan = plan_of({"precision_rules": {"body.*": "16", "body.1.norm": "32"}})
    assert plan.module_precision == {"body.0": "16", "body.1": "16", "body.1.norm": "32"}
    problems = problems_of({"precision_rules": {"bodi": "16", "fc": "8"}})
    assert [word in problem.what for word, problem in zip(("bodi", "`8`"), problems)] == [True, True]


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("16", "16.32"),
        ("16-true", "16.16"),
        ("32", "32.32"),
        ("16.16", "16.16"),
        ("16.32", "16.32"),
        ("32.32", "32.32"),
    ],
)
def test_precision_is_normalised(plan_of, written, normal):
    assert plan_of({"precision": written}).precision == normal


@pytest.mark.parametrize("tower", ["decoder", "text"])
def test_both_stacks_are_placed_and_the_head_returns_to_its_embedding(tower):
    facts = trees.traced(trees.speech(tower=tower))
    layout, notes = laid_out(facts, layers_per_ipu=[1, 1, 1, 1])
    assert [(placement.module, placement.ipu) for placement in layout.placements if placement.module] == [
        ("encoder.layers.1", 1),
        (f"{tower}.layers.0", 2),
        (f"{tower}.layers.1", 3),
        ("proj_out", 1),  # where the second stack's embedding runs
    ]
    assert any("the head (proj_out) runs on IPU 1" in note for note in notes)


def test_a_table_in_parts_begins_blocks_and_so_does_the_layer_after_it():
    gpt = trees.gpt(layers=2)
    parts = ["wte.part0", "wte.part1", "lm_head.part0", "lm_head.part1"]
    kinds = {**gpt["module_kinds"], **dict.fromkeys(parts, "Linear")}
    order = ["", "wte", *parts[:2], "wpe", *(name for name in kinds if name.startswith("h.")), "ln_f", "lm_head"]
    facts = {**gpt, "module_kinds": kinds, "module_names": tuple(name for name in kinds if name)}
    facts["shared_parameters"] = tuple((f"wte.part{n}.weight", f"lm_head.part{n}.weight") for n in range(2))
    facts = {**trees.traced(facts, [*order, *parts[2:]]), "table_parts": {"wte": (0, 1), "lm_head": (0, 1)}}
    layout, _ = laid_out(facts, layers_per_ipu=[1, 1])
    blocks = {placement.module: placement.ipu for placement in layout.placements if placement.module}
    assert blocks == {"wte.part0": 0, "wte.part1": 1, "h.0": 0, "h.1": 1, "lm_head.part0": 0, "lm_head.part1": 1}
