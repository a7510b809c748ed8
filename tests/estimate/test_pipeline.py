"""Timelines of pipelines, counted on paper."""

from __future__ import annotations

from typing import Set, Tuple

import pytest
from estimate_toys import chain

from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.pipeline import gantt, timeline_of
from ipurun.estimate.stages import layout_of_cuts, single_ipu
from ipurun.estimate.types import EstimatedModel, Settings, StageLayout


def _estimated(layout: StageLayout, settings: Settings) -> EstimatedModel:
    traced = chain(len(layout.stage_of_op))
    return EstimatedModel(traced, layout, settings, Machine(), estimate(traced, layout, settings, Machine()))


def test_a_training_pipeline_fills_and_drains_for_two_cycles_per_stage() -> None:
    layout, settings = layout_of_cuts(chain(4), [1, 2, 3]), Settings(gradient_accumulation=16)
    timeline = timeline_of(_estimated(layout, settings))
    assert (timeline.fill, timeline.steady, timeline.drain) == (6, 10, 6)
    assert timeline.cycles == 16 + 2 * 3
    assert timeline.bubble == pytest.approx(6 / 22)


def test_an_inference_pipeline_has_no_backward_pass() -> None:
    layout, settings = layout_of_cuts(chain(4), [1, 2, 3]), Settings(device_iterations=8, training=False)
    timeline = timeline_of(_estimated(layout, settings))
    assert timeline.cycles == 8 + 3
    assert timeline.steady == 5


def test_one_stage_has_no_bubble() -> None:
    layout, settings = single_ipu(chain(4)), Settings(gradient_accumulation=4)
    timeline = timeline_of(_estimated(layout, settings))
    assert (timeline.bubble, timeline.idle, timeline.cycles) == (0.0, 0.0, 4)


def test_ipus_that_work_in_turn_idle_for_the_others() -> None:
    layout, settings = layout_of_cuts(chain(4), [1, 2, 3]), Settings(gradient_accumulation=4, strategy="sharded")
    timeline = timeline_of(_estimated(layout, settings))
    assert timeline.bubble == 0.0
    assert timeline.idle == pytest.approx(3 / 4)


def test_the_chart_has_every_pass_of_every_micro_batch_once() -> None:
    layout, settings = layout_of_cuts(chain(3), [1, 2]), Settings(gradient_accumulation=6)
    bars = gantt(_estimated(layout, settings), most_cycles=100)
    done: Set[Tuple[str, int, int]] = {(bar.kind, bar.stage, bar.micro_batch) for bar in bars}
    assert len(bars) == len(done) == 2 * 3 * 6


@pytest.mark.parametrize("strategy", ["pipelined", "sharded"])
def test_the_chart_respects_the_order_of_the_passes(strategy: str) -> None:
    layout = layout_of_cuts(chain(3), [1, 2], ipus=[0, 1, 0])  # the last stage runs on IPU 0 again
    settings = Settings(gradient_accumulation=6, strategy=strategy)
    bars = gantt(_estimated(layout, settings))
    begins = {(bar.kind, bar.stage, bar.micro_batch): bar.start for bar in bars}
    for batch in range(3):
        path = [("forward", 0), ("forward", 1), ("forward", 2), ("backward", 2), ("backward", 1), ("backward", 0)]
        times = [begins[(kind, stage, batch)] for kind, stage in path if (kind, stage, batch) in begins]
        assert times == sorted(times) and len(set(times)) == len(times)
    for ipu in (0, 1):
        own = sorted((bar.start, bar.start + bar.seconds) for bar in bars if bar.ipu == ipu)
        assert all(before[1] <= after[0] + 1e-12 for before, after in zip(own, own[1:]))
