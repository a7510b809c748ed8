"""Schedules, parameter groups, clipping and label smoothing in a run, against the same in plain torch."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import pytest
import torch
from run_harness import Folder, Recorder, built, trained
from run_toys import Net, NormNet, Points
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from ipurun import emulator as poptorch
from ipurun.checkpoint import latest, listed, load
from ipurun.errors import ConfigError, RunError
from ipurun.inspect.loss import SmoothedCrossEntropy
from ipurun.training.loop import train

SCHEDULERS = "torch.optim.lr_scheduler."
ONE_CYCLE = {"_target_": SCHEDULERS + "OneCycleLR", "max_lr": 0.1}
SEQUENCE = {
    "_target_": SCHEDULERS + "SequentialLR",
    "milestones": [4],
    "schedulers": [
        {"_target_": SCHEDULERS + "LinearLR", "total_iters": 4},
        {"_target_": SCHEDULERS + "CosineAnnealingLR"},
    ],
}
CHAIN = {
    "_target_": SCHEDULERS + "ChainedScheduler",
    "schedulers": [
        {"_target_": SCHEDULERS + "LinearLR", "total_iters": 4},
        {"_target_": SCHEDULERS + "ExponentialLR", "gamma": 0.9},
    ],
}
UPDATES = 16  # 2 epochs of 32 points in micro-batches of 4


def _sequence(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, UPDATES - 4)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def _chain(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def _plain_torch(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_scheduler: Optional[Callable[[Any], Any]] = None,
    batch: int = 4,
    every: int = 1,
    smoothing: float = 0.0,
    max_norm: Optional[float] = None,
) -> Dict[str, torch.Tensor]:
    """Train in the order of the data; the scheduler advances after every so many updates, by as many steps."""
    points, optimizer = Points(32), make_optimizer(model)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    for update in range(2 * 32 // batch):
        place = update * batch % 32
        optimizer.zero_grad()
        output = model(points.x[place : place + batch])
        functional.cross_entropy(output, points.y[place : place + batch], label_smoothing=smoothing).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        for _ in range(every if scheduler is not None and (update + 1) % every == 0 else 0):
            scheduler.step()
    return model.state_dict()


def _initial(run: Any) -> nn.Module:
    return copy.deepcopy(run.user_model)


def _trained(run: Any, folder: Path) -> Dict[str, torch.Tensor]:
    train(run, Folder(folder), [])
    return run.user_model.state_dict()


def _assert_close(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-6, msg=name)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("device_iterations", [1, 4])
@pytest.mark.parametrize(
    ("schedule", "plain"),
    [
        (ONE_CYCLE, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=UPDATES)),
        (SEQUENCE, _sequence),
        (CHAIN, _chain),
    ],
    ids=["one_cycle", "sequence", "chain"],
)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_schedules_equal_plain_torch(
    tmp_path: Path, name: str, schedule: Any, plain: Callable[[Any], Any], device_iterations: int
) -> None:
    node = {"_target_": f"poptorch.optim.{name}", "lr": 0.02}
    run = built(
        optimizer=node,
        schedule=schedule,
        loader__shuffle=False,
        device_iterations=device_iterations,
        eval__at_end=False,
    )
    expected = _plain_torch(
        _initial(run),
        lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.02),
        plain,
        every=device_iterations,
    )
    _assert_close(_trained(run, tmp_path), expected)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("schedule", [ONE_CYCLE, SEQUENCE, CHAIN], ids=["one_cycle", "sequence", "chain"])
def test_schedules_resume_exactly_over_replicas(tmp_path: Path, schedule: Any) -> None:
    changes: Dict[str, Any] = {
        "optimizer": {"_target_": "poptorch.optim.Adam", "lr": 0.02},
        "schedule": schedule,
        "devices": 2,
        "device_iterations": 2,
        "epochs": 6,
    }
    straight = _trained(built(**changes), tmp_path / "straight")
    folder, stopped = Folder(tmp_path / "resumed"), built(**changes)
    stopped.train_loader.epoch = _failing_after(stopped.train_loader.epoch, 5)  # type: ignore[method-assign]
    with pytest.raises(RunError, match="stop"):
        train(stopped, folder, [])
    resumed = built(**changes)
    train(resumed, folder, [Recorder()], resume_from=latest(folder))
    for name, value in resumed.user_model.state_dict().items():
        assert torch.equal(value, straight[name]), name


def _failing_after(epochs: Any, calls: int) -> Any:
    left = iter(range(calls))

    def epoch() -> Any:
        for batch in epochs():
            if next(left, None) is None:
                raise OSError("stop")
            yield batch

    return epoch


def test_torch_adam_cannot_cycle_beta1_and_a_constant_cannot_be_scheduled() -> None:
    with pytest.raises(ConfigError, match="changes beta1") as caught:
        built(optimizer={"_target_": "torch.optim.Adam", "lr": 0.1}, schedule=ONE_CYCLE)
    assert "poptorch.optim.Adam" in caught.value.problems[0].fix
    with pytest.raises(ConfigError, match="lists `momentum`, but `schedule` changes it"):
        built(optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.1, "constant": ["momentum"]}, schedule=ONE_CYCLE)


class DecaySchedule(lr_scheduler.LambdaLR):
    """A user's scheduler that also changes the weight decay."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 1.0)

    def step(self, epoch: Any = None) -> None:
        super().step()
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch


def test_a_users_scheduler_that_changes_a_constant_is_reported_with_what_to_set(tmp_path: Path) -> None:
    schedule = {"_target_": f"{__name__}.DecaySchedule"}
    node = {"_target_": "poptorch.optim.SGD", "lr": 0.1}
    with pytest.raises(ConfigError, match="changes `weight_decay`") as caught:
        trained(tmp_path, optimizer=node, schedule=schedule)
    assert caught.value.problems[0].fix == "optimizer.variable=[weight_decay]"
    run, _, _ = trained(tmp_path, optimizer={**node, "variable": ["weight_decay"]}, schedule=schedule)
    assert run.optimizer.param_groups[0]["weight_decay"] == pytest.approx(1.6)


def test_no_decay_for_norms_and_biases_equals_plain_torch(tmp_path: Path) -> None:
    node = {"_target_": "poptorch.optim.AdamW", "lr": 0.02, "weight_decay": 0.5, "no_decay": "norms_and_biases"}
    run = built(model={"_target_": "run_toys.NormNet"}, optimizer=node, loader__shuffle=False)

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, NormNet)
        others = [*model.norm.parameters(), model.out.bias]
        groups = [{"params": [model.out.weight]}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.5)

    expected = _plain_torch(_initial(run).train(), plain)
    found = _trained(run, tmp_path)
    _assert_close(found, {name: value for name, value in expected.items() if "num_batches" not in name})


def test_no_decay_divides_groups_but_not_those_with_their_own_decay() -> None:
    node: Dict[str, Any] = {
        "_target_": "poptorch.optim.SGD",
        "lr": 0.1,
        "weight_decay": 0.3,
        "no_decay": ["*.bias"],
        "groups": [{"match": "first", "lr": 0.5}, {"match": "second.bias", "weight_decay": 0.2}],
    }
    run = built(optimizer=node)
    names = {id(parameter): name for name, parameter in run.user_model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in run.optimizer.param_groups
        for parameter in group["params"]
    }
    assert found == {
        "first.weight": (0.5, 0.3),
        "first.bias": (0.5, 0.0),
        "second.weight": (0.1, 0.3),
        "second.bias": (0.1, 0.2),
    }
    with pytest.raises(ConfigError, match="no such parameter"):
        built(optimizer={**node, "no_decay": "*.gamma"})


def test_no_decay_without_decay_is_noted() -> None:
    node = {"_target_": "poptorch.optim.SGD", "lr": 0.1, "no_decay": "norms_and_biases"}
    assert any("no_decay has no effect" in note for note in built(optimizer=node).plan.notes)


@pytest.mark.parametrize("name", ["clip", "grad_clip", "clip_grad_norm", "gradient_clip_val", "max_norm"])
def test_names_of_clipping_lead_to_the_argument(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(optimizer={"_target_": "poptorch.optim.Adam", "lr": 0.1, name: 1.0})
    assert "max_grad_norm" in caught.value.problems[0].fix


def test_clipping_equals_clip_grad_norm(tmp_path: Path) -> None:
    node = {"_target_": "poptorch.optim.Adam", "lr": 0.02, "max_grad_norm": 0.05}
    run = built(optimizer=node, loader__shuffle=False, devices=2)
    expected = _plain_torch(
        _initial(run), lambda model: torch.optim.Adam(model.parameters(), lr=0.02), batch=8, max_norm=0.05
    )
    _assert_close(_trained(run, tmp_path), expected)


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "cross_entropy"])
def test_label_smoothing_equals_plain_torch(tmp_path: Path, name: str) -> None:
    run = built(
        optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.1},
        loss__name=name,
        loss__args={"label_smoothing": 0.2},
        loader__shuffle=False,
        device_iterations=2,
        gradient_accumulation=1,
    )
    expected = _plain_torch(_initial(run), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), smoothing=0.2)
    _assert_close(_trained(run, tmp_path), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3)])
def test_smoothed_cross_entropy_has_torchs_results(reduction: str, shape: Any) -> None:
    torch.manual_seed(1)
    scores, classes = torch.randn(shape), torch.randint(0, 5, (shape[0], *shape[2:]))
    classes[0] = 2
    shares = torch.softmax(torch.randn(shape), dim=1)
    arguments: Dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction}
    own = SmoothedCrossEntropy(ignore_index=2, **arguments)
    torch.testing.assert_close(
        own(scores, classes), functional.cross_entropy(scores, classes, ignore_index=2, **arguments)
    )
    expected = functional.cross_entropy(scores, shares, **arguments)
    torch.testing.assert_close(SmoothedCrossEntropy(**arguments)(scores, shares), expected)


class _OwnSmoothing(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.net = Net()
        self.smoothing = smoothing

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(x), y, label_smoothing=self.smoothing)


def test_the_emulator_ignores_label_smoothing_as_poptorch_does(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    smoothed, plain = _OwnSmoothing(0.5), _OwnSmoothing(0.0)
    plain.load_state_dict(smoothed.state_dict())
    batch = Points(4).x[:4], Points(4).y[:4]
    logger = logging.getLogger("poptorch")
    logger.addHandler(caplog.handler)
    try:
        found = [poptorch.inferenceModel(model)(*batch) for model in (smoothed, plain)]
    finally:
        logger.removeHandler(caplog.handler)
    assert torch.equal(found[0], found[1]) and "ignores label_smoothing=0.5" in caplog.text


def test_automatic_loss_scaling_follows_the_gradients_and_resumes_exactly(tmp_path: Path) -> None:
    changes: Dict[str, Any] = {
        "precision": "16.16",
        "loss_scaling": "auto",
        "optimizer": {"_target_": "poptorch.optim.SGD", "lr": 0.01, "accum_type": "float16", "loss_scaling": 2048.0},
        "gradient_accumulation": 2,
        "devices": 2,
        "epochs": 6,
        "checkpoint__every_steps": 1,
        "checkpoint__keep": 0,
    }
    folder, run = Folder(tmp_path), built(**changes)
    train(run, folder, [])
    factors = [float(load(saved)["optimizer"]["ipu_state"]["lossScaleUpdateFactor"]) for saved in listed(folder)]
    # It doubles until gradients come near the largest float16 number, and then halves.
    assert factors[:3] == [2.0, 4.0, 8.0] and min(factors[5:]) < max(factors)
    middle = listed(folder)[len(factors) // 2]
    resumed = built(**changes)
    train(resumed, Folder(tmp_path / "resumed"), [], resume_from=middle)
    expected = run.user_model.state_dict()
    for name, value in resumed.user_model.state_dict().items():
        assert torch.equal(value, expected[name]) and torch.isfinite(value).all(), name
