"""The replacements for popart, horovod, libpvti, pva and popdist, used if those are not installed."""

import importlib.util
import subprocess
import sys

import pytest
import torch

import ipurun.emulator as poptorch
from ipurun.emulator._options.checks import check_backend_options
from ipurun.emulator._sdk import libpvti, popart, popdist, pva
from ipurun.emulator._sdk.horovod import torch as hvd

IMPORT_ALL = """
import popart, popdist.poptorch, pva, libpvti
import horovod.torch as hvd
import ipurun
for module in (popart, popdist, pva, libpvti, hvd):
    assert module.__file__.startswith(ipurun.__path__[0]), module.__file__
print(int(popart.SyntheticDataMode.RandomNormal), hvd.Average)
"""


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="horovod is installed")
@pytest.mark.parametrize("in_child", [False, True])
def test_programs_and_their_children_import_them(tmp_path, child_environment, in_child):
    script = tmp_path / "program.py"
    run = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IMPORT_ALL!r}], check=True)"
    script.write_text(run if in_child else IMPORT_ALL)
    code = "import sys; from ipurun.emulator import exec; sys.exit(exec.run_script(sys.argv[1], []))"
    arguments = [sys.executable, "-c", code, str(script)]
    ran = subprocess.run(arguments, env=child_environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "2 0\n", ran.stderr


# The values in PopART's sessionoptions.hpp, tensorlocation.hpp, adam.hpp and devicemanager.hpp.
VALUES = {
    "AccumulateOuterFragmentSchedule.OverlapMemoryOptimized": 3,
    "AdamMode.LambNoBias": 4,
    "AutodiffStitchStrategy.SafeAddFwdOutputs": 3,
    "DeviceType.Sim": 4,
    "MergeVarUpdateType.AutoTight": 3,
    "RecomputationType.Pipeline": 3,
    "ReductionType.Mean": 1,
    "SubgraphCopyingStrategy.JustInTime": 1,
    "TensorStorage.OffChip": 1,
    "VirtualGraphMode.ExecutionPhases": 3,
}


@pytest.mark.parametrize("name", VALUES)
def test_popart_enumerations_have_the_values_of_popart(name):
    kind, member = name.split(".")
    assert int(getattr(getattr(popart, kind), member)) == VALUES[name]


def test_popart_enumerations_are_integers_only_when_converted():
    mode = popart.SubgraphCopyingStrategy.JustInTime
    check_backend_options({"subgraphCopyingStrategy": int(mode)})
    with pytest.raises(poptorch.Error, match="Unknown value type"):
        check_backend_options({"subgraphCopyingStrategy": mode})
    assert popart.SyntheticDataMode.Off != 0
    assert str(popart.SyntheticDataMode(1)) == "SyntheticDataMode.Zeros"


def test_popart_session_options_have_defaults_and_refuse_unknown_names():
    options = popart.SessionOptions()
    assert (options.enableOutlining, options.enablePipelining, options.cachePath) == (True, False, "session_cache")
    assert options.weightTensorLocationSettings.minElementsForReplicatedTensorSharding == 8192
    options.enableExplicitIR(True)
    assert options.useHostCopyOps
    with pytest.raises(AttributeError, match="has no option 'enableOutlinig'"):
        options.enableOutlinig = False


def test_popart_has_a_version_prefixes_and_a_log_level():
    assert popart.versionNumber() == (3, 4, 0)
    assert popart.__version__ == popart.versionString() == poptorch.__version__
    assert popart.reservedAccl1Prefix() + "w" == "Accl1___w"
    popart.getLogger("ir").setLevel("ERR")
    with pytest.raises(ValueError):
        popart.getLogger().setLevel("LOUD")


def test_what_needs_the_sdk_can_be_imported_but_not_used():
    from ipurun.emulator._sdk.popart import Builder, TrainingSession

    assert isinstance(Builder, type)
    with pytest.raises(popart.popart_exception, match=r"popart\.TrainingSession needs the Poplar SDK"):
        TrainingSession(fnModel=b"")
    with pytest.raises(AttributeError, match=r"no 'Bilder'.*Poplar SDK"):
        popart.Bilder  # noqa: B018  # the access is tested


@pytest.fixture
def horovod():
    hvd.init()
    yield hvd
    hvd.shutdown()


def test_horovod_must_be_initialized():
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()


def test_horovod_has_one_process(horovod):
    assert (hvd.size(), hvd.local_size(), hvd.rank(), hvd.local_rank()) == (1, 1, 0, 0)
    assert hvd.is_initialized()
    assert hvd.allgather_object("a") == ["a"]
    assert hvd.broadcast_object({"seed": 3}, root_rank=0) == {"seed": 3}


def test_horovod_refuses_several_processes(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="OMPI_COMM_WORLD_SIZE is 4"):
        hvd.init()


@pytest.mark.parametrize("collective", [hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, root_rank=0)])
def test_collectives_return_copies(horovod, collective):
    tensor = torch.tensor([1.0, 2.0])
    result = collective(tensor)
    result += 1
    assert tensor.tolist() == [1, 2]
    assert result.tolist() == [2, 3]


def test_collectives_in_place_and_later(horovod):
    tensor = torch.tensor([1.0, 2.0])
    assert hvd.allreduce_(tensor, op=hvd.Sum, postscale_factor=0.5) is tensor
    assert tensor.tolist() == [0.5, 1]
    handle = hvd.allreduce_async(tensor, average=False)
    assert hvd.poll(handle)
    assert hvd.synchronize(handle).tolist() == [0.5, 1]
    with pytest.raises(ValueError, match="no operation"):
        hvd.synchronize(handle)


def test_horovod_keeps_parameters_and_optimizers(horovod):
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    before = model.weight.item()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert isinstance(optimizer, torch.optim.SGD)
    assert model.weight.item() == pytest.approx(before - 1)
    with pytest.raises(ValueError, match="has 1 process, and not one with rank 1"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)


def test_popdist_calls_functions_on_the_instances_that_include_this_one():
    assert popdist.execute_on_instances({0}, lambda a, b: a + b, 1, b=2) == 3
    assert popdist.execute_on_instances([1, 2], pytest.fail) is None


def test_popdist_answers_for_one_process():
    assert popdist.getLocalInstanceIndex() == popdist.getDeviceId(4) == 0
    assert popdist.getNumIpusPerReplica() == 1
    assert popdist.checkNumIpusPerReplica(1)
    assert not popdist.checkNumIpusPerReplica(2)


@pytest.mark.parametrize("name", ["openReport", "openTrace"])
def test_pva_refuses_to_open_files(name):
    with pytest.raises(poptorch.Error, match=r"does not write PopVision .*'mine\.pop'"):
        getattr(pva, name)("mine.pop")


def test_libpvti_traces_nothing():
    channel = libpvti.createTraceChannel("mine")
    assert ["mine", False] in libpvti.listTraceChannel()

    @libpvti.instrument_fn(channel)
    def double(x):
        with libpvti.Tracepoint(channel, "inside"):
            return 2 * x

    libpvti.Tracepoint.begin(libpvti.traceFramework, "all")
    libpvti.Graph("Loss", "").addSeries("training").add(double(0.5))
    libpvti.HeatmapDouble("weights", [-1.0, 0.0, 1.0], "2^x").add([0.5])
    libpvti.Tracepoint.end(libpvti.traceFramework, "all")
    assert double(3) == 6
    assert libpvti.getCurrentTraceFilename() == ""


def test_libpvti_says_that_a_requested_trace_is_not_written(child_environment):
    arguments = [sys.executable, "-c", "from ipurun.emulator._sdk import libpvti"]
    environment = {**child_environment, "PVTI_OPTIONS": '{"enable":"true"}'}
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr.count("no trace is recorded") == 1
