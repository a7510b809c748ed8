"""General options: storage rules, setters and their checks."""

import copy
import pickle

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.api.manifest import load as load_manifest
from ipurun.emulator.options import _OptionsDict

GENERAL = load_manifest()["option_groups"]["Options"]


def manifest_default(expression):
    return eval(expression, {"enums": poptorch.enums})


@pytest.mark.parametrize("key", sorted(GENERAL["storage_defaults"]))
def test_defaults_match_the_manifest(key):
    assert getattr(poptorch.Options(), key) == manifest_default(GENERAL["storage_defaults"][key])


@pytest.mark.parametrize("key", GENERAL["keys_absent_until_set"])
def test_some_keys_exist_only_once_set(key):
    options = poptorch.Options()
    assert not options.exists(key)
    with pytest.raises(AttributeError):
        getattr(options, key)


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("_show_compilation_progress_bar", True),
        ("_relax_optimizer_checks", False),
        ("_module_namescope_enabled", True),
        ("_source_location_excludes", ["install/poptorch", "site-packages/torch", "site-packages/poptorch"]),
    ],
)
def test_python_only_state(name, default):
    assert getattr(poptorch.Options(), name) == default


@pytest.mark.parametrize(
    ("setter", "argument", "key", "stored"),
    [
        ("deviceIterations", 4, "device_iterations", 4),
        ("replicationFactor", 8, "replication_factor", 8),
        ("broadcastBuffers", False, "broadcast_buffers", False),
        ("autoRoundNumIPUs", True, "auto_round_num_ipus", True),
        ("logDir", "logs", "log_dir", "logs"),
        ("maxRepeatLogs", 2, "max_repeat_logs", 2),
        ("maxRepeatLogs", None, "max_repeat_logs", 2**64 - 1),
        ("modelName", "bert", "model_name", "bert"),
        ("useIpuModel", True, "use_model", True),
        ("useIpuId", 3, "ipu_id", 3),
        ("randomSeed", 42, "random_seed", 42),
        ("connectionType", poptorch.ConnectionType.OnDemand, "connection_type", 1),
        ("syncPattern", poptorch.SyncPattern.ReplicaAndLadder, "sync_pattern", 2),
        ("outputMode", poptorch.OutputMode.Sum, "output_mode", 3),
        ("setAvailableMemoryProportion", {"IPU0": 0.3, "IPU1": 0.5}, "available_memory_proportion", {0: 0.3, 1: 0.5}),
    ],
)
def test_setter_stores_and_chains(setter, argument, key, stored):
    options = poptorch.Options()
    assert getattr(options, setter)(argument) is options
    assert getattr(options, key) == stored
    assert options(key) == stored


@pytest.mark.parametrize(
    ("setter", "argument"),
    [
        ("deviceIterations", 1.5),
        ("deviceIterations", "2"),
        ("replicationFactor", None),
        ("broadcastBuffers", 1),
        ("autoRoundNumIPUs", 1),
        ("logDir", 3),
        ("connectionType", 1),
        ("syncPattern", 0),
        ("useIpuId", "0"),
        ("randomSeed", 1.0),
        ("outputMode", 2),
        ("outputMode", poptorch.OutputMode.EveryN),
        ("setExecutionStrategy", "pipelined"),
        ("setAvailableMemoryProportion", {"GPU0": 0.3}),
    ],
)
def test_setter_asserts_the_type(setter, argument):
    with pytest.raises(AssertionError):
        getattr(poptorch.Options(), setter)(argument)


def test_no_range_checks_and_bool_passes_for_int():
    options = poptorch.Options().deviceIterations(0).replicationFactor(-1)
    assert (options.device_iterations, options.replication_factor) == (0, -1)
    assert poptorch.Options().deviceIterations(True).device_iterations is True


def test_use_ipu_model_is_typed_from_the_second_call():
    options = poptorch.Options().useIpuModel(1)
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.useIpuModel("yes")


def test_memory_proportion_needs_a_number():
    with pytest.raises(ValueError):
        poptorch.Options().setAvailableMemoryProportion({"IPUx": 0.3})


def test_output_mode_periods():
    options = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 4)
    assert (options.output_mode, options.output_return_period) == (1, 4)
    with pytest.raises(AssertionError):
        options.outputMode(poptorch.OutputMode.EveryN, 0)
    options.outputMode(poptorch.OutputMode.All, 3)
    assert (options.output_mode, options.output_return_period) == (2, 3)
    options.outputMode(poptorch.OutputMode.Final)
    assert (options.output_mode, options.output_return_period) == (0, 1)


def test_default_output_mode_until_one_is_set():
    options = poptorch.Options()
    assert options.defaultOutputMode()
    assert not options.outputMode(poptorch.OutputMode.All).defaultOutputMode()


@pytest.mark.parametrize(
    ("replicas", "size", "kind", "expected"),
    [
        (4, 2, poptorch.CommGroupType.Consecutive, (2, poptorch.CommGroupType.Consecutive)),
        (4, 4, poptorch.CommGroupType.Orthogonal, (4, poptorch.CommGroupType.Orthogonal)),
        (4, 3, poptorch.CommGroupType.NoGrouping, (1, poptorch.CommGroupType.Consecutive)),
    ],
)
def test_input_replica_grouping(replicas, size, kind, expected):
    options = poptorch.Options().replicationFactor(replicas).inputReplicaGrouping(size, kind)
    assert (options.input_group_size, options.input_cgt) == expected


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (2, poptorch.CommGroupType.All),
        (8, poptorch.CommGroupType.Consecutive),
        (3, poptorch.CommGroupType.Consecutive),
    ],
)
def test_input_replica_grouping_refuses(size, kind):
    with pytest.raises(ValueError):
        poptorch.Options().replicationFactor(4).inputReplicaGrouping(size, kind)


def test_input_grouping_is_checked_only_when_called():
    options = poptorch.Options().replicationFactor(4).inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive)
    options.replicationFactor(2)
    assert options.input_group_size == 4


def test_random_seed_seeds_torch_immediately():
    torch.manual_seed(42)
    expected = torch.rand(3)
    torch.manual_seed(0)
    poptorch.Options().randomSeed(42)
    assert torch.equal(torch.rand(3), expected)


def test_anchors_store_mode_and_period():
    options = poptorch.Options()
    assert options.anchorTensor("w", "Gradient___w") is None
    options.anchorTensor("x", "long", poptorch.OutputMode.EveryN, 2)
    options.anchorTensor("y", "long", poptorch.OutputMode.All, 2)
    anchors = options.anchored_tensors
    assert anchors["w"][:2] == ["Gradient___w", True]
    assert anchors["x"] == ["long", False, poptorch.OutputMode.EveryN, 2]
    assert anchors["y"] == ["long", False, poptorch.OutputMode.All, 1]


def test_offline_target():
    options = poptorch.Options().useOfflineIpuTarget(21)
    assert (options.connection_type, options.ipu_version) == (poptorch.ConnectionType.Never, 21)


def test_python_flags():
    options = (
        poptorch.Options().relaxOptimizerAttributesChecks().disableModuleNamescope().showCompilationProgressBar(False)
    )
    assert options._relax_optimizer_checks is True
    assert options._module_namescope_enabled is False
    assert options._show_compilation_progress_bar is False


def test_location_excludes():
    options = poptorch.Options().sourceLocationExcludes(["a"]).appendToLocationExcludes("b", "c")
    assert options._source_location_excludes == ["a", "b", "c"]


def test_attribute_assignment_calls_set():
    options = poptorch.Options()
    options.device_iterations = 5
    assert options.device_iterations == 5
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.device_iterations = "5"
    with pytest.raises(AssertionError, match="Invalid option"):
        options.devices = 5
    with pytest.raises(AttributeError):
        options._devices = 5
    with pytest.raises(AttributeError):
        options.devices  # noqa: B018


def test_set_create_and_delete():
    options = poptorch.Options()
    with pytest.raises(AssertionError, match="Invalid option"):
        options.set(random_seed=3)
    options.createOrSet(random_seed=3)
    with pytest.raises(AssertionError, match="Unexpected type"):
        options.createOrSet(random_seed="3")
    options.deleteIfExists("random_seed")
    options.deleteIfExists("random_seed")
    assert not options.exists("random_seed")


def frozen_options():
    options = poptorch.Options()
    options._freeze()
    return options


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.deviceIterations(2),
        lambda o: o.set(device_iterations=2),
        lambda o: setattr(o, "device_iterations", 2),
        lambda o: o.randomSeed(1),
        lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()),
        lambda o: o.showCompilationProgressBar(False),
        lambda o: o.Training.gradientAccumulation(2),
        lambda o: o.Distributed.configureProcessId(0, 2),
        lambda o: o.TensorLocations.numIOTiles(32),
        lambda o: o.Precision.setPartialsType(torch.float16),
        lambda o: o._Popart.set("enableOutlining", False),
        lambda o: o._Popart.setPatterns({}, 0),
    ],
)
def test_frozen_options_refuse_changes(change):
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(frozen_options())


def test_check_is_frozen_changes_nothing():
    poptorch.Options().checkIsFrozen("device_iterations")
    poptorch.Options()._Popart.checkIsFrozen()
    for group in (frozen_options(), frozen_options().Training, frozen_options()._Popart):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            group.checkIsFrozen("anything")


def test_anchors_and_deletion_bypass_the_freeze():
    options = poptorch.Options().useIpuId(1)
    options._freeze()
    options.anchorTensor("w", "weight")
    options.deleteIfExists("ipu_id")
    assert "w" in options.anchored_tensors
    assert not options.exists("ipu_id")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda options: options.clone()])
def test_copies_are_deep_and_unfrozen(duplicate):
    original = poptorch.Options().deviceIterations(3)
    original._Popart.set("autoRecomputation", 3)
    original.anchorTensor("a", "b")
    original._freeze()
    copied = duplicate(original)
    copied.deviceIterations(5).anchorTensor("c", "d")
    copied._Popart.set("autoRecomputation", 1)
    copied.Training.gradientAccumulation(7)
    copied.Precision.enableStochasticRounding(True)
    assert original.device_iterations == 3
    assert list(original.anchored_tensors) == ["a"]
    assert original._Popart.options["autoRecomputation"] == 3
    assert original.Training.gradient_accumulation == 1
    assert copied._Popart.options["enableStochasticRounding"] is True
    assert "enableStochasticRounding" not in original._Popart.options


def test_pickle_keeps_values_and_links_between_groups():
    options = poptorch.Options().deviceIterations(3)
    options.Training.gradientAccumulation(2)
    read_back = pickle.loads(pickle.dumps(options))
    assert repr(read_back) == repr(options)
    read_back.Precision.enableStochasticRounding(True)
    assert read_back._Popart.options["enableStochasticRounding"] is True


def test_to_dict_merges_all_groups():
    options = poptorch.Options().outputMode(poptorch.OutputMode.All).deviceIterations(2)
    options.Training.gradientAccumulation(3)
    options.Distributed.configureProcessId(1, 4)
    options.TensorLocations.numIOTiles(64)
    options._Popart.set("enableOutlining", False)
    merged = options.toDict()
    expected = {
        "execution_mode": 0,
        "device_iterations": 2,
        "gradient_accumulation": 3,
        "distributed_process_id": 1,
        "num_distributed_processes": 4,
        "numIOTiles": 64,
        "enableOutlining": False,
        "rearrangeAnchorsOnHost": False,
    }
    assert {key: merged[key] for key in expected} == expected


def test_to_dict_needs_an_output_mode_and_unique_keys():
    with pytest.raises(AssertionError):
        poptorch.Options().toDict()
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options._Popart.set("device_iterations", 3)
    with pytest.raises(AssertionError, match="Can't merge dictionaries"):
        options.toDict()


def test_repr_lists_stored_values():
    text = repr(poptorch.Options().replicationFactor(4))
    assert text.startswith("Options(")
    assert "replication_factor=4" in text
    assert "gradient_accumulation=1" in text
    assert repr(poptorch.Options()) == repr(poptorch.Options())


def test_caching_profiling_and_other_backend_options(monkeypatch):
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)
    options = poptorch.Options().enableExecutableCaching("cache").enableStableNorm(True).enableSyntheticData(True)
    options.logCycleCount(True).updatableNamedBuffers(["a.b"])
    backend = options._Popart.options
    assert (backend["cachePath"], backend["enableEngineCaching"]) == ("cache", True)
    assert backend["enableStableNorm"] is True
    assert backend["syntheticDataMode"] == 2
    assert backend["instrumentWithHardwareCycleCounter"] is True
    assert backend["updatableNamedBuffers"] == ["a.b"]
    options.enableExecutableCaching(None).enableSyntheticData(False)
    assert (backend["cachePath"], backend["enableEngineCaching"], backend["syntheticDataMode"]) == ("cache", False, 0)
    options.enableProfiling("report")
    assert backend["engineOptions"] == {
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": "report",
        "autoReport.all": "true",
    }


def test_profiling_warns_about_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "false"}')
    poptorch.Options().enableProfiling()
    assert "autoReport.all" in capsys.readouterr().err


def test_the_class_of_a_group_can_be_replaced():
    class Distributed(poptorch.options._DistributedOptions):
        def disable(self):
            raise RuntimeError("Cannot call")

    options = poptorch.Options()
    options.Distributed.__class__ = Distributed
    with pytest.raises(RuntimeError, match="Cannot call"):
        options.Distributed.disable()
    assert isinstance(options, _OptionsDict)
