"""Resuming: N steps equal N/2 steps, a stop and N/2 more, bit for bit."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from run_harness import Folder, Recorder, built

from ipurun.checkpoint import latest, listed, load
from ipurun.errors import ConfigError
from ipurun.training.events import Observer, StepEnd, Summary
from ipurun.training.loop import train

ADAM = {"_target_": "poptorch.optim.Adam", "lr": 0.01}
COSINE = {"_target_": "ipurun.schedules.cosine", "warmup_steps": 3}


class _PressCtrlC(Observer):
    def __init__(self, at_call: int, times: int = 1, how: int = signal.SIGINT) -> None:
        self.at_call = at_call
        self.times = times
        self.how = how

    def on_step(self, event: StepEnd) -> None:
        if event.call == self.at_call:
            for _ in range(self.times):
                os.kill(os.getpid(), self.how)


def _straight_and_resumed(tmp_path: Path, stop_at: int, **changes: Any) -> tuple[Any, Any, Any, Any]:
    straight, straight_seen = built(**changes), Recorder()
    train(straight, Folder(tmp_path / "straight"), [straight_seen])

    folder = Folder(tmp_path / "resumed")
    first, seen = built(**changes), Recorder()
    summary = train(first, folder, [seen, _PressCtrlC(stop_at)])
    assert summary.status == "interrupted"
    second = built(**changes)
    end = train(second, folder, [seen], resume_from=latest(folder))
    assert end.status == "done"
    return straight, straight_seen, second, seen


def _assert_equal_runs(straight: Any, straight_seen: Recorder, resumed: Any, seen: Recorder) -> None:
    assert seen.losses == straight_seen.losses
    assert [e.lr for e in seen.events["step"]] == [e.lr for e in straight_seen.events["step"]]
    expected: Dict[str, torch.Tensor] = straight.user_model.state_dict()
    for name, value in resumed.user_model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    evaluated = [(e.step, dict(e.metrics)) for e in straight_seen.events["eval"]]
    assert [(e.step, dict(e.metrics)) for e in seen.events["eval"]] == evaluated
    assert seen.events["end"][-1].best == straight_seen.events["end"][-1].best


@pytest.mark.parametrize("stop_at", [1, 3, 8, 11, 15])
def test_resume_is_exact_anywhere(tmp_path: Path, stop_at: int) -> None:
    """After the first call, in the first epoch, at its end, in the second, and one call before the last."""
    _assert_equal_runs(*_straight_and_resumed(tmp_path, stop_at, optimizer=ADAM, schedule=COSINE))


def test_a_record_of_several_calls_has_the_loss_of_all_of_them_after_a_resume(tmp_path: Path) -> None:
    _assert_equal_runs(
        *_straight_and_resumed(tmp_path, 3, log_every_steps=10, device_iterations=2, devices=2, epochs=8)
    )


def test_a_resume_completes_a_record_of_several_host_calls(tmp_path: Path) -> None:
    class Late(Recorder):
        takes_steps_late = True

    keys = {"log_every_steps": 10, "device_iterations": 2, "checkpoint__every_steps": 6, "checkpoint__keep": 9}
    straight, resumed = Late(), Late()
    train(built(**keys), Folder(tmp_path / "straight"), [straight])
    middle = listed(Folder(tmp_path / "straight"))[0]
    train(built(**keys), Folder(tmp_path / "resumed"), [resumed], resume_from=middle)
    records = [[(e.step, e.loss) for e in seen.events["step"] if e.logged] for seen in (straight, resumed)]
    assert middle.step == 6 and records[0] == records[1] and records[0][0][0] == 10


LOADERS: Dict[str, Dict[str, Any]] = {
    "sync": {},
    "sync-workers": {"loader__workers": 2},
    "async": {"loader__mode": "async"},
    "async-workers": {"loader__mode": "async", "loader__workers": 2},
    "rebatched": {"loader__mode": "async_rebatched", "loader__rebatched_worker_size": 3},
    "rebatched-workers": {"loader__mode": "async_rebatched", "loader__workers": 2},
}
OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "momentum": {
        "_target_": "poptorch.optim.SGD",
        "lr": 0.1,
        "momentum": 0.9,
        "groups": [{"match": "*.bias", "lr": 0.01}],
    },
    "combined": {"_target_": "poptorch.optim.SGD", "lr": 0.1, "momentum": 0.9, "use_combined_accum": True},
    "Adam": {"accum_type": "float16", "loss_scaling": 8.0},
    "AdamW": {"weight_decay": 0.1, "max_grad_norm": 1.0},
    "LAMB": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "torch.optim.SGD": {"lr": 0.1, "momentum": 0.9},
    "torch.optim.Adam": {},
    "torch.optim.AdamW": {},
    "torch.optim.RMSprop": {"momentum": 0.5},
}
PRECISIONS: Dict[str, Dict[str, Any]] = {
    "32": {},
    "16.16": {"precision": "16.16"},
    "16.16-stochastic": {"precision": "16.16", "stochastic_rounding": True},
    "16.32": {"precision": "16.32"},
}
STRATEGIES: Dict[str, Dict[str, Any]] = {
    "one": {},
    "replicas": {"devices": 2},
    "accumulation": {"gradient_accumulation": 2},
    "iterations": {"device_iterations": 2},
    "pipeline": {"devices": 2, "pipeline__split": ["second"], "gradient_accumulation": 4, "micro_batch_size": 1},
    "sharded": {"devices": 2, "pipeline__split": ["second"], "pipeline__strategy": "sharded"},
    "all": {"devices": 2, "gradient_accumulation": 2, "device_iterations": 2, "micro_batch_size": 1},
}


def _combinations() -> List[Tuple[str, str, str, str]]:
    """Return every optimizer with every precision, and every loader, with the other choices in turn."""
    optimizers, precisions, strategies = (itertools.cycle(names) for names in (OPTIMIZERS, PRECISIONS, STRATEGIES))
    pairs = itertools.product(OPTIMIZERS, PRECISIONS)
    return [("sync", optimizer, precision, next(strategies)) for optimizer, precision in pairs] + [
        (loader, next(optimizers), next(precisions), next(strategies)) for loader in LOADERS
    ]


@pytest.mark.parametrize(("loader", "optimizer", "precision", "strategy"), _combinations())
def test_resume_is_exact(tmp_path: Path, loader: str, optimizer: str, precision: str, strategy: str) -> None:
    target = optimizer if "." in optimizer else f"poptorch.optim.{optimizer}"
    _assert_equal_runs(
        *_straight_and_resumed(
            tmp_path,
            stop_at=3,
            model={"_target_": "run_toys.Net", "dropout": 0.5},
            data={"_target_": "run_toys.EpochPoints", "shift": 0.1, "_eval_": {"length": 8}},
            optimizer={"_target_": target, "lr": 0.01, **OPTIMIZERS[optimizer]},
            **LOADERS[loader],
            **PRECISIONS[precision],
            **STRATEGIES[strategy],
        )
    )


def test_resume_is_exact_with_dropout_augmentation_and_device_iterations(tmp_path: Path) -> None:
    _assert_equal_runs(
        *_straight_and_resumed(
            tmp_path,
            stop_at=3,
            model={"_target_": "run_toys.Net", "dropout": 0.5},
            data={
                "_target_": "run_toys.Points",
                "jitter": 0.3,
                "_eval_": {"length": 10, "offset": 1000, "jitter": 0.0},
            },
            optimizer=ADAM,
            schedule=COSINE,
            micro_batch_size=1,
            device_iterations=2,
            gradient_accumulation=2,
            devices=2,
        )
    )


def test_resume_is_exact_with_momentum_and_batchnorm(tmp_path: Path) -> None:
    _assert_equal_runs(*_straight_and_resumed(tmp_path, 5, model={"_target_": "run_toys.NormNet"}))


@pytest.mark.parametrize("loader", ["sync", "sync-workers", "async", "rebatched-workers"])
@pytest.mark.parametrize("data", ["run_toys.Stream", "run_toys.ShuffledStream"])
def test_resume_is_exact_for_a_stream(tmp_path: Path, data: str, loader: str) -> None:
    straight, straight_seen, resumed, seen = _straight_and_resumed(
        tmp_path, 11, data={"_target_": data}, optimizer=ADAM, **LOADERS[loader]
    )
    assert seen.losses == straight_seen.losses
    for name, value in resumed.user_model.state_dict().items():
        assert torch.equal(value, straight.user_model.state_dict()[name]), name


def test_an_evaluation_that_was_put_off_does_not_change_training(tmp_path: Path) -> None:
    """Reading this data draws random numbers, in training and in evaluation."""
    data = {"_target_": "run_toys.Points", "jitter": 0.3, "_eval_": {"length": 8}}
    _assert_equal_runs(*_straight_and_resumed(tmp_path, 8, data=data))


def test_resume_is_exact_with_a_random_sampler(tmp_path: Path) -> None:
    sampler = {"_target_": "torch.utils.data.WeightedRandomSampler", "weights": [1.0] * 32, "num_samples": 24}
    _assert_equal_runs(*_straight_and_resumed(tmp_path, 8, loader__sampler=sampler))


def test_resume_is_exact_with_a_batch_sampler(tmp_path: Path) -> None:
    sampler = {"_target_": "torch.utils.data.BatchSampler"}
    _assert_equal_runs(*_straight_and_resumed(tmp_path, 3, loader__batch_sampler=sampler, devices=2))


def test_skipped_samples_are_not_loaded(tmp_path: Path) -> None:
    straight, _, resumed, _ = _straight_and_resumed(tmp_path, 11)
    loaded = straight.train_loader._data.loaded
    # Inspection reads the first sample of either run.
    assert resumed.train_loader._data.loaded[1:] == loaded[45:65]


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    train(built(epochs=1), folder, [])
    seen = Recorder()
    summary = train(built(epochs=1), folder, [seen], resume_from=latest(folder))
    assert summary.status == "done" and summary.step == 8
    assert "step" not in seen.events and [c.step for c in listed(folder)] == [8]


def test_a_finished_run_resumes_with_more_epochs(tmp_path: Path) -> None:
    folder, straight = Folder(tmp_path / "parts"), Recorder()
    train(built(epochs=2), Folder(tmp_path / "whole"), [straight])
    seen = Recorder()
    train(built(epochs=1), folder, [seen])
    summary = train(built(epochs=2), folder, [seen], resume_from=latest(folder))
    assert seen.losses == straight.losses and summary.epoch == 2


def test_first_ctrl_c_saves_and_says_how_to_resume(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    seen = Recorder()
    summary = train(built(), folder, [seen, _PressCtrlC(3)])
    assert summary.status == "interrupted" and summary.step == 3
    assert latest(folder).step == 3
    assert summary.resume_command == f"ipurun train resume={tmp_path}"
    assert seen.events["end"] == [summary]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_save_like_ctrl_c(tmp_path: Path, how: int) -> None:
    summary = train(built(), Folder(tmp_path), [_PressCtrlC(3, how=how)])
    assert summary.status == "interrupted" and latest(tmp_path / "checkpoints").step == 3


def test_under_nohup_a_lost_connection_is_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        summary = train(built(epochs=1), Folder(tmp_path), [_PressCtrlC(3, how=signal.SIGHUP)])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert summary.status == "done"


def test_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(built(), folder, [_PressCtrlC(3, times=2)])
    assert latest(folder) is None


def test_an_interrupted_evaluation_is_done_on_resume(tmp_path: Path) -> None:
    """Ctrl-C in the last step: the evaluation at the end waits for the resume."""
    folder = Folder(tmp_path)
    summary = train(built(epochs=1), folder, [_PressCtrlC(8)])
    assert summary.status == "interrupted" and summary.step == 8 and summary.metrics == {}
    seen = Recorder()
    summary = train(built(epochs=1), folder, [seen], resume_from=latest(folder))
    assert summary.status == "done" and set(summary.metrics) == {"loss", "accuracy"}
    assert "step" not in seen.events and [event.step for event in seen.events["eval"]] == [8]


def test_resume_with_host_calls_of_another_size(tmp_path: Path) -> None:
    folder, seen = Folder(tmp_path), Recorder()
    train(built(), folder, [_PressCtrlC(6)])
    resumed = built(device_iterations=2)
    summary = train(resumed, folder, [seen], resume_from=latest(folder))
    assert summary.step == 16 and summary.epoch == 2
    assert any("samples per host call changed" in note.text for note in seen.events["note"])
    assert sorted(resumed.train_loader._data.loaded[9:]) == list(range(32))


def test_ctrl_c_while_workers_load_still_saves(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the workers as well; they must survive it."""
    root = Path(__file__).resolve().parents[2]
    code = """
import os, signal, sys
from pathlib import Path
from run_harness import Folder, built
from ipurun.training.events import Observer
from ipurun.training.loop import train

class Press(Observer):
    def on_step(self, event):
        if event.call == 3:
            os.killpg(0, signal.SIGINT)

if __name__ == "__main__":
    os.setpgrp()
    summary = train(built(loader__workers=2), Folder(Path(sys.argv[1])), [Press()])
    print(summary.status, summary.step)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["interrupted", "3"], done.stderr
    assert latest(tmp_path / "run" / "checkpoints").step == 3


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(built(epochs=1), Folder(tmp_path), [])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    train(built(epochs=1), folder, [])
    other = built(model={"_target_": "run_toys.Net", "width": 5})
    with pytest.raises(ConfigError, match="does not fit the model"):
        train(other, folder, [], resume_from=latest(folder))


def test_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    train(built(epochs=1), folder, [])
    groups = {**ADAM, "groups": [{"match": "*.bias", "weight_decay": 0.1}]}
    with pytest.raises(ConfigError, match="does not fit the optimizer"):
        train(built(optimizer=groups), folder, [], resume_from=latest(folder))


def test_a_new_learning_rate_is_used_after_a_resume(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    train(built(epochs=1), folder, [])
    before = load(latest(folder))["model"]
    frozen = built(optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.0, "momentum": 0.9})
    train(frozen, folder, [], resume_from=latest(folder))
    for name, value in frozen.user_model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_summary_is_json_ready(tmp_path: Path) -> None:
    import json

    summary: Summary = train(built(epochs=1), Folder(tmp_path), [])
    assert json.loads(json.dumps(summary.to_dict()))["status"] == "done"
