"""Small functions of the package root: hardware, printing, argument parsers, testing."""

import datetime
import sys
import types

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.emulator import _utils, testing
from ipurun.emulator._options_impl import ProgressBar

MODEL_VARIABLES = (
    "POPTORCH_IPU_MODEL",
    "POPTORCH_SMALL_IPU_MODEL",
    "POPTORCH_EMULATOR_HARDWARE",
    "POPTORCH_IPU_MODEL_VERSION",
)


@pytest.fixture
def hardware(monkeypatch):
    for name in MODEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_no_hardware_by_default(hardware):
    assert poptorch.ipuHardwareIsAvailable() is False
    with pytest.raises(AssertionError):
        poptorch.ipuHardwareVersion()


def test_simulated_hardware(hardware):
    hardware.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    assert poptorch.ipuHardwareIsAvailable(16) is True
    assert poptorch.ipuHardwareVersion() == 2
    hardware.setenv("POPTORCH_EMULATOR_HARDWARE", "0")
    assert poptorch.ipuHardwareIsAvailable() is False


@pytest.mark.parametrize("variable", MODEL_VARIABLES[:2])
def test_the_simulator_reports_version_zero(hardware, variable):
    hardware.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    hardware.setenv(variable, "1")
    assert poptorch.ipuHardwareVersion() == 0
    assert poptorch.ipuHardwareIsAvailable() is False


def test_unknown_simulator_versions_are_refused(hardware):
    hardware.setenv("POPTORCH_IPU_MODEL_VERSION", "ipu3")
    assert poptorch.ipuHardwareIsAvailable() is False
    hardware.setenv("POPTORCH_IPU_MODEL", "1")
    with pytest.raises(poptorch.Error, match="Invalid IPU model version 'ipu3'"):
        poptorch.ipuHardwareIsAvailable()


def annotated_model():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.ReLU()))
    poptorch.BeginBlock(model[1], user_id="tail", ipu_id=1)
    return model


def test_module_repr_adds_blocks_to_torchs():
    model = annotated_model()
    plain = repr(model)
    shown = poptorch.module_repr(model)
    assert shown.replace("BeginBlock(user_id=tail, ipu_id=1) ", "") == plain
    assert shown.split("\n")[2].strip() == "(1): BeginBlock(user_id=tail, ipu_id=1) Sequential("


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Transformer(4, 1, 1, 1, 4)])
def test_module_repr_without_blocks_equals_torchs(module):
    assert poptorch.module_repr(module) == repr(module)


def test_print_shows_the_module_twice(capsys):
    model = annotated_model()
    poptorch.print(model)
    poptorch.print("text")
    assert capsys.readouterr().out == f"{poptorch.module_repr(model)}\n{model!r}\ntext\n"


class Pair:
    def __init__(self, first, second):
        self.first = first
        self.second = second


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.first
        yield struct.second

    def reconstruct(self, original_structure, tensor_iterator):
        return Pair(next(tensor_iterator), next(tensor_iterator))


class AddPair(torch.nn.Module):
    def forward(self, pair):
        return Pair(pair.first + pair.second, pair.first * pair.second)


def test_registered_classes_pass_through_a_model():
    poptorch.registerCustomArgParser(Pair, PairParser())
    try:
        result = poptorch.inferenceModel(AddPair())(Pair(torch.tensor([2.0]), torch.tensor([3.0])))
    finally:
        poptorch.registerCustomArgParser(Pair, None)
    assert (result.first.item(), result.second.item()) == (5.0, 6.0)


def test_parsers_must_derive_from_the_base():
    with pytest.raises(poptorch.Error, match="ICustomArgParser"):
        poptorch.registerCustomArgParser(Pair, object())


def test_graphs_of_torch_geometric(monkeypatch):
    class Data:
        def __init__(self, **tensors):
            self.stores = [tensors]

        def __copy__(self):
            return Data(**self.stores[0])

    data_module = types.ModuleType("torch_geometric.data")
    data_module.Data = Data
    data_module.HeteroData = type("HeteroData", (Data,), {})
    monkeypatch.setitem(sys.modules, "torch_geometric", types.ModuleType("torch_geometric"))
    monkeypatch.setitem(sys.modules, "torch_geometric.data", data_module)

    class Sum(torch.nn.Module):
        def forward(self, graph):
            return graph.stores[0]["x"] + graph.stores[0]["y"]

    poptorch.registerGeometricCustomArgParsers()
    try:
        result = poptorch.inferenceModel(Sum())(Data(y=torch.ones(2), x=torch.zeros(2), name="graph"))
    finally:
        poptorch.registerCustomArgParser(Data, None)
        poptorch.registerCustomArgParser(data_module.HeteroData, None)
    assert result.tolist() == [1.0, 1.0]


def test_allclose_is_recursive():
    ones, nearly = torch.ones(2), torch.ones(2) + 1e-7
    assert testing.allclose((ones, [ones]), (nearly, [nearly]))
    assert not testing.allclose((ones, [ones]), (nearly, [nearly + 1]))
    assert not testing.allclose((ones, ones), (ones,))
    assert not testing.allclose((ones,), ones)


def test_attributes_of_custom_ops_by_id():
    first = _utils.keepAttributes({"alpha": 0.5})
    second = _utils.keepAttributes(None)
    assert poptorch.accessAttributes(first) == {"alpha": 0.5}
    assert poptorch.accessAttributes(second) == {}
    assert poptorch.accessAttributes('{"beta": 2}') == {"beta": 2}
    for wrong in ("attr:ffff", "alpha", 3):
        with pytest.raises(ValueError):
            poptorch.accessAttributes(wrong)


def test_ipu_tensor_ids_exist_only_during_capture():
    numbers = []

    class Net(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            numbers.extend([poptorch.getIpuTensorId(y), poptorch.getIpuTensorId(y)])
            return y

    poptorch.inferenceModel(Net())(torch.ones(1))
    assert numbers[0] == numbers[1]
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        poptorch.getIpuTensorId(torch.ones(1))


def test_running_on_ipu_is_true_only_during_capture():
    class Net(torch.nn.Module):
        def forward(self, x, y):
            return x + y if poptorch.isRunningOnIpu() else x * y

    model = Net()
    x, y = torch.tensor([50.0]), torch.tensor([2.0])
    assert poptorch.inferenceModel(model)(x, y).item() == 52
    assert model(x, y).item() == 100
    assert not poptorch.isRunningOnIpu()


def test_progress_bar_times_a_compilation(monkeypatch):
    updates = []

    class Bar:
        def __init__(self, total, **kwargs):
            updates.append(("total", total))

        def update(self, steps):
            updates.append(("update", steps))

        def close(self):
            updates.append("close")

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    bar = ProgressBar()
    for progress in (0, 3, 10):
        bar(progress, 10)
    assert updates == [("total", 10), ("update", 0), ("update", 3), ("update", 7), "close"]
    assert bar.compilation_time >= datetime.timedelta(0)


def test_removed_names_report_when_they_were_removed():
    with pytest.raises(AttributeError, match=r"IPUScope was removed in PopTorch 3\.1"):
        poptorch.IPUScope  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        poptorch.fly  # noqa: B018


def test_exit_function_can_be_called():
    assert poptorch.poptorchAtExit() is None


def test_attribute_scopes_nest_and_are_restored():
    assert poptorch.Attribute._attributes == {}
    with poptorch.Attribute(__outline={"layer": "embedding"}):
        with poptorch.Attribute(__outline={"head": "1"}, other={"a": "b"}):
            assert poptorch.Attribute._attributes == {
                "__outline": {"layer": "embedding", "head": "1"},
                "other": {"a": "b"},
            }
        assert poptorch.Attribute._attributes == {"__outline": {"layer": "embedding"}}
    assert poptorch.Attribute._attributes == {}


def test_host_function_runs_on_its_persistent_data():
    op = poptorch.CPU(lambda x, y: x + y, "add")
    op(torch.ones(2), torch.ones(2))
    op.registerPersistentData()
    op.inputs[0].fill_(2.0)
    op.inputs[1].fill_(3.0)
    op.execute()
    assert op.outputs[0].tolist() == [5.0, 5.0]


def test_blocks_begin_at_plain_functions():
    double = poptorch.BeginBlock(lambda x: 2 * x, user_id="double", ipu_id=0)
    assert isinstance(double, poptorch.LegacyBeginBlockFn)
    assert double(torch.ones(1)).item() == 2.0


def test_weights_are_copied_only_when_needed():
    class Net(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, poptorch.identity_loss(y, reduction="mean")

    model = Net(2, 2)
    training = poptorch.trainingModel(model)
    training(torch.ones(1, 2))
    assert training.copyWeightsToHostIfNeeded() is True
    assert training.copyWeightsToHostIfNeeded() is False


def compiled(options=None):
    poptorch.inferenceModel(torch.nn.Identity(), options).compile(torch.ones(1))


@pytest.mark.parametrize("by_variable", [True, False])
def test_what_the_ipu_model_means_here_is_said_once(hardware, capfd, by_variable):
    hardware.setattr("ipurun.emulator._logging._warned", set())
    if by_variable:
        hardware.setenv("POPTORCH_IPU_MODEL", "1")
    for _ in range(2):
        compiled(None if by_variable else poptorch.Options().useIpuModel(True))
    assert capfd.readouterr().err.count("The IPU Model is selected") == 1
    compiled(poptorch.Options().useIpuModel(False))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "needs_hardware", [poptorch.ipuHardwareVersion, lambda: compiled(poptorch.Options().logCycleCount(True))]
)
def test_what_needs_hardware_names_the_variable_that_simulates_it(hardware, needs_hardware):
    with pytest.raises((AssertionError, poptorch.Error), match="POPTORCH_EMULATOR_HARDWARE=1"):
        needs_hardware()


def test_tensors_of_batches_are_joined():
    batches = [[torch.tensor([1]), torch.tensor([[2]])], [torch.tensor([3, 4]), torch.tensor([[5]])]]
    joined = list(_utils.combine_batch_tensors_gen(batches))
    assert [tensor.tolist() for tensor in joined] == [[1, 3, 4], [[2], [5]]]
