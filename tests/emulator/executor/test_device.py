"""One executor at a time on the IPU chosen by useIpuId, with simulated hardware."""

import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch
from executor_models import Classifier, Double, images

import ipurun.emulator as poptorch

HOLDER = """
import sys, torch
import ipurun.emulator as poptorch

executor = poptorch.inferenceModel(torch.nn.Identity(), poptorch.Options().useIpuId(1))
executor.compile(torch.ones(1))
print("attached", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def hardware(monkeypatch, tmp_path):
    """Simulate hardware, with IPUs that no other test run uses."""
    monkeypatch.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def on_ipu(ipu_id, model=None):
    return poptorch.inferenceModel(model or Double(), poptorch.Options().useIpuId(ipu_id))


def test_a_second_executor_is_refused_until_the_first_detaches():
    first, second = on_ipu(1), on_ipu(1)
    first(torch.ones(2))
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 1"):
        second.compile(torch.ones(2))
    assert not second.isCompiled()
    first.detachFromDevice()
    assert second(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 1"):
        first.attachToDevice()
    assert not first.isAttachedToDevice()
    second.destroy()
    assert first(torch.ones(2)).tolist() == [2.0, 2.0]


def test_training_and_validation_take_turns_on_the_ipu():
    model = Classifier()
    options = poptorch.Options().useIpuId(3)
    training = poptorch.trainingModel(model, options)
    validation = poptorch.inferenceModel(model, options.clone())
    for _ in range(2):
        training(*images(4))
        training.detachFromDevice()
        validation(images(4)[0])
        validation.detachFromDevice()


def test_other_ipus_are_free():
    executors = [on_ipu(1), on_ipu(2), poptorch.inferenceModel(Double())]
    for executor in executors:
        executor(torch.ones(2))
    assert all(executor.isAttachedToDevice() for executor in executors)


@pytest.mark.parametrize("variable", ["POPTORCH_EMULATOR_HARDWARE", "POPTORCH_IPU_MODEL"])
def test_nothing_is_locked_without_hardware(monkeypatch, variable):
    monkeypatch.setenv(variable, "0" if variable == "POPTORCH_EMULATOR_HARDWARE" else "1")
    executors = [on_ipu(1), on_ipu(1)]
    for executor in executors:
        executor(torch.ones(2))
    assert all(executor.isAttachedToDevice() for executor in executors)


def test_a_failed_compile_leaves_the_ipu_free():
    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        on_ipu(1, Broken())(torch.ones(2))
    assert on_ipu(1)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_an_unreferenced_executor_leaves_the_ipu_free():
    def attach_and_forget():
        executor = on_ipu(1)
        executor.cycle = [executor]
        executor(torch.ones(2))

    attach_and_forget()
    assert on_ipu(1)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_copy_is_not_attached():
    executor = on_ipu(1)
    executor(torch.ones(2))
    twin = pickle.loads(pickle.dumps(executor))
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        twin(torch.ones(2))
    del twin
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        on_ipu(1)(torch.ones(2))


def test_a_forked_process_does_not_release_its_parents_ipu():
    executor = on_ipu(1)
    executor(torch.ones(2))
    child = os.fork()
    if child == 0:
        executor._device.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        on_ipu(1)(torch.ones(2))


def test_another_process_holds_its_ipu_until_it_ends(child_environment):
    environment = {**child_environment, "TMPDIR": os.environ["TMPDIR"], "POPTORCH_EMULATOR_HARDWARE": "1"}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "attached\n"
        executor = on_ipu(1)
        with pytest.raises(poptorch.Error, match="Failed to acquire"):
            executor(torch.ones(2))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert executor(torch.ones(2)).tolist() == [2.0, 2.0]


def test_waiting_for_an_ipu(monkeypatch, capfd):
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    first, second = on_ipu(1), on_ipu(1)
    first(torch.ones(2))
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            first.detachFromDevice()

    monkeypatch.setattr("time.sleep", sleep)
    poptorch.setLogLevel("TRACE")
    try:
        assert second(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        poptorch.setLogLevel("WARN")
    assert naps == [15, 15]
    assert "No IPU available, sleeping" in capfd.readouterr().err
    assert second.isAttachedToDevice()
