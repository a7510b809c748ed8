"""Placements that PopTorch or PopART would refuse minutes later, or never: one clear problem for each."""

import pytest
from trees import gpt, resnet, traced

from ipurun.inspect.facts import UserBlock

ENOUGH = {"gradient_accumulation": 64, "pipeline.auto_round": True}
UNTIED = gpt(tied=False)


def the_problem(problems_of, keys, facts=UNTIED):
    problems = problems_of({**ENOUGH, **keys}, facts=facts)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("keys", "name", "near"),
    [
        ({"pipeline.split": ["h.9"]}, "h.9", "h."),
        ({"pipeline.split": ["hh.*"]}, "hh.*", ""),
        ({"pipeline.blocks": {"lm_haed": {"ipu": 1}}}, "lm_haed", "lm_head"),
        ({"pipeline.layers": "blocks", "pipeline.layers_per_ipu": [3, 3]}, "blocks", ""),
        ({"pipeline.head": "head", "pipeline.head_ipu": 1}, "head", "lm_head"),
        ({"pipeline.stages": ["first", "lm_hed"]}, "lm_hed", "lm_head"),
        ({"memory.serialize": {"lm_headd": 2}}, "lm_headd", "lm_head"),
        ({"memory.module_proportion": {"lm_headd": 0.1}}, "lm_headd", "lm_head"),
        ({"recompute.checkpoints": ["h.*.atn"]}, "h.*.atn", "h."),
        ({"pipeline.blocks": {"re:h[.]x": 1}}, "re:h[.]x", ""),
    ],
)
def test_every_name_must_match(problems_of, keys, name, near):
    problem = the_problem(problems_of, keys)
    assert f"`{name}`" in problem.what
    assert near in problem.known


def test_the_fix_for_a_pattern_is_a_pattern(problems_of):
    assert the_problem(problems_of, {"recompute.checkpoints": ["h.*.atn"]}).fix.startswith("`h.*.attn` instead")


def test_a_number_of_ipus_that_is_not_a_power_of_two_is_one_problem(problems_of):
    problem = the_problem(problems_of, {"pipeline.layers_per_ipu": [2, 2, 2], "pipeline.auto_round": False})
    assert "3 IPUs" in problem.what and "pipeline.auto_round=true" in problem.fix


def test_stages_of_a_broken_placement_are_not_counted(problems_of):
    """The accumulation that a pipeline needs is not known while one of its names is wrong."""
    keys = {"pipeline.split": ["nope", "h.3"], "inference.device_iterations": 1}
    (problem,) = problems_of({"pipeline.auto_round": True, **keys}, facts=UNTIED)
    assert "`nope`" in problem.what


def test_blocks_in_the_models_code_need_an_ipu_where_it_is_their_stage(problems_of):
    facts = {**traced(UNTIED), "user_blocks": (UserBlock("h.2", None, "own"),)}
    problem = the_problem(problems_of, {"pipeline.auto_stage": "same_as_ipu"}, facts)
    assert "own has none" in problem.seen and "pipeline.auto_stage=auto" in problem.fix


def test_a_missed_block_lists_each_name_once(problems_of):
    problem = the_problem(problems_of, {"pipeline.stages": ["h.1", "lm_hed"]})
    names = problem.known.split(", ")
    assert len(names) == len(set(names))


def test_an_ambiguous_name(problems_of):
    problem = the_problem(problems_of, {"pipeline.split": ["attn"]})
    assert "6 modules" in problem.what
    assert "h.0.attn" in problem.known


def test_a_broken_expression(problems_of):
    assert "regular expression" in the_problem(problems_of, {"pipeline.blocks": {"re:h(": 1}}).what


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"pipeline.layers_per_ipu": [3, 4]}, "7 layers, but the model has 6", "[3,3]"),
        ({"pipeline.layers_per_ipu": [0, 2, 2]}, "4 layers, but the model has 6", "[0,3,3]"),
        ({"pipeline.layers_per_ipu": [9, -1]}, "9 layers", "[3,3]"),
        ({"pipeline.layers_per_ipu": [3, -2]}, "numbers of layers, or -1", ""),
        ({"pipeline.layers_per_ipu": [3, 3], "pipeline.ipus": 4}, "2 entries", "pipeline.ipus=null"),
        ({"pipeline.layers_per_ipu": [3, 3], "pipeline.split": ["h.1"]}, "contradict", "pipeline.split=[]"),
        ({"pipeline.split": "h.1"}, "takes a list of module names, or auto", "pipeline.split=[h.1]"),
        ({"pipeline.split": {"a": 1}}, "takes a module name or a list", ""),
        ({"pipeline.blocks": {"h.1": {"id": "B"}}}, "has no IPU", "pipeline.stages"),
        ({"pipeline.blocks": {"h.1": {"ipu": -1}}}, "takes an IPU", ""),
        ({"pipeline.blocks": {"h.1": {"ipu": 1, "name": "B"}}}, "takes an IPU", ""),
        (
            {"pipeline.blocks": {"h.*": {"ipu": 1, "id": "{3}"}}, "pipeline.layers": "h"},
            "cannot be filled in",
            "{index}",
        ),
        ({"pipeline.head": "lm_head"}, "`pipeline.head_ipu` is not", "pipeline.head_ipu"),
        ({"pipeline.stages": [3.5, "h.1"]}, "takes a block", ""),
        ({"pipeline.phases": ["h.1"]}, "does not work with", "pipeline.stages"),
        ({"pipeline.stages": [["h.1"], ["h.1"]]}, "twice", ""),
    ],
)
def test_keys_that_make_no_sense_are_refused(problems_of, keys, what, fix):
    problems = problems_of({**ENOUGH, **keys}, facts=UNTIED)
    assert what in problems[0].what
    assert fix in problems[0].fix


def test_a_wrong_number_of_layers_keeps_the_number_of_ipus(problems_of):
    keys = {"pipeline.layers_per_ipu": [0, 3, 4], "memory.available_proportion": [0.1, 0.2, 0.2]}
    assert "7 layers" in the_problem(problems_of, keys).what


def test_one_of_several_stacks_must_be_chosen(problems_of):
    problem = the_problem(problems_of, {"pipeline.layers_per_ipu": [8, 8]}, resnet())
    assert "layer3 (6)" in problem.known
    assert "pipeline.layers=" in problem.fix


def test_two_parts_of_one_container_class_are_not_a_stack(problems_of):
    kinds = {"": "AlexNet", "features": "Sequential", "features.0": "Conv2d", "classifier": "Sequential"}
    kinds["classifier.0"] = "Linear"
    facts = {"module_names": tuple(name for name in kinds if name), "module_kinds": kinds}
    assert "no stack of layers" in the_problem(problems_of, {"pipeline.layers_per_ipu": [1, 1]}, facts).what


def test_one_stack_may_be_much_longer_than_the_others(plan_of):
    plan = plan_of({**ENOUGH, "pipeline.layers_per_ipu": [10, 13]}, facts=resnet((3, 4, 23, 3)))
    assert plan.placements[0].module == "layer3.10"


@pytest.mark.parametrize(
    ("blocks", "what"),
    [
        ({"h.1": 1, "h.[12]": 2}, "both begin a block at `h.1`"),
        ({"h.1": {"ipu": 1, "id": "A"}, "h.2": {"ipu": 2, "id": "A"}}, "`A` is on IPU 1 and on IPU 2"),
    ],
)
def test_overlapping_blocks(problems_of, blocks, what):
    assert what in the_problem(problems_of, {"pipeline.blocks": blocks}).what


def test_blocks_that_overlap_other_keys_or_the_models_code(problems_of):
    keys = {"pipeline.split": ["h.2"], "pipeline.blocks": {"h.2": 3}}
    assert "two blocks begin at `h.2`" in the_problem(problems_of, keys).what
    written = {**UNTIED, "user_blocks": (UserBlock("h.2", 1, "own"),)}
    assert "in the model's code" in the_problem(problems_of, {"pipeline.split": ["h.2"]}, written).what


def test_a_list_of_modules_is_never_called(problems_of):
    problem = the_problem(problems_of, {"pipeline.split": ["h"]})
    assert "ModuleList" in problem.what
    assert "`h.0`" in problem.fix


def test_a_module_that_does_not_run(problems_of):
    facts = traced(UNTIED, calls=["", "wte", "h.0", "h.0.mlp", "h.0.mlp.c_fc", "lm_head"])
    assert "does not run" in the_problem(problems_of, {"pipeline.split": ["h.3"]}, facts).what


def test_a_stage_without_operations(problems_of):
    problem = the_problem(problems_of, {"pipeline.split": ["h.0", "h.0.ln_1"]}, traced(UNTIED))
    assert "`h.0`" in problem.what and "no operations" in problem.what
    untraced = the_problem(problems_of, {"pipeline.split": ["layer2", "layer2.0"]}, resnet())
    assert "`layer2`" in untraced.what and "no operations" in untraced.what
    at_the_end = the_problem(problems_of, {"pipeline.split": ["lm_head"]}, traced(UNTIED, silent=["lm_head"]))
    assert "nothing is computed after it" in at_the_end.seen


@pytest.mark.parametrize(
    ("keys", "empty"),
    [
        ({"pipeline.layers_per_ipu": [3, 0, 3]}, "1"),
        ({"pipeline.blocks": {"h.1": 2, "h.3": 4}}, "1, 3"),
        ({"pipeline.embedding_ipu": 1, "pipeline.layers_per_ipu": [0, 6]}, "0"),
        ({"pipeline.split": ["wte"]}, "0"),
    ],
)
def test_an_ipu_on_which_nothing_runs(problems_of, keys, empty):
    problem = the_problem(problems_of, keys, traced(UNTIED))
    assert problem.what.endswith(empty)


def test_shared_weights_must_be_on_one_ipu(problems_of, plan_of):
    for facts in (gpt(), traced(gpt())):
        problem = the_problem(problems_of, {"pipeline.split": ["h.3"]}, facts)
        assert "`wte.weight` and `lm_head.weight` are one tensor" in problem.what
        assert "lm_head on IPU 1" in problem.seen
        assert "pipeline.head_ipu=0" in problem.fix
        fixed = plan_of({**ENOUGH, "pipeline.split": ["h.3"], "pipeline.head_ipu": 0}, facts=facts)
        assert fixed.stages == 3
    keys = {"pipeline.split": ["h.3"], "pipeline.strategy": "sharded"}
    assert "one tensor" in the_problem(problems_of, keys, gpt()).what


def test_a_module_that_runs_on_two_ipus(problems_of):
    calls = ["", "wte", "h.0", "h.0.mlp", "h.0.mlp.c_fc", "h.1", "h.1.mlp", "h.1.mlp.c_fc", "wte", "lm_head"]
    problem = the_problem(problems_of, {"pipeline.split": ["h.1"]}, traced(UNTIED, calls=calls))
    assert "`wte` runs on IPUs 0, 1, but" in problem.what


def test_accumulation_counts_switches_between_ipus(problems_of, plan_of):
    keys = {"pipeline.layers_per_ipu": [0, 3, 3], "pipeline.auto_round": True, "gradient_accumulation": 6}
    problem = problems_of(keys, facts=gpt())[0]
    assert "4 stages" in problem.what  # three IPUs, and the first one twice
    assert problem.fix.startswith("gradient_accumulation=7")
    plan = plan_of({**keys, "gradient_accumulation": 7}, facts=gpt())
    assert plan.inference.device_iterations == 4
    too_few = {**keys, "gradient_accumulation": 7, "inference.device_iterations": 3}
    assert "inference.device_iterations=4" in problems_of(too_few, facts=gpt())[0].fix


def test_blocks_on_one_ipu_are_one_stage(plan_of):
    keys = {"pipeline.blocks": {"h.1": 1, "h.2": 1, "h.3": 1}, "gradient_accumulation": 3}
    assert plan_of(keys, facts=UNTIED).stages == 2


def test_stages_must_ascend(problems_of):
    keys = {"pipeline.layers_per_ipu": [0, 3, 3], "pipeline.head_ipu": 0, "pipeline.auto_stage": "same_as_ipu"}
    assert "pipeline.auto_stage=auto" in the_problem(problems_of, keys).fix
    keys = {"pipeline.stages": [["h.1"], ["lm_head"], ["h.4"]]}
    assert "order in which the model runs" in the_problem(problems_of, keys).what


def test_a_block_that_runs_again_cannot_be_pipelined(problems_of, plan_of):
    calls = ["", "wpe", "h.0", "h.0.ln_1", "h.1", "h.1.ln_1", "h.0", "h.0.ln_1", "lm_head"]
    keys = {"pipeline.split": ["h.0", "h.1"]}
    problem = the_problem(problems_of, keys, traced(UNTIED, calls=calls))
    assert "pipeline.strategy=sharded" in problem.fix
    assert plan_of({**ENOUGH, **keys, "pipeline.strategy": "sharded"}, facts=traced(UNTIED, calls=calls))


def test_parallel_phases_must_alternate(problems_of):
    keys = {"pipeline.strategy": "parallel_phased", "pipeline.phases": ["wte", {"blocks": "h.0", "ipu": 2}]}
    problem = problems_of({**ENOUGH, **keys}, facts=UNTIED)[0]
    assert "phase 1" in problem.seen and "IPU 2" in problem.seen


def test_every_block_must_be_in_a_stage(problems_of):
    keys = {"pipeline.blocks": {"h.1": {"id": "B"}, "h.2": {"id": "C"}}, "pipeline.stages": ["first", "B"]}
    assert "C" in the_problem(problems_of, keys).seen
    keys = {"pipeline.blocks": {"h.1": 1, "h.2": 2}, "pipeline.stages": ["first", ["h.1", "h.2"]]}
    assert "several IPUs" in problems_of({**ENOUGH, **keys}, facts=UNTIED)[0].what


def test_blocks_in_the_models_code_must_be_in_a_stage_too(problems_of, plan_of):
    written = {**UNTIED, "user_blocks": (UserBlock("h.4", 1, "own"),)}
    assert "own" in the_problem(problems_of, {"pipeline.stages": ["first", "h.2"]}, written).seen
    assert plan_of({**ENOUGH, "pipeline.stages": ["first", ["h.2", "own"]]}, facts=written).stages == 2


def test_all_problems_are_reported_together(problems_of):
    keys = {
        "pipeline.layers_per_ipu": [3, 4],
        "pipeline.head": "haed",
        "pipeline.head_ipu": 0,
        "recompute.checkpoints": ["nothing.*"],
        "memory.serialize": {"lm_head": 7},
        "memory.overlap_io": "accumulation_loop",
    }
    text = " ".join(problem.what for problem in problems_of({**ENOUGH, **keys}, facts=UNTIED))
    for word in ("layers_per_ipu", "haed", "nothing.*", "7 parts", "overlap_io"):
        assert word in text


def test_without_a_model_names_are_not_checked(plan_of):
    keys = {"pipeline.layers_per_ipu": [0, 3, 3, 3], "pipeline.head_ipu": 0, "memory.serialize": {"lm_head": 2}}
    assert plan_of({**ENOUGH, **keys}, facts={"module_names": ()}).devices.per_replica == 4
