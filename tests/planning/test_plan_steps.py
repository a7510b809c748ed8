import pytest

from ipurun.estimate.settings import settings_of


def test_epochs_and_dropped_samples(plan_of):
    plan = plan_of({"micro_batch_size": 16, "device_iterations": 4, "epochs": 3}, {"train_samples": 1000})
    steps = plan.steps
    assert (steps.calls_per_epoch, steps.updates_per_epoch, steps.dropped_samples) == (15, 60, 1000 - 15 * 64)
    assert (steps.total_calls, steps.total_updates, steps.epochs) == (45, 180, 3)
    assert any("40 of 1000 samples are dropped" in note for note in plan.notes)


def test_one_epoch_by_default(plan_of):
    assert plan_of({"micro_batch_size": 10}).steps.total_updates == 100


def test_steps_rounded_up_to_whole_host_calls_are_noted(plan_of):
    plan = plan_of(
        {
            "device_iterations": 8,
            "max_steps": 10,
            "checkpoint.every_steps": 8,
            "eval.every_steps": 12,
            "log_every_steps": 20,
        }
    )
    steps = plan.steps
    assert (steps.total_calls, steps.total_updates) == (2, 16)
    assert (steps.save_every_calls, steps.eval_every_calls, steps.log_every_calls) == (1, 2, 3)
    assert [note.split(" is")[0] for note in plan.notes if "rounded up" in note] == [
        "max_steps=10",
        "eval.every_steps=12",
        "log_every_steps=20",
    ]


def test_the_smaller_of_epochs_and_max_steps_counts(plan_of):
    assert plan_of({"micro_batch_size": 10, "epochs": 2, "max_steps": 50}).steps.total_updates == 50
    assert plan_of({"micro_batch_size": 10, "epochs": 2, "max_steps": 500}).steps.total_updates == 200


def test_max_steps_alone_may_pass_the_data_many_times(plan_of):
    steps = plan_of({"micro_batch_size": 10, "max_steps": 250}).steps
    assert (steps.total_updates, steps.epochs) == (250, 2.5)


def test_a_stream_has_no_epochs(plan_of):
    steps = plan_of({"max_steps": 7}, {"train_samples": None}).steps
    assert (steps.total_updates, steps.calls_per_epoch, steps.epochs, steps.dropped_samples) == (7, None, None, None)
    assert plan_of({}, {"train_samples": None}).steps.total_updates is None


@pytest.mark.parametrize(
    ("keys", "samples", "fix"),
    [
        ({"micro_batch_size": 10, "device_iterations": 200}, 1000, "device_iterations=100"),
        ({"micro_batch_size": 10, "gradient_accumulation": 500}, 1000, "gradient_accumulation=100"),
        ({"micro_batch_size": 2000}, 1000, "micro_batch_size=1000"),
    ],
)
def test_a_host_call_larger_than_the_data_is_refused(problems_of, keys, samples, fix):
    problem = problems_of(keys, {"train_samples": samples})[0]
    assert "more samples than the training set has" in problem.what
    assert str(samples) in problem.seen
    assert problem.fix == fix


def test_an_empty_training_set_is_refused(problems_of):
    assert "empty" in problems_of({}, {"train_samples": 0})[0].what


def test_keeping_a_partial_host_call_is_refused(problems_of, plan_of):
    keys = {"micro_batch_size": 64, "loader.drop_last": False}
    assert "loader.drop_last=true" in problems_of(keys)[0].fix
    assert plan_of({**keys, "micro_batch_size": 50}).steps.dropped_samples == 0


def test_a_schedule_that_changes_once_per_host_call_is_noted(plan_of):
    schedule = {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.9}
    assert any(
        "every 4 weight updates" in note for note in plan_of({"schedule": schedule, "device_iterations": 4}).notes
    )
    assert not any("learning rate" in note for note in plan_of({"schedule": schedule}).notes)


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"loader.mode": "async_rebatched"}, "loader.mode=async"),
        (
            {"loader.mode": "async_rebatched", "micro_batch_size": 8, "loader.rebatched_worker_size": 9},
            "loader.rebatched_worker_size=8",
        ),
        ({"loader.rebatched_worker_size": 2}, "loader.mode=async_rebatched"),
    ],
)
def test_loader_settings_that_poptorch_refuses(problems_of, keys, fix):
    assert problems_of(keys)[0].fix == fix


def test_several_processes_are_noted(plan_of):
    notes = plan_of({"options": {"Distributed": {"configureProcessId": [0, 2]}}}).notes
    assert any("one of the 2 processes" in note for note in notes)


def test_a_launcher_says_how_many_processes_share_the_replicas(plan_of):
    launched = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
    plan = plan_of({"devices": 8}, environ=launched)
    assert (plan.instances.kind, plan.instances.count, plan.instances.index) == ("mpirun", 4, 1)
    assert (plan.training.replicas, plan.local_training.replicas) == (8, 2)
    calls = {call.path: call.args for call in plan.training_options}
    assert calls["replicationFactor"] == (2,)
    assert calls["Distributed.configureProcessId"] == (1, 4)
    by_poprun = plan_of({"devices": 8}, environ={**launched, "POPDIST_NUM_TOTAL_REPLICAS": "8"})
    assert by_poprun.instances.uses_popdist
    paths = {call.path for call in by_poprun.training_options}
    assert not {"replicationFactor", "Distributed.configureProcessId"} & paths


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        (
            {"distributed.instances": 3, "devices": 8},
            "8 replicas cannot be divided among 3 instances",
            "distributed.instances=2 or distributed.instances=4",
        ),
        (
            {"distributed.instances": 4, "devices": 8, "distributed.hosts": ["a", "b", "c"]},
            "4 instances cannot be divided among 3 hosts",
            "2 hosts or 4 hosts",
        ),
        (
            {"distributed.kind": "poprun", "distributed.instances": 4, "devices": 8, "distributed.ilds": 3},
            "4 instances cannot be divided among 3 IPU-Link domains",
            "distributed.ilds=2 or distributed.ilds=4",
        ),
        (
            {"distributed.instances": 3, "devices": 8, "distributed.hosts": ["a", "b", "c"]},
            "8 replicas cannot be divided among 3 instances",
            "distributed.instances=2 or distributed.instances=4, and hosts and IPU-Link domains that divide them",
        ),
        (
            {"distributed.instances": 6, "devices": 8, "distributed.hosts": ["a", "b", "c", "d"]},
            "6 instances cannot be divided among 4 hosts",
            "distributed.instances=4 or distributed.instances=8",
        ),
        (
            {"distributed.instances": 4, "devices": 4, "replication.input_group_size": 2},
            "groups of 2 replicas that share their input span instances",
            "replication.input_group_size=1",
        ),
        (
            {"distributed.rendezvous": "nowhere", "devices": 2, "distributed.instances": 2},
            "`distributed.rendezvous` must be HOST:PORT",
            "distributed.rendezvous=localhost:29400",
        ),
        (
            {"distributed.ilds": 2, "devices": 2, "distributed.instances": 2},
            "`distributed.ilds`: only poprun has these",
            "leave them out, or distributed=poprun",
        ),
        (
            {"distributed.kind": "poprun", "distributed.instances": 6, "devices": 8, "distributed.ilds": 4},
            "6 instances cannot be divided among 4 IPU-Link domains",
            "distributed.instances=4 or distributed.instances=8",
        ),
        (
            {"distributed.kind": "none", "distributed.instances": 2, "devices": 2},
            "`distributed.instances` needs `distributed`",
            "distributed=torchrun",
        ),
    ],
)
def test_instances_that_do_not_work_are_refused(problems_of, keys, what, fix):
    found = {problem.what: problem.fix for problem in problems_of({"distributed.kind": "torchrun", **keys})}
    assert found[what] == fix


def test_tensors_are_sharded_over_the_replicas_of_one_instance(plan_of):
    keys = {"devices": 4, "replication.tensor_sharding": True, "distributed.kind": "torchrun"}
    notes = plan_of({**keys, "distributed.instances": 4}).notes
    assert any("two or more replicas in a process" in note for note in notes)
    assert settings_of(plan_of({**keys, "distributed.instances": 2})).sharding_replicas == 2


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("test", 100, 4, 28, 0)),
        ({"eval.max_samples": 33}, ("test", 33, 2, 31, 67)),
        ({"eval.max_samples": 500}, ("test", 100, 4, 28, 0)),
        ({"inference.device_iterations": 1}, ("test", 100, 13, 4, 0)),
    ],
)
def test_an_evaluation_pads_its_last_host_call(plan_of, keys, expected):
    keys = {"micro_batch_size": 8, "device_iterations": 4, **keys}
    plan = plan_of(keys, {"eval_split": "test", "split_samples": {"test": 100}})
    assert tuple(vars(plan.evaluation).values()) == expected


def test_an_evaluation_of_a_stream_or_of_nothing(plan_of):
    stream = plan_of({}, {"eval_split": "eval", "split_samples": {"eval": None}}).evaluation
    assert (stream.split, stream.samples, stream.host_calls) == ("eval", None, None)
    assert plan_of({}).evaluation is None


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"early_stopping.min_change": 0.1}, "early_stopping has no effect without early_stopping.patience"),
        ({"averaging.decay": 0.9}, "averaging has no effect without averaging.kind=ema"),
        ({"early_stopping.min_change": 0.1, "early_stopping.patience": 2}, None),
        ({"averaging.decay": 0.9, "averaging.kind": "ema"}, None),
    ],
)
def test_keys_of_something_that_is_off_are_noted(plan_of, keys, note):
    found = [text for text in plan_of(keys).notes if "has no effect" in text]
    assert len(found) == (note is not None) and all(text.startswith(note) for text in found)
