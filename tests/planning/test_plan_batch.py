import pytest


def test_the_batch_equation(plan_of):
    plan = plan_of({"devices": 2, "micro_batch_size": 4, "device_iterations": 2, "gradient_accumulation": 3})
    assert plan.training.samples_per_update == 4 * 3 * 2
    assert plan.training.samples_per_call == 4 * 2 * 3 * 2
    assert plan.inference.samples_per_call == 4 * 2 * 2  # no accumulation


def test_accumulation_follows_from_the_global_batch_size(plan_of, composed):
    keys = {"devices": 4, "micro_batch_size": 8, "global_batch_size": 256}
    assert plan_of(keys).training.gradient_accumulation == 8
    assert composed(keys).Training.gradient_accumulation == 8


def test_replicas_that_share_input_count_once(plan_of, composed):
    keys = {
        "devices": 8,
        "micro_batch_size": 3,
        "replication.input_group_size": 4,
        "replication.input_group_type": "Orthogonal",
    }
    assert plan_of(keys).training.samples_per_call == 6
    options = composed(keys)
    assert (options.input_group_size, options.input_cgt.name) == (4, "Orthogonal")


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        (
            {"devices": 4, "micro_batch_size": 8, "global_batch_size": 100},
            "global_batch_size=96 or global_batch_size=128",
        ),
        ({"devices": 4, "micro_batch_size": 8, "global_batch_size": 8}, "global_batch_size=32"),
        (
            {"micro_batch_size": 2, "global_batch_size": 4, "pipeline.split": ["fc"]},
            "global_batch_size=6",
        ),
        (
            {"micro_batch_size": 2, "global_batch_size": 12, "gradient_accumulation": 4},
            "global_batch_size=8",
        ),
    ],
)
def test_an_impossible_global_batch_size_is_refused(problems_of, keys, fix):
    problems = problems_of(keys)
    assert len(problems) == 1
    assert "global_batch_size" in problems[0].what
    assert fix in problems[0].fix


def test_an_input_group_must_divide_the_replicas(problems_of):
    problem = problems_of({"devices": 4, "replication.input_group_size": 3})[0]
    assert problem.known == "1, 2, 4"
    assert problem.fix == "replication.input_group_size=2"


def test_inference_may_have_other_sizes(plan_of, composed):
    keys = {
        "devices": 4,
        "device_iterations": 2,
        "micro_batch_size": 5,
        "inference.device_iterations": 3,
        "inference.micro_batch_size": 7,
        "inference.replicas": 2,
    }
    batch = plan_of(keys).inference
    assert (batch.device_iterations, batch.micro_batch_size, batch.replicas) == (3, 7, 2)
    options = composed(keys, "inference")
    assert (options.device_iterations, options.replication_factor) == (3, 2)
    assert options.Training.gradient_accumulation == 1
    assert composed(keys).replication_factor == 4


def test_inference_cannot_use_more_than_the_devices(problems_of):
    problem = problems_of({"devices": 4, "inference.replicas": 8})[0]
    assert problem.fix == "inference.replicas=4"


class TestPipelines:
    def test_training_needs_enough_micro_batches(self, problems_of):
        problem = problems_of({"pipeline.split": ["conv2", "body", "fc"], "gradient_accumulation": 6})[0]
        assert problem.fix.startswith("gradient_accumulation=7")  # 2 x 4 - 1

    def test_sharded_models_need_no_minimum(self, plan_of):
        plan = plan_of({"pipeline.split": ["fc"], "pipeline.strategy": "sharded"})
        assert plan.training.gradient_accumulation == 1

    def test_inference_gets_as_many_iterations_as_stages(self, plan_of):
        plan = plan_of({"pipeline.split": ["fc"], "gradient_accumulation": 3})
        assert plan.inference.device_iterations == 2
        assert any("inference runs 2 device iterations" in note for note in plan.notes)

    def test_too_few_iterations_in_inference_are_refused(self, problems_of):
        keys = {"pipeline.split": ["fc"], "gradient_accumulation": 3, "inference.device_iterations": 1}
        assert problems_of(keys)[0].fix == "inference.device_iterations=2"

    def test_the_share_of_useful_time_is_noted(self, plan_of):
        notes = plan_of({"pipeline.split": ["fc"], "gradient_accumulation": 8}).notes
        assert any("80%" in note for note in notes)  # 8 / (8 + 2)
