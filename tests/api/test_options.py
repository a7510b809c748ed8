from pathlib import Path

import pytest

from ipurun.api.calls import Symbol
from ipurun.api.options import read_setters
from ipurun.api.setters import option_setters, popart_keys


def calls_of(options):
    calls, problems = read_setters(options)
    assert problems == []
    return [(call.path, call.args) for call in calls]


def problem_of(options):
    calls, problems = read_setters(options)
    assert calls == []
    assert len(problems) == 1
    return problems[0]


@pytest.mark.parametrize("options", [{"Training": {"gradientAccumulation": 8}}, {"Training.gradientAccumulation": 8}])
def test_nested_and_dotted_names(options):
    assert calls_of(options) == [("Training.gradientAccumulation", (8,))]


def test_the_origin_is_the_key():
    calls, _ = read_setters({"Training": {"gradientAccumulation": 8}}, "inference.options")
    assert calls[0].origin == "inference.options.Training.gradientAccumulation"


@pytest.mark.parametrize("written", ["Sum", "OutputMode.Sum", "poptorch.OutputMode.Sum"])
def test_enumerations_by_name(written):
    assert calls_of({"outputMode": written}) == [("outputMode", (Symbol("poptorch.OutputMode.Sum"),))]


@pytest.mark.parametrize(
    ("written", "name"), [("half", "float16"), ("float16", "float16"), ("torch.half", "float16"), ("float", "float32")]
)
def test_dtypes_by_name(written, name):
    options = {"Precision": {"setPartialsType": written}}
    assert calls_of(options) == [("Precision.setPartialsType", (Symbol(f"torch.{name}"),))]


@pytest.mark.parametrize(
    "written",
    [
        ["EveryN", 4],
        {"output_mode": "EveryN", "output_return_period": 4},
    ],
)
def test_several_arguments_as_list_or_mapping(written):
    assert calls_of({"outputMode": written}) == [("outputMode", (Symbol("poptorch.OutputMode.EveryN"), 4))]


def test_settings_objects_are_mappings_of_their_setters():
    (path, (settings,)) = calls_of(
        {"TensorLocations": {"setWeightLocation": {"useOnChipStorage": False, "minElementsForOffChip": 3}}}
    )[0]
    assert path == "TensorLocations.setWeightLocation"
    assert settings.path == "poptorch.TensorLocationSettings"
    assert [(setter.path, setter.args) for setter in settings.chain] == [
        ("useOnChipStorage", (False,)),
        ("minElementsForOffChip", (3,)),
    ]


def test_strategies():
    (_, (strategy,)) = calls_of({"setExecutionStrategy": {"PipelinedExecution": [["A", "B"], "C"]}})[0]
    assert (strategy.path, strategy.args) == ("poptorch.PipelinedExecution", (["A", "B"], "C"))
    (_, (strategy,)) = calls_of(
        {
            "setExecutionStrategy": {
                "SerialPhasedExecution": ["A", "B"],
                "setTensorsLiveness": "AlwaysLive",
                "useSeparateBackwardPhase": True,
            }
        }
    )[0]
    assert [setter.path for setter in strategy.chain] == ["setTensorsLiveness", "useSeparateBackwardPhase"]


@pytest.mark.parametrize(
    "written",
    [
        {"automaticLossScalingSettings.enabled": True, "outlineThreshold": 2},
        {"automaticLossScalingSettings": {"enabled": True}, "outlineThreshold": 2},
        [["automaticLossScalingSettings.enabled", True], ["outlineThreshold", 2]],
    ],
)
def test_popart_options(written):
    calls = calls_of({"_Popart": {"set": written}})
    assert calls == [
        ("_Popart.set", ("automaticLossScalingSettings.enabled", True)),
        ("_Popart.set", ("outlineThreshold", 2.0)),
    ]
    assert isinstance(calls[1][1][1], float)  # PopART finds a key by the type of its value


def test_engine_options_are_strings():
    assert calls_of({"_Popart": {"setEngineOptions": {"a": {"b": True}, "c.d": 4}}}) == [
        ("_Popart.setEngineOptions", ({"a.b": "true", "c.d": "4"},))
    ]


def test_setters_without_arguments_are_switches():
    assert calls_of({"disableModuleNamescope": True}) == [("disableModuleNamescope", ())]
    assert calls_of({"disableModuleNamescope": False, "Distributed": {"disable": None}}) == []
    assert calls_of({"enableProfiling": True, "useOfflineIpuTarget": False}) == [("enableProfiling", ())]
    assert calls_of({"autoRoundNumIPUs": False}) == [("autoRoundNumIPUs", (False,))]  # a bool is its argument


def test_null_unsets_an_option():
    assert calls_of({"deviceIterations": None, "Training": None, "Precision": {"setPartialsType": None}}) == []
    assert calls_of({"maxRepeatLogs": None}) == [("maxRepeatLogs", (None,))]  # here it means: no limit


@pytest.mark.parametrize(
    "written",
    [
        {"g": "Gradient___w"},
        ["g", "Gradient___w"],
        [["g", "Gradient___w"]],
        {"short_name": "g", "long_name": "Gradient___w"},
    ],
)
def test_anchors(written):
    assert calls_of({"anchorTensor": written}) == [("anchorTensor", ("g", "Gradient___w"))]


@pytest.mark.parametrize(
    ("options", "what", "shown"),
    [
        ({"deviceIteration": 2}, "`options.deviceIteration`", "deviceIterations"),
        ({"gradientAccumulation": 2}, "`options.gradientAccumulation`", "Training.gradientAccumulation"),
        (
            {"Training": {"gradientAcumulation": 2}},
            "`options.Training.gradientAcumulation`",
            "Training.gradientAccumulation",
        ),
        ({"training": {"gradientAccumulation": 2}}, "`options.training`", "Training.gradientAccumulation"),
        ({"toDict": True}, "`options.toDict`", "poptorch-options.md"),
        ({"loadFromFile": "x"}, "`options.loadFromFile`", "poptorch_conf"),
        ({"deviceIterations": "2"}, "a whole number", ""),
        ({"deviceIterations": True}, "a whole number", ""),
        ({"deviceIterations": 2.5}, "a whole number", ""),
        ({"deviceIterations": [2]}, "a whole number", ""),
        ({"deviceIterations": 0}, "of at least 1", "1"),
        ({"broadcastBuffers": 1}, "true or false", ""),
        ({"logDir": 3}, "a string", ""),
        ({"outputMode": "Som"}, "a member of OutputMode", "Sum"),
        ({"outputMode": "ReductionType.Sum"}, "a member of OutputMode", "Final"),
        ({"outputMode": "EveryN"}, "a period", "[EveryN, 2]"),
        ({"outputMode": {"mode": "Sum"}}, "a member of OutputMode", ""),
        ({"outputMode": ["Sum", 1, 2]}, "2 arguments", "output_return_period"),
        ({"inputReplicaGrouping": [2]}, "`input_group_type` as well", ""),
        ({"inputReplicaGrouping": [2, "All"]}, "Consecutive or Orthogonal", ""),
        ({"setAvailableMemoryProportion": {"ipu0": 0.1}}, "numbers from 0 to 1", "IPU0"),
        ({"setAvailableMemoryProportion": 0.1}, "a mapping", ""),
        ({"Precision": {"setPartialsType": "int8"}}, "a dtype", "float16"),
        ({"TensorLocations": {"numIOTiles": 33}}, "32 to 192", "32"),
        (
            {"TensorLocations": {"setWeightLocation": {"onChip": 1}}},
            "setters of TensorLocationSettings",
            "useOnChipStorage",
        ),
        ({"TensorLocations": {"setWeightLocation": True}}, "a mapping of TensorLocationSettings", "useOnChipStorage"),
        ({"setExecutionStrategy": "Pipelined"}, "an execution strategy", "PipelinedExecution"),
        ({"_Popart": {"set": {"enableOutlinin": True}}}, "keys that PopART has", "enableOutlining"),
        ({"_Popart": {"set": {"enableOutlining": "yes"}}}, "true or false", ""),
        ({"_Popart": {"set": {"replication_factor": 2}}}, "keys that PopART has", ""),
        ({"Training": {"accumulationAndReplicationReductionType": "NoReduction"}}, "Mean or Sum", "Mean"),
        (
            {"Training": {"setMeanAccumulationAndReplicationReductionStrategy": "PostAndLoss"}},
            "Post or Running",
            "Post",
        ),
        ({"Jit": {"traceModel": True}}, "false", ""),
        ({"disableModuleNamescope": "yes"}, "0 arguments", ""),
        ({"Training": 3}, "`options.Training`", "Training."),
    ],
)
def test_bad_options_are_refused(options, what, shown):
    problem = problem_of(options)
    assert what in problem.what
    assert shown in problem.known + " " + problem.fix


def test_all_problems_are_reported_together():
    calls, problems = read_setters({"logDir": 1, "deviceIterations": 2, "modelName": 3})
    assert [call.path for call in calls] == ["deviceIterations"]
    assert len(problems) == 2


def test_the_manifest_and_the_emulator_name_the_same_setters():
    from ipurun import emulator

    options = emulator.Options()
    for path in option_setters():
        target = options
        for part in path.split("."):
            target = getattr(target, part)
        assert callable(target), path


def test_the_how_to_lists_every_setter():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "poptorch-options.md").read_text(encoding="utf-8")
    assert [path for path in option_setters() if f"`{path}`" not in page] == []


def test_poptorchs_own_options_are_not_popart_keys():
    keys = popart_keys()
    assert {
        "enableOutlining": "bool",
        "autoRecomputation": "enum",
        "engineOptions": "container",
    }.items() <= keys.items()
    assert not {"replication_factor", "numIOTiles", "meanAccumulationAndReplicationReductionStrategy"} & set(keys)
