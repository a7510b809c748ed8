"""Settings of the estimate, read from a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ipurun.config.compose import one
from ipurun.estimate.settings import loading_of, machine_of, phases_of, resets_of, settings_of
from ipurun.estimate.types import Settings
from ipurun.inspect.facts import Facts
from ipurun.planning import make_plan


def test_instances_share_the_cpus_of_their_host() -> None:
    words = ["+recipe=mnist", "machine.host_samples_per_second=10", "machine.host_cpus=32", "loader.workers=24"]

    def loaded(instances: int, hosts: str) -> float:
        config = one([*words, f"distributed.hosts={hosts}"]).config
        rate = loading_of(config, machine_of(config), None, instances, is_synthetic=False)["host_samples_per_second"]
        return float(rate)

    assert [loaded(instances, "[]") for instances in (1, 2, 64)] == [240, 320, 640]  # each has one process at least
    assert [loaded(instances, "[a, b]") for instances in (1, 2, 4)] == [240, 480, 640]


def _settings(*words: str) -> Settings:
    config = one(["+recipe=mnist", *words]).config
    names = ("conv1", "conv2", "fc1", "fc2")
    return settings_of(make_plan(config, Facts("cpu", "emulator", train_samples=4000, module_names=names)))


@pytest.mark.parametrize(
    ("words", "state_bytes", "tensors"),
    [
        (["optimizer._target_=poptorch.optim.SGD", "~optimizer.weight_decay"], 0.0, 0),
        (["optimizer._target_=poptorch.optim.SGD", "~optimizer.weight_decay", "optimizer.momentum=0.9"], 4.0, 1),
        (["optimizer=adamw"], 8.0, 2),
        (["optimizer=adamw", "optimizer.first_order_momentum_accum_type=float16"], 6.0, 2),
        (["optimizer=rmsprop"], 4.0, 1),
    ],
)
def test_optimizer_state_by_class_and_types(words: Any, state_bytes: float, tensors: int) -> None:
    found = _settings(*words)
    assert (found.state_bytes, found.state_tensors) == (state_bytes, tensors)


@pytest.mark.parametrize("phases", ["[first,fc1]", "[[first],[fc1]]"])
def test_phases_of_a_strategy_under_options(phases: str) -> None:
    words = ["pipeline.split=[fc1]", f"options.setExecutionStrategy={{SerialPhasedExecution: {phases}}}"]
    config = one(["+recipe=mnist", *words]).config
    facts = Facts("cpu", "emulator", train_samples=4000, module_names=("conv1", "fc1"))
    assert phases_of(make_plan(config, facts).training_options) == {"first": 0, "fc1": 1}


def test_accumulators_exist_only_where_gradients_accumulate() -> None:
    assert _settings("gradient_accumulation=1").gradient_bytes == 0
    assert _settings("gradient_accumulation=4").gradient_bytes == 4
    assert _settings("gradient_accumulation=4", "optimizer.accum_type=float16").gradient_bytes == 2


def test_accumulators_of_a_half_model_are_float32_by_default_and_combined_ones_always_exist() -> None:
    accumulating = dataclasses.replace(_settings("precision=16.16", "gradient_accumulation=1"), gradient_accumulation=8)
    assert accumulating.gradient_bytes == 4
    sgd = ["precision=16.16", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.use_combined_accum=true"]
    assert _settings(*sgd, "gradient_accumulation=1").gradient_bytes == 2


def test_locations_and_precision() -> None:
    found = _settings(
        "precision=16.16", "partials=half", "memory.optimizer_state.on_chip=false", "replication.tensor_sharding=true"
    )
    assert (found.compute_bytes, found.partials_bytes) == (2, 2)
    assert not found.state_on_chip and found.state_sharded
    assert found.weights_on_chip and not found.weights_sharded


def test_small_tensors_are_not_sharded_by_default() -> None:
    """8,192 values is the threshold of PopART, which PopTorch does not change."""
    sharded = ["replication.tensor_sharding=true", "devices=2"]
    assert _settings(*sharded).min_elements_sharded == 8192
    assert _settings(*sharded, "memory.optimizer_state.min_elements_sharded=5").min_elements_sharded == 5


def test_memory_proportions_of_modules_are_used() -> None:
    config = one(["+recipe=mnist", "memory.module_proportion={fc1: 0.3}"]).config
    kinds = {"fc1": "Linear"}
    facts = Facts("cpu", "emulator", train_samples=4000, module_names=("fc1",), module_kinds=kinds)
    assert settings_of(make_plan(config, facts)).module_proportions == {"fc1": 0.3}


def test_a_pipeline_recomputes_by_default() -> None:
    split = ["pipeline.split=[fc1]", "gradient_accumulation=8"]
    assert _settings().recompute == "none"
    assert _settings(*split).recompute == "checkpoints"
    assert _settings(*split, "recompute.mode=none").recompute == "none"
    assert _settings(*split, "recompute.mode=norm_only").recompute == "norm_only"


def test_poptorch_options_count_as_well() -> None:
    assert _settings("options.Precision.setPartialsType=torch.half").partials_bytes == 2
    assert _settings("memory.available_proportion=0.3").available_proportion == (0.3,)


def test_the_machine_is_the_configured_one() -> None:
    gc200, bow = machine_of(one(["+recipe=mnist"]).config), machine_of(one(["+recipe=mnist", "machine=bow"]).config)
    assert gc200.memory_bytes == bow.memory_bytes == 1472 * 638976
    assert bow.clock_hz > gc200.clock_hz
    assert machine_of(one(["+recipe=mnist", "machine.tiles=10"]).config).tiles == 10


def test_only_conflicting_keys_are_reset() -> None:
    plain = resets_of(one(["+recipe=mnist"]).config)
    assert (plain.placement, plain.blocks, plain.ipus, plain.batch) == ((), (), (), ())
    placed = resets_of(
        one(
            [
                "+recipe=mnist",
                "pipeline.blocks={fc1: 1}",
                "pipeline.ipus=2",
                "global_batch_size=80",
                "memory.available_proportion=[0.1,0.2]",
                "inference.device_iterations=4",
            ]
        ).config
    )
    assert placed.placement == ("pipeline.ipus=null",)
    assert placed.blocks == ("pipeline.blocks=null",)
    assert placed.ipus == ("memory.available_proportion=null", "inference.device_iterations=null")
    assert placed.batch == ("global_batch_size=null",)
