"""Training against plain PyTorch, and everything the loop does around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_harness import Folder, Recorder, built, config, trained
from run_toys import Net, Points
from torch import nn

from ipurun import emulator
from ipurun.checkpoint import latest, listed, load
from ipurun.emulator._poplar_executor import PoplarExecutor
from ipurun.errors import ConfigError, RunError
from ipurun.inspect.sampling import seeded
from ipurun.training.loop import train


def _plain_torch(batches: int, size: int, lr: Any = 0.1, accumulation: int = 1) -> tuple[list, nn.Module]:
    """Train with SGD and momentum on the points in order: `batches` updates of `size` samples."""
    with seeded(0):
        model = Net()
    rate = lr if callable(lr) else lambda step: lr
    optimizer = torch.optim.SGD(model.parameters(), lr=rate(0), momentum=0.9)
    data = Points(32)
    losses = []
    for number in range(batches):
        optimizer.param_groups[0]["lr"] = rate(number)
        optimizer.zero_grad()
        for part in range(accumulation):
            rows = [(number * accumulation * size + part * size + row) % 32 for row in range(size)]
            loss = nn.functional.cross_entropy(model(data.x[rows]), data.y[rows])
            (loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, model


def test_training_equals_plain_torch(tmp_path: Path) -> None:
    run, summary, recorder = trained(tmp_path, loader__shuffle=False)
    losses, model = _plain_torch(16, 4)
    assert recorder.losses == pytest.approx(losses, abs=1e-5)
    for name, value in run.user_model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name
    assert summary.status == "done" and summary.step == 16 and summary.epoch == 2


def test_loss_is_the_mean_over_iterations_accumulation_and_replicas(tmp_path: Path) -> None:
    _, summary, recorder = trained(
        tmp_path, loader__shuffle=False, device_iterations=2, gradient_accumulation=2, devices=2, micro_batch_size=2
    )
    losses, _ = _plain_torch(8, 2, accumulation=4)
    expected = [sum(losses[start : start + 8]) / 8 for start in range(0, 32, 8)]
    assert recorder.losses == pytest.approx(expected, abs=1e-5)
    assert summary.step == 8


def test_training_metrics_come_from_the_same_batches(tmp_path: Path) -> None:
    _, _, recorder = trained(
        tmp_path,
        loader__shuffle=False,
        optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.0},
        metrics={"accuracy": {"on": ["train", "eval"]}},
        epochs=1,
        device_iterations=2,
    )
    with seeded(0):
        model = Net()
    data = Points(32)
    right = (model(data.x).argmax(1) == data.y).float()
    expected = [right[start : start + 8].mean().item() for start in range(0, 32, 8)]
    assert [event.metrics["accuracy"] for event in recorder.events["step"]] == pytest.approx(expected)
    losses = nn.functional.cross_entropy(model(data.x), data.y, reduction="none")
    assert recorder.losses == pytest.approx([losses[s : s + 8].mean().item() for s in range(0, 32, 8)], abs=1e-5)


def test_the_schedule_advances_once_per_weight_update(tmp_path: Path) -> None:
    _, _, recorder = trained(
        tmp_path,
        loader__shuffle=False,
        schedule={"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2, "gamma": 0.5},
        epochs=1,
        device_iterations=2,
    )
    assert [event.lr for event in recorder.events["step"]] == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_scheduled_rate_reaches_the_device(tmp_path: Path) -> None:
    schedule = {"_target_": "ipurun.schedules.linear"}
    run, _, recorder = trained(tmp_path, loader__shuffle=False, schedule=schedule)
    _, model = _plain_torch(16, 4, lr=lambda step: 0.1 * (1 - step / 16))
    for name, value in run.user_model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name
    assert recorder.events["step"][8].lr == pytest.approx(0.05)


def test_plateau_schedule_follows_the_monitored_metric(tmp_path: Path) -> None:
    schedule = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 10.0}
    _, _, recorder = trained(tmp_path, schedule=schedule, monitor="loss", epochs=3)
    rates = [event.lr for event in recorder.events["step"]]
    assert rates == pytest.approx([0.1] * 8 + [0.01] * 8 + [0.001] * 8)


def test_evaluates_and_saves_when_due(tmp_path: Path) -> None:
    _, summary, recorder = trained(
        tmp_path, epochs=3, eval__every_epochs=2, checkpoint__every_epochs=None, checkpoint__every_steps=5,
        checkpoint__keep=0, checkpoint__best="loss", monitor="loss",
    )  # fmt: skip
    assert [event.step for event in recorder.events["eval"]] == [16, 24]
    due = {5, 10, 15, 20, 24} | {event.step for event in recorder.events["eval"] if event.is_best}
    assert {event.step for event in recorder.events["checkpoint"]} == due
    assert summary.best == min(event.metrics["loss"] for event in recorder.events["eval"])


def test_intervals_are_rounded_up_to_host_calls(tmp_path: Path) -> None:
    _, summary, recorder = trained(
        tmp_path, device_iterations=4, epochs=None, max_steps=5, eval__every_steps=3, eval__every_epochs=None,
        checkpoint__every_epochs=None, checkpoint__at_end=False,
    )  # fmt: skip
    assert summary.step == 8 and [event.step for event in recorder.events["eval"]] == [4, 8]
    assert "checkpoint" not in recorder.events and summary.checkpoint is None


def test_log_interval_gives_window_means(tmp_path: Path) -> None:
    _, _, every = trained(tmp_path / "a", loader__shuffle=False, epochs=1)
    _, _, sparse = trained(tmp_path / "b", loader__shuffle=False, epochs=1, log_every_steps=4)
    logged = [event.loss for event in sparse.events["step"] if event.logged]
    assert logged == pytest.approx([sum(every.losses[:4]) / 4, sum(every.losses[4:]) / 4], abs=1e-6)


def test_shuffling_differs_by_epoch_and_not_by_run(tmp_path: Path) -> None:
    first, _, _ = trained(tmp_path / "a")
    second, _, _ = trained(tmp_path / "b")
    loaded = first.train_loader._data.loaded
    assert loaded == second.train_loader._data.loaded
    loaded = loaded[1:]  # inspection read the first one
    assert sorted(loaded[:32]) == sorted(loaded[32:64]) == list(range(32))
    assert loaded[:32] != loaded[32:64]


def test_seed_changes_weights_and_order(tmp_path: Path) -> None:
    first, _, _ = trained(tmp_path / "a", epochs=1)
    second, _, _ = trained(tmp_path / "b", epochs=1, seed=1)
    assert first.train_loader._data.loaded != second.train_loader._data.loaded


def test_a_stream_trains_until_its_end(tmp_path: Path) -> None:
    _, summary, recorder = trained(tmp_path, data={"_target_": "run_toys.Stream"}, epochs=2, micro_batch_size=5)
    losses, _ = _plain_torch(6, 5)
    assert recorder.losses[:6] == pytest.approx(losses, abs=1e-5)
    assert summary.step == 12 and summary.epoch == 2
    assert any("nothing is evaluated" in note.text for note in recorder.events["note"])


def test_a_stream_with_max_steps_restarts(tmp_path: Path) -> None:
    _, summary, _ = trained(tmp_path, data={"_target_": "run_toys.Stream"}, epochs=None, max_steps=11)
    assert summary.step == 11 and summary.epoch == 1


def test_model_with_its_own_loss(tmp_path: Path) -> None:
    _, summary, recorder = trained(tmp_path, model={"_target_": "run_toys.OwnLossNet"}, loss__name=None, epochs=20)
    assert recorder.losses[-1] < recorder.losses[0]
    assert set(summary.metrics) == {"loss", "accuracy"}


def test_named_items_and_own_loss(tmp_path: Path) -> None:
    _, summary, recorder = trained(
        tmp_path,
        model={"_target_": "run_toys.NamedNet"},
        data={"_target_": "run_toys.mapping", "named": True},
        loss__name=None,
        epochs=20,
        metrics={"accuracy": {"on": ["train", "eval"]}},
    )
    assert recorder.losses[-1] < recorder.losses[0]
    assert 0.0 <= summary.metrics["accuracy"] <= 1.0


def test_custom_loss_through_identity_loss(tmp_path: Path) -> None:
    _, _, recorder = trained(
        tmp_path, loss__name="run_toys.margin", loss__args={"power": 2.0}, loader__shuffle=False,
        optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.0}, epochs=1,
    )  # fmt: skip
    with seeded(0):
        model = Net()
    data = Points(32)
    output = model(data.x).gather(1, data.y.unsqueeze(1)).squeeze(1)
    expected = ((1 - output) ** 2).reshape(8, 4).mean(1).tolist()
    assert recorder.losses == pytest.approx(expected, abs=1e-5)


def test_a_rate_that_changes_during_an_evaluation_reaches_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PopTorch writes the optimizer's values of the last detach again when it attaches; the emulator does not."""
    changes = {
        "schedule": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 10.0},
        "eval__every_epochs": 1,
        "epochs": 3,
        "monitor": "loss",
    }
    _, _, expected = trained(tmp_path / "emulator", **changes)
    attach = PoplarExecutor.attachToDevice

    def attach_with_old_values(executor: PoplarExecutor) -> None:
        attach(executor)
        if executor._optimizer is not None:
            kept = executor._optimizer.optimizer.get_state_dict()
            if kept["ipu_param"] is not None:
                executor._optimizer._device.write_state(kept)

    monkeypatch.setattr(PoplarExecutor, "attachToDevice", attach_with_old_values)
    _, _, recorder = trained(tmp_path / "device", **changes)
    rates = [event.lr for event in recorder.events["step"]]
    assert rates[0] > rates[8] > rates[16]
    assert recorder.losses == expected.losses


def test_batchnorm_on_two_replicas(tmp_path: Path) -> None:
    run, summary, _ = trained(tmp_path, model={"_target_": "run_toys.NormNet"}, devices=2)
    assert summary.status == "done"
    assert "broadcastBuffers" not in [call.path for call in run.plan.training_options]
    state = run.user_model.state_dict()
    assert not torch.equal(state["norm.running_mean"], torch.zeros(4))
    assert int(state["norm.num_batches_tracked"]) == 0  # an integer buffer is a constant on an IPU


def test_nonfinite_loss_stops_with_step_and_key(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        trained(tmp_path, model={"_target_": "run_toys.ExplodingNet"})
    text = str(caught.value)
    assert "nan at step 1" in text and "on_nonfinite=rollback" in text


def test_training_continues_after_a_nonfinite_loss_if_configured(tmp_path: Path) -> None:
    _, summary, _ = trained(
        tmp_path, model={"_target_": "run_toys.ExplodingNet"}, debug__stop_on_nonfinite=False, epochs=1
    )
    assert summary.status == "done" and summary.step == 8


def test_a_failing_data_set_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        trained(tmp_path, data={"_target_": "run_toys.Broken"}, loader__shuffle=False)
    text = str(caught.value)
    assert "reading the training data failed" in text
    assert "the third file is damaged" in text and "run_toys.py" in text


def test_a_model_that_does_not_fit_its_data(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="compiling the model for training") as caught:
        trained(tmp_path, model={"_target_": "torch.nn.Linear", "in_features": 7, "out_features": 3})
    assert len(caught.value.problems) == 1


def test_unwritable_checkpoint_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RunError, match="could not be saved"):
        trained(tmp_path)


def test_a_recoverable_error_says_what_to_do(tmp_path: Path) -> None:
    run = built(epochs=3)
    errors = run.engine.module

    class Failing:
        """The training model, until its tenth call."""

        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def __call__(self, *batch: Any) -> Any:
            self.calls += 1
            if self.calls == 10:
                error = errors.RecoverableError("link down")
                error.recovery_action = "PARTITION_RESET"
                raise error
            return executor(*batch)

    executor = run.training_model
    run.training_model = Failing()
    with pytest.raises(RunError) as caught:
        train(run, Folder(tmp_path), [])
    text = str(caught.value)
    assert "PARTITION_RESET" in text and "step-00000008.pt" in text and f"resume={tmp_path}" in text


def test_an_engine_error_has_a_cause_but_no_traceback(tmp_path: Path) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def compile(self, *args: Any) -> None:
            raise emulator.Error("the graph cannot be lowered")

    run = built(epochs=1)
    executor, run.training_model = run.training_model, Failing()
    with pytest.raises(RunError, match="PopTorch failed while compiling") as caught:
        train(run, Folder(tmp_path), [])
    assert isinstance(caught.value.__cause__, emulator.Error) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize("keys", [{}, {"device_iterations": 2, "devices": 2}])
def test_a_floating_point_exception_names_the_operation_and_what_to_change(tmp_path: Path, keys: Any) -> None:
    run = built(epochs=1, debug__fp_exceptions=True, optimizer={"_target_": "torch.optim.SGD", "lr": 1e38}, **keys)
    with pytest.raises(RunError) as caught:
        train(run, Folder(tmp_path), [])
    text = " ".join(str(caught.value).split())  # lines break where the path ends
    assert "Floating point exception: " in text and "in addmm at" in text and "a smaller optimizer.lr" in text


@pytest.mark.parametrize(
    ("kind", "level", "said"), [("cpu", "info", "on the CPU engine only"), ("ipu", "warning", "an empty one")]
)
def test_a_torch_optimizer_is_said_to_resume_exactly_only_here(
    tmp_path: Path, kind: str, level: str, said: str
) -> None:
    run, recorder = built(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1}, epochs=1), Recorder()
    run.engine = replace(run.engine, kind=kind)
    train(run, Folder(tmp_path), [recorder])
    assert [(note.level, said in note.text) for note in recorder.events["note"]] == [(level, True)]
    assert (load(latest(tmp_path / "checkpoints"))["device_optimizer"] is not None) is (kind == "cpu")


def test_checkpoint_has_the_names_of_the_users_model(tmp_path: Path) -> None:
    trained(tmp_path, epochs=1)
    state = load(latest(tmp_path / "checkpoints"))
    assert set(state["model"]) == set(Net().state_dict())
    Net().load_state_dict(state["model"])


def test_best_checkpoint_survives_pruning(tmp_path: Path) -> None:
    _, summary, _ = trained(tmp_path, epochs=6, checkpoint__keep=1, monitor="loss")
    kept = [checkpoint.step for checkpoint in listed(tmp_path / "checkpoints")]
    assert set(kept) == {summary.best_step, 48}
    assert summary.best_checkpoint == str(tmp_path / "checkpoints" / f"step-{summary.best_step:08d}.pt")


def test_throughput_excludes_compile_time(tmp_path: Path) -> None:
    _, summary, recorder = trained(tmp_path, epochs=1)
    assert [event.mode for event in recorder.events["compile_end"]] == ["training", "inference"]
    expected = summary.samples / (summary.seconds["train"] + summary.seconds["data_wait"])
    assert summary.samples_per_second == pytest.approx(expected)
    assert summary.seconds["compile"] == pytest.approx(sum(e.seconds for e in recorder.events["compile_end"]))


def test_unknown_monitor_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="monitor"):
        built(monitor="acuracy")


@pytest.mark.parametrize(("precision", "weights"), [("16.16", torch.float16), ("16.32", torch.float32)])
def test_half_precision_follows_float32(tmp_path: Path, precision: str, weights: torch.dtype) -> None:
    optimizer = {"_target_": "poptorch.optim.SGD", "lr": 0.1}
    _, _, full = trained(tmp_path / "full", optimizer=optimizer)
    run, _, half = trained(tmp_path / "half", precision=precision, optimizer=optimizer)
    assert {value.dtype for value in run.user_model.state_dict().values()} == {weights}
    assert half.losses == pytest.approx(full.losses, abs=0.01)
    assert half.losses != full.losses


def test_pipelined_training_equals_plain_torch(tmp_path: Path) -> None:
    run, summary, recorder = trained(
        tmp_path, loader__shuffle=False, devices=2, pipeline__split=["second"], gradient_accumulation=4,
        micro_batch_size=2, inference__device_iterations=2, epochs=1,
    )  # fmt: skip
    losses, model = _plain_torch(4, 2, accumulation=4)
    assert recorder.losses == pytest.approx([sum(losses[s : s + 4]) / 4 for s in range(0, 16, 4)], abs=1e-5)
    for name, value in run.user_model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-5), name
    assert summary.metrics["accuracy"] >= 0


def test_options_are_logged_on_request(tmp_path: Path) -> None:
    folder, lines = Folder(tmp_path), []
    folder.log = lines.append
    train(built(epochs=1, device_iterations=4, debug__print_options=True), folder, [])
    assert len(lines) == 1 and "training Options(" in lines[0] and "device_iterations=4" in lines[0]


def test_events_start_and_end(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = config(epochs=1)
    summary = train(built(settings), Folder(tmp_path), [recorder])
    assert recorder.events["start"][0].total_steps == 8
    assert recorder.events["end"] == [summary]
    assert recorder.events["step"][-1].epoch == 1.0
