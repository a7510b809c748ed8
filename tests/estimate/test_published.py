"""Estimates of published runs: throughput, scaling, memory of a compiled model, and the fitted constants."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Dict

import pytest
from published_runs import (
    ADAM,
    BOW_HZ,
    GC200_HZ,
    GPT2_SMALL,
    HALF,
    bert_base,
    bert_demo,
    gpt2_small,
    measurements,
    resnet50,
    vit_base,
)

from ipurun.config.compose import one
from ipurun.estimate.calibration import FREE, Measurement, calibrate, leave_one_out, ratio
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine, machine_from
from ipurun.estimate.stages import layout_of_blocks, single_ipu
from ipurun.estimate.types import Estimate, Settings, Verdict
from ipurun.inspect.trace import trace_model

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "planner.md"


def machine(kind: str = "gc200") -> Machine:
    return machine_from(dataclasses.asdict(one(["+recipe=mnist", f"machine={kind}"]).config.machine))


def estimated(row: Measurement, clock_hz: float, **changes: object) -> Estimate:
    settings = dataclasses.replace(row.settings, **changes)
    return estimate(row.traced, row.layout, settings, dataclasses.replace(machine(), clock_hz=clock_hz))


@pytest.mark.parametrize("index", range(8))
def test_published_throughput_is_within_a_factor_of_1_25(index: int) -> None:
    row = measurements()[index]
    assert 1 / 1.25 < ratio(row, machine()) < 1.25, row.name


@pytest.mark.parametrize("index", range(8))
def test_published_configs_fit(index: int) -> None:
    row = measurements()[index]
    found = estimated(row, row.clock_hz)
    assert found.verdict in (Verdict.FITS, Verdict.TIGHT), [ipu.share for ipu in found.ipus]


def test_throughput_of_gpt2_small_grows_with_accumulation_as_published() -> None:
    """CARAML's table, as shares of its highest throughput; 32 and 128 were not part of the fit."""
    published = {16: 0.33, 32: 0.50, 64: 0.67, 128: 0.80, 512: 0.94}
    row = gpt2_small(4096, GPT2_SMALL[4096])
    highest = estimated(row, GC200_HZ).time.samples_per_second
    for accumulation, share in published.items():
        found = estimated(row, GC200_HZ, gradient_accumulation=accumulation).time.samples_per_second
        assert found / highest == pytest.approx(share, abs=0.015), accumulation


def test_a_weight_update_of_gpt2_small_has_a_fixed_cost_and_one_per_micro_batch() -> None:
    seconds = {
        accumulation: estimated(gpt2_small(accumulation, measured), GC200_HZ).time.total
        for accumulation, measured in GPT2_SMALL.items()
    }
    per_micro_batch = (seconds[4096] - seconds[16]) / (4096 - 16)
    fixed = seconds[16] - 16 * per_micro_batch
    assert per_micro_batch == pytest.approx(5.1e-3, rel=0.1)
    assert fixed == pytest.approx(0.16, rel=0.1)


@pytest.mark.parametrize("make", [bert_base, resnet50, vit_base])
def test_bow_is_a_third_faster_where_the_device_is_the_limit(make: object) -> None:
    row = make()  # type: ignore[operator]
    faster = estimated(row, BOW_HZ).time
    slower = estimated(row, GC200_HZ).time
    assert not faster.host_bound
    assert 1.3 <= faster.samples_per_second / slower.samples_per_second <= 1.4


@pytest.mark.parametrize(("make", "replicas"), [(resnet50, 16), (vit_base, 4), (bert_base, 4)])
def test_pod64_is_nearly_four_times_a_pod16(make: object, replicas: int) -> None:
    row = make()  # type: ignore[operator]
    small = estimated(row, row.clock_hz, replicas=replicas).time.samples_per_second
    large = estimated(row, row.clock_hz, replicas=4 * replicas, hosts=4).time.samples_per_second
    assert 3.6 <= large / small <= 4


def test_memory_of_a_compiled_tiny_bert() -> None:
    """Popliner's profile: 103.1 MB on one IPU, 62.6 MB of it code, 106,267 bytes on the fullest tile."""
    model = bert_demo().traced
    settings = Settings(gradient_accumulation=16, **HALF, **{**ADAM, "state_on_chip": True})
    (ipu,) = estimate(model, single_ipu(model), settings, machine()).ipus
    assert ipu.total == pytest.approx(103_077_866, rel=0.2)
    assert ipu.code == pytest.approx(62_643_519, rel=0.2)
    assert ipu.fullest / 1472 == pytest.approx(106_267, rel=0.2)


def test_memory_and_the_fullest_tile_of_bert_large_in_inference() -> None:
    """Popliner's split of BERT-large over two IPUs, and the one IPU it was made of."""
    words = ["+recipe=bert", "model=bert_large", "model.sequence_length=128", "precision=16.16", "micro_batch_size=1"]
    traced = trace_model(one(words).config, training=False)
    settings = Settings(training=False, **HALF)
    (alone,) = estimate(traced, single_ipu(traced), settings, machine()).ipus
    assert alone.weights + alone.temporary + alone.io == pytest.approx(718_514_294, rel=0.05)
    assert alone.code == pytest.approx(63_152_872, rel=0.05)  # vertices, their state and exchange
    layout = layout_of_blocks(traced, [("embeddings", 0), ("encoder.layer.12", 1), ("pooler", 0), ("predictions", 0)])
    halves = estimate(traced, layout, settings, machine()).ipus
    for half, total, fullest in zip(halves, (470.8e6, 403.2e6), (336_670, 291_170)):
        assert half.total == pytest.approx(total, rel=0.05)
        assert half.fullest / 1472 == pytest.approx(fullest, rel=0.06)


def test_shipped_constants_are_those_of_the_fit() -> None:
    shipped = machine()
    fitted = calibrate(measurements(), shipped)
    for name in FREE:
        assert getattr(fitted, name) == pytest.approx(getattr(shipped, name), rel=0.1), name


def test_the_docs_state_the_leave_one_out_error() -> None:
    found: Dict[str, float] = leave_one_out(measurements(), machine())
    stated = _stated_ratios()
    assert set(stated) == set(found)
    for name, value in found.items():
        assert stated[name] == pytest.approx(value, rel=0.1), name
    assert math.exp(sum(abs(math.log(value)) for value in found.values()) / len(found)) < 1.25


def test_bow_differs_from_gc200_in_name_and_clock_only() -> None:
    bow = machine("bow")
    assert dataclasses.replace(bow, name="GC200", clock_hz=GC200_HZ) == machine()
    assert bow.peak_flops(2) == pytest.approx(348.6e12, rel=0.01)


def _stated_ratios() -> Dict[str, float]:
    """Return the leave-one-out column of the table in the docs, by run."""
    table = DOCS.read_text(encoding="utf-8").split("| Left out |\n|---|---|---|---|---|\n", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {cells[0]: float(cells[4]) for cells in rows}
