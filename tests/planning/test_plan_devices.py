import pytest

from ipurun.inspect.facts import Purpose


def test_replicas_are_derived_from_the_total_of_devices(plan_of):
    plan = plan_of({"devices": 8, "pipeline.split": ["fc"], "gradient_accumulation": 4})
    assert (plan.devices.total, plan.devices.per_replica, plan.devices.replicas, plan.devices.idle) == (8, 2, 4, 0)
    assert plan.training.replicas == 4


@pytest.mark.parametrize(
    ("available", "split", "expected"),
    [
        (None, [], (1, 1, 0)),  # the CPU: as many as the model needs
        (None, ["conv2", "body", "fc"], (4, 1, 0)),
        (16, [], (16, 16, 0)),
        (16, ["fc"], (16, 8, 0)),
        (6, [], (4, 4, 2)),  # the largest power of two
        (128, [], (64, 64, 64)),  # the most that one process attaches
    ],
)
def test_auto_uses_all_available_ipus(plan_of, available, split, expected):
    plan = plan_of(
        {"pipeline.split": split, "gradient_accumulation": 8},
        {"available_ipus": available, "engine": "ipu" if available else "cpu"},
    )
    assert (plan.devices.total, plan.devices.replicas, plan.devices.idle) == expected


def test_ipus_left_idle_by_fewer_replicas_are_noted(plan_of):
    plan = plan_of({"devices": 8, "replication.factor": 2})
    assert (plan.devices.replicas, plan.devices.idle) == (2, 6)
    assert any("6 of 8" in note and "idle" in note for note in plan.notes)


def test_devices_may_be_a_string(plan_of):
    assert plan_of({"devices": "4"}).devices.total == 4


@pytest.mark.parametrize(
    ("keys", "facts", "what", "fix"),
    [
        ({"devices": 3}, {}, "power of two", "devices=2 or devices=4"),
        ({"devices": 6}, {}, "power of two", "devices=4 or devices=8"),
        ({"devices": 0}, {}, "power of two", "devices=1"),
        ({"devices": -4}, {}, "power of two", "devices=1"),
        ({"devices": 128}, {}, "64", "devices=64"),
        ({"devices": "all"}, {}, "number of IPUs, or auto", "devices=1"),
        ({"devices": 16}, {"available_ipus": 4, "engine": "ipu"}, "4 can be attached", "devices=4"),
        (
            {"devices": 2, "pipeline.split": ["conv2", "body", "fc"], "gradient_accumulation": 8},
            {},
            "not divisible by the 4 IPUs",
            "devices=4",
        ),
        ({"devices": 4, "replication.factor": 8}, {}, "need 8 IPUs", "replication.factor=4 or devices=8"),
        ({"devices": 4, "replication.factor": 3}, {}, "not a power of two", "replication.factor=4"),
    ],
)
def test_impossible_devices_are_refused(problems_of, keys, facts, what, fix):
    problem = problems_of({"micro_batch_size": 1, **keys}, facts)[0]
    assert what in problem.what
    assert fix in problem.fix
    assert problem.seen


def test_three_stages_need_rounding_up(plan_of, problems_of, composed):
    keys = {"pipeline.split": ["body", "fc"], "gradient_accumulation": 5}
    problem = problems_of(keys)[0]
    assert "3 IPUs" in problem.what
    assert "pipeline.auto_round=true" in problem.fix
    keys["pipeline.auto_round"] = True
    plan = plan_of(keys)
    assert (plan.devices.total, plan.devices.replicas, plan.devices.idle) == (4, 1, 1)
    assert composed(keys).auto_round_num_ipus is True


def test_a_replication_factor_under_options_counts(plan_of):
    plan = plan_of({"devices": 8, "options": {"replicationFactor": 4}})
    assert (plan.devices.replicas, plan.devices.idle) == (4, 4)


def test_all_problems_are_reported_together(problems_of):
    problems = problems_of(
        {
            "devices": 3,
            "global_batch_size": 7,
            "micro_batch_size": 2,
            "pipeline.split": ["fcc"],
            "memory.io_tiles": 7,
            "optimizer": {"_target_": "poptorch.optim.LAMB", "max_grad_norm": 1.0},
            "options": {"deviceIteration": 2},
        }
    )
    text = " ".join(problem.what for problem in problems)
    for word in ("`devices`", "global_batch_size", "fcc", "io_tiles", "clip", "deviceIteration"):
        assert word in text


def test_single_values_out_of_range_do_not_hide_other_problems(problems_of):
    problems = problems_of(
        {
            "device_iterations": 0,
            "micro_batch_size": -2,
            "pipeline.strategy": "sideways",
            "partials": "double",
            "replication.reduction": "max",
            "recompute.mode": "some",
            "output.mode": "most",
            "devices": 3,
        }
    )
    named = " ".join(problem.what for problem in problems)
    for key in ("device_iterations", "micro_batch_size", "sideways", "double", "max", "some", "most", "`devices`"):
        assert key in named
    assert len(problems) == 8


def test_a_problem_of_training_is_not_repeated_for_inference(problems_of):
    problems = problems_of({"pipeline.split": ["fc"], "devices": 1, "gradient_accumulation": 8})
    assert [problem.fix for problem in problems] == ["devices=2"]


def test_more_ipus_than_one_process_attaches_can_be_planned(plan_of):
    plan = plan_of({"devices": 256, "micro_batch_size": 1}, {"purpose": Purpose.PLAN})
    assert plan.devices.replicas == 256
    assert any("distributed.instances=4 distributed=poprun" in note for note in plan.notes)
