import pytest
import torch

from ipurun import emulator
from ipurun.api.calls import Call, Symbol, apply_calls, construct, resolve
from ipurun.errors import ConfigError


def test_calls_reach_groups_and_settings_objects():
    location = Call("poptorch.TensorLocationSettings", chain=(Call("useOnChipStorage", (False,)),))
    options = apply_calls(
        emulator.Options(),
        [
            Call("deviceIterations", (3,)),
            Call("Training.gradientAccumulation", (2,)),
            Call("outputMode", (Symbol("poptorch.OutputMode.EveryN"),), {"output_return_period": 3}),
            Call("TensorLocations.setWeightLocation", (location,)),
            Call("Precision.setPartialsType", (Symbol("torch.float16"),)),
        ],
        emulator,
    )
    assert (options.device_iterations, options.output_mode, options.output_return_period) == (3, 1, 3)
    assert options.Training.gradient_accumulation == 2
    assert options.TensorLocations.location_weight == {"onChip": 0}
    assert options._Popart.options["partialsTypeMatMuls"] == "half"


def test_values_are_resolved_inside_containers():
    resolved = resolve({"a": [Symbol("torch.float32"), (Symbol("poptorch.AutoStage.SameAsIpu"), 1)]}, emulator)
    assert resolved == {"a": [torch.float32, (emulator.AutoStage.SameAsIpu, 1)]}


def test_strategies_with_stages():
    stage = Call("poptorch.Stage", ("A",), chain=(Call("ipu", (1,)),))
    strategy = construct(Call("poptorch.PipelinedExecution", (stage, ["B", "C"])), emulator)
    assert strategy.stage("A")._ipu == 1
    assert strategy.stage("C").blocks == ("B", "C")


def test_construct_takes_further_arguments_from_the_builder():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    call = Call("torch.optim.SGD", kwargs={"lr": 0.5})
    optimizer = construct(call, emulator, parameters, momentum=0.9)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)


def test_refusals_are_reported_together_with_their_origin():
    calls = [
        Call("deviceIterations", ("two",), origin="options.deviceIterations"),
        Call("logDir", ("fine",)),
        Call("TensorLocations.numIOTiles", (7,), origin="memory.io_tiles"),
    ]
    with pytest.raises(ConfigError) as raised:
        apply_calls(emulator.Options(), calls, emulator)
    assert [problem.where for problem in raised.value.problems] == ["options.deviceIterations", "memory.io_tiles"]
    assert "deviceIterations('two')" in raised.value.problems[0].what
