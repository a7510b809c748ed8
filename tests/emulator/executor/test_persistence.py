"""Saving compiled models to files and loading them."""

import os

import pytest
import torch
from executor_models import Classifier, images, options
from torch import nn

import ipurun.emulator as poptorch

FOLDER = os.path.dirname(os.path.abspath(__file__))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = nn.functional.dropout(self.layer(x), 0.5, True)
        return y, poptorch.identity_loss(y.pow(2).mean(), reduction="none")


def _executor(momentum=0.9, **kwargs):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, use_combined_accum=False)
    return poptorch.trainingModel(model, options(**kwargs), optimizer)


def test_training_resumed_from_a_file_equals_uninterrupted_training(tmp_path):
    x, labels = images(4)
    executor = _executor()
    for _ in range(2):
        executor(x, labels)
    path = tmp_path / "deep" / "folder" / "model.poptorch"
    executor.save(str(path))
    expected = [executor(x, labels)[1] for _ in range(3)]
    resumed = poptorch.load(str(path))
    assert resumed.isCompiled()
    assert [resumed(x, labels)[1] for _ in range(3)] == expected


def test_files_of_ipurun_0_1_0_still_load():
    """Their pickles name modules that have moved since; the expected losses are those of ipurun 0.1.0."""
    resumed = poptorch.load(os.path.join(FOLDER, "exported_by_0.1.0.poptorch"))
    losses = torch.stack([resumed(*images(4))[1] for _ in range(3)])
    torch.testing.assert_close(losses, torch.tensor([0.5568890, 0.2643275, 0.0883595]), rtol=1e-4, atol=1e-5)
    model = torch.load(os.path.join(FOLDER, "model_saved_by_0.1.0.pt"), weights_only=False)
    assert model(images(4)[0]).shape == (4, 3)


def test_random_streams_continue(tmp_path):
    opts = poptorch.Options().randomSeed(7)
    model = Noisy()
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.0))
    executor(torch.ones(2, 4))
    executor.save(str(tmp_path / "with"), save_rng_state=True)
    executor.save(str(tmp_path / "without"), save_rng_state=False)
    first, second = executor(torch.ones(2, 4))[0], poptorch.load(str(tmp_path / "with"))(torch.ones(2, 4))[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, poptorch.load(str(tmp_path / "without"))(torch.ones(2, 4))[0])


def test_export_without_a_device_and_load_with_other_options(tmp_path):
    path = str(tmp_path / "model.poptorch")
    executor = poptorch.inferenceModel(Classifier(), poptorch.Options().useOfflineIpuTarget())
    x, _ = images(4)
    executor.compileAndExport(path, x)
    seen = []

    def edit(opts):
        seen.append(opts.connection_type)
        opts.deviceIterations(2)

    loaded = poptorch.load(path, edit_opts_fn=edit)
    assert seen == [poptorch.ConnectionType.Always.value]
    assert loaded.options.device_iterations == 2
    torch.testing.assert_close(loaded(x), executor.model(x).detach())


def test_a_file_without_the_model_needs_the_model(tmp_path):
    path = str(tmp_path / "model.poptorch")
    executor = _executor()
    executor.compileAndExport(path, *images(4), export_model=False)
    with pytest.raises(AssertionError, match="loadExecutable"):
        poptorch.load(path)
    other = _executor()
    other.loadExecutable(path)
    assert other.isCompiled()
    torch.testing.assert_close(other(*images(4))[1], executor(*images(4))[1])


def test_saving_to_a_folder_creates_a_file_in_it(tmp_path):
    executor = poptorch.inferenceModel(Classifier())
    executor.compileAndExport(str(tmp_path), images(4)[0])
    assert os.listdir(tmp_path) == ["model.poptorch"]
    with pytest.raises(AssertionError):
        executor.save(str(tmp_path / "model.poptorch" / "below"))


def test_other_files_and_versions_are_refused(tmp_path):
    path = tmp_path / "model.poptorch"
    path.write_bytes(b"not ours")
    with pytest.raises(AssertionError, match="not a valid"):
        poptorch.load(str(path))
    executor = poptorch.inferenceModel(Classifier())
    executor._poptorch_version = "1.2.3"
    executor.compileAndExport(str(path), images(4)[0])
    with pytest.raises(AssertionError, match=r"1\.2\.3"):
        poptorch.load(str(path))
    with pytest.raises(poptorch.Error, match=r"1\.2\.3"):
        poptorch.inferenceModel(Classifier()).loadExecutable(str(path))


def test_processes_of_a_distributed_program_compile_one_at_a_time(tmp_path):
    opts = poptorch.Options()
    opts.enableExecutableCaching(str(tmp_path))
    opts.Distributed.configureProcessId(1, 2)
    poptorch.inferenceModel(Classifier(), opts)(images(4)[0])
    assert sorted(os.path.splitext(name)[1] for name in os.listdir(tmp_path)) == ["", ".lock"]


def test_an_export_is_loaded_and_not_compiled_again(tmp_path, monkeypatch):
    """Forward runs on tensors without data, and nothing is captured; with another model or options it is."""
    from ipurun.emulator._run import compile as compiling

    class Net(torch.nn.Module):
        def __init__(self, hidden=4, scale=1.0):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = torch.nn.Linear(3, hidden), torch.nn.Linear(hidden, 2)
            self.scale = scale

        def forward(self, x, y):
            out = self.second(torch.relu(self.first(x)) * self.scale)
            return out, torch.nn.functional.cross_entropy(out, y)

    def executor(iterations=1, **changes):
        model = Net(**changes)
        options = poptorch.Options().randomSeed(3).deviceIterations(iterations)
        return poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))

    captured = []
    usual = compiling.capture
    monkeypatch.setattr(compiling, "capture", lambda *args, **kwargs: captured.append(1) or usual(*args, **kwargs))
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0])
    path = str(tmp_path / "net.poptorch")
    first = executor()
    first.compileAndExport(path, *batch, export_model=False)
    assert len(captured) == 1
    second = executor()
    second.loadExecutable(path)
    assert len(captured) == 1
    for _ in range(2):
        assert torch.equal(first(*batch)[1], second(*batch)[1])
    expected = first.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in second.model.state_dict().items())
    first.destroy(), second.destroy()
    for number, other in enumerate((executor(scale=2.0), executor(iterations=2))):
        other.loadExecutable(path)
        assert len(captured) == 2 + number
        other.destroy()
