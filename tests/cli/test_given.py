"""What was typed or written in a YAML file wins over poptorch.conf and defaults, and must not contradict itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

from ipurun.cli.main import main

_CONF = """\
deviceIterations(2)
Training.gradientAccumulation(4)
randomSeed(7)
outputMode(poptorch.OutputMode.All)
setExecutionStrategy(poptorch.ShardedExecution())
Precision.enableStochasticRounding(True)
enableExecutableCaching("elsewhere")
autoRoundNumIPUs(True)
inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal)
Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
Precision.enableFloatingPointExceptions(True)
Training.setAutomaticLossScaling(True)
TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useReplicatedTensorSharding(True))
"""
_SHORT_RUN = ("+recipe=mnist", "poptorch_conf=short.conf", "data=synthetic", "max_steps=1", "eval.max_samples=10")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.conf").write_text(_CONF)
    Path("short.conf").write_text("deviceIterations(2)\nrandomSeed(7)\n")


def _calls(capsys: Any, *argv: str) -> List[str]:
    """The lines of the plan that call setters, as `plan` and as `plan --json` show them."""
    assert main(["plan", "+recipe=mnist", "devices=2", *argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main(["plan", "+recipe=mnist", "devices=2", *argv]) == 0
    text = capsys.readouterr().out
    shown = [line for line in document["poptorch"] if line.startswith(("opts.", "inference_opts."))]
    assert all(f"  {line}\n" in text for line in shown)
    return shown


def _refusal(capsys: Any, *argv: str) -> str:
    assert main(["plan", "+recipe=mnist", *argv]) == 2
    return " ".join(capsys.readouterr().err.split())


def _recipe(name: str, text: str) -> None:
    path = Path("conf/recipe") / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\ndefaults:\n  - mnist\n{text}")


def test_calls_of_a_file_name_its_lines(capsys: Any) -> None:
    calls = _calls(capsys, "poptorch_conf=good.conf")
    assert "opts.deviceIterations(2)  # good.conf:1" in calls
    assert "inference_opts.deviceIterations(2)  # good.conf:1" in calls
    assert "opts.Training.gradientAccumulation(4)  # good.conf:2" in calls
    assert "opts.randomSeed(7)  # good.conf:3" in calls
    assert "opts.inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal)  # good.conf:9" in calls
    assert "opts.replicationFactor(2)  # devices" in calls


def test_every_call_has_an_origin(capsys: Any) -> None:
    assert all("  # " in call for call in _calls(capsys, "options.deviceIterations=3", "profile=graph"))


def test_calls_of_options_name_their_key(capsys: Any) -> None:
    calls = _calls(capsys, "options.deviceIterations=3", "options.replicationFactor=2", "poptorch_conf=good.conf")
    assert "opts.deviceIterations(3)  # options.deviceIterations" in calls
    assert "opts.replicationFactor(2)  # options.replicationFactor" in calls


@pytest.mark.parametrize(
    ("typed", "call"),
    [
        ("device_iterations=1", "deviceIterations(1)  # device_iterations"),
        ("gradient_accumulation=1", "Training.gradientAccumulation(1)  # gradient_accumulation"),
        ("seed=0", "randomSeed(0)  # seed"),
        ("output.mode=auto", "outputMode(poptorch.OutputMode.Sum)  # output.mode=auto"),
        (
            "pipeline.strategy=pipelined",
            "setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))  # pipeline",
        ),
        ("cache=off", "enableExecutableCaching(None)  # cache.enabled=false"),
        ("pipeline.auto_round=false", "autoRoundNumIPUs(False)  # pipeline.auto_round"),
        (
            "replication.input_group_size=1",
            "inputReplicaGrouping(1, poptorch.CommGroupType.Orthogonal)  # replication.input_group_size",
        ),
        (
            "replication.reduction=mean",
            "Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)  # replication.reduction",
        ),
        (
            "replication.mean_strategy=post",
            "Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Post)"
            "  # replication.mean_strategy",
        ),
        ("debug.fp_exceptions=false", "Precision.enableFloatingPointExceptions(False)  # debug.fp_exceptions"),
        ("loss_scaling=1", "Training.setAutomaticLossScaling(False)  # loss_scaling=1"),
        (
            "replication.tensor_sharding=false",
            "TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings()"
            ".useReplicatedTensorSharding(False))  # replication.tensor_sharding",
        ),
    ],
)
def test_a_typed_default_wins_over_the_file(capsys: Any, typed: str, call: str) -> None:
    calls = _calls(capsys, "poptorch_conf=good.conf", typed)
    assert f"opts.{call}" in calls
    name = call.partition("(")[0]
    assert [line for line in calls if line.startswith(f"opts.{name}(")] == [f"opts.{call}"]


def test_a_key_of_training_keeps_the_file_out_of_inference_too(capsys: Any) -> None:
    calls = _calls(capsys, "poptorch_conf=good.conf", "stochastic_rounding=false")
    assert "opts.Precision.enableStochasticRounding(False)  # stochastic_rounding" in calls
    assert not [line for line in calls if line.startswith("inference_opts.Precision.enableStochasticRounding")]


def test_a_default_in_the_users_recipe_wins_over_the_file(capsys: Any) -> None:
    _recipe("mine", "poptorch_conf: good.conf\ndevice_iterations: 1\n")
    assert main(["plan", "+recipe=mine", "devices=2"]) == 0
    out = capsys.readouterr().out
    assert "opts.deviceIterations(1)  # device_iterations" in out
    assert "opts.randomSeed(7)  # good.conf:3" in out


def test_a_file_in_a_recipe_loses_against_a_typed_default(capsys: Any) -> None:
    _recipe("mine", "poptorch_conf: good.conf\n")
    assert main(["plan", "+recipe=mine", "devices=2", "device_iterations=1"]) == 0
    out = capsys.readouterr().out
    assert "opts.deviceIterations(1)  # device_iterations" in out
    assert "device_iterations wins over good.conf:1: 1, not 2" in out


def test_null_takes_a_key_back(capsys: Any) -> None:
    _recipe("mine", "poptorch_conf: good.conf\ngradient_accumulation: 3\n")
    assert main(["plan", "+recipe=mine", "devices=2", "gradient_accumulation=null"]) == 0
    assert "opts.Training.gradientAccumulation(4)  # good.conf:2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("device_iterations=1", "options.deviceIterations=8"),
        ("gradient_accumulation=1", "options.Training.gradientAccumulation=4"),
        ("global_batch_size=20", "options.Training.gradientAccumulation=4"),
        ("seed=0", "options.randomSeed=5"),
        ("pipeline.strategy=pipelined", "options.setExecutionStrategy=ShardedExecution"),
        ("replication.factor=1", "options.replicationFactor=2"),
        ("replication.input_group_size=1", "options.inputReplicaGrouping=[2,Consecutive]"),
        ("replication.reduction=mean", "options.Training.accumulationAndReplicationReductionType=Sum"),
        ("replication.broadcast_buffers=true", "options.broadcastBuffers=false"),
        ("output.mode=auto", "options.outputMode=Final"),
        ("partials=half", "options.Precision.setPartialsType=float"),
        ("stochastic_rounding=false", "options.Precision.enableStochasticRounding=true"),
        ("cache.enabled=false", "options.enableExecutableCaching=elsewhere"),
        ("cache.dir=here", "options.enableExecutableCaching=elsewhere"),
        ("recompute.mode=none", "options._Popart.set.autoRecomputation=1"),
        ("memory.io_tiles=32", "options.TensorLocations.numIOTiles=64"),
        ("memory.weights.on_chip=true", "options.TensorLocations.setWeightLocation.useOnChipStorage=false"),
        ("memory.available_proportion=0.3", "options.setAvailableMemoryProportion={IPU0: 0.2}"),
        ("loss_scaling=1", "options.Training.setAutomaticLossScaling=true"),
        ("inference.device_iterations=2", "inference.options.deviceIterations=4"),
        ("inference.replicas=1", "inference.options.replicationFactor=2"),
    ],
)
def test_a_key_and_its_option_must_agree(capsys: Any, key: str, option: str) -> None:
    message = _refusal(capsys, "devices=2", key, option)
    setter = option.partition("=")[0].replace(".useOnChipStorage", "")
    assert f"error: `{key.partition('=')[0]}` and `{setter}` disagree" in message
    assert message.count("error:") == 1
    assert f"command line: {key}; command line: {option}" in message


@pytest.mark.parametrize(
    "words",
    [
        ("device_iterations=8", "options.deviceIterations=8"),
        ("device_iterations=2", "device_iterations=8", "options.deviceIterations=8"),
        ("device_iterations=8", "options.deviceIterations=4", "options.deviceIterations=null"),
        ("global_batch_size=80", "options.Training.gradientAccumulation=4"),
        ("pipeline.strategy=sharded", "options.setExecutionStrategy=ShardedExecution"),
        ("output.mode=sum", "options.outputMode=Sum"),
        ("cache=on", "options.enableExecutableCaching=elsewhere"),
        ("inference.device_iterations=2", "options.deviceIterations=4"),
        ("seed=0", "inference.options.randomSeed=4"),
    ],
)
def test_what_agrees_or_speaks_of_another_mode_is_fine(capsys: Any, words: Any) -> None:
    assert main(["plan", "+recipe=mnist", "devices=2", *words]) == 0


def test_both_in_a_recipe_are_named_with_their_lines(capsys: Any) -> None:
    _recipe("mine", "device_iterations: 1\noptions:\n  deviceIterations: 8\n")
    assert main(["plan", "+recipe=mine"]) == 2
    message = capsys.readouterr().err
    assert "`device_iterations` and `options.deviceIterations` disagree" in message
    assert "conf/recipe/mine.yaml:4; conf/recipe/mine.yaml:6" in message
    assert main(["plan", "+recipe=mine", "~options.deviceIterations"]) == 0


def test_only_the_swept_points_that_disagree_are_named(capsys: Any) -> None:
    message = _refusal(capsys, "-m", "device_iterations=1,8", "options.deviceIterations=8")
    assert "sweep point device_iterations=1" in message and message.count("error:") == 1


def test_validate_refuses_the_same(capsys: Any) -> None:
    assert main(["validate", "+recipe=mnist", "device_iterations=1", "options.deviceIterations=8"]) == 2
    assert "disagree" in capsys.readouterr().err


def test_a_run_and_what_resumes_it_have_the_same_plan(capsys: Any) -> None:
    typed = ["device_iterations=1", "hydra.run.dir=run"]
    assert main(["train", *_SHORT_RUN, *typed, "--quiet"]) == 0
    before = Path("run/plan.txt").read_text()
    assert "opts.deviceIterations(1)  # device_iterations" in before
    assert "opts.randomSeed(7)  # short.conf:2" in before
    assert main(["train", "resume=run", "--quiet"]) == 0
    assert Path("run/plan.txt").read_text() == before
    assert main(["train", "resume=run", "options.deviceIterations=4", "--quiet"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "command line: device_iterations=1; command line: options.deviceIterations=4" in message


def test_the_points_of_a_sweep_know_what_was_typed() -> None:
    words = ["device_iterations=1,4", "hydra.sweep.dir=sweep"]
    assert main(["train", "-m", *_SHORT_RUN, *words, "--quiet"]) == 0
    plans = sorted(path.read_text() for path in Path("sweep").glob("*/plan.txt"))
    assert [f"opts.deviceIterations({n})  # device_iterations" in plan for n, plan in zip((1, 4), plans)] == [True] * 2


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_one_config_does_not_load_the_sweep(command: str) -> None:
    code = (
        "import sys; from ipurun.cli.main import main; "
        f"assert main([{command!r}, '+recipe=mnist', '--quiet']) == 0; "
        "assert not [name for name in sys.modules if name.startswith('ipurun.sweep')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
