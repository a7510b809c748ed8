"""The placement of a compiled model in the debug log."""

import json

import pytest
import torch

import ipurun.emulator as poptorch


@pytest.fixture(autouse=True)
def debug_level():
    poptorch.setLogLevel("DEBUG")
    yield
    poptorch.setLogLevel("WARN")


def logged(capfd, model, strategy=None, device_iterations=4, shape=(1, 4)):
    options = poptorch.Options().deviceIterations(device_iterations)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    capfd.readouterr()
    poptorch.inferenceModel(model, options).compile(torch.ones(shape[0] * device_iterations, *shape[1:]))
    return capfd.readouterr().err


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = torch.nn.Linear(4, 3)
        self.l2 = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.l2(self.l1(x) * 2) * 3


def test_pipelined(capfd):
    model = TwoLayers()
    text = logged(capfd, model)
    assert "enablePipelining set to value 0" in text
    assert " l1/MatMul:0 [float32(1, 3), mode(Pipelined), ipu(0), stage(0)]" in text
    poptorch.BeginBlock(model.l2, ipu_id=1)
    text = logged(capfd, model)
    assert "enablePipelining set to value 1" in text
    assert " l1/Transpose:0 [float32(4, 3), mode(Pipelined), ipu(0), stage(0)]" in text
    assert " Mul:0 [float32(1, 3), mode(Pipelined), ipu(0), stage(0)]" in text
    assert " l2/MatMul:0 [float32(1, 2), mode(Pipelined), ipu(1), stage(1)]" in text
    assert " Mul:0/1 [float32(1, 2), mode(Pipelined), ipu(1), stage(1)]" in text


def test_names_of_scopes(capfd):
    model = torch.nn.Module()

    def forward(x):
        with poptorch.NameScope("outer"), poptorch.NameScope("inner"):
            x = x * 2
        return poptorch.nop(x * 3)

    model.forward = forward
    text = logged(capfd, model)
    assert " outer/inner/Mul:0 [" in text
    assert " Mul:0 [" in text
    assert " Nop:0 [" in text


@pytest.mark.parametrize(
    ("liveness", "phases", "stride"),
    [
        ("AlwaysLive", 3, 1),
        ("OffChipAfterFwd", 6, 1),
        ("OffChipAfterFwdNoOverlap", 8, 2),
        ("OffChipAfterEachPhase", 12, 4),
    ],
)
def test_serial_phases(capfd, liveness, phases, stride):
    def forward(x):
        for name in "012":
            with poptorch.Block(name, ipu_id=0):
                x = x + 1
        return x

    model = torch.nn.Module()
    model.forward = forward
    strategy = poptorch.SerialPhasedExecution("0", "1", "2").setTensorsLiveness(poptorch.Liveness[liveness])
    text = logged(capfd, model, strategy, 1)
    assert "set serial_phases_execution to value true" in text
    assert "executionPhaseSettings.stages set to value 1" in text
    assert f"executionPhaseSettings.phases set to value {phases}" in text
    assert "location_weight set to value useOnChipStorage(False)" in text
    for phase, name in enumerate(["Add:0", "Add:0/1", "Add:0/2"]):
        assert f" {name} [float32(1, 4), mode(Phased), ipu(0), phase({phase * stride})]" in text


def test_loss_of_a_training_model(capfd):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            first, second = torch.split(x * self.w, 2, 1)
            return torch.nn.functional.l1_loss(first, second)

    poptorch.trainingModel(Model()).compile(torch.ones(3, 4))
    text = capfd.readouterr().err
    for name, shape in [("Slice:0", "3, 2"), ("Slice:0/1", "3, 2"), ("Sub:0", "3, 2"), ("L1:0", "")]:
        assert f" {name} [float32({shape}), mode(Pipelined), ipu(0), stage(0)]" in text
    assert " IdentityLoss:0 [float32(), mode(Pipelined), ipu(0), stage(0)]" in text
    assert "Abs" not in text


def test_program_dump_names_the_type_of_every_op():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def forward(self, x, y):
            out = torch.relu(self.layer(x))
            return out, torch.nn.functional.mse_loss(out, y)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    training.compile(torch.ones(1, 2), torch.ones(1, 3))
    types = [op["type"] for op in json.loads(training._debugGetPopartIR())["maingraph"]]
    assert {"MatMul", "Add", "Relu", "IdentityLoss"} <= set(types)
    assert types.count("AdamVarUpdate") == 2


def test_inputs_are_traced_with_their_types(capfd):
    poptorch.setLogLevel("TRACE")
    text = logged(capfd, torch.nn.BatchNorm1d(4).half().eval())
    assert " : Half(4, strides=[1], requires_grad=0, device=ipu:0) -> running_var" in text


@pytest.mark.parametrize(
    ("excludes", "in_model", "in_torch"),
    [(None, True, False), ([], False, True), (["/"], False, False)],
    ids=["by default", "nothing", "everything"],
)
def test_source_lines_respect_the_excludes(capfd, excludes, in_model, in_torch):
    options = poptorch.Options()
    if excludes is not None:
        options.sourceLocationExcludes(excludes)
    poptorch.inferenceModel(TwoLayers(), options).compile(torch.ones(1, 4))
    line = next(line for line in capfd.readouterr().err.split("\n") if "l1/MatMul:0 (" in line)
    assert line.endswith("was lowered to MatMul")
    assert (__file__ in line) == in_model
    assert ("torch/nn/modules/linear.py" in line) == in_torch


@pytest.mark.parametrize(("use_model", "word"), [(True, "Enabled"), (False, "Disabled")])
def test_the_choice_of_the_simulator_is_logged(capfd, use_model, word):
    poptorch.inferenceModel(TwoLayers(), poptorch.Options().useIpuModel(use_model)).compile(torch.ones(1, 4))
    assert f"From the user configuration: Ipu model: {word}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("index", "op", "dim"),
    [
        ((slice(None), torch.tensor([0, 2])), "ScatterReduce", 1),
        ((torch.tensor([0, 2]),), "ScatterReduce", 0),
        ((torch.tensor([1]),), "Scatter", None),
        ((torch.tensor([0, 1]), torch.tensor([0, 1])), "Scatter", None),
        ((torch.tensor([True, False, True, True]),), "Where", None),
    ],
)
def test_indexed_assignment(capfd, index, op, dim):
    """A vector of integers in one dimension replaces whole slices; other indices go by element, masks select."""

    class Assign(torch.nn.Module):
        def forward(self, x):
            copy = x + 1
            copy[index] = 0.0
            return copy

    poptorch.setLogLevel("TRACE")
    text = logged(capfd, Assign(), device_iterations=1, shape=(4, 4))
    assert f"was lowered to {op}\n" in text
    assert ("Using vectorized ScatterReduce" in text) == (dim is not None)
    assert dim is None or f"none reduction in dim {dim}\n" in text


@pytest.mark.parametrize(("checkpoint", "stages", "stashes"), [(False, 2, 1), (True, 2, 2), (True, 1, 0)])
def test_program_dump_shows_what_stages_stash(checkpoint, stages, stashes):
    """A stage keeps its inputs and the checkpoints until the backward pass returns; the last stage keeps nothing."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3, bias=False)

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                x = torch.tanh(self.layer(x))
                x = poptorch.recomputationCheckpoint(x) if checkpoint else x
                x = self.layer(x)
            with poptorch.Block("second", ipu_id=stages - 1):
                return poptorch.identity_loss(x**2, reduction="sum")

    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(Model(), options)
    training.compile(torch.ones(3, 3))
    types = [op["type"] for op in json.loads(training._debugGetPopartIR())["maingraph"]]
    assert types.count("Stash") == types.count("Restore") == stashes
