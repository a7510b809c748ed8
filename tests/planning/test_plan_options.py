"""The composed poptorch.Options, key by key. Defaults and storage keys are those of PopTorch's reference."""

import pytest
import torch

from ipurun.inspect.facts import Purpose


def stored(options):
    """Return everything that the backend gets."""
    return options.toDict()


def test_a_plain_config_changes_only_what_it_sets(composed):
    from ipurun import emulator

    plain = emulator.Options().outputMode(emulator.OutputMode.Sum)
    expected = {
        **plain.toDict(),
        "random_seed": 0,
        "cachePath": "/home/somebody/.cache/ipurun/executables/run",
        "enableEngineCaching": True,
    }
    assert stored(composed({"cache.dir": "/home/somebody/.cache/ipurun/executables/run"})) == expected


@pytest.mark.parametrize(
    ("keys", "storage", "value"),
    [
        ({"device_iterations": 5}, "device_iterations", 5),
        ({"devices": 4}, "replication_factor", 4),
        ({"gradient_accumulation": 6}, "gradient_accumulation", 6),
        ({"replication.reduction": "sum"}, "accumulation_and_replication_reduction_type", 0),
        ({"replication.mean_strategy": "running"}, "meanAccumulationAndReplicationReductionStrategy", 0),
        ({"replication.broadcast_buffers": False}, "broadcast_buffers", False),
        ({"seed": 42}, "random_seed", 42),
        ({"output.mode": "final"}, "output_mode", 0),
        ({"output.mode": "all"}, "output_mode", 2),
        ({"partials": "half"}, "partialsTypeMatMuls", "half"),
        ({"partials": "half"}, "convolutionOptions", {"partialsType": "half"}),
        ({"partials": "float"}, "convolutionOptions", {"partialsType": "float"}),
        ({"stochastic_rounding": True}, "enableStochasticRounding", True),
        ({"debug.fp_exceptions": True}, "enableFloatingPointChecks", True),
        ({"memory.available_proportion": 0.25}, "available_memory_proportion", {0: 0.25}),
        ({"memory.available_proportion": {"IPU3": 0.5}}, "available_memory_proportion", {3: 0.5}),
        ({"memory.io_tiles": 64}, "numIOTiles", 64),
        ({"memory.prefetch_depth": 3}, "defaultPrefetchBufferingDepth", 3),
        ({"recompute.mode": "standard"}, "autoRecomputation", 1),
        ({"memory.optimizer_state.on_chip": False}, "location_optimizer", {"onChip": 0}),
        (
            {"memory.weights.sharded": True, "memory.weights.min_elements_sharded": 10},
            "location_weight",
            {"useReplicatedTensorSharding": 1, "minElementsForReplicatedTensorSharding": 10},
        ),
        (
            {"memory.activations.io_tiles_to_load": True, "memory.activations.io_tiles_to_store": False},
            "location_activation",
            {"useIOTilesToLoad": 1, "useIOTilesToStore": 0},
        ),
        ({"memory.accumulators.min_elements_off_chip": 7}, "location_accumulator", {"minElementsForOffChip": 7}),
        (
            {"replication.tensor_sharding": True, "devices": 2, "memory.optimizer_state.on_chip": False},
            "location_optimizer",
            {"onChip": 0, "useReplicatedTensorSharding": 1},
        ),
    ],
)
def test_keys_set_their_options(composed, keys, storage, value):
    assert stored(composed(keys))[storage] == value


def test_sharding_over_one_replica_is_noted(plan_of):
    """PopART continues without sharding, with a warning for each tensor; published configs have it."""

    def noted(devices):
        notes = plan_of({"replication.tensor_sharding": True, "devices": devices}).notes
        return [note for note in notes if "with one, PopART does not shard" in note]

    assert noted(1) and not noted(2)


def test_every_n(composed, problems_of):
    options = composed({"output.mode": "every_n", "output.every": 2, "device_iterations": 4})
    assert (options.output_mode, options.output_return_period) == (1, 2)
    problem = problems_of({"output.mode": "every_n", "output.every": 3, "device_iterations": 4})[0]
    assert problem.fix == "output.every=2"


def test_the_simulator(composed):
    assert stored(composed({}, facts={"engine": "ipu_model"}))["use_model"] is True
    assert "use_model" not in stored(composed({}))


def test_training_metrics_need_every_output(composed, plan_of, problems_of):
    metrics = {"accuracy": {"_target_": "x.Accuracy", "on": ["train", "eval"]}}
    assert plan_of({"metrics": metrics}).output_mode == "all"
    assert composed({"metrics": metrics}).output_mode == 2
    assert "output.mode=all" in problems_of({"metrics": metrics, "output.mode": "sum"})[0].fix
    assert plan_of({"metrics": {"accuracy": {"_target_": "x.Accuracy"}}}).output_mode == "sum"


class TestInference:
    def test_reads_every_output_and_accumulates_nothing(self, composed):
        options = composed({"gradient_accumulation": 4, "output.mode": "final"}, "inference")
        assert (options.output_mode, options.Training.gradient_accumulation) == (2, 1)

    def test_what_only_training_has_is_left_out(self, composed):
        keys = {
            "stochastic_rounding": True,
            "memory.optimizer_state.on_chip": False,
            "memory.weights.on_chip": False,
            "options": {"Training": {"setAutomaticLossScaling": True}},
        }
        kept = stored(composed(keys, "inference"))
        assert kept["location_weight"] == {"onChip": 0}
        for storage in ("location_optimizer", "enableStochasticRounding", "automaticLossScalingSettings.enabled"):
            assert storage not in kept
            assert storage in stored(composed(keys))

    def test_its_options_win(self, composed):
        keys = {
            "partials": "half",
            "options": {"logDir": "both", "syncPattern": "SinglePipeline"},
            "inference.options": {"Precision.setPartialsType": "float32", "logDir": "inference"},
        }
        training, inference = stored(composed(keys)), stored(composed(keys, "inference"))
        assert (training["log_dir"], inference["log_dir"]) == ("both", "inference")
        assert (training["partialsTypeMatMuls"], inference["partialsTypeMatMuls"]) == ("half", "float")
        assert inference["sync_pattern"] == 1

    def test_sizes_under_its_options_count(self, plan_of):
        plan = plan_of({"inference.options": {"deviceIterations": 6}, "device_iterations": 2})
        assert (plan.inference.device_iterations, plan.training.device_iterations) == (6, 2)

    def test_what_evaluation_cannot_do_is_refused(self, problems_of):
        assert "outputMode" in problems_of({"inference.options": {"outputMode": "Final"}})[0].seen
        keys = {"inference.options": {"Training": {"gradientAccumulation": 2}}}
        assert "gradientAccumulation" in problems_of(keys)[0].seen


class TestPrecedence:
    def test_sizes_under_options_count_where_their_keys_are_not_set(self, plan_of, composed):
        keys = {"options": {"deviceIterations": 4, "Training": {"gradientAccumulation": 5}}, "devices": 2}
        plan = plan_of(keys)
        assert plan.training.samples_per_call == 4 * 5 * 2
        options = composed(keys)
        assert (options.device_iterations, options.Training.gradient_accumulation) == (4, 5)

    def test_keys_win_with_a_note(self, plan_of, composed):
        keys = {"options": {"deviceIterations": 4, "randomSeed": 3}, "device_iterations": 8, "seed": 5}
        options = composed(keys)
        assert (options.device_iterations, options.random_seed) == (8, 5)
        notes = plan_of(keys).notes
        assert "device_iterations wins over options.deviceIterations: 8, not 4" in notes
        assert "seed wins over options.randomSeed: 5, not 3" in notes

    def test_defaults_do_not_win_over_options(self, composed, plan_of):
        keys = {"options": {"randomSeed": 3, "outputMode": "All", "enableExecutableCaching": "/elsewhere"}}
        options = composed(keys)
        assert (options.random_seed, options.output_mode) == (3, 2)
        assert options._Popart.options["cachePath"] == "/elsewhere"
        plan = plan_of(keys)
        assert (plan.output_mode, plan.cache_dir) == ("all", "/elsewhere")

    def test_options_win_over_the_file(self, composed, plan_of, tmp_path):
        conf = tmp_path / "poptorch.conf"
        conf.write_text("deviceIterations(2)\nlogDir('file')\nTraining.gradientAccumulation(3)\n")
        keys = {"poptorch_conf": str(conf), "options": {"logDir": "options"}, "device_iterations": 4}
        options = composed(keys)
        assert (options.device_iterations, options.log_dir) == (4, "options")
        assert options.Training.gradient_accumulation == 3
        assert plan_of(keys).training.gradient_accumulation == 3

    def test_a_strategy_under_options_replaces_the_default(self, plan_of, composed):
        keys = {"pipeline.split": ["fc"], "options": {"setExecutionStrategy": "ShardedExecution"}}
        assert plan_of(keys).training.gradient_accumulation == 1  # no pipeline, no minimum
        assert composed(keys)._execution_strategy.backendOptions()["execution_mode"] == 1

    def test_a_disagreement_names_only_the_key_that_disagrees(self, problems_of):
        keys = {
            "memory.optimizer_state.on_chip": False,
            "memory.optimizer_state.min_elements_off_chip": 5,
            "options": {"TensorLocations": {"setOptimizerLocation": {"useOnChipStorage": True}}},
        }
        setter = "options.TensorLocations.setOptimizerLocation"
        places = {**dict.fromkeys(keys, "mine.yaml:1"), setter: "mine.yaml:2"}
        (problem,) = problems_of(keys, places=places)
        assert problem.what == f"`memory.optimizer_state.on_chip` and `{setter}` disagree"
        assert (problem.key, problem.where) == ("memory.optimizer_state.on_chip", "mine.yaml:1; mine.yaml:2")


class TestMerging:
    def test_partials_and_dithering_share_convolution_options(self, composed):
        keys = {"partials": "half", "options": {"Training": {"setConvolutionDithering": True}}}
        kept = stored(composed(keys))
        assert kept["convolutionOptions"] == {"partialsType": "half", "enableConvDithering": "true"}
        assert kept["partialsTypeMatMuls"] == "half"

    def test_convolution_options_keep_what_nobody_else_sets(self, composed):
        popart = {"set": {"convolutionOptions": {"partialsType": "float", "availableMemoryProportion": 0.1}}}
        kept = stored(composed({"partials": "half", "options": {"_Popart": popart}}))
        assert kept["convolutionOptions"] == {"partialsType": "half", "availableMemoryProportion": "0.1"}

    def test_engine_options_of_all_sources_are_merged(self, composed, tmp_path):
        conf = tmp_path / "poptorch.conf"
        conf.write_text(
            "_Popart.set('engineOptions', {'opt.useAutoloader': 'true', 'target.deterministicWorkers': 'x'})\n"
        )
        keys = {
            "poptorch_conf": str(conf),
            "options": {"_Popart": {"setEngineOptions": {"target": {"deterministicWorkers": False}}}},
            "profile.kind": "graph",
            "profile.dir": str(tmp_path),
        }
        assert stored(composed(keys))["engineOptions"] == {
            "opt.useAutoloader": "true",
            "target.deterministicWorkers": "false",
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": str(tmp_path),
            "autoReport.all": "true",
        }

    def test_tensor_locations_by_field(self, composed):
        location = {"minElementsForOffChip": 5, "useOnChipStorage": True}
        keys = {
            "memory.optimizer_state.on_chip": False,
            "options": {"TensorLocations": {"setOptimizerLocation": location}},
        }
        assert stored(composed(keys))["location_optimizer"] == {"onChip": 0, "minElementsForOffChip": 5}

    def test_memory_proportions_by_ipu(self, composed):
        keys = {
            "memory.available_proportion": {"IPU0": 0.1},
            "options": {"setAvailableMemoryProportion": {"IPU0": 0.9, "IPU1": 0.2}},
        }
        assert stored(composed(keys))["available_memory_proportion"] == {0: 0.1, 1: 0.2}

    def test_patterns(self, composed, tmp_path):
        conf = tmp_path / "poptorch.conf"
        conf.write_text("_Popart.setPatterns({'TiedGather': True}, level=1)\n")
        keys = {"poptorch_conf": str(conf), "options": {"_Popart": {"setPatterns": {"InPlace": False}}}}
        kept = stored(composed(keys))
        assert (kept["patterns"], kept["patterns_level"]) == ({"TiedGather": True, "InPlace": False}, 1)


class TestBuffers:
    facts = {"written_buffers": ("memory.keys", "memory.values")}

    def test_replicas_keep_their_own_written_buffers(self, plan_of, composed):
        assert composed({"devices": 2}, facts=self.facts).broadcast_buffers is False
        for keys in ({}, {"replication.broadcast_buffers": False}):
            notes = plan_of({"devices": 2, **keys}, self.facts).notes
            assert any(
                "broadcastBuffers(False)" in note and "a resumed run gives them to all" in note for note in notes
            )

    def test_batch_norm_needs_no_call(self, plan_of, composed):
        norms = {"batch_norms": 3}
        assert composed({"devices": 2}, facts=norms).broadcast_buffers is True
        assert any("own batch norm statistics" in note for note in plan_of({"devices": 2}, norms).notes)
        assert not any("batch norm" in note for note in plan_of({"devices": 1}, norms).notes)

    def test_one_replica_does_not(self, composed):
        assert composed({"devices": 1}, facts=self.facts).broadcast_buffers is True

    def test_one_input_group_does_not(self, composed):
        keys = {"devices": 4, "replication.input_group_size": 4}
        assert composed(keys, facts=self.facts).broadcast_buffers is True

    @pytest.mark.parametrize("keys", [{"replication.broadcast_buffers": True}, {"options": {"broadcastBuffers": True}}])
    def test_broadcast_buffers_are_refused(self, problems_of, keys):
        problem = problems_of({"devices": 2, **keys}, self.facts)[0]
        assert problem.fix == "replication.broadcast_buffers=false"


@pytest.mark.parametrize("tiles", [31, 33, 194])
def test_io_tiles_out_of_range_are_refused(problems_of, tiles):
    assert "even number from 32 to 192" in problems_of({"memory.io_tiles": tiles})[0].what


@pytest.mark.parametrize("value", [1.5, -0.1, [0.1, 0.2], {"ipu0": 0.1}, "much"])
def test_impossible_memory_proportions_are_refused(problems_of, value):
    assert "memory.available_proportion" in problems_of({"memory.available_proportion": value})[0].what


def test_every_setter_of_poptorch_can_be_reached(composed):
    """One value for each setter of the manifest; the emulator checks each call as PopTorch does."""
    options = {
        "sourceLocationExcludes": ["a"],
        "appendToLocationExcludes": ["b"],
        "showCompilationProgressBar": False,
        "relaxOptimizerAttributesChecks": True,
        "autoRoundNumIPUs": True,
        "deviceIterations": 2,
        "setExecutionStrategy": {"PipelinedExecution": "AutoIncrement"},
        "setAvailableMemoryProportion": {"IPU0": 0.5},
        "replicationFactor": 2,
        "inputReplicaGrouping": [2, "Consecutive"],
        "broadcastBuffers": False,
        "logDir": "logs",
        "maxRepeatLogs": None,
        "modelName": "net",
        "enableExecutableCaching": "cache",
        "useIpuModel": True,
        "connectionType": "OnDemand",
        "syncPattern": "SyncPattern.ReplicaAndLadder",
        "useIpuId": 1,
        "useOfflineIpuTarget": 21,
        "anchorTensor": {"grad": {"long_name": "Gradient___fc.weight", "output_mode": "All"}},
        "outputMode": "Sum",
        "randomSeed": 7,
        "enableStableNorm": True,
        "enableSyntheticData": False,
        "logCycleCount": True,
        "enableProfiling": "report",
        "disableModuleNamescope": True,
        "updatableNamedBuffers": ["b"],
        "Training": {
            "gradientAccumulation": 3,
            "accumulationAndReplicationReductionType": "Sum",
            "setMeanAccumulationAndReplicationReductionStrategy": "Running",
            "setAutomaticLossScaling": True,
            "setConvolutionDithering": True,
        },
        "Precision": {
            "halfFloatCasting": "HalfUpcastToFloat",
            "runningStatisticsAlwaysFloat": True,
            "enableFloatingPointExceptions": True,
            "enableStochasticRounding": True,
            "setPartialsType": "half",
        },
        "Jit": {"traceModel": False},
        "Distributed": {"disable": True, "setEnvVarNames": ["SIZE_X", "RANK_X"], "configureProcessId": [0, 1]},
        "TensorLocations": {
            "numIOTiles": 32,
            "setActivationLocation": {"useOnChipStorage": False},
            "setWeightLocation": {"useIOTilesToLoad": True},
            "setOptimizerLocation": {"useReplicatedTensorSharding": True},
            "setAccumulatorLocation": {"minElementsForOffChip": 1},
        },
        "_Popart": {
            "set": {"enableOutlining": False, "outlineThreshold": 2, "kahnTieBreaker": "FIFO"},
            "setEngineOptions": {"a.b": 1},
            "setPatterns": [{"TiedGather": True}, 1],
        },
    }
    from ipurun.api.setters import option_setters

    named = {f"{group}.{name}" for group, node in options.items() if isinstance(node, dict) for name in node}
    assert set(option_setters()) <= named | set(options)
    made = composed({"options": options, "devices": 2}, facts={"purpose": Purpose.PLAN})  # an offline target
    kept = stored(made)
    expected = {
        "device_iterations": 2,
        "replication_factor": 2,
        "input_group_size": 2,
        "broadcast_buffers": False,
        "log_dir": "logs",
        "max_repeat_logs": 2**64 - 1,
        "model_name": "net",
        "cachePath": "cache",
        "use_model": True,
        "sync_pattern": 2,
        "ipu_id": 1,
        "ipu_version": 21,
        "connection_type": 2,  # useOfflineIpuTarget attaches to nothing
        "output_mode": 3,
        "random_seed": 7,
        "enableStableNorm": True,
        "instrumentWithHardwareCycleCounter": True,
        "gradient_accumulation": 3,
        "accumulation_and_replication_reduction_type": 0,
        "meanAccumulationAndReplicationReductionStrategy": 0,
        "automaticLossScalingSettings.enabled": True,
        "enableFloatingPointChecks": True,
        "enableStochasticRounding": True,
        "numIOTiles": 32,
        "location_accumulator": {"minElementsForOffChip": 1},
        "enableOutlining": False,
        "outlineThreshold": 2.0,
        "kahnTieBreaker": "FIFO",
        "patterns_level": 1,
        "updatableNamedBuffers": ["b"],
        "auto_round_num_ipus": True,
    }
    assert {key: kept[key] for key in expected} == expected
    assert kept["anchored_tensors"]["grad"][0] == "Gradient___fc.weight"
    assert kept["engineOptions"] == {
        "a.b": "1",
        "debug.allowOutOfMemory": "true",
        "autoReport.directory": "report",
        "autoReport.all": "true",
    }
    assert made._source_location_excludes == ["a", "b"]


def test_dtypes_are_names_until_an_engine_is_loaded(plan_of):
    from ipurun import emulator
    from ipurun.api.calls import resolve

    call = next(call for call in plan_of({"partials": "half"}).training_options if "Partials" in call.path)
    assert str(call.args[0]) == "torch.float16"
    assert resolve(call.args[0], emulator) is torch.float16


class TestInputGroups:
    def test_of_options(self, plan_of, composed):
        keys = {"devices": 4, "options": {"inputReplicaGrouping": [2, "Orthogonal"]}}
        assert plan_of(keys).training.distinct_replicas == 2
        for mode in ("training", "inference"):
            options = composed(keys, mode)
            assert (options.input_group_size, options.input_cgt.name) == (2, "Orthogonal")

    def test_of_training_need_not_fit_inference(self, composed):
        keys = {"devices": 4, "inference.replicas": 1, "options": {"inputReplicaGrouping": [2, "Orthogonal"]}}
        assert composed(keys, "inference").input_group_size == 1

    def test_of_inference_alone(self, plan_of, composed):
        keys = {"devices": 4, "inference.options": {"inputReplicaGrouping": [4, "Consecutive"]}}
        assert composed(keys).input_group_size == 1
        assert composed(keys, "inference").input_group_size == 4
        assert plan_of(keys).inference.samples_per_call == 1


def test_memory_shares_of_a_longer_training_pipeline(composed):
    keys = {
        "pipeline.split": ["fc"],
        "gradient_accumulation": 3,
        "inference.split": [],
        "memory.available_proportion": [0.1, 0.2],
    }
    assert stored(composed(keys))["available_memory_proportion"] == {0: 0.1, 1: 0.2}
    assert stored(composed(keys, "inference"))["available_memory_proportion"] == {0: 0.1}


def test_unsplit_inference_of_a_phased_model(composed):
    keys = {"pipeline.split": ["fc"], "pipeline.strategy": "serial_phased", "inference.split": []}
    assert composed(keys)._execution_strategy.backendOptions()["execution_mode"] == 2
    assert composed(keys, "inference")._execution_strategy.backendOptions()["execution_mode"] == 0
