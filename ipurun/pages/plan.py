"""The page of a plan: whether it fits, what fills each IPU, when each works, and what would help."""

from __future__ import annotations

import datetime
import re
import shlex
from typing import Dict, List, Sequence, Tuple

from ipurun import __version__
from ipurun.estimate.advice import PlanEstimate
from ipurun.estimate.estimate import assumptions_of
from ipurun.estimate.pipeline import Bar, gantt, timeline_of
from ipurun.estimate.stages import with_parents
from ipurun.estimate.types import EstimatedModel, IpuMemory, Verdict
from ipurun.log.estimate_text import change_text, count_short
from ipurun.log.format import batch_equation, count, devices_text, plural
from ipurun.log.style import verdict_style
from ipurun.pages.charts import strip
from ipurun.pages.data import RunData
from ipurun.pages.parts import (
    Cell,
    Piece,
    badge,
    bar_rows,
    command,
    details,
    escape,
    page,
    section,
    swatches,
    table,
    tiles,
)
from ipurun.planning.plan import Plan

__all__ = ["MEMORY_PARTS", "measured_against_estimate", "plan_page", "plan_sections"]

# Field of a memory estimate, its label and its colour.
MEMORY_PARTS = (
    ("weights", "weights", "var(--weights)"),
    ("gradients", "gradients and accumulators", "var(--gradients)"),
    ("optimizer_state", "optimizer state", "var(--state)"),
    ("activations", "activations", "var(--activations)"),
    ("temporary", "temporary", "var(--temporary)"),
    ("io", "I/O", "var(--io)"),
    ("code", "code", "var(--code)"),
    ("imbalance", "uneven tiles", "var(--uneven)"),
)
_PASSES = {
    "forward": ("var(--forward)", "forward"),
    "backward": ("var(--backward)", "backward, recomputation included"),
}
_GOLDEN_ANGLE = 137.508  # keeps the colours of any number of IPUs apart
_MIB = 1 << 20
_ROW = 26
_MOST_CYCLES_AT_ONCE = 60  # of more, the page shows the first ones: the whole is a click away
_MOST_BARS = 600  # drawn one by one at each end of a pipeline


def plan_page(plan: Plan, plan_estimate: PlanEstimate, words: Sequence[str] = ()) -> str:
    """Return the whole page.

    Args:
        plan: The plan.
        plan_estimate: Its estimate.
        words: The command line of the plan, for the commands to copy.
    """
    found = plan_estimate.estimate
    time = found.time
    fullest = found.fullest
    facts = (
        ("samples/s (estimate)", count_short(time.samples_per_second)),
        ("fullest IPU (estimate)", f"{fullest.share:,.0%} of IPU {fullest.ipu}"),
        ("share of peak (estimate)", f"{time.flops_share:.1%}"),
        ("parameters", _rounded_count(plan.parameters)),
        ("replicas x IPUs", f"{plan.devices.replicas} x {plan.devices.per_replica}"),
        ("streaming memory (estimate)", f"{found.streaming / 1024**3:.1f} GiB" if found.streaming else ""),
        ("bubble (estimate)", f"{timeline_of(plan_estimate.training).bubble:.0%}"),
        ("limited by (estimate)", "the host" if time.host_bound else "the IPUs"),
    )
    machine = plan_estimate.training.machine.name
    lead = f"Every figure marked as an estimate is one, for {machine}; nothing was compiled or run."
    made = f"{datetime.datetime.now():%Y-%m-%d %H:%M} by ipurun {__version__}"
    rows = (
        ("model", f"{plan.name}, {plural(plan.parameters, 'parameter')}"),
        ("devices", devices_text(plan.devices, plan.stages)),
        ("batch", batch_equation(plan.training)),
        ("precision", plan.precision),
        ("engine", f"{plan.engine} ({plan.engine_version})"),
        ("made", made),
    )
    head = [command(shlex.join(["ipurun", "plan", *words]))] if words else []
    head += [tiles(facts), table(["", ""], [(Cell(label, kind="nowrap"), text) for label, text in rows])]
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
    body = [*head, *plan_sections(plan_estimate, words), section("Notes", f"<ul>{notes}</ul>" if notes else "")]
    return page(f"Plan of {plan.name}", body, lead, found.verdict.value)


def _rounded_count(number: int) -> str:
    """Return a number in three digits: ``46,730`` as ``46.7 k``, 336,226,108 as ``336 M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def plan_sections(plan_estimate: PlanEstimate, words: Sequence[str] = ()) -> List[str]:
    """Return the pictures of an estimate: memory, pipeline, modules, inference, remedies, assumptions."""
    found = plan_estimate.estimate
    return [
        section("Memory of each IPU (estimate)", _memory(found.ipus, found.verdicts)),
        section("One weight update (estimate)", _pipeline(plan_estimate.training)),
        section("What would help (each estimated)", _remedies(plan_estimate, words)),
        section("Modules by IPU", _tree(plan_estimate.training)),
        section("Inference (estimate)", _inference(plan_estimate)),
        section("Assumptions", details("what the estimate assumes", _assumptions(plan_estimate), name="assumptions")),
    ]


def measured_against_estimate(run: RunData, plan_estimate: PlanEstimate) -> str:
    """Return the throughput of a run beside its estimate."""
    expected, measured = plan_estimate.estimate.time.samples_per_second, run.samples_per_second
    engine = run.env.get("engine")
    kind = str(engine.get("kind", "")) if isinstance(engine, dict) else ""
    machine = plan_estimate.training.machine.name
    rows = [(f"estimate for {machine}", f"{count_short(expected)} samples/s")]
    where = "on IPUs" if kind == "ipu" else "on the CPU engine, whose speed says nothing about IPUs"
    if measured:
        ratio = f", {measured / expected:.0%} of the estimate" if kind == "ipu" and expected > 0 else ""
        rows.append((f"measured {where}", f"{count_short(measured)} samples/s{ratio}"))
    return section("Estimate and measurement", table(["throughput", ""], rows))


def _memory(ipus: Sequence[IpuMemory], verdicts: Sequence[Verdict]) -> str:
    """Draw stacked bars with the limit as a line; the fullest IPU is marked."""
    if not ipus:
        return ""
    limit = ipus[0].limit
    most = max(1.06, *(ipu.share for ipu in ipus)) * limit
    fullest = max(ipus, key=lambda ipu: ipu.share)
    rows = []
    for ipu, verdict in zip(ipus, verdicts):
        pieces = [
            Piece(getattr(ipu, name) / most, colour, f"IPU {ipu.ipu} {label}: {getattr(ipu, name) / _MIB:,.0f} MiB")
            for name, label, colour in MEMORY_PARTS
            if getattr(ipu, name)
        ]
        mark = ", fullest" if ipu is fullest and len(ipus) > 1 else ""
        text = f"{ipu.fullest / _MIB:,.0f} MiB, {ipu.share:,.0%} {verdict.value}{mark}"
        rows.append((f"IPU {ipu.ipu}", pieces, text, f"{verdict_style(verdict.value)}{' fullest' if mark else ''}"))
    drawn = [(colour, label) for name, label, colour in MEMORY_PARTS if any(getattr(ipu, name) for ipu in ipus)]
    note = f'<p class="note">The red line is the limit of {limit / _MIB:,.0f} MiB.</p>'
    return swatches(drawn) + bar_rows(rows, limit / most) + note


def _pipeline(model: EstimatedModel) -> str:
    """Draw the whole update over milliseconds: the ends cycle by cycle, the steady part as a repeated cycle."""
    timeline, time = timeline_of(model), model.estimate.time
    is_pipeline = timeline.stages > 1
    longest = max((ipu.total for ipu in time.ipus), default=0.0)
    if not longest:
        return ""
    cycle = longest if is_pipeline else sum(sum(stage) for stage in time.stages) or longest
    cycles = timeline.cycles if is_pipeline else timeline.micro_batches
    per_cycle = max(1, 2 * timeline.stages)
    if cycles * per_cycle <= 2 * _MOST_BARS:
        head, tail = cycles, 0
    else:
        head = min(timeline.fill + 2, _MOST_BARS // per_cycle) if is_pipeline else 2
        tail = min(timeline.drain + 2, _MOST_BARS // per_cycle) if is_pipeline else 0
        head = max(1, head)
    bars = gantt(model, head) if is_pipeline else gantt(model, 4 * head)
    if not is_pipeline:
        bars = [bar for bar in bars if bar.micro_batch < head]
    if tail:
        bars += gantt(model, tail, cycles - tail)
    shapes = "".join(_bar(bar) for bar in bars)
    repeated = cycles - head - tail
    if repeated > 0:
        sample = gantt(model, 1, head) if is_pipeline else [bar for bar in bars if bar.micro_batch == head - 1]
        begin = head * cycle if is_pipeline else (head - 1) * cycle
        shapes += _repeated(sample, begin, head * cycle, cycle, repeated, model.layout.num_ipus)
    end = cycles * cycle
    views: List[Tuple[str, float, float]] = [("whole", 0.0, end * 1e3)]
    if is_pipeline and cycles > 8:
        fill, drain = (timeline.fill + 2) * cycle * 1e3, (timeline.drain + 2) * cycle * 1e3
        middle = end * 1e3 / 2
        views += [
            ("fill", 0.0, fill),
            ("steady", middle, min(end * 1e3, middle + fill)),
            ("drain", end * 1e3 - drain, end * 1e3),
        ]
    rows = [f"IPU {ipu}" for ipu in range(model.layout.num_ipus)]
    kinds = dict.fromkeys(bar.kind for bar in bars)
    first = views[1][0] if cycles > _MOST_CYCLES_AT_ONCE and len(views) > 1 else ""
    chart = strip("when each IPU works", rows, end, shapes, views, "pipeline", first)
    text = "1 micro-batch"
    if timeline.micro_batches != 1:
        text = f"{count(timeline.micro_batches)} micro-batches, one after the other"
    if is_pipeline:
        parts = (("fill", timeline.fill), ("steady", timeline.steady), ("drain", timeline.drain))
        phases = ", ".join(f"{name} {number} cycles ({_ms(number * cycle)})" for name, number in parts)
        idle = f"bubble {timeline.bubble:.0%}, IPUs idle {timeline.idle:.0%} of the time"
        text = f"{timeline.stages} stages: {phases}; {idle}"
    rest = f"all-reduce {_ms(time.all_reduce)}, optimizer {_ms(time.update)} and host {_ms(time.host)} follow"
    return swatches(_PASSES[kind] for kind in kinds) + chart + f'<p class="note">{escape(text)}; {escape(rest)}.</p>'


def _ms(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _bar(bar: Bar) -> str:
    label = f"{bar.kind} of micro-batch {bar.micro_batch}, stage {bar.stage}: {bar.seconds * 1e3:.3g} ms"
    return _rect(bar, bar.start * 1e3, label)


def _rect(bar: Bar, start: float, label: str) -> str:
    width = bar.seconds * 1e3
    return (
        f'<rect x="{start:.6g}" y="{bar.ipu * _ROW + 3}" width="{width * 0.985:.6g}" height="{_ROW - 7}" '
        f'fill="{_PASSES[bar.kind][0]}"><title>{escape(label)}</title></rect>'
    )


def _repeated(sample: Sequence[Bar], begin: float, at: float, cycle: float, times: int, num_ipus: int) -> str:
    """Draw one cycle as a pattern that fills the time of many."""
    bars = "".join(_rect(bar, (bar.start - begin) * 1e3, "") for bar in sample)
    width = cycle * 1e3
    pattern = (
        f'<pattern id="steady" patternUnits="userSpaceOnUse" x="{at * 1e3:.9g}" y="0" width="{width:.9g}" '
        f'height="{num_ipus * _ROW}">{bars}</pattern>'
    )
    label = f"{times:,} more cycles of {_ms(cycle)}, all alike"
    return (
        f'{pattern}<rect x="{at * 1e3:.9g}" y="0" width="{times * width:.9g}" height="{num_ipus * _ROW}" '
        f'fill="url(#steady)"><title>{escape(label)}</title></rect>'
    )


def ipu_colour(ipu: int) -> str:
    """Return the colour of an IPU."""
    return f"hsl({(210 + ipu * _GOLDEN_ANGLE) % 360:.0f},52%,{38 if ipu % 2 else 44}%)"


def _tree(model: EstimatedModel) -> str:
    """Return the modules as nested lists, each with the IPUs that run it; equal neighbours are folded into one."""
    ipus: Dict[str, List[int]] = {}
    flops: Dict[str, float] = {}
    sizes: Dict[str, int] = {}
    traced = model.traced
    elements = {parameter.name: parameter.elements for parameter in traced.parameters}
    counted: Dict[str, set] = {}
    for op in traced.ops:
        ipu = model.layout.ipu_of_op(op.index)
        for name in with_parents(op.module):
            if ipu not in ipus.setdefault(name, []):
                ipus[name].append(ipu)
            flops[name] = flops.get(name, 0.0) + op.flops_forward + op.flops_backward
            fresh = set(op.parameters) - counted.setdefault(name, set())
            counted[name] |= fresh
            sizes[name] = sizes.get(name, 0) + sum(elements.get(parameter, 0) for parameter in fresh)
    children: Dict[str, List[str]] = {}
    for name in ipus:
        children.setdefault(name.rpartition(".")[0], []).append(name)
    total = sum(op.flops_forward + op.flops_backward for op in traced.ops) or 1.0
    shares = {name: (flops[name] / total, sizes[name]) for name in ipus}
    return _branch("", children, ipus, shares)


def _branch(
    name: str, children: Dict[str, List[str]], ipus: Dict[str, List[int]], shares: Dict[str, Tuple[float, int]]
) -> str:
    items = []
    for same in _folded(children.get(name, ()), children, ipus, shares):
        first, last = same[0], same[-1]
        marks = "".join(f'<i class="ipu" style="background:{ipu_colour(ipu)}">{ipu}</i>' for ipu in ipus[first][:8])
        more = len(ipus[first]) - 8
        marks += f"<small>and {more} more</small>" if more > 0 else ""
        share, size = shares[first]
        short = first.rpartition(".")[2]
        text = escape(short)
        each = ""
        if len(same) > 1:
            text = f"{escape(short)} ... {escape(last.rpartition('.')[2])}"
            each = f"{len(same)} alike, each "
        label = f"{marks} {text} <small>{each}{share:.1%} of the work, {size:,} parameters</small>"
        inner = _branch(first, children, ipus, shares)
        is_open = " open" if (len(ipus[first]) > 1 or not name) and len(same) == 1 else ""
        items.append(
            f"<li><details{is_open}><summary>{label}</summary>{inner}</details></li>" if inner else f"<li>{label}</li>"
        )
    return f'<ul class="tree">{"".join(items)}</ul>' if items else ""


def _folded(
    names: Sequence[str],
    children: Dict[str, List[str]],
    ipus: Dict[str, List[int]],
    shares: Dict[str, Tuple[float, int]],
) -> List[List[str]]:
    """Group neighbours that are alike in all that the tree shows."""

    def form(name: str) -> Tuple:
        inner = tuple((child.rpartition(".")[2], form(child)) for child in children.get(name, ()))
        return (tuple(ipus[name]), round(shares[name][0], 4), shares[name][1], inner)

    groups: List[List[str]] = []
    for name in names:
        is_numbered = re.fullmatch(r"\d+", name.rpartition(".")[2])
        if groups and is_numbered and form(groups[-1][0]) == form(name):
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _inference(plan_estimate: PlanEstimate) -> str:
    if plan_estimate.inference is None:
        return ""
    settings, found = plan_estimate.inference.settings, plan_estimate.inference.estimate
    number = settings.device_iterations
    batches = f"{number} {'batch' if number == 1 else 'batches'} of {settings.micro_batch_size} per host call"
    bound = "the host" if found.time.host_bound else "the IPUs"
    speed = f"{count_short(found.time.samples_per_second)} samples/s in {batches}, limited by {bound}"
    return f"<p>{badge(found.verdict.value)} {escape(speed)}</p>{_memory(found.ipus, found.verdicts)}"


def _remedies(plan_estimate: PlanEstimate, words: Sequence[str]) -> str:
    rows = []
    for remedy in plan_estimate.remedies:
        whole = with_overrides(words, remedy.overrides) if words else list(remedy.overrides)
        typed = command(shlex.join(["ipurun", "plan", *whole] if words else whole))
        verdict = Cell(remedy.verdict.value, markup=badge(remedy.verdict.value))
        change = Cell(remedy.title, markup=f"{escape(remedy.title)}{details('command', typed)}")
        rows.append(
            (change, change_text(remedy.saved_bytes), f"{remedy.fullest_share:,.0%}", f"{remedy.speed:.2f}x", verdict)
        )
    return table(["change", "fullest IPU", "then", "speed", "verdict"], rows, "remedies", numeric=(1, 2, 3))


def with_overrides(words: Sequence[str], overrides: Sequence[str]) -> List[str]:
    """Return a command line with other values for some keys: each is typed once."""
    keys = {word.lstrip("+~").partition("=")[0] for word in overrides}
    kept: List[str] = []
    for word in words:
        if "=" not in word or word.startswith("-") or word.lstrip("+~").partition("=")[0] not in keys:
            kept.append(word)
    return [*kept, *overrides]


def _assumptions(plan_estimate: PlanEstimate) -> str:
    found = assumptions_of(plan_estimate.training)
    items = "".join(f"<li><b>{escape(topic)}</b>: {escape(text)}</li>" for topic, text in found)
    return f"<ul>{items}</ul>"
