"""Early stopping, averages of the weights, and intervals by the clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest
import torch
from run_harness import Folder, Recorder, built, config, trained
from run_toys import Poisoned

from ipurun.checkpoint import latest, listed, load, save
from ipurun.config.schema import AveragingConfig, EarlyStoppingConfig
from ipurun.errors import ConfigError
from ipurun.inspect.metrics import check_monitor
from ipurun.inspect.sampling import seeded
from ipurun.planning.steps import most_eval_samples
from ipurun.training.callbacks import Callback
from ipurun.training.events import Observer, StepEnd
from ipurun.training.loop import train
from ipurun.training.state import Progress, load_weights
from ipurun.training.when import Minutes, note_for_stopping, reason_to_stop

PLATEAU = {"optimizer": {"_target_": "poptorch.optim.SGD", "lr": 0.0}, "epochs": 8, "device_iterations": 2}


def _stopped_at(values: List[float], higher: bool = False, **keys: Any) -> int:
    """Return after how many evaluations a run with these values stops; 0 if never."""
    stopping, progress = EarlyStoppingConfig(**keys), Progress()
    for number, value in enumerate(values, 1):
        note_for_stopping(stopping, progress, value, higher)
        if reason_to_stop(stopping, progress, "loss", higher):
            return number
    return 0


def test_patience_counts_evaluations_since_the_last_improvement() -> None:
    assert _stopped_at([3.0, 2.0, 2.5, 1.0, 1.5, 1.2, 1.1], patience=3) == 7
    assert _stopped_at([3.0, 2.0, 2.5, 1.0], patience=3) == 0
    assert _stopped_at([0.1, 0.5, 0.4, float("nan")], higher=True, patience=2) == 4


def test_smaller_changes_are_not_improvements() -> None:
    assert _stopped_at([1.0, 0.95, 0.9, 0.85], patience=2, min_change=0.1) == 3  # 0.9 is 0.1 less, but not more
    assert _stopped_at([1.0, 0.95, 0.85, 0.7], patience=2, min_change=0.1) == 0


def test_a_threshold_ends_a_run_also_where_the_change_is_small() -> None:
    assert _stopped_at([0.5, 0.89, 0.9], higher=True, threshold=0.9, min_change=0.05) == 3
    assert _stopped_at([0.5, 0.4], threshold=0.3) == 0


def test_a_run_that_no_longer_learns_stops_and_says_why(tmp_path: Path) -> None:
    _, summary, recorder = trained(tmp_path, early_stopping__patience=2, **PLATEAU)
    assert summary.status == "done" and summary.epoch == 3  # the first evaluation, and two more
    assert summary.stop_reason.startswith("early stopping: accuracy did not improve in 2 evaluations since ")
    assert [event.epoch for event in recorder.events["eval"]] == [1, 2, 3]
    assert latest(Folder(tmp_path)).step == summary.step


def test_mode_and_metric_choose_what_is_better(tmp_path: Path) -> None:
    keys = {"early_stopping__metric": "loss", "early_stopping__patience": 1, "epochs": 4}
    _, falls, _ = trained(tmp_path / "min", **keys)
    _, wrong, _ = trained(tmp_path / "max", early_stopping__mode="max", **keys)
    assert not falls.stop_reason and wrong.epoch == 2


class _StopAt(Callback):
    """Stops its run as an interrupt does, but without a signal."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: StepEnd) -> None:
        if event.step == self.step:
            self.run.save()
            self.run.stop("enough")


def _equal_when_resumed(tmp_path: Path, step: int, **changes: Any) -> Dict[str, Any]:
    """Check that a run that is saved and stopped at a step, and resumed, ends as one that is not."""
    recorder, seen = Recorder(), Recorder()
    train(built(**changes), Folder(tmp_path / "straight"), [recorder])
    folder = Folder(tmp_path / "resumed")
    train(built(eval__at_end=False, **changes), folder, [seen], callbacks={"stop": _StopAt(step)})
    assert latest(folder).step == step
    train(built(**changes), folder, [seen], resume_from=latest(folder))
    assert [dict(e.metrics) for e in seen.events["eval"]] == [dict(e.metrics) for e in recorder.events["eval"]]
    assert seen.events["end"][-1].stop_reason == recorder.events["end"][-1].stop_reason
    expected, found = load(latest(Folder(tmp_path / "straight"))), load(latest(folder))
    for part in ("model", "average"):
        _assert_same(found[part], expected[part])
    return found


def _assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            _assert_same(value, expected[key])
    else:
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


def test_patience_survives_a_resume(tmp_path: Path) -> None:
    _equal_when_resumed(tmp_path, 10, early_stopping__patience=2, **PLATEAU)


@pytest.mark.parametrize("kind", ["ema", "tail"])
def test_an_average_survives_a_resume_bit_for_bit(tmp_path: Path, kind: str) -> None:
    average = {"averaging__kind": kind, "averaging__decay": 0.9, "averaging__start_step": 4}
    model = {"_target_": "run_toys.Net", "dropout": 0.2}
    state = _equal_when_resumed(tmp_path, 10, model=model, device_iterations=2, **average)
    assert state["average"]["readings"] == 6  # after 6, 8, ... 16 of 16 updates


def test_a_stopped_run_stays_stopped_unless_it_gets_more_patience(tmp_path: Path) -> None:
    trained(tmp_path, early_stopping__patience=2, **PLATEAU)
    newest = latest(Folder(tmp_path))
    _, again, _ = trained(tmp_path, resume_from=newest, early_stopping__patience=2, **PLATEAU)
    assert again.step == newest.step and again.stop_reason
    _, longer, _ = trained(tmp_path, resume_from=newest, early_stopping__patience=4, **PLATEAU)
    assert longer.epoch == 5


class _Weights(Callback):
    """Keeps the weights after each host call."""

    def __init__(self) -> None:
        self.seen: List[Dict[str, torch.Tensor]] = []

    def on_step(self, event: StepEnd) -> None:
        self.seen.append({name: value.clone() for name, value in self.run.model.state_dict().items()})


def _weights_by_call(tmp_path: Path, **changes: Any) -> List[Dict[str, torch.Tensor]]:
    weights = _Weights()
    train(built(eval__every_epochs=None, **changes), Folder(tmp_path), callbacks={"weights": weights})
    return weights.seen


@pytest.mark.parametrize(("iterations", "every"), [(1, 1), (2, 1), (2, 2)])
def test_ema_decays_by_weight_updates(tmp_path: Path, iterations: int, every: int) -> None:
    keys = {"device_iterations": iterations, "epochs": 1}
    seen = _weights_by_call(tmp_path / "raw", **keys)[every - 1 :: every]
    average = {"averaging__kind": "ema", "averaging__decay": 0.8, "averaging__every_calls": every}
    trained(tmp_path / "ema", **keys, **average)
    found = load(latest(Folder(tmp_path / "ema")))
    decay = 0.8 ** (iterations * every)
    for name, value in found["average"]["model"].items():
        expected = seen[0][name].double()
        for weights in seen[1:]:
            expected = decay * expected + (1 - decay) * weights[name].double()
        assert torch.allclose(value.double(), expected, atol=1e-6), name
        assert torch.equal(found["model"][name], seen[-1][name])  # averaging does not change training


EMA = {"averaging__kind": "ema", "averaging__decay": 0.8}


@pytest.mark.parametrize("kind", ["ema", "tail"])
def test_an_average_over_replicas_is_that_of_larger_batches(tmp_path: Path, kind: str) -> None:
    keys = {"averaging__kind": kind, "averaging__decay": 0.8, "averaging__start_step": 2, "loader__shuffle": False}
    _, _, one = trained(tmp_path / "one", micro_batch_size=8, **keys)
    _, _, four = trained(tmp_path / "four", micro_batch_size=2, devices=4, **keys)
    expected, found = (load(latest(Folder(tmp_path / name)))["average"]["model"] for name in ("one", "four"))
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-5), name
    for first, second in zip(one.events["eval"], four.events["eval"]):
        assert dict(second.metrics) == pytest.approx(dict(first.metrics), rel=1e-4)


UNFREEZE: Dict[str, Any] = {
    "freeze": ["first"],
    "unfreeze": {"first": 6},
    "device_iterations": 2,
    "devices": 2,
    "epochs": 4,
}


@pytest.mark.parametrize("kind", ["ema", "tail"])
def test_an_average_continues_over_an_unfreeze(tmp_path: Path, kind: str) -> None:
    seen = _weights_by_call(tmp_path / "raw", **UNFREEZE)
    average = {"averaging__kind": kind, "averaging__decay": 0.8, "averaging__start_step": 0}
    trained(tmp_path / "averaged", **UNFREEZE, **average)
    assert len(seen) == 8 and torch.equal(seen[2]["first.weight"], seen[0]["first.weight"])
    for name, value in load(latest(Folder(tmp_path / "averaged")))["average"]["model"].items():
        expected = seen[0][name].double()
        for count, weights in enumerate(seen[1:], 2):
            share = 1 - 0.8**2 if kind == "ema" else 1 / count
            expected += share * (weights[name].double() - expected)
        assert torch.allclose(value.double(), expected, atol=1e-6), name


@pytest.mark.parametrize("step", [4, 6, 10])
def test_an_average_resumes_on_either_side_of_an_unfreeze(tmp_path: Path, step: int) -> None:
    _equal_when_resumed(tmp_path, step, **EMA, **UNFREEZE)


def test_ema_equals_torchs_averaged_model(tmp_path: Path) -> None:
    from torch.optim.swa_utils import AveragedModel

    run, _, _ = trained(tmp_path / "a", averaging__kind="ema", averaging__decay=0.8, epochs=1)
    oracle = AveragedModel(run.user_model, avg_fn=lambda mean, value, count: 0.8 * mean + 0.2 * value)
    for weights in _weights_by_call(tmp_path / "b", epochs=1):
        run.user_model.load_state_dict(weights)
        oracle.update_parameters(run.user_model)
    for name, value in load(latest(Folder(tmp_path / "a")))["average"]["model"].items():
        assert torch.allclose(value, oracle.module.state_dict()[name], atol=1e-6), name


def test_the_tail_is_the_mean_over_the_last_quarter(tmp_path: Path) -> None:
    seen = _weights_by_call(tmp_path / "raw")
    trained(tmp_path / "tail", averaging__kind="tail")
    for name, value in load(latest(Folder(tmp_path / "tail")))["average"]["model"].items():
        expected = torch.stack([weights[name] for weights in seen[12:]]).mean(0)
        assert torch.allclose(value, expected, atol=1e-6), name


def test_the_average_is_evaluated_beside_the_weights(tmp_path: Path) -> None:
    average = {"averaging__kind": "ema", "averaging__decay": 0.9, "device_iterations": 2}
    _, _, plain = trained(tmp_path / "plain", device_iterations=2)
    run, summary, both = trained(tmp_path / "both", monitor="ema_loss", **average)
    _, _, alone = trained(tmp_path / "alone", averaging__evaluate="average", **average)
    for first, second, third in zip(plain.events["eval"], both.events["eval"], alone.events["eval"]):
        averaged = {name: value for name, value in second.metrics.items() if name.startswith("ema_")}
        assert {name: second.metrics[name] for name in first.metrics} == first.metrics
        assert averaged == {f"ema_{name}": value for name, value in third.metrics.items()}
        assert averaged["ema_loss"] != first.metrics["loss"]
    assert summary.best == min(event.metrics["ema_loss"] for event in both.events["eval"])
    assert not run.eval_metrics.higher_is_better("ema_loss") and run.eval_metrics.higher_is_better("ema_accuracy")
    assert plain.losses == both.losses == alone.losses


def test_saved_averages_are_loaded_by_choice(tmp_path: Path) -> None:
    run, _, _ = trained(tmp_path, averaging__kind="ema", averaging__decay=0.9)
    newest = latest(Folder(tmp_path))
    state = load(newest)
    for which, part in (("both", state["model"]), ("average", state["average"]["model"])):
        load_weights(run.user_model, newest, AveragingConfig(evaluate=which))
        assert torch.equal(run.user_model.state_dict()["first.weight"], part["first.weight"])
    trained(tmp_path / "without")
    with pytest.raises(ConfigError, match="no average"):
        load_weights(run.user_model, latest(Folder(tmp_path / "without")), AveragingConfig(evaluate="average"))


def test_half_precision_is_averaged_in_float32_and_evaluated(tmp_path: Path) -> None:
    _, _, recorder = trained(tmp_path, precision="16.16", averaging__kind="ema", epochs=1)
    assert "ema_accuracy" in recorder.events["eval"][-1].metrics
    state = load(latest(Folder(tmp_path)))
    assert state["model"]["first.weight"].dtype == torch.float16
    assert state["average"]["model"]["first.weight"].dtype == torch.float32


def test_buffers_are_averaged_too_and_masks_stay(tmp_path: Path) -> None:
    keys: Dict[str, Any] = {"model": {"_target_": "run_toys.NormNet"}, "epochs": 1}
    seen = _weights_by_call(tmp_path / "raw", **keys)
    trained(tmp_path / "tail", averaging__kind="tail", averaging__start_step=0, **keys)
    average = load(latest(Folder(tmp_path / "tail")))["average"]["model"]
    mean = torch.stack([weights["norm.running_mean"] for weights in seen]).mean(0)
    assert torch.allclose(average["norm.running_mean"], mean, atol=1e-6)
    assert torch.equal(average["scale"], torch.ones(1))


def test_a_tail_of_unknown_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"averaging\.kind=tail"):
        built(data={"_target_": "run_toys.Stream"}, averaging__kind="tail")


def test_monitors_may_name_the_metrics_of_the_average() -> None:
    nodes = {"accuracy": {}}
    assert not check_monitor("monitor", "ema_accuracy", nodes, "ema_")
    assert check_monitor("monitor", "ema_accuracy", nodes)[0].known == "loss, accuracy"


@pytest.fixture(name="now")
def fixture_now(monkeypatch: pytest.MonkeyPatch) -> List[float]:
    """Replace the clock of intervals; the item is its time in seconds."""
    seconds = [0.0]
    monkeypatch.setattr("ipurun.training.when.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_minutes_pass_by_the_clock(now: List[float]) -> None:
    minutes = Minutes(0.5)
    now[0] = 29.0
    assert not minutes.are_over and not Minutes(None).are_over
    now[0] = 30.0
    assert minutes.are_over
    minutes.restart()
    assert not minutes.are_over


def test_evaluations_checkpoints_and_records_by_minutes(tmp_path: Path, now: List[float]) -> None:
    class Minute(Observer):
        def on_step(self, event: StepEnd) -> None:
            now[0] += 60.0

    off = {"eval__every_epochs": None, "checkpoint__every_epochs": None, "metrics": {}}
    minutes = {"eval__every_minutes": 3, "checkpoint__every_minutes": 5, "log_every_minutes": 4}
    recorder = Recorder()
    run = built(**off, **minutes, optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.0}, checkpoint__keep=0)
    train(run, Folder(tmp_path), [recorder, Minute()])
    assert [event.step for event in recorder.events["eval"]] == [3, 6, 9, 12, 15, 16]
    assert [event.step for event in recorder.events["step"] if event.logged] == [5, 10, 15, 16]
    assert [checkpoint.step for checkpoint in listed(Folder(tmp_path))] == [3, 8, 13, 16]  # the first is the best


def test_records_by_epochs(tmp_path: Path) -> None:
    _, _, recorder = trained(tmp_path, epochs=4, log_every_epochs=2)
    assert [event.step for event in recorder.events["step"] if event.logged] == [16, 32]


def test_checkpoints_are_kept_by_number_or_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr("ipurun.checkpoint.time.time", lambda: now[0])

    def kept(**rule: Any) -> List[int]:
        place = tmp_path / "-".join(map(str, rule.values()))
        place.mkdir()
        for hour in range(5):
            now[0] = 1e9 + 3600 * hour
            save(place, hour, {}, is_best=hour == 0, **rule)
        return [checkpoint.step for checkpoint in listed(place)]

    assert kept(keep=1) == [0, 4]  # and the best one
    assert kept(keep=1, keep_hours=2) == [0, 2, 3, 4]
    assert kept(keep=3, keep_hours=1) == [0, 2, 3, 4]
    assert kept(keep=0, keep_hours=1) == [0, 3, 4]


def test_limits_end_epochs_and_evaluations_early(tmp_path: Path) -> None:
    run, summary, recorder = trained(
        tmp_path, limit__train_calls=2, limit__eval_calls=1, device_iterations=2, epochs=3, loader__shuffle=False
    )
    assert summary.step == 12 and summary.epoch == 3
    assert recorder.events["eval"][-1].samples == 8 == run.plan.evaluation.samples
    assert most_eval_samples(config(limit__eval_calls=1, eval__max_samples=5), run.plan.inference) == 5
    assert set(run.train_loader._data.loaded) == set(range(16))  # each epoch begins again


def test_a_limit_on_calls_replaces_epochs_and_steps(tmp_path: Path) -> None:
    _, summary, _ = trained(tmp_path, limit__calls=5, limit__train_calls=1, epochs=2, max_steps=3, device_iterations=2)
    assert (summary.step, summary.epoch) == (10, 5)


def test_limited_epochs_resume_exactly(tmp_path: Path) -> None:
    _equal_when_resumed(tmp_path, 5, limit__train_calls=3, epochs=3)


def test_limited_epochs_of_a_stream(tmp_path: Path) -> None:
    with seeded(0):
        _, summary, _ = trained(tmp_path, data={"_target_": "run_toys.Stream"}, limit__train_calls=3)
    assert summary.step == 6


def test_a_rollback_restores_average_and_patience(tmp_path: Path) -> None:
    keys: Dict[str, Any] = {"averaging__kind": "ema", "averaging__decay": 0.9, "early_stopping__patience": 9}
    poisoned = {"_target_": "run_toys.Poisoned", "index": 3, "times": 0}
    again = {**poisoned, "_target_": f"{__name__}._poisoned_in_the_second_epoch"}
    rolls = {"on_nonfinite": "rollback", "rollback__factor": 1.0, "eval__split": "train"}
    _, _, straight = trained(tmp_path / "straight", data=poisoned, **rolls, **keys)
    _, summary, rolled = trained(tmp_path / "rolled", data=again, **rolls, **keys)
    assert summary.rollbacks == 1
    assert dict(rolled.events["eval"][-1].metrics) == dict(straight.events["eval"][-1].metrics)
    expected, found = (load(latest(Folder(tmp_path / name)))["average"] for name in ("straight", "rolled"))
    _assert_same(found, expected)


def _poisoned_in_the_second_epoch(index: int, times: int) -> Poisoned:
    data = Poisoned(index, times)
    read = Poisoned.__getitem__
    uses = [0]

    def item(self: Poisoned, number: int) -> Any:
        if number == index:
            uses[0] += 1
            self.times = int(uses[0] == 4)  # inspection, training, evaluation, and training again
        return read(self, number)

    data.__class__ = type("LatePoison", (Poisoned,), {"__getitem__": item})
    return data
