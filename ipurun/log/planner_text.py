"""What the planner expects, as text and as JSON. Every figure is an estimate, and says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipurun.log.format import count, plural
from ipurun.planner.needs import Needs
from ipurun.planner.outlook import Outlook
from ipurun.planner.remedies import Remedy
from ipurun.planner.solve import Solution
from ipurun.planner.types import Estimate, IpuMemory, Verdict

__all__ = [
    "bar",
    "count_short",
    "explain_lines",
    "outlook_dict",
    "outlook_lines",
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


def outlook_lines(outlook: Outlook) -> List[str]:
    """Memory by IPU, balance, schedule, speed, and what would help."""
    situation, found = outlook.situation, outlook.estimate
    settings = situation.settings
    name, peak = situation.machine.name, found.time.flops_share
    lines = [f"estimate for {name}: {_verdict_text(found)}", "", *_memory_table(found)]
    if found.streaming:
        lines.append(f"  streaming memory: {_gib(found.streaming)} of {_gib(found.streaming_limit)} (estimate)")
    lines += ["", "work of each IPU on one micro-batch (estimate)", *_balance(found)]
    time = found.time
    schedule = outlook.schedule
    parts = [
        f"compute {_ms(time.compute)}",
        f"all-reduce {_ms(time.all_reduce)}",
        f"optimizer {_ms(time.update)}",
        f"host {_ms(time.host)}",
    ]
    rows = [
        ("throughput", f"{count_short(time.samples_per_second)} samples/s, {peak:.1%} of peak (estimate)"),
        ("one update" if settings.training else "one batch", f"{_ms(time.total)} = {' + '.join(parts)} (estimate)"),
        ("schedule", _schedule_text(outlook)),
        ("", f"bubble {schedule.bubble:.0%}; IPUs idle {schedule.idle:.0%} of the time, waiting included (estimate)"),
        ("host I/O", _host_text(found)),
        ("links", f"{_mib_text(time.link_bytes)} between IPUs per micro-batch (estimate)"),
        ("cache", _cache_text(outlook.cached)),
    ]
    lines += ["", *(f"  {label:<11}{text}" for label, text in rows)]
    if outlook.needs is not None:
        lines += ["", "what it would take (estimate)", *_needs_lines(outlook.needs, outlook)]
    return lines + _remedy_lines(outlook.remedies, found)


def explain_lines(outlook: Outlook) -> List[str]:
    """What the estimate takes for granted."""
    lines = ["", "assumptions"]
    return lines + [f"  - {item.topic}: {item.text}" for item in outlook.estimate.assumptions]


def solution_lines(solutions: Sequence[Solution], most: int = 3) -> List[str]:
    """The configs that a search found, the best one with all that is to be typed."""
    if not solutions:
        return ["solve: no split, micro-batch, accumulation and replication was found that fits (estimate)"]
    lines = ["solve: found by trying splits, micro-batches, accumulation and replication (estimate)"]
    for number, solution in enumerate(solutions[:most], start=1):
        settings, found = solution.settings, solution.estimate
        lines.append(
            f"  {number}. {plural(settings.replicas, 'replica')} x {plural(solution.ipus, 'IPU')}, "
            f"micro-batch {settings.micro_batch_size} x accumulation {settings.gradient_accumulation}: "
            f"{found.verdict.value}, fullest IPU {max(ipu.share for ipu in found.ipus):.0%}, "
            f"{count_short(found.time.samples_per_second)} samples/s"
        )
    lines += ["", "type"] + [f"  {_quoted(word)}" for word in solutions[0].overrides]
    return lines


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


def outlook_dict(outlook: Outlook) -> Dict[str, Any]:
    """All of it as JSON-ready data; everything below is an estimate."""
    found, situation = outlook.estimate, outlook.situation
    return {
        "is_estimate": True,
        "machine": situation.machine.name,
        "verdict": found.verdict.value,
        "ipus": [
            {**asdict(ipu), "total": ipu.total, "fullest": ipu.fullest, "share": ipu.share, "verdict": verdict.value}
            for ipu, verdict in zip(found.ipus, found.verdicts)
        ],
        "streaming_bytes": found.streaming,
        "streaming_limit_bytes": found.streaming_limit,
        "time": asdict(found.time),
        "schedule": {**asdict(outlook.schedule), "cycles": outlook.schedule.cycles},
        "cached_executables": outlook.cached,
        "remedies": [{**asdict(item), "verdict": item.verdict.value} for item in outlook.remedies],
        "needs": None if outlook.needs is None else asdict(outlook.needs),
        "assumptions": [asdict(item) for item in found.assumptions],
    }


def quiet_text(outlook: Outlook) -> str:
    """The estimate in a few words."""
    fullest = max(ipu.share for ipu in outlook.estimate.ipus)
    speed = count_short(outlook.estimate.time.samples_per_second)
    return f"estimate: {outlook.estimate.verdict.value}, fullest IPU {fullest:,.0%}, {speed} samples/s"


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
    lines.append("  IPU  " + "  ".join(f"{text:>{width}}" for text, width in zip(_HEADINGS, widths)))
    for ipu, verdict, row in zip(found.ipus, found.verdicts, rows):
        cells = "  ".join(f"{text:>{width}}" for text, width in zip(row, widths))
        lines.append(f"  {ipu.ipu:>3}  {cells}  {bar(ipu.share)} {ipu.share:,.0%} {verdict.value}")
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
        if groups and groups[-1][0] == text:
            groups[-1][1].append(ipu.ipu)
        else:
            groups.append((text, [ipu.ipu]))
    names = [str(ipus[0]) if len(ipus) == 1 else f"{ipus[0]}-{ipus[-1]}" for _, ipus in groups]
    width = max(2, *map(len, names))
    return [f"  IPU {name:>{width}}  {text}" for name, (text, _) in zip(names, groups)]


def _schedule_text(outlook: Outlook) -> str:
    schedule, settings = outlook.schedule, outlook.situation.settings
    if schedule.stages == 1:
        strategy = f" ({settings.strategy}, in turn)" if outlook.situation.layout.num_ipus > 1 else ""
        return f"no pipeline{strategy}: accumulation {schedule.micro_batches} of {settings.micro_batch_size} samples"
    return (
        f"{schedule.stages} stages: fill {schedule.fill}, steady {schedule.steady}, drain {schedule.drain} cycles "
        f"of {_ms(outlook.estimate.time.cycle)} (estimate)"
    )


def _host_text(found: Estimate) -> str:
    bound = "host-bound" if found.time.host_bound else "not host-bound"
    return f"{found.time.host_bytes_per_second / 1e6:,.1f} MB/s to read; {bound} (estimate)"


def _cache_text(cached: Optional[int]) -> str:
    if cached is None:
        return "off: compiles at every start"
    if cached == 0:
        return "miss: nothing was compiled under this name"
    return f"{plural(cached, 'executable')} of this name: a hit unless the model or its options changed since"


def _needs_lines(needs: Needs, outlook: Outlook) -> List[str]:
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
        lines.append(f"  supposed: {' '.join(needs.overrides)}")
    return lines


def _remedy_lines(remedies: Sequence[Remedy], found: Estimate) -> List[str]:
    if not remedies:
        return []
    title = "what would make it faster" if found.verdict is Verdict.FITS else "what would help it fit"
    lines = ["", f"{title} (each tried by the planner; estimates)"]
    for number, remedy in enumerate(remedies[:_MOST_REMEDIES], start=1):
        change = f"{'-' if remedy.saved_bytes >= 0 else '+'}{_mib(abs(remedy.saved_bytes))} MiB on the fullest IPU"
        lines.append(
            f"  {number}. {remedy.title}: {change} ({remedy.fullest_share:,.0%}), "
            f"{remedy.speed:.2f}x the speed, {remedy.verdict.value}"
        )
        lines.append("     " + " ".join(_quoted(word) for word in remedy.overrides))
    return lines


def _quoted(word: str) -> str:
    return f"'{word}'" if any(sign in word for sign in "[]{} *?") else word


def _yaml(values: Dict[str, Any], depth: int) -> List[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{key}:", *_yaml(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {value}")
    return lines


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
