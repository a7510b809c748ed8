import pytest

from ipurun import emulator
from ipurun.api.calls import apply_calls
from ipurun.api.conf_file import read_conf

# What PopTorch's loadFromFile accepts, one statement per line.
ACCEPTED = """
# a comment
deviceIterations(4)  # a trailing comment

setExecutionStrategy(poptorch.ShardedExecution(poptorch.AutoStage.AutoIncrement))
replicationFactor(2).logDir("logs")
Training.gradientAccumulation(8).accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
outputMode(poptorch.OutputMode.EveryN, output_return_period=2)
TensorLocations.numIOTiles(64)
TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(2*8))
setAvailableMemoryProportion({"IPU0": 0.5, "IPU1": 1 / 4})
_Popart.set("enableOutlining", False)
_Popart.set("autoRecomputation", 3)
_Popart.setPatterns({"TiedGather": True}, level=1)
inputReplicaGrouping(input_group_size=2, input_group_type=poptorch.CommGroupType.Orthogonal)
randomSeed(+42)
anchorTensor("g", "Gradient___w", poptorch.OutputMode.All)
Precision.enableStochasticRounding(True)
"""


@pytest.fixture
def conf(tmp_path):
    def write(text):
        path = tmp_path / "poptorch.conf"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_means_the_same_as_in_poptorch(conf):
    path = conf(ACCEPTED)
    calls, problems = read_conf(path)
    assert problems == []
    loaded = emulator.Options()
    loaded.loadFromFile(path)
    assert repr(apply_calls(emulator.Options(), calls, emulator)) == repr(loaded)


def test_phased_strategies(conf):
    calls, problems = read_conf(
        conf(
            'setExecutionStrategy(poptorch.SerialPhasedExecution(poptorch.Phase(poptorch.Stage("A").ipu(0)), ["B"])'
            ".setTensorsLiveness(poptorch.Liveness.AlwaysLive).useSeparateBackwardPhase())"
        )
    )
    assert problems == []
    strategy = apply_calls(emulator.Options(), calls, emulator)._execution_strategy
    assert strategy.backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "tensors_liveness": 0,
        "serial_phases_execution": True,
    }


def test_none_turns_caching_off(conf):
    calls, problems = read_conf(conf("enableExecutableCaching(None)"))
    assert problems == []
    assert apply_calls(emulator.Options(), calls, emulator)._Popart.options["enableEngineCaching"] is False


def test_the_origin_of_a_call_is_its_line(conf):
    path = conf("\n# one\ndeviceIterations(4)\n")
    assert read_conf(path)[0][0].origin == f"{path}:3"


def test_nothing_is_executed(conf, tmp_path):
    victim = tmp_path / "victim"
    lines = [
        f"logDir(open({str(victim)!r}, 'w').name)",
        f"__import__('pathlib').Path({str(victim)!r}).touch()",
        f"logDir(__import__('pathlib').Path({str(victim)!r}).touch())",
        f"_values.update(x=open({str(victim)!r}, 'w'))",
        f"deviceIterations(4); open({str(victim)!r}, 'w')",
        f"deviceIterations([open({str(victim)!r}, 'w') for _ in range(1)])",
        "logDir(poptorch.os.environ)",
        "deviceIterations(9 ** 9)",
    ]
    calls, problems = read_conf(conf("\n".join(lines)))
    assert calls == []
    assert [problem.where.rpartition(":")[2] for problem in problems] == [str(n) for n in range(1, len(lines) + 1)]
    assert not victim.exists()


@pytest.mark.parametrize(
    ("line", "what", "shown"),
    [
        ("deviceIterations(", "not Python", ""),
        ("deviceIterations = 4", "one call", "deviceIterations(4)"),
        ("deviceIterations", "one call", "deviceIterations(4)"),
        ("deviceIteration(4)", "no setter `deviceIteration`", "deviceIterations"),
        ("options.deviceIterations(4)", "no setter", "leave out `options.`"),
        ("deviceIterations('4')", "a whole number", ""),
        ("outputMode(poptorch.OutputMode.Som)", "a member of OutputMode", "Sum"),
        ("outputMode(OutputMode.Sum)", "not data", "poptorch.<Enum>"),
        ("deviceIterations(n)", "not data", ""),
        ("deviceIterations(*[4])", "not data", ""),
        ("deviceIterations(**{'device_iterations': 4})", "not data", ""),
        (
            "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().onChip(1))",
            "setters of",
            "useOnChipStorage",
        ),
        ("_Popart.set('nonsense', 1)", "keys that PopART has", ""),
        ("loadFromFile('other.conf')", "no setter", ""),
    ],
)
def test_a_bad_line_is_reported(conf, line, what, shown):
    path = conf(f"logDir('fine')\n\n{line}\n")
    calls, problems = read_conf(path)
    assert [call.path for call in calls] == ["logDir"]
    assert len(problems) == 1
    assert what in problems[0].what
    assert problems[0].where == f"{path}:3"
    assert problems[0].seen == line
    assert shown in problems[0].known + problems[0].fix


def test_a_missing_file_is_reported(tmp_path):
    calls, problems = read_conf(str(tmp_path / "none.conf"))
    assert calls == []
    assert "none.conf" in problems[0].seen


def test_json_is_reported_with_the_command_that_reads_it(conf):
    path = conf('{"layers_per_ipu": [1, 2]}')
    calls, problems = read_conf(path)
    assert calls == [] and len(problems) == 1
    assert problems[0].fix.startswith(f"ipurun import {path}")
