"""Estimates and solutions as text and as JSON. Every figure is marked as an estimate."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import asdict, fields
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from ipurun.estimate.advice import PlanEstimate, Remedy
from ipurun.estimate.estimate import assumptions_of
from ipurun.estimate.pipeline import PipelineTimeline, timeline_of
from ipurun.estimate.search import MOST_SOLUTIONS, Requirements, Solution
from ipurun.estimate.timing import compile_class
from ipurun.estimate.types import Estimate, EstimatedModel, IpuMemory, Verdict
from ipurun.log.format import WIDE, columns, count, fitted, plural
from ipurun.planning.artifacts import CacheState

__all__ = [
    "bar",
    "change_text",
    "count_short",
    "estimate_dict",
    "estimate_lines",
    "explain_lines",
    "inference_lines",
    "quiet_text",
    "solution_dict",
    "solution_lines",
    "solution_yaml",
]

_MIB = 1 << 20
_BAR = 24
_LOADED_IN = 1e-4  # seconds that a sample may take to load, as an example
_WAITS = 0.05  # share of the time for which waiting is worth a word
_HEADINGS = ("weights", "gradients", "state", "activations", "temporary", "I/O", "code", "uneven", "total")


def bar(share: float, width: int = _BAR) -> str:
    """Draw a bar that is full at 1 and ends with ``>`` above it."""
    filled = min(width, round(share * width))
    return "[" + "#" * (filled if share <= 1 else width - 1) + ("." * (width - filled) if share <= 1 else ">") + "]"


def estimate_lines(plan_estimate: PlanEstimate, cache: CacheState) -> List[str]:
    """Return memory and work by IPU, throughput, pipeline, cache, and the changes that would help."""
    training, found = plan_estimate.training, plan_estimate.estimate
    lines = [f"estimate for {training.machine.name}: {_verdict_text(found)}"]
    if training.traced.refused:
        lines += [
            "  but PopTorch would refuse the model; it was traced past the reason:",
            f"  {training.traced.refused}",
        ]
    rows = _rows(training)
    if plan_estimate.inference is not None:
        rows.append(("inference", _inference_text(plan_estimate.inference)))
    rows.append(("cache", _cache_text(cache)))
    rows.append(("compile", f"{_compile_class(training)}, unless it is cached (estimate)"))
    lines += ["", *_tables(found), "", *_row_lines(rows)]
    if plan_estimate.requirements is not None:
        lines += ["", "what it would take (estimate)", *_requirement_lines(plan_estimate.requirements, training)]
    return lines + _remedy_lines(plan_estimate.remedies, found)


def inference_lines(plan_estimate: PlanEstimate) -> List[str]:
    """Return the same tables for evaluation and prediction."""
    inference = plan_estimate.inference
    if inference is None:
        return ["", "no estimate of inference: the model cannot be traced in eval mode"]
    found = inference.estimate
    title = f"inference on {inference.machine.name}: {_verdict_text(found)} (estimate)"
    return ["", title, "", *_tables(found), "", *_row_lines(_rows(inference))]


def _row_lines(rows: Iterable[Tuple[str, str]]) -> List[str]:
    return fitted((f"  {label:<11}{text}" for label, text in rows), indent=13)


def _tables(found: Estimate) -> List[str]:
    lines = _memory_table(found)
    if found.streaming:
        lines.append(f"  streaming memory: {_gib(found.streaming)} of {_gib(found.streaming_limit)} (estimate)")
    return [*lines, "", "work of each IPU on one micro-batch (estimate)", *_balance(found)]


def _rows(model: EstimatedModel) -> List[Tuple[str, str]]:
    settings, time = model.settings, model.estimate.time
    timeline = timeline_of(model)
    parts = [f"compute {_ms(time.compute)}"]
    if settings.training:
        parts += [f"all-reduce {_ms(time.all_reduce)}", f"optimizer {_ms(time.update)}"]
    if time.host_input > time.compute + time.all_reduce + time.update:
        parts = [f"host I/O {_ms(time.host_input)} (beside {', '.join(parts)})"]
    if time.loading:
        parts.append(f"loading {_ms(time.loading)}")
    parts.append(f"host {_ms(time.host)}")
    low, high = map(count_short, time.range)
    unmeasured = "" if settings.is_loading_known else ", since loading was not measured"
    speed = (
        f"{count_short(time.samples_per_second)} samples/s ({low} to {high}{unmeasured}), "
        f"{time.flops_share:.1%} of peak (estimate)"
    )
    return [
        ("throughput", speed),
        ("one update" if settings.training else "one batch", f"{_ms(time.total)} = {' + '.join(parts)} (estimate)"),
        ("schedule", _timeline_text(model, timeline)),
        ("", f"bubble {timeline.bubble:.0%}; IPUs idle {timeline.idle:.0%} of the time, waiting included (estimate)"),
        ("host I/O", _host_text(model)),
        ("links", f"{_mib_text(time.link_bytes)} between IPUs per micro-batch (estimate)"),
        *_domains_rows(model),
    ]


def _domains_rows(model: EstimatedModel) -> List[Tuple[str, str]]:
    """Tell how gradients are summed over more IPUs than IPU-Links connect."""
    machine, time = model.machine, model.estimate.time
    domains = machine.domains(model.num_ipus)
    if domains == 1 or not model.settings.training:
        return []
    text = f"{domains} domains of {machine.ipus_per_domain} IPUs joined by IPU-Links, gateways between them: gradients"
    return [("domains", f"{text} take {_ms(time.gateways)} of {_ms(time.all_reduce)} there (estimate)")]


def _inference_text(model: EstimatedModel) -> str:
    found = model.estimate
    fullest, speed = found.fullest.share, count_short(found.time.samples_per_second)
    bound = ", host-bound" if found.time.host_bound else ""
    return f"{_verdict_text(found)}, fullest IPU {fullest:,.0%}, {speed} samples/s{bound} (estimate; more: --inference)"


def explain_lines(plan_estimate: PlanEstimate) -> List[str]:
    """Return the assumptions of the estimate."""
    return ["", "assumptions", *(f"  - {topic}: {text}" for topic, text in assumptions_of(plan_estimate.training))]


def estimate_dict(plan_estimate: PlanEstimate, cache: CacheState) -> Dict[str, Any]:
    """Return all of it as JSON-ready data; every figure is an estimate."""
    needs = plan_estimate.requirements
    return {
        "is_estimate": True,
        "machine": plan_estimate.training.machine.name,
        **_model_dict(plan_estimate.training),
        "inference": None if plan_estimate.inference is None else _model_dict(plan_estimate.inference),
        "cache": asdict(cache),
        "compile": _compile_class(plan_estimate.training),
        "remedies": [{**asdict(item), "verdict": item.verdict.value} for item in plan_estimate.remedies],
        "needs": None if needs is None else _requirements_dict(needs),
        "assumptions": [{"topic": topic, "text": text} for topic, text in assumptions_of(plan_estimate.training)],
    }


def _requirements_dict(needs: Requirements) -> Dict[str, Any]:
    figures = {field.name: getattr(needs, field.name) for field in fields(needs) if field.name != "solution"}
    solution = None if needs.solution is None else solution_dict(needs.solution)
    return {**figures, "ipus": None if needs.solution is None else needs.solution.ipus, "solution": solution}


def _model_dict(model: EstimatedModel) -> Dict[str, Any]:
    found, timeline = model.estimate, timeline_of(model)
    return {
        "verdict": found.verdict.value,
        "refused": model.traced.refused or None,
        "ipus": [
            {**asdict(ipu), "total": ipu.total, "fullest": ipu.fullest, "share": ipu.share, "verdict": verdict.value}
            for ipu, verdict in zip(found.ipus, found.verdicts)
        ],
        "streaming_bytes": found.streaming,
        "streaming_limit_bytes": found.streaming_limit,
        "time": asdict(found.time),
        "schedule": {**asdict(timeline), "cycles": timeline.cycles},
    }


def quiet_text(plan_estimate: PlanEstimate) -> str:
    """Return the estimate in one line."""
    text = f"estimate: {_short_text(plan_estimate.estimate)}"
    if plan_estimate.inference is not None and plan_estimate.verdict is not plan_estimate.estimate.verdict:
        text += f"; inference: {_short_text(plan_estimate.inference.estimate)}"
    return text


def _short_text(found: Estimate) -> str:
    speed = count_short(found.time.samples_per_second)
    return f"{found.verdict.value}, fullest IPU {found.fullest.share:,.0%}, {speed} samples/s"


def count_short(number: float) -> str:
    """Return a throughput as text, without decimals if it is large."""
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
    longest = 5 + sum(width + 2 for width in widths) + 2 + max(map(len, bars), default=0)
    is_wide = columns() >= (longest if sys.stdout.isatty() else WIDE)
    gap = "  " if is_wide else " "
    heading = "  IPU" + "".join(f"{gap}{text:>{width}}" for text, width in zip(_HEADINGS, widths))
    if len(heading) > columns():  # only what matters most
        bars = [
            f"{bar(ipu.share, 10)} {ipu.share:,.0%} {verdict.value}" for ipu, verdict in zip(found.ipus, found.verdicts)
        ]
        return lines + [f"  IPU {ipu.ipu:>2}  {drawn}" for ipu, drawn in zip(found.ipus, bars)]
    lines.append(heading)
    for ipu, row, drawn in zip(found.ipus, rows, bars):
        cells = "".join(f"{gap}{text:>{width}}" for text, width in zip(row, widths))
        lines.append(f"  {ipu.ipu:>3}{cells}" + (f"  {drawn}" if is_wide else ""))
    if not is_wide:  # the bars would wrap next to the numbers
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


def _timeline_text(model: EstimatedModel, timeline: PipelineTimeline) -> str:
    settings = model.settings
    if timeline.stages == 1:
        strategy = f" ({settings.strategy}, in turn)" if model.layout.num_ipus > 1 else ""
        what = "accumulation" if settings.training else "batches of a host call:"
        return f"no pipeline{strategy}: {what} {timeline.micro_batches} of {settings.micro_batch_size} samples"
    cycle = model.estimate.time.cycle
    if not settings.training:  # there it is the time per batch, including filling and draining
        cycle *= timeline.micro_batches / timeline.cycles
    return (
        f"{timeline.stages} stages: fill {timeline.fill}, steady {timeline.steady}, drain {timeline.drain} cycles "
        f"of {_ms(cycle)} (estimate)"
    )


def _host_text(model: EstimatedModel) -> str:
    traced, time = model.traced, model.estimate.time
    moved = f"{time.host_bytes_per_second / 1e6:,.1f} MB/s to read"
    if not model.settings.training:
        written = traced.output_bytes / traced.micro_batch_size * time.samples_per_second
        moved += f", {written / 1e6:,.1f} MB/s to write"
    return f"{moved}; {_bound_text(model)} (estimate)"


def _bound_text(model: EstimatedModel) -> str:
    settings, time = model.settings, model.estimate.time
    rate = settings.host_samples_per_second
    waits = time.loading > _WAITS * time.total
    if not time.host_bound and not waits:
        if rate is None:
            return _unmeasured_text(model)
        return f"not host-bound: {count_short(rate)} samples/s are loaded ({settings.loading_basis})"
    if time.sending > time.device and time.sending >= time.host_input:
        hosts, machine = plural(settings.hosts, "host"), model.machine
        most = min(
            machine.host_bytes_per_second * machine.machines(model.num_ipus),
            machine.host_link_bytes_per_second * settings.hosts,
        )
        return f"host-bound: {hosts} can send {most / 1e9:,.0f} GB/s; more distributed.hosts or smaller samples help"
    if rate is None or (not waits and time.device > time.host_input):
        return "host-bound: host calls take most of the time; device_iterations makes them fewer"
    per_process = rate / settings.loading_processes  # one of each instance
    workers = math.ceil(time.total * time.samples_per_second / time.device / per_process)
    text = f"host-bound: loader.workers={workers} would load as fast as the device trains"
    if not time.host_bound:
        share = f"{time.loading / time.total:.0%} of the time"
        text = f"the device waits for data {share}: loader.workers={workers} would load beside it"
    if settings.host_cpus and workers > settings.host_cpus:
        text += f", on more than the {plural(settings.host_cpus, 'CPU')} of the host"
        text += " for each instance" if settings.instances > 1 else ""
    return f"{text} (one loads {count_short(per_process)} samples/s, {settings.loading_basis})"


def _unmeasured_text(model: EstimatedModel) -> str:
    """Say what the estimate leaves out: how fast data is loaded."""
    settings, time = model.settings, model.estimate.time
    if settings.loads_beside or settings.is_loading_known:
        needed = count_short(time.samples_per_second)
        return f"not host-bound if {needed} samples/s are loaded, which ipurun bench measures"
    added = f"{_ms(_LOADED_IN)} a sample, between host calls, would add {_LOADED_IN * time.samples_per_second:.0%}"
    return f"loading is not counted: {added} to the time; ipurun bench measures it"


def _compile_class(model: EstimatedModel) -> str:
    return compile_class(model.traced, model.layout, model.settings, model.machine)


def _cache_text(cache: CacheState) -> str:
    if cache.training == "off":
        return "off: compiles at every start"
    if not cache.executables:
        return "miss: nothing was compiled under this name"
    there = f"{plural(cache.executables, 'executable')} of this name"
    if cache.training == "unknown":
        return f"{there}; {cache.why}"
    return f"training {cache.training}, inference {cache.inference}, of {there} (CPU engine)"


def _requirement_lines(needs: Requirements, training: EstimatedModel) -> List[str]:
    memory, devices = training.machine.memory_bytes, training.num_ipus
    lines = [
        f"  one replica: {_gib(needs.parameter_bytes)} of parameters on chip, {_gib(needs.streaming_bytes)} "
        f"in streaming memory",
        f"  the on-chip part alone needs {plural(needs.least_ipus, 'IPU')}; "
        f"{plural(devices, 'IPU')} {'holds' if devices == 1 else 'hold'} {_gib(devices * memory)}",
    ]
    if needs.largest is not None:
        module, size = needs.largest
        lines.append(
            f"  {module} takes {_mib(size)} MiB (largest tensor: {needs.tensor}) and cannot be cut between modules: "
            f"no split fits {_mib(memory)} MiB; "
            "use narrower layers, memory.serialize, or a model that splits it in its code"
        )
    elif needs.solution is not None:
        verdict = "fits" if needs.solution.estimate.verdict is Verdict.FITS else "is tight"
        lines.append(f"  a split over {needs.solution.ipus:,} IPUs per replica {verdict}, with micro-batch 1:")
        lines.append("     " + shlex.join(needs.solution.overrides))
    else:
        lines.append(f"  no split over up to {needs.tried:,} IPUs per replica fits, with micro-batch 1")
    if needs.overrides:
        lines.append(f"  assuming: {shlex.join(needs.overrides)}")
    return lines


def _remedy_lines(remedies: Sequence[Remedy], found: Estimate) -> List[str]:
    if not remedies:
        return []
    title = "what would make it faster" if found.verdict is Verdict.FITS else "what would help it fit"
    lines = ["", f"{title} (each estimated)"]
    for number, remedy in enumerate(remedies, start=1):
        text = (
            f"  {number}. {remedy.title}: {change_text(remedy.saved_bytes)} on the fullest IPU "
            f"({remedy.fullest_share:,.0%}), {remedy.speed:.2f}x the speed, {remedy.verdict.value}"
        )
        lines += [*fitted([text], indent=5), "     " + shlex.join(remedy.overrides)]
    return lines


def change_text(saved_bytes: float) -> str:
    """Return the memory that a change saves (-) or adds (+)."""
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


def solution_lines(solutions: Sequence[Solution], unsolved: str = "") -> List[str]:
    """List the best configs of a search, the first one with its overrides.

    Args:
        solutions: The configs, best first.
        unsolved: Why there are none, if those that were tried were refused.
    """
    if not solutions:
        lines = ["solve: no combination of split, micro-batch, accumulation and replication fits (estimate)"]
        return lines + ([f"  the best of those that were tried is refused: {unsolved}"] if unsolved else [])
    lines = ["solve: found by trying splits, micro-batches, accumulation and replication (estimate)"]
    lines += [f"  {number}. {_line(solution)}" for number, solution in enumerate(solutions[:MOST_SOLUTIONS], start=1)]
    fastest = max(solutions, key=lambda solution: solution.estimate.time.samples_per_second)
    if fastest not in solutions[:MOST_SOLUTIONS]:
        lines += [f"  faster, if it fits: {_line(fastest)}"]
        lines += [f"    {shlex.quote(word)}" for word in fastest.overrides]
    if not solutions[0].overrides:
        return [*lines, "", "nothing to type: the config itself is the best of them"]
    return [*lines, "", "type", *(f"  {shlex.quote(word)}" for word in solutions[0].overrides)]


def _line(solution: Solution) -> str:
    settings, found = solution.settings, solution.estimate
    own = "" if solution.overrides else " (the config itself)"
    if solution.inference is not None and solution.inference.verdict is not Verdict.FITS:
        own = f"; inference: {_short_text(solution.inference)}{own}"
    return (
        f"{plural(settings.replicas, 'replica')} x {plural(solution.ipus, 'IPU')}, "
        f"micro-batch {settings.micro_batch_size} x accumulation {settings.gradient_accumulation}: "
        f"{found.verdict.value}, fullest IPU {found.fullest.share:.0%}, "
        f"{count_short(found.time.samples_per_second)} samples/s{own}"
    )


def solution_yaml(solution: Solution, recipe_words: Sequence[str]) -> str:
    """Return a config file of a solution, for use as ``+recipe=FILE``.

    Args:
        solution: The solution.
        recipe_words: The command line that was solved, for the comment at the top.
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
    """Return a solution as JSON-ready data."""
    return {
        "is_estimate": True,
        "overrides": list(solution.overrides),
        "verdict": solution.estimate.verdict.value,
        "ipus_per_replica": solution.ipus,
        "replicas": solution.settings.replicas,
        "micro_batch_size": solution.settings.micro_batch_size,
        "gradient_accumulation": solution.settings.gradient_accumulation,
        "samples_per_second": solution.estimate.time.samples_per_second,
        "fullest_share": solution.estimate.fullest.share,
        "inference_verdict": None if solution.inference is None else solution.inference.verdict.value,
    }


def _yaml(values: Dict[str, Any], depth: int) -> List[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{key}:", *_yaml(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {value}")
    return lines
