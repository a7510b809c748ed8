"""Tables, bars and files of estimates."""

from __future__ import annotations

import dataclasses
from typing import Any, List

import pytest
import yaml

from ipurun.estimate.advice import PlanEstimate, Remedy
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.search import Search, Solution
from ipurun.estimate.stages import layout_of_cuts
from ipurun.estimate.types import EstimatedModel, IpuMemory, Settings, Verdict
from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter
from ipurun.log.estimate_text import (
    bar,
    change_text,
    estimate_dict,
    estimate_lines,
    inference_lines,
    quiet_text,
    solution_lines,
    solution_yaml,
)
from ipurun.planning.artifacts import CacheState

MISS = CacheState("miss")


def toy_estimate(**changes: Any) -> PlanEstimate:
    """Estimate two layers on two IPUs."""
    ops = tuple(
        TracedOp(
            index,
            "mm",
            f"layer.{index}",
            "matmul",
            flops_forward=1e6,
            output_bytes=1000,
            saved_bytes=1000,
            parameters=(f"layer.{index}.weight",),
            inputs=tuple(range(index)),
            dims=(1, 64, 32, 32, 1),
            gradients=2,
            signature="mm",
        )
        for index in range(2)
    )
    parameters = tuple(TracedParameter(f"layer.{index}.weight", 1024, 2, True, (index,)) for index in range(2))
    traced = TracedModel(ops, parameters, 0, 100, 4, 1)
    layout, settings, machine = layout_of_cuts(traced, [1]), Settings(gradient_accumulation=8), Machine()
    found = estimate(traced, layout, settings, machine)
    model = EstimatedModel(traced, layout, settings, machine, found)
    return PlanEstimate(model, changes.pop("inference", None), Search(traced, machine), **changes)


def test_more_ipus_than_links_connect_show_their_domains() -> None:
    small = toy_estimate()
    assert not any("domains" in line for line in estimate_lines(small, MISS))
    model = small.training
    settings = dataclasses.replace(model.settings, replicas=128)
    found = estimate(model.traced, model.layout, settings, model.machine)
    large = dataclasses.replace(small, training=dataclasses.replace(model, settings=settings, estimate=found))
    (line,) = [line for line in estimate_lines(large, MISS) if "domains" in line]
    assert "4 domains of 64 IPUs" in line
    assert 0 < found.time.gateways < found.time.all_reduce


def with_memory(plan_estimate: PlanEstimate, *ipus: IpuMemory) -> PlanEstimate:
    """Return the same estimate with other memory."""
    verdicts = tuple(Verdict.DOES_NOT_FIT if ipu.share > 1 else Verdict.FITS for ipu in ipus)
    overall = Verdict.DOES_NOT_FIT if Verdict.DOES_NOT_FIT in verdicts else Verdict.FITS
    found = dataclasses.replace(plan_estimate.estimate, ipus=ipus, verdicts=verdicts, verdict=overall)
    return dataclasses.replace(plan_estimate, training=dataclasses.replace(plan_estimate.training, estimate=found))


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.0, "[........]"), (0.5, "[####....]"), (1.0, "[########]"), (1.3, "[#######>]"), (90.0, "[#######>]")],
)
def test_a_bar_is_full_at_the_limit(share: float, shown: str) -> None:
    assert bar(share, width=8) == shown


def test_the_reason_why_poptorch_would_refuse_follows_the_verdict() -> None:
    plan_estimate = toy_estimate()
    traced = dataclasses.replace(plan_estimate.training.traced, refused="value read back (net.py:3)")
    refused = dataclasses.replace(plan_estimate, training=dataclasses.replace(plan_estimate.training, traced=traced))
    assert estimate_lines(refused, MISS)[1:3] == [
        "  but PopTorch would refuse the model; it was traced past the reason:",
        "  value read back (net.py:3)",
    ]
    assert estimate_dict(refused, MISS)["refused"] == "value read back (net.py:3)"
    assert estimate_dict(plan_estimate, MISS)["refused"] is None and estimate_lines(plan_estimate, MISS)[1] == ""


def test_the_table_shows_every_part_against_the_limit() -> None:
    mib = 1 << 20
    sizes = [100, 50, 200, 60, 70, 3, 17]
    names = ["weights", "gradients", "optimizer_state", "activations", "temporary", "io", "code"]
    parts = {name: size * mib for name, size in zip(names, sizes)}
    fits = IpuMemory(ipu=0, limit=1000 * mib, **parts)
    full = dataclasses.replace(fits, ipu=1, temporary=1070 * mib)
    lines = estimate_lines(with_memory(toy_estimate(), fits, full), MISS)
    assert lines[0] == "estimate for GC200: does not fit: IPU 1"
    (first,) = [line.split() for line in lines if line.startswith("    0 ")]
    assert first[1:8] == [str(size) for size in sizes]
    assert first[9] == "500" and "50%" in first and first[-1] == "fits"
    (second,) = [line for line in lines if line.startswith("    1 ")]
    assert second.endswith(">] 150% does not fit")


def test_the_pipeline_is_shown() -> None:
    text = "\n".join(estimate_lines(toy_estimate(), MISS))
    assert "2 stages: fill 2, steady 6, drain 2 cycles" in text
    assert "bubble 20%" in text  # 2 of 10 cycles


@pytest.mark.parametrize(
    ("cache", "shown"),
    [
        (CacheState("off"), "off: compiles at every start"),
        (CacheState("miss"), "miss: nothing was compiled under this name"),
        (CacheState("hit", 3, "miss"), "training hit, inference miss, of 3 executables of this name (CPU engine)"),
        (CacheState("unknown", 1, why="only PopART can tell"), "1 executable of this name; only PopART can tell"),
    ],
)
def test_the_cache_is_shown(cache: CacheState, shown: str) -> None:
    assert f"  cache      {shown}" in estimate_lines(toy_estimate(), cache)


def inference_of(plan_estimate: PlanEstimate) -> EstimatedModel:
    own = plan_estimate.training
    settings = dataclasses.replace(own.settings, training=False, gradient_accumulation=1, device_iterations=4)
    found = estimate(own.traced, own.layout, settings, own.machine)
    return dataclasses.replace(own, settings=settings, estimate=found)


def test_inference_is_one_line_and_a_separate_table() -> None:
    plan_estimate = toy_estimate()
    plan_estimate = dataclasses.replace(plan_estimate, inference=inference_of(plan_estimate))
    (line,) = [line for line in estimate_lines(plan_estimate, MISS) if line.startswith("  inference  ")]
    assert line.startswith("  inference  fits, fullest IPU ") and "samples/s" in line and "(estimate" in line
    text = "\n".join(inference_lines(plan_estimate))
    # 4 batches through 2 stages: one more cycle than batches, without a backward pass.
    assert "2 stages: fill 1, steady 3, drain 1 cycles" in text and "bubble 20%" in text
    assert "one batch" in text and "optimizer" not in text and "to write" in text
    document = estimate_dict(plan_estimate, MISS)["inference"]
    assert [ipu["activations"] + ipu["gradients"] + ipu["optimizer_state"] for ipu in document["ipus"]] == [0, 0]
    assert document["time"]["all_reduce"] == 0 and document["schedule"]["cycles"] == 5


def test_a_host_that_limits_throughput_is_part_of_the_sum() -> None:
    plan_estimate = toy_estimate()
    time = dataclasses.replace(plan_estimate.estimate.time, host_input=2.0, total=2.004, host=0.004, host_bound=True)
    found = dataclasses.replace(plan_estimate.estimate, time=time)
    text = "\n".join(
        estimate_lines(
            dataclasses.replace(plan_estimate, training=dataclasses.replace(plan_estimate.training, estimate=found)),
            MISS,
        )
    )
    assert "one update 2 s = host I/O 2 s (beside compute " in text and ") + host 4 ms (estimate)" in text


def test_ipus_with_the_same_work_share_a_line() -> None:
    plan_estimate = toy_estimate()
    one = plan_estimate.estimate.time.ipus[0]
    for numbers, shown in (((0, 1, 2), ["IPU 0-2"]), ((0,), ["IPU  0"])):
        time = dataclasses.replace(
            plan_estimate.estimate.time, ipus=tuple(dataclasses.replace(one, ipu=number) for number in numbers)
        )
        found = dataclasses.replace(plan_estimate.estimate, time=time)
        lines = estimate_lines(
            dataclasses.replace(plan_estimate, training=dataclasses.replace(plan_estimate.training, estimate=found)),
            MISS,
        )
        assert [line.strip()[:7].strip() for line in lines if "recomputed" in line] == shown


def test_remedies_can_be_copied_into_a_shell() -> None:
    remedy = Remedy("another split", ("pipeline.split=[a,b]", "devices=4"), Verdict.FITS, 12 << 20, 1.5, 10.0, 0.4)
    lines: List[str] = estimate_lines(toy_estimate(remedies=(remedy,)), MISS)
    assert lines[-1].strip() == "'pipeline.split=[a,b]' devices=4"
    assert "-12 MiB on the fullest IPU (40%), 1.50x the speed, fits" in lines[-2]


def test_quiet_text_shows_the_reason_of_the_exit_code() -> None:
    plan_estimate = toy_estimate()
    large = dataclasses.replace(plan_estimate.estimate, verdict=Verdict.DOES_NOT_FIT)
    assert "inference" not in quiet_text(dataclasses.replace(plan_estimate, inference=plan_estimate.training))
    text = quiet_text(
        dataclasses.replace(plan_estimate, inference=dataclasses.replace(plan_estimate.training, estimate=large))
    )
    assert text.startswith(quiet_text(plan_estimate)) and "; inference: does not fit" in text


def test_json_holds_plain_values() -> None:
    import json

    document = json.loads(json.dumps(estimate_dict(toy_estimate(), MISS)))
    assert document["is_estimate"] is True
    assert [ipu["ipu"] for ipu in document["ipus"]] == [0, 1]
    assert document["schedule"]["cycles"] == 10


def _solution(*overrides: str) -> Solution:
    training = toy_estimate().training
    return Solution(training.settings, training.layout, None, overrides, training.estimate)


def test_inference_that_does_not_fit_well_is_shown_with_a_solution() -> None:
    solution = _solution("devices=4")
    tight = dataclasses.replace(solution.estimate, verdict=Verdict.TIGHT)
    (line,) = [line for line in solution_lines([dataclasses.replace(solution, inference=tight)]) if "1. " in line]
    assert "fits, fullest IPU" in line and "; inference: tight, fullest IPU" in line
    (plain,) = [
        line for line in solution_lines([dataclasses.replace(solution, inference=solution.estimate)]) if "1. " in line
    ]
    assert "inference" not in plain


def test_a_solution_is_valid_yaml() -> None:
    solution = _solution("devices=4", "pipeline.split=[h.1,h.2]", "pipeline.blocks={lm_head: 0}", "optimizer.lr=0.1")
    text = solution_yaml(solution, ["+recipe=gpt"])
    assert text.startswith("# @package _global_\n")
    assert yaml.safe_load(text) == {
        "devices": 4,
        "pipeline": {"split": ["h.1", "h.2"], "blocks": {"lm_head": 0}},
        "optimizer": {"lr": 0.1},
    }


def test_no_solution_says_so() -> None:
    assert solution_lines([])[0].startswith("solve: no combination")
    assert "  'pipeline.split=[a]'" in solution_lines([_solution("pipeline.split=[a]")])


def test_a_faster_tight_config_is_shown_besides_those_that_fit() -> None:
    fits = [_solution(f"micro_batch_size={size}") for size in (1, 2, 3)]
    time = fits[0].estimate.time
    faster = dataclasses.replace(time, samples_per_second=2 * time.samples_per_second)
    tight = dataclasses.replace(fits[0].estimate, verdict=Verdict.TIGHT, time=faster)
    lines = solution_lines([*fits, dataclasses.replace(_solution("micro_batch_size=9"), estimate=tight)])
    shown = next(index for index, line in enumerate(lines) if line.startswith("  faster, if it fits: "))
    assert "tight" in lines[shown] and lines[shown + 1] == "    micro_batch_size=9"
    assert lines[-1] == "  micro_batch_size=1"


def test_the_config_itself_may_be_the_best() -> None:
    lines = solution_lines([_solution()])
    assert "(the config itself)" in lines[1] and lines[-1].startswith("nothing to type")


def test_words_are_not_broken_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = Remedy("another split", ("pipeline.split=[a,b]",), Verdict.FITS, 12 << 20, 1.5, 10.0, 0.4)
    plan_estimate = toy_estimate(remedies=(remedy,))
    wide = estimate_lines(plan_estimate, MISS)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = estimate_lines(plan_estimate, MISS)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert set(" ".join(narrow).split()) == set(" ".join(wide).split())


def test_a_change_that_saves_nothing_has_no_sign() -> None:
    assert [change_text(size) for size in (-(3 << 20), 10, -10, 3 << 20)] == ["+3 MiB", "0 MiB", "0 MiB", "-3 MiB"]
