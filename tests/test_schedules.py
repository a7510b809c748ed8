"""Schedules: values against formulas, state across a stop, no changes to the engine's optimizer."""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, List

import pytest
import torch
from torch.optim import lr_scheduler

from ipurun.errors import ConfigError
from ipurun.inspect.optimizer import check_schedule, make_schedule
from ipurun.schedules import Schedule, constant, cosine, linear, polynomial, warm_restarts

SCHEDULERS = "torch.optim.lr_scheduler."


def _optimizer(lr: float = 0.4, groups: int = 1) -> torch.optim.Optimizer:
    parameters = [{"params": [torch.zeros(2, requires_grad=True)]} for _ in range(groups)]
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _rates(factory: Callable[[Any], Any], steps: int) -> List[float]:
    schedule = Schedule(_optimizer(), factory)
    rates = []
    for _ in range(steps):
        rates.append(schedule.lr)
        schedule.advance(1)
    return rates


def test_cosine() -> None:
    expected = [0.4 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert _rates(lambda o: cosine(o, 8), 8) == pytest.approx(expected)


def test_warmup_rises_linearly_to_the_full_rate() -> None:
    rates = _rates(lambda o: linear(o, total_steps=8, warmup_steps=3), 9)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.32, 0.24, 0.16, 0.08, 0.0])


def test_the_rate_ends_and_stays_at_the_final_factor() -> None:
    for curve in (cosine, linear):
        rates = _rates(lambda o, curve=curve: curve(o, 4, final_factor=0.25), 7)
        assert rates[4:] == pytest.approx([0.1] * 3)


def test_constant_with_warmup() -> None:
    assert _rates(lambda o: constant(o, warmup_steps=1), 4) == pytest.approx([0.2, 0.4, 0.4, 0.4])


def test_polynomial_equals_torchs() -> None:
    own = _rates(lambda o: polynomial(o, 8, power=3.0), 10)
    assert own == pytest.approx(_rates(lambda o: lr_scheduler.PolynomialLR(o, 8, power=3.0), 10))


@pytest.mark.parametrize(("cycles", "growth", "first"), [(3, 1.0, 7), (4, 2.0, 3), (1, 1.0, 21)])
def test_warm_restarts_equal_torchs(cycles: int, growth: float, first: int) -> None:
    total = sum(int(first * growth**number) for number in range(cycles))
    own = _rates(lambda o: warm_restarts(o, total, cycles=cycles, cycle_growth=growth), total)
    theirs = _rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, first, T_mult=int(growth)), total)
    assert own == pytest.approx(theirs)


def test_a_longer_run_follows_its_own_length_after_a_resume() -> None:
    node = {"_target_": SCHEDULERS + "OneCycleLR", "max_lr": 0.5}
    short = make_schedule(node, _optimizer(), total_updates=10)
    short.advance(10)
    longer = make_schedule(node, _optimizer(), total_updates=20)
    longer.load_state_dict(short.state_dict())
    straight = make_schedule(node, _optimizer(), total_updates=20)
    straight.advance(15)
    longer.advance(5)
    assert longer.lr == straight.lr


def test_parts_of_a_schedule_are_checked_and_get_their_lengths() -> None:
    parts = [{"_target_": SCHEDULERS + "LinearLR"}, {"_target_": SCHEDULERS + "CosineAnnealingLR"}]
    node = {"_target_": SCHEDULERS + "SequentialLR", "milestones": [10], "schedulers": parts}
    assert check_schedule(node) == []
    (problem,) = check_schedule({**node, "schedulers": [parts[0], {"_target_": SCHEDULERS + "StepLR"}]})
    assert problem.key == "schedule.schedulers.1" and "step_size" in problem.what


def test_no_schedule_changes_nothing() -> None:
    schedule = Schedule(_optimizer())
    assert schedule.advance(100) is False and schedule.lr == 0.4


@pytest.mark.parametrize(
    "factory",
    [
        lambda o: cosine(o, 20, warmup_steps=3),
        lambda o: lr_scheduler.StepLR(o, 3),
        lambda o: lr_scheduler.MultiStepLR(o, [2, 9]),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=30),
        lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, step_size_up=4),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_state_resumes_exactly(factory: Callable[[Any], Any], tmp_path: Any) -> None:
    straight = _rates(factory, 16)
    first = Schedule(_optimizer(), factory)
    for _ in range(7):
        first.advance(1)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    optimizer = _optimizer()
    second = Schedule(optimizer, factory)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        second.advance(1)
    assert rates == straight[7:]


def test_several_updates_at_once_equal_one_by_one() -> None:
    one = _rates(lambda o: lr_scheduler.ExponentialLR(o, 0.9), 9)
    schedule = Schedule(_optimizer(), lambda o: lr_scheduler.ExponentialLR(o, 0.9))
    schedule.advance(8)
    assert schedule.lr == one[8]


def test_groups_keep_their_ratios() -> None:
    optimizer = _optimizer(groups=2)
    optimizer.param_groups[1]["lr"] = 0.04
    schedule = Schedule(optimizer, lambda o: linear(o, 4))
    schedule.advance(2)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])


def test_momentum_is_cycled_too() -> None:
    optimizer = _optimizer()
    schedule = Schedule(optimizer, lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10))
    before = optimizer.param_groups[0]["momentum"]
    assert schedule.advance(2) is True
    assert optimizer.param_groups[0]["momentum"] != before


def test_the_engines_optimizer_is_not_patched_and_nothing_warns() -> None:
    optimizer = _optimizer()
    step = optimizer.step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = Schedule(optimizer, lambda o: lr_scheduler.StepLR(o, 3))
        schedule.advance(5)
    assert optimizer.step == step and len(optimizer.param_groups[0]["params"][0]) == 2


@pytest.mark.parametrize(
    ("node", "filled"),
    [
        ({"_target_": "ipurun.schedules.cosine"}, 40),
        ({"_target_": SCHEDULERS + "CosineAnnealingLR"}, 40),
        ({"_target_": SCHEDULERS + "CosineAnnealingLR", "T_max": 7}, 7),
    ],
)
def test_length_of_the_run_is_filled_in(node: Any, filled: int) -> None:
    assert check_schedule(node) == []
    schedule = make_schedule(node, _optimizer(), total_updates=40)
    schedule.advance(filled)
    assert schedule.lr == pytest.approx(0.0)


def test_a_length_is_required_if_the_data_has_none() -> None:
    with pytest.raises(ConfigError, match="max_steps"):
        make_schedule({"_target_": "ipurun.schedules.cosine"}, _optimizer(), total_updates=None)


def test_wrong_arguments_are_found_without_making_the_schedule() -> None:
    (problem,) = check_schedule({"_target_": "ipurun.schedules.cosine", "warmup_step": 3})
    assert "warmup_step" in problem.what and problem.fix == "schedule.warmup_steps=3"
    (problem,) = check_schedule({"_target_": SCHEDULERS + "StepLR"})
    assert "step_size" in problem.what
