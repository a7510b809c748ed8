"""Compiling, attaching, detaching and destroying an executor, and its queries."""

import datetime
import pickle

import pytest
import torch
from executor_models import Classifier, Double, images, options
from torch import nn

import ipurun.emulator as poptorch


def test_the_first_call_compiles_and_attaches():
    executor = poptorch.inferenceModel(Double())
    assert not executor.isCompiled()
    assert not executor.isAttachedToDevice()
    executor(torch.ones(2))
    assert executor.isCompiled()
    assert executor.isAttachedToDevice()


def test_compile_runs_nothing_and_a_second_one_is_ignored(caplog):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self):
            self.count += 1
            return self.count

    executor = poptorch.inferenceModel(Counter())
    executor.compile()
    executor.compile()
    assert float(executor()) == 1.0


def test_detach_and_implicit_attach():
    model = Classifier()
    executor = poptorch.trainingModel(model)
    with pytest.raises(poptorch.Error):
        executor.detachFromDevice()
    executor(*images(4))
    with pytest.raises(poptorch.Error, match="already attached"):
        executor.attachToDevice()
    executor.detachFromDevice()
    assert not executor.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.detachFromDevice()
    executor(*images(4))
    assert executor.isAttachedToDevice()


def test_training_continues_after_detach():
    x, labels = images(4)
    losses = []
    for detach in (False, True):
        torch.manual_seed(0)
        model = Classifier()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=False)
        executor = poptorch.trainingModel(model, optimizer=optimizer)
        for _ in range(4):
            _, loss = executor(x, labels)
            if detach:
                executor.detachFromDevice()
        losses.append(loss)
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.attachToDevice(),
        lambda e: e.copyWeightsToHost(),
        lambda e: e.copyWeightsToDevice(),
        lambda e: e.save("never-written"),
        lambda e: e.rng_state,
        lambda e: e.compilationTime(),
    ],
)
def test_methods_that_need_a_compiled_model_report_it(call):
    with pytest.raises(poptorch.Error):
        call(poptorch.inferenceModel(Double()))


def test_connection_type_never_compiles_but_does_not_run():
    opts = poptorch.Options().connectionType(poptorch.ConnectionType.Never)
    executor = poptorch.inferenceModel(Double(), opts)
    executor.compile(torch.ones(2))
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError):
        executor(torch.ones(2))
    with pytest.raises(AssertionError):
        executor.attachToDevice()


def test_options_are_frozen_and_copied():
    opts = poptorch.Options()
    executor = poptorch.inferenceModel(Double(), opts)
    with pytest.raises(AttributeError, match="frozen"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError, match="frozen"):
        executor.options.deviceIterations(2)
    assert executor.options is not opts


def test_options_of_another_type_are_refused():
    with pytest.raises(poptorch.Error):
        poptorch.inferenceModel(Double(), {"deviceIterations": 2})


def test_inference_refuses_accumulation():
    with pytest.raises(poptorch.Error, match="gradientAccumulation"):
        poptorch.inferenceModel(Double(), options(accumulation=2))
    with pytest.raises(AttributeError):
        poptorch.inferenceModel(Double()).setOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


def test_attributes_are_forwarded_to_the_model():
    class Named(nn.Linear):
        label = "mine"

        def shout(self):
            return self.label.upper()

    model = Named(2, 2)
    executor = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert executor.label == "mine"
    assert executor.shout() == "MINE"
    assert executor.model is model
    assert executor.weight.shape == (2, 2)
    assert not isinstance(executor.weight, nn.Parameter)
    assert "Named" in repr(executor)
    with pytest.raises(AttributeError):
        executor.absent  # noqa: B018  # the read is the test


def test_hooks_run_around_every_compile_and_can_be_removed():
    calls = []
    before = poptorch.registerPreCompileHook(lambda: calls.append("before"))
    after = poptorch.registerPostCompileHook(lambda: calls.append("after"))
    try:
        poptorch.inferenceModel(Double())(torch.ones(1))
        assert calls == ["before", "after"]

        class Fails(nn.Module):
            def forward(self, x):
                raise ValueError("from the model")

        with pytest.raises(ValueError, match="from the model"):
            poptorch.inferenceModel(Fails())(torch.ones(1))
        assert calls == ["before", "after"] * 2
    finally:
        before.remove()
        after.remove()
    poptorch.inferenceModel(Double())(torch.ones(1))
    assert len(calls) == 4
    with pytest.raises(RuntimeError):
        poptorch.registerPreCompileHook("no function")


def test_times_are_measured():
    executor = poptorch.trainingModel(Classifier(), options(device_iterations=2, accumulation=3))
    assert executor.getPerfCounters()["input"] == [[]]
    assert executor.getLatency() == (0.0, 0.0, 0.0)
    executor(*images(12))
    assert isinstance(executor.compilationTime(), datetime.timedelta)
    counters = executor.getPerfCounters()
    assert [len(times) for times in counters["input"]] == [6, 6]
    assert [len(times) for times in counters["input_complete"]] == [6, 6]
    assert [len(times) for times in counters["output"]] == [1, 1]
    assert [len(times) for times in counters["output_complete"]] == [1, 1]
    for latency in (
        executor.getHostIpuLatency(),
        executor.getComputeLatency(),
        executor.getIpuHostLatency(),
        executor.getLatency(),
    ):
        least, most, mean = latency
        assert 0.0 <= least <= mean <= most
    assert executor.getLatency()[0] >= executor.getComputeLatency()[0] > 0.0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(poptorch.OutputMode.All, 8), (poptorch.OutputMode.Final, 2), (poptorch.OutputMode.Sum, 2)],
)
def test_only_outputs_that_are_kept_have_timestamps(mode, expected):
    executor = poptorch.inferenceModel(Double(), options(device_iterations=4, replicas=2, outputMode=mode))
    executor(torch.ones(8))
    assert len(executor.getPerfCounters()["output"][0]) == expected


def test_compilation_time_needs_the_progress_bar():
    executor = poptorch.inferenceModel(Double(), options(showCompilationProgressBar=False))
    with pytest.raises(poptorch.Error, match="Please compile the model before obtaining compilation time"):
        executor.compilationTime()
    executor(torch.ones(1))
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        executor.compilationTime()


def test_cycles_are_counted_only_on_hardware(monkeypatch):
    executor = poptorch.inferenceModel(Double(), options(logCycleCount=True))
    with pytest.raises(poptorch.Error, match="only supported on actual IPU hardware"):
        executor(torch.ones(1))
    monkeypatch.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    with pytest.raises(poptorch.Error):
        executor.cycleCount()
    executor(torch.ones(1))
    assert executor.cycleCount() > 0
    with pytest.raises(poptorch.Error):
        poptorch.inferenceModel(Double()).cycleCount()


def test_anchored_tensors():
    opts = poptorch.Options()
    opts.anchorTensor("gradient", "Gradient___model.linear.bias")
    opts.anchorTensor("updated", "UpdatedVar___model.linear.bias")
    torch.manual_seed(0)
    model = Classifier()
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    x, labels = images(4)
    model(x, labels)[1].backward()
    expected = model.linear.bias.grad.clone()
    with pytest.raises(AssertionError):
        executor.getAnchoredTensor("gradient")
    executor(x, labels)
    torch.testing.assert_close(executor.getAnchoredTensor("gradient"), expected)
    assert torch.equal(executor.getAnchoredTensor("updated"), model.linear.bias.detach())
    assert any(name.startswith("Gradient___") for name in executor.getTensorNames())
    with pytest.raises(AssertionError):
        executor.getAnchoredTensor("unknown")


class Sums(nn.Module):
    def forward(self, x):
        kept = x + 1
        kept.add_(1)
        kept.add_(2)
        return (x + 2) * kept, x + 3


def test_long_names_number_equal_operations_and_name_a_tensor_once():
    executor = poptorch.inferenceModel(Sums())
    executor(torch.ones(2))
    names = [name for name in executor.getTensorNames() if name.startswith("add")]
    assert names == ["add:0", "add_:0", "add__1:0", "add__2:0"]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("IPU_RESET", poptorch.RecoverableError),
        ("FULL_RESET", poptorch.RecoverableError),
        ("UNRECOVERABLE", poptorch.UnrecoverableError),
    ],
)
def test_requested_faults_are_raised(monkeypatch, kind, error):
    executor = poptorch.inferenceModel(Double())
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", f"call=2:{kind}")
    executor(torch.ones(1))
    with pytest.raises(error) as raised:
        executor(torch.ones(1))
    if error is poptorch.RecoverableError:
        assert raised.value.recovery_action == kind
    assert float(executor(torch.ones(1))) == 2.0


def test_an_invalid_fault_specification_is_reported(monkeypatch):
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "sometimes")
    with pytest.raises(ValueError, match="POPTORCH_EMULATOR_FAULTS"):
        poptorch.inferenceModel(Double())(torch.ones(1))


def test_a_failed_compile_leaves_the_model_usable():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            y = self.layer(x)
            return y if y.sum() > 0 else -y

    model = Branches()
    weight = model.layer.weight.detach().clone()
    with pytest.raises(poptorch.Error, match=r"test_executor_lifecycle\.py:\d+"):
        poptorch.inferenceModel(model)(torch.ones(1, 1))
    assert torch.equal(model.layer.weight, weight)
    assert model(torch.ones(1, 1)).shape == (1, 1)
    assert not poptorch.isRunningOnIpu()


def test_too_many_ipus_and_powers_of_two(monkeypatch):
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(128\)"):
        poptorch.inferenceModel(Double(), options(replicas=128))(torch.ones(128))
    poptorch.inferenceModel(Double(), options(replicas=3))(torch.ones(3))
    monkeypatch.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    with pytest.raises(poptorch.Error, match="must reserve a minimum of 4"):
        poptorch.inferenceModel(Double(), options(replicas=3))(torch.ones(3))
    poptorch.inferenceModel(Double(), options(replicas=3, autoRoundNumIPUs=True))(torch.ones(3))


def test_the_loss_scale_can_be_anchored():
    model = Classifier().half()
    opts = options()
    opts.anchorTensor("scale", "finalLossScale")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0, loss_scaling=8.0)
    executor = poptorch.trainingModel(model, opts, optimizer)
    data, labels = images(4)
    executor(data.half(), labels)
    assert float(executor.getAnchoredTensor("scale")) == 8.0


def test_an_executor_can_be_pickled_and_compiles_again():
    executor = poptorch.inferenceModel(Double())
    executor(torch.ones(2))
    copied = pickle.loads(pickle.dumps(executor))
    assert not copied.isCompiled()
    assert copied(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
