"""Stages, phases and the four execution strategies."""

import copy
import pickle

import pytest

from ipurun import emulator as poptorch
from ipurun.api.manifest import load as load_manifest

BACKEND = load_manifest()["option_groups"]["Options execution strategy"]["backend_options"]


def placed(strategy, *blocks):
    manager = strategy.stage_manager()
    return [tuple(manager.beginStage(user_id, ipu_id))[:3] for user_id, ipu_id in blocks]


def test_same_as_ipu_is_the_default():
    assert placed(poptorch.PipelinedExecution(), ("a", 0), ("b", 2), ("c", 1)) == [(0, -1, 0), (2, -1, 2), (1, -1, 1)]


def test_same_as_ipu_needs_an_ipu():
    with pytest.raises(AssertionError, match="no IPU was specified"):
        placed(poptorch.PipelinedExecution(), ("a", None))


def test_auto_increment_counts_new_blocks_from_one():
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    assert placed(strategy, ("a", 0), ("b", 1), ("a", 0), ("c", None)) == [
        (1, -1, 0),
        (2, -1, 1),
        (1, -1, 0),
        (3, -1, 3),
    ]


def test_listed_stages_are_numbered_by_position():
    strategy = poptorch.PipelinedExecution("A", poptorch.Stage("B", "C"), ["D", "E"])
    assert placed(strategy, ("A", None), ("C", None), ("E", None)) == [(0, -1, 0), (1, -1, 1), (2, -1, 2)]


def test_ipu_of_stage_beats_block_beats_stage_number():
    strategy = poptorch.PipelinedExecution(poptorch.Stage("A").ipu(5), "B", "C")
    assert [ipu for _, _, ipu in placed(strategy, ("A", 1), ("B", 7), ("C", None))] == [5, 7, 2]
    strategy.stage("B").ipu(3)
    assert placed(strategy, ("B", 7))[0][2] == 3


def test_unknown_and_repeated_blocks():
    with pytest.raises(AssertionError, match="more than one stage"):
        poptorch.PipelinedExecution("A", poptorch.Stage("B", "A"))
    strategy = poptorch.PipelinedExecution("A", "B")
    with pytest.raises(AssertionError, match="Unknown Block"):
        placed(strategy, ("C", 0))
    with pytest.raises(AssertionError):
        strategy.stage("C")


@pytest.mark.parametrize("argument", [3, None, ["A", 3]])
def test_stages_consist_of_block_ids(argument):
    with pytest.raises(AssertionError):
        poptorch.PipelinedExecution("Z", argument)


def test_automatic_ids_increase_until_reset():
    manager = poptorch.PipelinedExecution().stage_manager()
    assert [manager.beginStage(None, 0).user_id for _ in range(2)] == ["0", "1"]
    assert manager.nextAutoId() == "2"
    manager.resetAutoId()
    assert manager.beginStage(None, 1).user_id == "0"


def test_stage_checks():
    stage = poptorch.Stage("A", "B")
    assert list(stage.blocks) == ["A", "B"]
    assert stage.ipu(1) is stage
    with pytest.raises(AssertionError):
        stage.ipu("1")
    with pytest.raises(AssertionError):
        poptorch.Stage("A", 1)


@pytest.mark.parametrize("kind", [poptorch.SerialPhasedExecution, poptorch.ParallelPhasedExecution])
def test_phases_accept_several_forms(kind):
    strategy = kind(
        poptorch.Phase("A", "B"),
        [poptorch.Stage("C"), poptorch.Stage("D")],
        ["E", "F"],
        poptorch.Stage("G"),
        "H",
    )
    expected = {"A": 0, "B": 0, "C": 1, "D": 1, "E": 2, "F": 2, "G": 3, "H": 4}
    assert {block: placed(strategy, (block, phase % 2))[0][1] for block, phase in expected.items()} == expected
    assert [len(strategy.phase(index).stages) for index in range(5)] == [1, 2, 1, 1, 1]


def test_phase_ipus():
    strategy = poptorch.ParallelPhasedExecution([poptorch.Stage("A"), poptorch.Stage("B")], "C")
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1)
    assert [ipu for _, _, ipu in placed(strategy, ("A", None), ("B", None), ("C", None))] == [0, 2, 1]
    assert strategy.phase(0).stage(1) is strategy.stage("B")
    with pytest.raises(AssertionError):
        strategy.phase(1).ipus(0, 1)


def test_parallel_phases_alternate_between_even_and_odd_ipus():
    assert placed(poptorch.ParallelPhasedExecution("A", "B"), ("A", 2), ("B", 3))[1][2] == 3
    with pytest.raises(poptorch.Error, match="Invalid IPU 0 for phase 1"):
        placed(poptorch.ParallelPhasedExecution("A", "B"), ("B", 0))
    assert placed(poptorch.SerialPhasedExecution("A", "B"), ("B", 0))[0][2] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: poptorch.SerialPhasedExecution(),
        lambda: poptorch.ParallelPhasedExecution(),
        lambda: poptorch.SerialPhasedExecution([poptorch.Phase("A"), poptorch.Phase("B")]),
        lambda: poptorch.SerialPhasedExecution("A", "A"),
        lambda: poptorch.Phase("A", poptorch.Stage("B")),
        lambda: poptorch.SerialPhasedExecution("A").phase(-1),
        lambda: poptorch.SerialPhasedExecution("A").phase("0"),
        lambda: poptorch.SerialPhasedExecution("A").useSeparateBackwardPhase(1),
        lambda: poptorch.SerialPhasedExecution("A").setTensorsLiveness(1),
        lambda: poptorch.ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd(1),
    ],
)
def test_phased_checks(wrong):
    with pytest.raises(AssertionError):
        wrong()


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (poptorch.PipelinedExecution(), "PipelinedExecution"),
        (poptorch.ShardedExecution(), "ShardedExecution"),
        (poptorch.SerialPhasedExecution("A"), "SerialPhasedExecution"),
        (poptorch.ParallelPhasedExecution("A"), "ParallelPhasedExecution"),
    ],
)
def test_backend_options(strategy, name):
    expected = dict(BACKEND[name])
    found = strategy.backendOptions()
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key] == {"bool": False, "int": 0}.get(value, value)


def test_phased_settings_reach_the_backend():
    serial = poptorch.SerialPhasedExecution("A").useSeparateBackwardPhase()
    serial.setTensorsLiveness(poptorch.Liveness.OffChipAfterEachPhase)
    assert serial.backendOptions()["separate_backward_phase"] is True
    assert serial.backendOptions()["tensors_liveness"] == 3
    parallel = poptorch.ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd()
    assert parallel.backendOptions()["tensors_liveness"] == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_strategies_can_be_copied_and_pickled(duplicate):
    strategy = duplicate(poptorch.PipelinedExecution(poptorch.Stage("A").ipu(1), "B"))
    assert placed(strategy, ("A", None), ("B", None)) == [(0, -1, 1), (1, -1, 1)]
    assert repr(strategy) == "PipelinedExecution(Stage('A').ipu(1), Stage('B'))"


def test_placement_of_the_last_capture_is_logged(capsys):
    strategy = poptorch.PipelinedExecution("A", "B")
    poptorch.setLogLevel("DEBUG")
    try:
        placed(strategy, ("A", None))
        strategy.onStartTracing()
        placed(strategy, ("B", None))
        strategy.onEndTracing()
    finally:
        poptorch.setLogLevel("WARN")
    logged = capsys.readouterr().err
    assert "Starting block id=B stage=1 phase=-1 ipu=1" in logged
    assert "block id=A" not in logged


def test_placement_messages_can_be_cleared(capsys):
    manager = poptorch.PipelinedExecution("A").stage_manager()
    manager.beginStage("A", None)
    manager.clearDebug()
    poptorch.setLogLevel("DEBUG")
    try:
        manager.printDebug()
    finally:
        poptorch.setLogLevel("WARN")
    assert "block id=A" not in capsys.readouterr().err


def test_default_manager_creates_stages():
    manager = poptorch.options._DefaultStageManager(poptorch.AutoStage.AutoIncrement)
    first = manager.getStage("x")
    assert manager.getStage("x") is first
    assert list(first.blocks) == ["x"]
