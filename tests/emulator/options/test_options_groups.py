"""The groups of Options and their checks."""

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.api.manifest import load as load_manifest

GROUPS = load_manifest()["option_groups"]


@pytest.mark.parametrize("group", ["Training", "Precision", "Jit", "Distributed", "TensorLocations", "_Popart"])
def test_group_defaults_match_the_manifest(group, monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    found = getattr(poptorch.Options(), group)
    stored = found.options if group == "_Popart" else found.toDict()
    expected = GROUPS[f"Options.{group}"]["storage_defaults"]
    assert stored == {key: eval(text, {"enums": poptorch.enums}) for key, text in expected.items()}


def test_training_setters():
    training = poptorch.Options().Training
    assert training.gradientAccumulation(8) is training
    training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
    assert training.gradient_accumulation == 8
    assert training.accumulation_and_replication_reduction_type == poptorch.ReductionType.Sum
    assert training.meanAccumulationAndReplicationReductionStrategy == poptorch.MeanReductionStrategy.Running


@pytest.mark.parametrize("value", [poptorch.ReductionType.NoReduction, 1, "Mean"])
def test_reduction_type_is_checked(value):
    with pytest.raises(ValueError):
        poptorch.Options().Training.accumulationAndReplicationReductionType(value)


def test_mean_strategy_and_accumulation_are_checked():
    training = poptorch.Options().Training
    with pytest.raises(AssertionError):
        training.setMeanAccumulationAndReplicationReductionStrategy(1)
    with pytest.raises(AssertionError):
        training.gradientAccumulation(2.0)


def test_partials_and_dithering_overwrite_each_other():
    options = poptorch.Options()
    options.Precision.setPartialsType(torch.float16)
    assert options._Popart.options["partialsTypeMatMuls"] == "half"
    assert options._Popart.options["convolutionOptions"] == {"partialsType": "half"}
    options.Training.setConvolutionDithering(True)
    assert "partialsType" not in options._Popart.options["convolutionOptions"]
    options.Precision.setPartialsType(torch.float32)
    assert options._Popart.options["convolutionOptions"] == {"partialsType": "float"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, "half"])
def test_partials_type_is_checked(dtype):
    with pytest.raises(ValueError):
        poptorch.Options().Precision.setPartialsType(dtype)


def test_precision_flags_reach_the_backend():
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True).enableStochasticRounding(True)
    options.Training.setAutomaticLossScaling(True)
    assert options._Popart.options["enableFloatingPointChecks"] is True
    assert options._Popart.options["enableStochasticRounding"] is True
    assert options._Popart.options["automaticLossScalingSettings.enabled"] is True
    with pytest.raises(AssertionError):
        options.Precision.enableFloatingPointExceptions(1)


def test_deprecated_precision_options_warn_and_change_nothing(capsys):
    options = poptorch.Options()
    before = repr(options)
    precision = options.Precision
    assert precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default) is precision
    assert precision.runningStatisticsAlwaysFloat(True) is precision
    logged = capsys.readouterr().err
    assert "halfFloatCasting" in logged
    assert "runningStatisticsAlwaysFloat" in logged
    assert repr(options) == before
    with pytest.raises(ValueError):
        precision.runningStatisticsAlwaysFloat(1)


def test_jit_tracing_is_no_longer_supported(capsys):
    jit = poptorch.Options().Jit
    assert jit.traceModel(False) is jit
    assert "traceModel" in capsys.readouterr().err
    with pytest.raises(ValueError):
        jit.traceModel(True)


def test_distributed_from_the_environment(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("MY_SIZE", "2")
    monkeypatch.setenv("MY_RANK", "one")
    distributed = poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    distributed.disable()
    assert (distributed.processId, distributed.numProcesses) == (0, 1)
    distributed.setEnvVarNames("MY_SIZE", "UNSET_RANK")
    assert (distributed.processId, distributed.numProcesses) == (0, 2)
    with pytest.raises(ValueError):
        distributed.setEnvVarNames("MY_SIZE", "MY_RANK")
    with pytest.raises(AssertionError):
        distributed.configureProcessId("0", 2)


@pytest.mark.parametrize("tiles", [10, 31, 33, 193, 194, 64.0])
def test_io_tiles_are_checked(tiles):
    with pytest.raises(AssertionError, match=r"numIOTiles must be an even number between 32 and 192."):
        poptorch.Options().TensorLocations.numIOTiles(tiles)


@pytest.mark.parametrize("tiles", [32, 100, 192])
def test_io_tiles_are_stored(tiles):
    options = poptorch.Options()
    options.TensorLocations.numIOTiles(tiles)
    assert options.TensorLocations.toDict() == {"numIOTiles": tiles}


@pytest.mark.parametrize(
    ("setter", "key"),
    [
        ("setActivationLocation", "location_activation"),
        ("setWeightLocation", "location_weight"),
        ("setOptimizerLocation", "location_optimizer"),
        ("setAccumulatorLocation", "location_accumulator"),
    ],
)
def test_tensor_locations_store_a_snapshot(setter, key):
    locations = poptorch.Options().TensorLocations
    settings = poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(4)
    assert getattr(locations, setter)(settings) is locations
    settings.useOnChipStorage(True)
    assert locations.toDict() == {key: {"onChip": 0, "minElementsForOffChip": 4}}
    with pytest.raises(AssertionError):
        getattr(locations, setter)({"onChip": 0})


def test_tensor_location_settings():
    settings = (
        poptorch.TensorLocationSettings().useReplicatedTensorSharding().useIOTilesToLoad().useIOTilesToStore(False)
    )
    settings.minElementsForReplicatedTensorSharding(8).useOnChipStorage()
    assert settings.toDict() == {
        "useReplicatedTensorSharding": 1,
        "useIOTilesToLoad": 1,
        "useIOTilesToStore": 0,
        "minElementsForReplicatedTensorSharding": 8,
        "onChip": 1,
    }
    settings.useOnChipStorage(None)
    assert not settings.exists("onChip")


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("minElementsForOffChip", 1.0),
        ("minElementsForReplicatedTensorSharding", "8"),
        ("useOnChipStorage", 1),
        ("useReplicatedTensorSharding", None),
        ("useIOTilesToLoad", 0),
        ("useIOTilesToStore", 1),
    ],
)
def test_tensor_location_settings_are_checked(setter, value):
    with pytest.raises(AssertionError):
        getattr(poptorch.TensorLocationSettings(), setter)(value)


def test_popart_patterns_and_engine_options():
    popart = poptorch.Options()._Popart
    assert popart.setPatterns({"PadSum": True}, 0) is popart
    assert (popart.options["patterns"], popart.options["patterns_level"]) == ({"PadSum": True}, 0)
    popart.setEngineOptions({"debug.allowOutOfMemory": "true"})
    assert popart.options["engineOptions"] == {"debug.allowOutOfMemory": "true"}
    with pytest.raises(AssertionError):
        popart.setPatterns(["PadSum"])
    with pytest.raises(AssertionError):
        popart.setPatterns({}, "2")
