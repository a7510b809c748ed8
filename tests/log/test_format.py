from __future__ import annotations

import math
from typing import Optional

import pytest

from ipurun.log.format import batch_equation, count, devices_text, duration, metric, rate, value_text
from ipurun.planning.plan import BatchSizes, Devices


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (42.4, "42 s"),
        (59.7, "1:00"),
        (185, "3:05"),
        (3723, "1:02:03"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.96341, "0.9634"),
        (2.302585, "2.303"),
        (123.456, "123.5"),
        (0.0, "0.0000"),
        (1.5e-7, "1.500e-07"),
        (math.nan, "nan"),
        (7, "7"),
        (True, "True"),
    ],
)
def test_metrics_have_four_digits(value: float, text: str) -> None:
    assert metric(value) == text


def test_counts_are_grouped() -> None:
    assert count(51234.4) == "51,234"
    assert count(None) == "-"


def test_the_batch_equation_holds() -> None:
    text = batch_equation(BatchSizes(16, 8, 2, 4))
    assert text == ("micro-batch 16 x device_iterations 8 x accumulation 2 x replicas 4 = 1,024 samples per host call")


def test_replicas_that_share_input_count_once() -> None:
    text = batch_equation(BatchSizes(16, 1, 1, 4, input_group_size=2))
    assert "replicas 2 (groups of 2 share their input) = 32 samples" in text


def test_idle_ipus_are_shown() -> None:
    assert devices_text(Devices(4, 3, 1, 1), 3) == "4 IPUs = 1 replica x 3 IPUs, 3 stages (1 idle)"


def test_values_look_as_they_are_typed() -> None:
    assert value_text([1, None, True, {"a": "b"}]) == "[1,null,true,{a:b}]"


@pytest.mark.parametrize(
    ("speed", "text"), [(0.634, "0.63"), (9.94, "9.9"), (9.96, "10"), (1234.4, "1,234"), (None, "-")]
)
def test_a_slow_run_has_a_speed_with_digits(speed: Optional[float], text: str) -> None:
    assert rate(speed) == text
