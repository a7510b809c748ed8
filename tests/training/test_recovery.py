"""Failures that a run survives: of the IPU system, of the numbers, and of single samples."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from run_harness import Folder, Recorder, built, trained
from run_toys import Points

from ipurun.build import Run
from ipurun.checkpoint import listed, load, save
from ipurun.emulator._executor import device
from ipurun.errors import ConfigError, RunError
from ipurun.log.jsonl import JsonlLogger
from ipurun.training.evaluate import gathered, predict
from ipurun.training.loop import train

ADAM = {"_target_": "poptorch.optim.Adam", "lr": 0.01}
COSINE = {"_target_": "ipurun.schedules.cosine", "warmup_steps": 3}
RANDOM: Dict[str, Any] = {
    "model": {"_target_": "run_toys.Net", "dropout": 0.5},
    "optimizer": ADAM,
    "schedule": COSINE,
    "checkpoint__every_steps": 3,
    "recovery__backoff_seconds": 0.0,
}


@pytest.fixture(autouse=True)
def _forget_earlier_faults() -> None:
    device._raised.clear()  # each fault is raised once in a process


def _assert_equal_weights(run: Run, expected: Run) -> None:
    wanted = expected.user_model.state_dict()
    for name, value in run.user_model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def _notes(recorder: Recorder) -> str:
    return "\n".join(note.text for note in recorder.events.get("note", []))


@pytest.mark.parametrize("faults", ["call=2:IPU_RESET", "call=5:IPU_RESET", "call=11:IPU_RESET,call=2:IPU_RESET"])
def test_a_recovered_run_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: str
) -> None:
    """Before the first checkpoint, after one, and twice in a row."""
    expected, _, seen = trained(tmp_path / "undisturbed", **RANDOM)
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", faults)
    run, summary, recorder = trained(tmp_path / "disturbed", **RANDOM)
    _assert_equal_weights(run, expected)
    assert summary.status == "done" and summary.rollbacks == faults.count("RESET")
    by_step = {event.step: event.loss for event in recorder.events["step"]}
    assert by_step == {event.step: event.loss for event in seen.events["step"]}
    assert "IPU_RESET" in _notes(recorder)


def test_a_fault_during_an_evaluation_is_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, end, _ = trained(tmp_path / "undisturbed", **RANDOM, data={"_target_": "run_toys.pair", "evaluation": 70})
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=17:IPU_RESET")  # training makes 16 calls
    run, summary, recorder = trained(
        tmp_path / "disturbed", **RANDOM, data={"_target_": "run_toys.pair", "evaluation": 70}
    )
    assert "while running inference" in _notes(recorder)
    _assert_equal_weights(run, expected)
    assert summary.metrics == end.metrics


def test_repeated_steps_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=6:IPU_RESET")
    path = tmp_path / "metrics.jsonl"
    train(built(**RANDOM), Folder(tmp_path), [JsonlLogger(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records if record["split"] == "train"] == list(range(1, 17))


def test_a_recovery_waits_longer_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=1:IPU_RESET,call=2:IPU_RESET")
    begun = time.monotonic()
    _, summary, recorder = trained(tmp_path, **{**RANDOM, "recovery__backoff_seconds": 0.2})
    assert time.monotonic() - begun >= 0.6 and summary.seconds["recovery"] >= 0.6
    assert "recovering in 0.2 s, attempt 1 of 3" in _notes(recorder)
    assert "recovering in 0.4 s, attempt 2 of 3" in _notes(recorder)


def test_recovery_gives_up_after_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=2:IPU_RESET,call=3:IPU_RESET")
    recorder = Recorder()
    with pytest.raises(RunError, match="start again"):
        train(built(**{**RANDOM, "recovery__max_attempts": 1}), Folder(tmp_path), [recorder])
    assert len(recorder.events["rollback"]) == 1


def test_without_recovery_the_message_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=5:IPU_RESET")
    with pytest.raises(RunError) as caught:
        trained(tmp_path, **RANDOM, recovery__max_attempts=0)
    (problem,) = caught.value.problems
    assert "IPU_RESET" in problem.what
    assert f"ipurun train resume={tmp_path} resumes from {tmp_path}/checkpoints/step-00000003.pt" in problem.fix


def test_attempts_count_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=5:IPU_RESET,call=7:IPU_RESET,call=6:IPU_RESET")
    _, summary, _ = trained(tmp_path, **RANDOM, recovery__max_attempts=1)
    assert summary.status == "done" and summary.rollbacks == 3


def test_other_resets_run_the_configured_command_or_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=5:PARTITION_RESET")
    with pytest.raises(RunError, match="vipu reset partition"):
        trained(tmp_path / "stops", **RANDOM)
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=4:PARTITION_RESET")
    mark = tmp_path / "mark"
    code = f"import os; open({str(mark)!r}, 'w').write(os.environ['IPURUN_RECOVERY_ACTION'])"
    _, summary, _ = trained(tmp_path / "resets", **RANDOM, recovery__reset_command=f'{sys.executable} -c "{code}"')
    assert summary.status == "done" and mark.read_text() == "PARTITION_RESET"
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=6:PARTITION_RESET")
    with pytest.raises(RunError, match="the command that resets it failed"):
        trained(tmp_path / "fails", **RANDOM, recovery__reset_command="no-such-command")


def test_an_unrecoverable_error_stops_and_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_FAULTS", "call=5:UNRECOVERABLE")
    with pytest.raises(RunError) as caught:
        trained(tmp_path, **RANDOM)
    (problem,) = caught.value.problems
    assert "cannot recover" in problem.what
    assert f"ipurun train resume={tmp_path} resumes from {tmp_path}/checkpoints/step-00000003.pt" in problem.fix


FRAGILE: Dict[str, Any] = {
    "model": {"_target_": "run_toys.FragileNet"},
    "optimizer": {"_target_": "poptorch.optim.SGD", "lr": 1e6, "loss_scaling": 8.0},
    "on_nonfinite": "rollback",
    "checkpoint__every_steps": 2,
}


def test_a_rollback_lowers_the_learning_rate_until_the_loss_is_finite(tmp_path: Path) -> None:
    _, summary, recorder = trained(tmp_path, **FRAGILE, rollback__factor=1e-7)
    assert summary.status == "done" and summary.step == 16 and summary.rollbacks == 1
    factor = 1e-7
    assert recorder.events["step"][-1].lr == pytest.approx(1e6 * factor)
    state = load(listed(tmp_path / "checkpoints")[-1])
    assert state["progress"]["lr_factor"] == pytest.approx(factor)
    resumed = built(**FRAGILE, epochs=3)
    recorder = Recorder()
    train(resumed, Folder(tmp_path), [recorder], resume_from=listed(tmp_path / "checkpoints")[-1])
    assert recorder.events["step"][0].lr == pytest.approx(1e6 * factor)  # a resumed run keeps it


def test_a_rollback_lowers_the_loss_scale(tmp_path: Path) -> None:
    """Scaled gradients overflow, so that the weights are not finite when they are saved after the first step."""
    optimizer = {"_target_": "poptorch.optim.SGD", "lr": 0.1, "momentum": 0.9}
    run, summary, _ = trained(
        tmp_path / "lowered",
        optimizer={**optimizer, "loss_scaling": 2.0**128 - 2.0**104},
        on_nonfinite="rollback",
        rollback__lower="loss_scaling",
        rollback__factor=2.0**-64,
        checkpoint__every_steps=1,
    )
    assert summary.status == "done" and summary.rollbacks == 1
    assert run.optimizer.loss_scaling == (2.0**128 - 2.0**104) * 2.0**-64
    expected, _, _ = trained(tmp_path / "small", optimizer={**optimizer, "loss_scaling": 1.0})
    for name, value in run.user_model.state_dict().items():
        assert torch.allclose(value, expected.user_model.state_dict()[name], atol=1e-6), name


def test_a_rollback_returns_further_if_the_last_checkpoint_does_not_help(tmp_path: Path) -> None:
    _, summary, recorder = trained(
        tmp_path,
        data={"_target_": "run_toys.Poisoned", "index": 28, "times": 3},  # of step 8
        loader__shuffle=False,
        on_nonfinite="rollback",
        rollback__max_times=3,
        checkpoint__every_steps=2,
        checkpoint__keep=0,
    )
    assert summary.status == "done" and summary.rollbacks == 3
    events = recorder.events["rollback"]
    assert [event.step for event in events] == [6, 4, 2]
    assert "abandoning step-00000006.pt" in events[1].reason and "abandoning step-00000004.pt" in events[2].reason
    aside = sorted(path.name for path in (tmp_path / "checkpoints").glob("abandoned-*.pt"))
    assert aside == ["abandoned-step-00000004.pt", "abandoned-step-00000006.pt"]
    assert [checkpoint.step for checkpoint in listed(tmp_path / "checkpoints")] == list(range(2, 17, 2))


def test_a_rollback_passes_over_weights_that_are_not_finite(tmp_path: Path) -> None:
    """A run that was started with `on_nonfinite=continue` may have saved such weights."""
    trained(tmp_path, checkpoint__every_steps=4, checkpoint__keep=0, epochs=1)
    newest = listed(tmp_path / "checkpoints")[-1]
    state = load(newest)
    state["model"]["first.weight"][0, 0] = float("inf")
    save(tmp_path / "checkpoints", newest.step, state)
    resumed = built(on_nonfinite="rollback", checkpoint__keep=0)
    recorder = Recorder()
    summary = train(resumed, Folder(tmp_path), [recorder], resume_from=listed(tmp_path / "checkpoints")[-1])
    (event,) = recorder.events["rollback"]
    assert event.step == 4 and "abandoning step-00000008.pt" in event.reason
    assert summary.status == "done" and summary.step == 16


def test_the_old_key_is_accepted_with_a_note() -> None:
    run = built(debug__stop_on_nonfinite=False)
    assert run.config.nonfinite_action == "continue"
    assert any("on_nonfinite=continue" in note for note in run.plan.notes)


def test_a_loss_scale_that_cannot_be_lowered_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollback\.lower"):
        built(loss_scaling="auto", on_nonfinite="rollback", rollback__lower="loss_scaling")


def test_rollbacks_are_limited(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the loss became nan") as raised:
        trained(tmp_path, model={"_target_": "run_toys.ExplodingNet"}, on_nonfinite="rollback")
    advice = raised.value.problems[0].fix
    assert "a larger rollback.max_times" in advice and "on_nonfinite=rollback" not in advice


@pytest.mark.parametrize("mode", ["sync", "async", "async_rebatched"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_replaced(tmp_path: Path, mode: str, workers: int) -> None:
    _, summary, recorder = trained(
        tmp_path,
        data={"_target_": "run_toys.Broken"},
        loader__on_error="skip",
        loader__mode=mode,
        loader__workers=workers,
    )
    assert summary.status == "done" and summary.step == 16
    assert summary.skipped_samples == (2,)
    assert "sample 2 of the training data could not be read (OSError: the third file is damaged)" in _notes(recorder)


def test_too_many_unreadable_samples_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"loader.max_errors=3"):
        trained(tmp_path, data={"_target_": "run_toys.Unreadable"}, loader__on_error="skip", loader__max_errors=3)


@pytest.mark.parametrize(
    ("workers", "model", "bad"),
    [
        (0, "Net", [0]),
        (0, "OwnLossNet", [3, 4, 10]),
        (0, "Net", [1, 2, 5, 6, 7]),
        (2, "OwnLossNet", [1, 2, 5, 6, 7]),
    ],
)
def test_an_evaluation_leaves_out_samples_that_cannot_be_read(
    tmp_path: Path, workers: int, model: str, bad: List[int]
) -> None:
    """All values are those of data without these samples, to the last bit."""
    changes: Dict[str, Any] = {"model": {"_target_": f"run_toys.{model}"}, "loader__workers": workers}
    if model == "OwnLossNet":
        changes["loss__name"] = None
    damaged = {"_target_": "run_toys.damaged", "bad": bad}
    run, summary, recorder = trained(tmp_path / "bad", data=damaged, loader__on_error="skip", **changes)
    _, _, expected = trained(tmp_path / "good", data={**damaged, "lacks": True}, **changes)
    found = [(event.samples, event.metrics) for event in recorder.events["eval"]]
    assert found == [(event.samples, event.metrics) for event in expected.events["eval"]]
    assert found[0][0] == 11 - len(bad)
    assert summary.skipped_eval_samples == {"eval": tuple(bad)} and summary.skipped_samples == ()
    notes = _notes(recorder)
    last = [bad[-1]] if not workers else bad  # of several workers, any may be the last to fail
    assert any(f"`eval` could not be read (OSError: file {index} is damaged); left out" in notes for index in last)
    predicted = gathered(predict(run, "eval", recorder, ["index", "output"]))
    run.close()
    assert predicted["index"].tolist() == [index for index in range(11) if index not in bad]
    assert len(predicted["output"]) == 11 - len(bad) and run.eval_loaders["eval"].left_out == tuple(bad)


def test_all_splits_share_the_limit_of_unreadable_samples(tmp_path: Path) -> None:
    data = {"_target_": "run_toys.damaged", "bad": [1, 2, 3]}
    assert trained(tmp_path / "enough", data=data, loader__on_error="skip", loader__max_errors=3)[1].status == "done"
    with pytest.raises(RunError, match=r"loader.max_errors=2") as raised:
        trained(tmp_path / "few", data=data, loader__on_error="skip", loader__max_errors=2)
    assert "reading the split `eval`" in raised.value.problems[0].what


def test_a_split_without_a_readable_sample_ends_the_run(tmp_path: Path) -> None:
    data = {"_target_": "run_toys.damaged", "bad": list(range(11))}
    with pytest.raises(RunError, match="no sample of the split `eval` can be read"):
        trained(tmp_path, data=data, loader__on_error="skip")


@pytest.mark.parametrize(("by_position", "workers"), [(True, 0), (True, 2), (False, 0)])
@pytest.mark.parametrize("bad", [[0], [1, 2, 5, 6, 7], [4, 5, 6, 7, 10]])
def test_an_evaluation_leaves_out_samples_of_a_stream(
    tmp_path: Path, by_position: bool, workers: int, bad: List[int]
) -> None:
    data = {"_target_": "run_toys.damaged_streams", "bad": bad, "by_position": by_position}
    run, summary, recorder = trained(tmp_path / "bad", data=data, loader__on_error="skip", loader__workers=workers)
    _, _, expected = trained(tmp_path / "good", data={**data, "lacks": True}, loader__workers=workers)
    found, wanted = recorder.events["eval"], expected.events["eval"]
    assert [event.samples for event in found] == [11 - len(bad)] * len(wanted)
    for event, other in zip(found, wanted):  # the same samples in other batches
        assert event.metrics == pytest.approx(other.metrics, rel=1e-6)
    assert summary.skipped_eval_samples == {"eval": tuple(bad)}
    predicted = gathered(predict(run, "eval", recorder, ["index", "input"]))
    run.close()
    good = [index for index in range(11) if index not in bad]
    assert predicted["index"].tolist() == good
    assert torch.equal(predicted["input"], Points(11, 1000).x[good])


@pytest.mark.parametrize(
    ("by_position", "mode", "workers"),
    [(True, "sync", 0), (True, "sync", 2), (True, "async", 0), (False, "sync", 0), (False, "async", 0)],
)
def test_a_sample_of_a_training_stream_is_replaced(tmp_path: Path, by_position: bool, mode: str, workers: int) -> None:
    data = {"_target_": "run_toys.damaged_streams", "bad": [], "of_training": [3, 31], "by_position": by_position}
    changes = {"data": data, "loader__on_error": "skip", "loader__mode": mode, "loader__workers": workers, "epochs": 2}
    _, summary, recorder = trained(tmp_path, **changes)
    assert summary.status == "done" and summary.skipped_samples == (3, 31)
    assert summary.step == 16 and summary.epoch == (2.0 if by_position else 2.25)  # a plain iterable becomes shorter
    assert "samples 3, 31 of the training data" in _notes(recorder) or "sample 31 of" in _notes(recorder)


def test_a_generator_cannot_be_skipped_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)iterable.*read\(start, stop\)") as raised:
        built(data={"_target_": "run_toys.Stream"}, loader__on_error="skip")
    assert raised.value.problems[0].key == "loader.on_error"
    data = {"_target_": "run_toys.damaged_generator", "bad": [3]}
    with pytest.raises(RunError, match=r"sample 3 of the split `eval` cannot be skipped, because\s+the iterator ended"):
        trained(tmp_path, data=data, loader__on_error="skip")
