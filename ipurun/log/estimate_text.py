"""What the planner expects, as text and as JSON. Every figure is an estimate, and says so."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from ipurun.estimate.advice import PlanEstimate, Remedy, Situation
from ipurun.estimate.pipeline import PipelineTimeline, timeline_of
from ipurun.estimate.search import Needs, Solution
from ipurun.estimate.types import Estimate, IpuMemory, Verdict
from ipurun.log.format import WIDE, columns, count, fitted, plural
from ipurun.planning.artifacts import CacheState

__all__ = [
    "bar",
    "change_text",
    "count_short",
    "explain_lines",
    "inference_lines",
    "estimate_dict",
    "estimate_lines",
    "quiet_text",
    "solution_dict",
    "solution_lines",
    "solution_yaml",
]

_MIB = 1 << 20
_BAR = 24
_HEADINGS = ("weights", "gradients", "state", "activations", "temporary", "I/O", "code", "uneven", "total")
_MOST_REMEDIES = 6


def bar(share: float, width: int = _BAR) -> str:
    """A bar that is full at 1; ``>`` at its end where it is over."""
    filled = min(width, round(share * width))
    return "[" + "#" * (filled if share <= 1 else width - 1) + ("." * (width - filled) if share <= 1 else ">") + "]"


def estimate_lines(outlook: PlanEstimate, cache: CacheState) -> List[str]:
    """Memory by IPU, balance, schedule, speed, and what would help."""
    situation, found = outlook.situation, outlook.estimate
    lines = [f"estimate for {situation.machine.name}: {_verdict_text(found)}", *_refused_lines(situation)]
    lines += ["", *_tables(found)]
    rows = _rows(situation, outlook.schedule)
    if outlook.inference is not None:
        rows.append(("inference", _inference_text(outlook.inference)))
    rows.append(("cache", _cache_text(cache)))
    lines += ["", *_row_lines(rows)]
    if outlook.needs is not None:
        lines += ["", "what it would take (estimate)", *_needs_lines(outlook.needs, outlook)]
    return lines + _remedy_lines(outlook.remedies, found)


def _refused_lines(situation: Situation) -> List[str]:
    if not situation.profile.refused:
        return []
    return [
        "  but PopTorch would refuse to train the model; it was traced in evaluation mode, and this is why:",
        f"  {situation.profile.refused}",
    ]


def inference_lines(outlook: PlanEstimate) -> List[str]:
    """The same tables for evaluation and prediction."""
    situation = outlook.inference
    if situation is None:
        return ["", "no estimate of inference: the model cannot be traced in eval mode"]
    schedule = timeline_of(situation.layout, situation.settings, situation.estimate.time)
    rows = _rows(situation, schedule)
    found = situation.estimate
    lines = ["", f"inference on {situation.machine.name}: {_verdict_text(found)} (estimate)", "", *_tables(found), ""]
    return lines + _row_lines(rows)


def _row_lines(rows: Iterable[Tuple[str, str]]) -> List[str]:
    return fitted((f"  {label:<11}{text}" for label, text in rows), indent=13)


def _tables(found: Estimate) -> List[str]:
    lines = _memory_table(found)
    if found.streaming:
        lines.append(f"  streaming memory: {_gib(found.streaming)} of {_gib(found.streaming_limit)} (estimate)")
    return [*lines, "", "work of each IPU on one micro-batch (estimate)", *_balance(found)]


def _rows(situation: Situation, schedule: PipelineTimeline) -> List[Tuple[str, str]]:
    settings, time = situation.settings, situation.estimate.time
    parts = [f"compute {_ms(time.compute)}"]
    if settings.training:
        parts += [f"all-reduce {_ms(time.all_reduce)}", f"optimizer {_ms(time.update)}"]
    if time.host_input > time.compute + time.all_reduce + time.update:
        parts = [f"host I/O {_ms(time.host_input)} (beside {', '.join(parts)})"]
    parts.append(f"host {_ms(time.host)}")
    speed = f"{count_short(time.samples_per_second)} samples/s, {time.flops_share:.1%} of peak (estimate)"
    return [
        ("throughput", speed),
        ("one update" if settings.training else "one batch", f"{_ms(time.total)} = {' + '.join(parts)} (estimate)"),
        ("schedule", _schedule_text(situation, schedule)),
        ("", f"bubble {schedule.bubble:.0%}; IPUs idle {schedule.idle:.0%} of the time, waiting included (estimate)"),
        ("host I/O", _host_text(situation)),
        ("links", f"{_mib_text(time.link_bytes)} between IPUs per micro-batch (estimate)"),
    ]


def _inference_text(situation: Situation) -> str:
    found = situation.estimate
    fullest, speed = max(ipu.share for ipu in found.ipus), count_short(found.time.samples_per_second)
    bound = ", host-bound" if found.time.host_bound else ""
    return f"{_verdict_text(found)}, fullest IPU {fullest:,.0%}, {speed} samples/s{bound} (estimate; more: --inference)"


def explain_lines(outlook: PlanEstimate) -> List[str]:
    """What the estimate takes for granted."""
    lines = ["", "assumptions"]
    return lines + [f"  - {item.topic}: {item.text}" for item in outlook.estimate.assumptions]


def estimate_dict(outlook: PlanEstimate, cache: CacheState) -> Dict[str, Any]:
    """All of it as JSON-ready data; everything below is an estimate."""
    return {
        "is_estimate": True,
        "machine": outlook.situation.machine.name,
        **_situation_dict(outlook.situation),
        "inference": None if outlook.inference is None else _situation_dict(outlook.inference),
        "cache": asdict(cache),
        "remedies": [{**asdict(item), "verdict": item.verdict.value} for item in outlook.remedies],
        "needs": None if outlook.needs is None else asdict(outlook.needs),
        "assumptions": [asdict(item) for item in outlook.estimate.assumptions],
    }


def _situation_dict(situation: Situation) -> Dict[str, Any]:
    found = situation.estimate
    schedule = timeline_of(situation.layout, situation.settings, found.time)
    return {
        "verdict": found.verdict.value,
        "refused": situation.profile.refused or None,
        "ipus": [
            {**asdict(ipu), "total": ipu.total, "fullest": ipu.fullest, "share": ipu.share, "verdict": verdict.value}
            for ipu, verdict in zip(found.ipus, found.verdicts)
        ],
        "streaming_bytes": found.streaming,
        "streaming_limit_bytes": found.streaming_limit,
        "time": asdict(found.time),
        "schedule": {**asdict(schedule), "cycles": schedule.cycles},
    }


def quiet_text(outlook: PlanEstimate) -> str:
    """The estimate in a few words."""
    told = f"estimate: {_short_text(outlook.estimate)}"
    if outlook.inference is not None and outlook.verdict is not outlook.estimate.verdict:
        told += f"; inference: {_short_text(outlook.inference.estimate)}"
    return told


def _short_text(found: Estimate) -> str:
    fullest, speed = max(ipu.share for ipu in found.ipus), count_short(found.time.samples_per_second)
    return f"{found.verdict.value}, fullest IPU {fullest:,.0%}, {speed} samples/s"


def count_short(number: float) -> str:
    """A throughput: whole where it is large."""
    return count(number) if number >= 100 else f"{number:.3g}"


def _verdict_text(found: Estimate) -> str:
    names = [f"IPU {ipu.ipu}" for ipu, verdict in zip(found.ipus, found.verdicts) if verdict is found.verdict]
    if found.verdict is Verdict.FITS:
        return "fits"
    if not names:
        return "does not fit: streaming memory"
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{found.verdict.value}: {shown}"


def _memory_table(found: Estimate) -> List[str]:
    limit = found.ipus[0].limit if found.ipus else 0
    lines = [f"memory of each IPU in MiB, of {limit // _MIB:,} (estimate)"]
    rows = [_cells(ipu) for ipu in found.ipus]
    widths = [max(len(text), *(len(row[column]) for row in rows)) for column, text in enumerate(_HEADINGS)]
    bars = [f"{bar(ipu.share)} {ipu.share:,.0%} {verdict.value}" for ipu, verdict in zip(found.ipus, found.verdicts)]
    is_wide = columns() >= WIDE
    gap = "  " if is_wide else " "
    lines.append("  IPU" + "".join(f"{gap}{text:>{width}}" for text, width in zip(_HEADINGS, widths)))
    for ipu, row, drawn in zip(found.ipus, rows, bars):
        cells = "".join(f"{gap}{text:>{width}}" for text, width in zip(row, widths))
        lines.append(f"  {ipu.ipu:>3}{cells}" + (f"  {drawn}" if is_wide else ""))
    if not is_wide:  # beside the numbers they would be broken
        lines += ["", *(f"  IPU {ipu.ipu:>2}  {drawn}" for ipu, drawn in zip(found.ipus, bars))]
    return lines


def _cells(ipu: IpuMemory) -> List[str]:
    return [_mib(size) for size in (*ipu.parts().values(), ipu.imbalance, ipu.fullest)]


def _balance(found: Estimate) -> List[str]:
    longest = max((ipu.total for ipu in found.time.ipus), default=0.0) or 1.0
    groups: List[Tuple[str, List[int]]] = []
    for ipu in found.time.ipus:
        text = (
            f"{bar(ipu.total / longest)} {_ms(ipu.total)}: forward {_ms(ipu.forward)}, "
            f"recomputed {_ms(ipu.recompute)}, backward {_ms(ipu.backward)}, links {_ms(ipu.links)}"
        )
        if ipu.streaming:
            text += f", streaming memory {_ms(ipu.streaming)}"
        if groups and groups[-1][0] == text:
            groups[-1][1].append(ipu.ipu)
        else:
            groups.append((text, [ipu.ipu]))
    names = [str(ipus[0]) if len(ipus) == 1 else f"{ipus[0]}-{ipus[-1]}" for _, ipus in groups]
    width = max(2, *map(len, names))
    return fitted((f"  IPU {name:>{width}}  {text}" for name, (text, _) in zip(names, groups)), indent=8 + width)


def _schedule_text(situation: Situation, schedule: PipelineTimeline) -> str:
    settings = situation.settings
    if schedule.stages == 1:
        strategy = f" ({settings.strategy}, in turn)" if situation.layout.num_ipus > 1 else ""
        what = "accumulation" if settings.training else "batches of a host call:"
        return f"no pipeline{strategy}: {what} {schedule.micro_batches} of {settings.micro_batch_size} samples"
    cycle = situation.estimate.time.cycle
    if not settings.training:  # there it is the time of a batch, filling and draining shared out
        cycle *= schedule.micro_batches / schedule.cycles
    return (
        f"{schedule.stages} stages: fill {schedule.fill}, steady {schedule.steady}, drain {schedule.drain} cycles "
        f"of {_ms(cycle)} (estimate)"
    )


def _host_text(situation: Situation) -> str:
    profile, time = situation.profile, situation.estimate.time
    moved = f"{time.host_bytes_per_second / 1e6:,.1f} MB/s to read"
    if not situation.settings.training:
        written = profile.output_bytes / profile.micro_batch_size * time.samples_per_second
        moved += f", {written / 1e6:,.1f} MB/s to write"
    return f"{moved}; {'host-bound' if time.host_bound else 'not host-bound'} (estimate)"


def _cache_text(cache: CacheState) -> str:
    if cache.training == "off":
        return "off: compiles at every start"
    if not cache.executables:
        return "miss: nothing was compiled under this name"
    there = f"{plural(cache.executables, 'executable')} of this name"
    if cache.training == "unknown":
        return f"{there}; {cache.why}"
    return f"training {cache.training}, inference {cache.inference}, of {there} (CPU engine)"


def _needs_lines(needs: Needs, outlook: PlanEstimate) -> List[str]:
    memory = outlook.situation.machine.memory_bytes
    devices = outlook.situation.layout.num_ipus * outlook.situation.settings.replicas
    lines = [
        f"  parameters of one replica take {_gib(needs.parameter_bytes)} on chip and {_gib(needs.streaming_bytes)} "
        f"in streaming memory: {needs.least_ipus:,} IPUs",
        f"  for what is on chip alone; {plural(devices, 'IPU')} hold {_gib(devices * memory)}",
    ]
    if needs.largest is not None:
        module, size = needs.largest
        lines.append(
            f"  {module} takes {_mib(size)} MiB and cannot be cut between modules: no split fits {_mib(memory)} MiB; "
            "narrower layers, or memory.serialize, or a model that shares it out itself"
        )
    elif needs.ipus is not None:
        lines.append(f"  a split over {needs.ipus:,} IPUs by replica fits, with micro-batch 1")
    else:
        lines.append(f"  no split over up to {needs.tried:,} IPUs by replica fits, with micro-batch 1")
    if needs.overrides:
        lines.append(f"  supposed: {shlex.join(needs.overrides)}")
    return lines


def _remedy_lines(remedies: Sequence[Remedy], found: Estimate) -> List[str]:
    if not remedies:
        return []
    title = "what would make it faster" if found.verdict is Verdict.FITS else "what would help it fit"
    lines = ["", f"{title} (each tried by the planner; estimates)"]
    for number, remedy in enumerate(remedies[:_MOST_REMEDIES], start=1):
        told = (
            f"  {number}. {remedy.title}: {change_text(remedy.saved_bytes)} on the fullest IPU "
            f"({remedy.fullest_share:,.0%}), {remedy.speed:.2f}x the speed, {remedy.verdict.value}"
        )
        lines += fitted([told], indent=5)
        lines.append("     " + shlex.join(remedy.overrides))
    return lines


def change_text(saved_bytes: float) -> str:
    """Memory that a change saves (-) or takes (+)."""
    size = _mib(abs(saved_bytes))
    return f"{'' if size == '0' else '-' if saved_bytes > 0 else '+'}{size} MiB"


def _mib(size: float) -> str:
    return f"{size / _MIB:,.0f}"


def _mib_text(size: float) -> str:
    return f"{size / _MIB:,.1f} MiB"


def _gib(size: float) -> str:
    return f"{size / (1 << 30):,.1f} GiB"


def _ms(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-5 else "0 ms"


def solution_lines(solutions: Sequence[Solution], most: int = 3) -> List[str]:
    """The configs that a search found, the best one with all that is to be typed."""
    if not solutions:
        return ["solve: no split, micro-batch, accumulation and replication was found that fits (estimate)"]
    lines = ["solve: found by trying splits, micro-batches, accumulation and replication (estimate)"]
    lines += [f"  {number}. {_line(solution)}" for number, solution in enumerate(solutions[:most], start=1)]
    quickest = max(solutions, key=lambda solution: solution.estimate.time.samples_per_second)
    if quickest not in solutions[:most]:
        lines += [f"  quicker, if it fits: {_line(quickest)}"]
        lines += [f"    {shlex.quote(word)}" for word in quickest.overrides]
    if not solutions[0].overrides:
        return [*lines, "", "nothing to type: the config is the best of them as it is"]
    return [*lines, "", "type", *(f"  {shlex.quote(word)}" for word in solutions[0].overrides)]


def _line(solution: Solution) -> str:
    settings, found = solution.settings, solution.estimate
    own = "" if solution.overrides else " (the config as it is)"
    return (
        f"{plural(settings.replicas, 'replica')} x {plural(solution.ipus, 'IPU')}, "
        f"micro-batch {settings.micro_batch_size} x accumulation {settings.gradient_accumulation}: "
        f"{found.verdict.value}, fullest IPU {max(ipu.share for ipu in found.ipus):.0%}, "
        f"{count_short(found.time.samples_per_second)} samples/s{own}"
    )


def solution_yaml(solution: Solution, recipe_words: Sequence[str]) -> str:
    """A config file of a solution, to be used as ``+recipe=FILE`` or copied from.

    Args:
        solution: What was found.
        recipe_words: The command line that it was solved for, for the comment at its top.
    """
    lines = ["# @package _global_", f"# Solved by `ipurun plan --solve {' '.join(recipe_words)}`; an estimate."]
    nested: Dict[str, Any] = {}
    for word in solution.overrides:
        key, _, value = word.partition("=")
        *path, last = key.split(".")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return "\n".join(lines + _yaml(nested, 0)) + "\n"


def solution_dict(solution: Solution) -> Dict[str, Any]:
    """A solution as JSON-ready data."""
    return {
        "is_estimate": True,
        "overrides": list(solution.overrides),
        "verdict": solution.estimate.verdict.value,
        "ipus_per_replica": solution.ipus,
        "replicas": solution.settings.replicas,
        "micro_batch_size": solution.settings.micro_batch_size,
        "gradient_accumulation": solution.settings.gradient_accumulation,
        "samples_per_second": solution.estimate.time.samples_per_second,
        "fullest_share": max(ipu.share for ipu in solution.estimate.ipus),
    }


def _yaml(values: Dict[str, Any], depth: int) -> List[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{key}:", *_yaml(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {value}")
    return lines
