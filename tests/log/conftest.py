"""A run on eight IPUs, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import pytest

from ipurun.api.calls import Call
from ipurun.config.compose import ChangedKey, Point
from ipurun.config.schema import RunConfig
from ipurun.planning.plan import BatchSizes, Devices, Plan, Steps
from ipurun.training.events import StepEnd, Summary


@pytest.fixture
def plan() -> Plan:
    batch = BatchSizes(micro_batch_size=16, device_iterations=8, gradient_accumulation=2, replicas=4)
    steps = Steps(
        total_updates=64,
        total_calls=8,
        calls_per_epoch=4,
        updates_per_epoch=32,
        epochs=2.0,
        dropped_samples=904,
        save_every_calls=2,
        eval_every_calls=None,
        log_every_calls=1,
    )
    return Plan(
        name="digits",
        engine="cpu",
        engine_version="emulator of PopTorch 3.4.0",
        devices=Devices(total=8, per_replica=2, replicas=4, idle=0),
        training=batch,
        inference=replace(batch, gradient_accumulation=1),
        steps=steps,
        precision="16.16",
        output_mode="sum",
        training_options=(Call("deviceIterations", (8,), origin="device_iterations"),),
        inference_options=(),
        placements=(),
        inference_placements=(),
        optimizer=Call("optim.SGD", kwargs={"lr": 0.1}, origin="optimizer"),
        environment={},
        cache_dir=None,
        profile_dir=None,
        parameters=12345,
        notes=("max_steps is rounded up from 60 to 64",),
    )


@pytest.fixture
def point() -> Point:
    return Point(
        RunConfig(),
        overrides=("+recipe=mnist", "devices=8"),
        recipes=("mnist",),
        changed=(
            ChangedKey("epochs", 2, "conf/recipe/mnist.yaml:4"),
            ChangedKey("devices", 8, "command line"),
            ChangedKey("loader.shuffle", False, "conf/recipe/mnist.yaml:9"),
        ),
    )


@pytest.fixture
def step() -> Callable[..., StepEnd]:
    def make(**changes: Any) -> StepEnd:
        values: Any = {
            "step": 8,
            "call": 1,
            "epoch": 0.25,
            "samples": 1024,
            "loss": 2.3025,
            "lr": 0.05,
            "metrics": {},
            "samples_per_second": 51234.4,
            "call_seconds": 0.0234,
            "data_wait": 0.031,
            "eta_seconds": 83.0,
            "total_steps": 64,
        }
        return StepEnd(**{**values, **changes})

    return make


@pytest.fixture
def summary() -> Summary:
    return Summary(
        status="done",
        step=64,
        epoch=2.0,
        samples=8192,
        loss=0.031,
        metrics={"loss": 0.21, "accuracy": 0.9634},
        monitor="accuracy",
        best=0.9712,
        best_step=32,
        samples_per_second=51000.0,
        seconds={"total": 75.0, "compile": 1.5, "train": 62.0, "eval": 8.0, "checkpoint": 0.2, "data_wait": 3.0},
        checkpoint="runs/digits/x/checkpoints/step-00000064.pt",
        resume_command="ipurun train resume=runs/digits/x",
    )
