"""Accuracy of estimates for published runs, fitted to and not. Run it with ``make bench-planner``.

Every row of tests/estimate/published.json is planned as `ipurun plan` does; it takes some minutes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Dict, List, Sequence

sys.path.insert(0, str(Path(__file__).parents[1] / "estimate"))

from held_out import (
    Planned,
    all_planned,
    inference_rows,
    machine,
    pairs_of_pods,
    placed,
    placed_inference,
    plan,
    plan_inference,
    rank_correlation,
)
from published_runs import bert_base, bert_demo, gpt2_small, measurements, resnet50

from ipurun.config.compose import one
from ipurun.estimate.calibration import leave_one_out, ratio
from ipurun.estimate.stages import single_ipu
from ipurun.estimate.timing import class_of_seconds, compile_seconds, estimate_time
from ipurun.estimate.types import Settings, Verdict
from ipurun.inspect.trace import trace_model

FACTOR = 1.5
# Seconds of published cold compiles. Of BERT-large (PopART, 8 IPUs), the cold start less the mean of the warm ones.
COMPILED = {
    "small CNN, 1 IPU": (23, 39),
    "BERT demo": (98, 98),
    "ResNet-50, 32 x 32": (228, 242),
    "ResNet-50": (377, 430),
    "BERT-base": (501, 501),
    "BERT-large, 4 IPUs": (684, 684),
    "BERT-large, 8 IPUs": (1180, 1423),
    "GPT-2 small": (1684, 1684),
}


def main() -> None:
    _print_fit()
    found = all_planned()
    print(f"{'run':<34} {'verdict':<13} {'fullest':>7} {'published':>10} {'estimated':>10} {'ratio':>6}")
    for item in found:
        print(_line(item))
    compared = [item for item in found if item.is_compared]
    ratios = [item.ratio for item in compared]
    logarithms = [math.log(ratio) for ratio in ratios]
    print(f"\nright about fit        {sum(item.is_right_about_fit for item in found)} of {len(found)}")
    print(f"within {FACTOR} of published {sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)} of {len(ratios)}")
    print(f"mean ratio             {math.exp(sum(logarithms) / len(logarithms)):.2f} (geometric)")
    print(f"mean error             {math.exp(sum(map(abs, logarithms)) / len(logarithms)):.2f}")
    _print_families(found, compared)
    speeds = [item.estimate.time.samples_per_second for item in compared]
    print(f"rank correlation       {rank_correlation([item.published for item in compared], speeds):.3f}")
    _print_range("Bow over GC200", [_chips(item) for item in compared])
    _print_inference()
    _print_compile_times()
    scaling = pairs_of_pods(found)
    print("\nfour times the IPUs             published  estimated")
    for name, (published, estimated) in scaling.items():
        print(f"  {name:<30} {published:8.2f} {estimated:10.2f}")


def _print_fit() -> None:
    """Print the runs that constants were fitted to, and the accumulation curve of one of them."""
    own = machine("GC200")
    left_out = leave_one_out(measurements(), own)
    print("fitted to                          measured  estimated  ratio  left out")
    for row in measurements():
        found = ratio(row, own)
        speed = row.samples_per_second
        print(f"  {row.name:<30} {speed:10,.0f} {found * speed:10,.0f} {found:6.2f} {left_out[row.name]:8.2f}")
    errors = {row.name: abs(math.log(left_out[row.name])) for row in measurements()}
    families: Dict[str, List[float]] = {}
    for row in measurements():
        families.setdefault(row.family, []).append(errors[row.name])
    by_family = [sum(values) / len(values) for values in families.values()]
    overall = math.exp(sum(errors.values()) / len(errors))
    print(f"mean error left out: {overall:.2f}, of models {math.exp(sum(by_family) / len(by_family)):.2f}")
    speeds = {
        number: estimate_time(row.traced, row.layout, row.settings, own).samples_per_second
        for number in (16, 32, 64, 128, 512, 4096)
        for row in [gpt2_small(number, 1.0)]
    }
    curve = ", ".join(f"{number} {speed / speeds[4096]:.2f}" for number, speed in speeds.items())
    print(f"GPT-2 small by accumulation, of the highest: {curve}\n")


def _line(item: Planned) -> str:
    fullest = max(ipu.share for ipu in item.estimate.ipus)
    verdict = item.estimate.verdict.value + ("" if item.is_right_about_fit else " (!)")
    line = f"{item.row['id']:<34} {verdict:<13} {fullest:7.2f}"
    if math.isnan(item.ratio):
        return line
    speed = item.estimate.time.samples_per_second
    note = "" if item.is_compared else "  end to end"
    return f"{line} {item.published:10,.0f} {speed:10,.0f} {item.ratio:6.2f}{note}"


def _print_families(found: Sequence[Planned], compared: Sequence[Planned]) -> None:
    """Print the verdicts of each family, and whether the errors of the others would have covered it."""
    print("\nfamily        right verdicts  of them tight  error of the others  rows within it")
    for family in dict.fromkeys(item.row["model"]["kind"] for item in found):
        own = [item for item in found if item.row["model"]["kind"] == family]
        right = [item for item in own if item.is_right_about_fit]
        tight = sum(item.estimate.verdict is Verdict.TIGHT for item in right)
        errors = [_error(item) for item in compared if item.row["model"]["kind"] != family]
        mine = [_error(item) for item in compared if item.row["model"]["kind"] == family]
        bar = max(errors, default=math.nan)
        covered = f"{sum(error <= bar for error in mine)} of {len(mine)}" if mine else "-"
        print(f"  {family:<12} {len(right):>6} of {len(own):<4} {tight:>11} {bar:>20.2f} {covered:>15}")
    within = sum(_error(item) <= item.estimate.time.error for item in compared)
    print(f"within the error bar that is shown: {within} of {len(compared)}\n")


def _print_inference() -> None:
    print("\ninference of one IPU (PopRT)       verdict       fullest  published  estimated  ratio")
    for row in inference_rows():
        print(_line(plan_inference(row)))


def _print_compile_times() -> None:
    traced = trace_model(one(["+recipe=fashion_mnist", "micro_batch_size=16"]).config)
    words = ["+recipe=resnet", "model=resnet50", "model.norm=batch", "model.image_size=32", "micro_batch_size=8"]
    small = trace_model(one(words).config)
    models = {
        "small CNN, 1 IPU": (traced, single_ipu(traced), Settings(micro_batch_size=16)),
        "ResNet-50, 32 x 32": (small, single_ipu(small), Settings(micro_batch_size=8)),
        "BERT-large, 4 IPUs": placed("bert.large_128_pod64"),
        "BERT-large, 8 IPUs": placed("bert.squad_large_384"),
    }
    fitted = {
        "BERT demo": bert_demo(),
        "ResNet-50": resnet50(),
        "BERT-base": bert_base(),
        "GPT-2 small": gpt2_small(64, 1.0),
    }
    models.update({name: (row.traced, row.layout, row.settings) for name, row in fitted.items()})
    print("\ncompile                   published  estimated  classes")
    compiled = dict(COMPILED)
    for row in inference_rows():
        compiled[row["id"]] = (row["measured"]["compile_seconds"],) * 2
        models[row["id"]] = placed_inference(row["id"])
    for name, (low, high) in compiled.items():
        seconds = compile_seconds(*models[name], machine("GC200"))
        classes = " | ".join(dict.fromkeys(class_of_seconds(value) for value in (low, high, seconds)))
        print(f"  {name:<20} {low:>7}-{high:<6} {seconds:8.0f} s  {classes}")


def _error(item: Planned) -> float:
    return max(item.ratio, 1 / item.ratio)


def _chips(item: Planned) -> float:
    speeds: Dict[str, float] = {
        chip: plan(item.row, chip=chip).estimate.time.samples_per_second for chip in ("Bow", "GC200")
    }
    return speeds["Bow"] / speeds["GC200"]


def _print_range(name: str, values: Sequence[float]) -> None:
    ordered: List[float] = sorted(values)
    print(f"{name:<22} {ordered[0]:.2f} to {ordered[-1]:.2f}, median {ordered[len(ordered) // 2]:.2f}")


if __name__ == "__main__":
    main()
