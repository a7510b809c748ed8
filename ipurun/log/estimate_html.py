"""The estimate of a plan as one self-contained HTML page."""

from __future__ import annotations

import shlex
from html import escape
from typing import Dict, List, Sequence, Tuple

from ipurun.estimate.advice import PlanEstimate
from ipurun.estimate.estimate import assumptions_of
from ipurun.estimate.pipeline import gantt, timeline_of
from ipurun.estimate.stages import with_parents
from ipurun.estimate.types import EstimatedModel, IpuMemory
from ipurun.log.estimate_text import change_text, count_short
from ipurun.planning.plan import Plan

__all__ = ["PARTS", "STYLE", "ipu_colour", "page_of"]

# Field of a memory estimate, its label and its colour.
PARTS = (
    ("weights", "weights", "#2f5d8a"),
    ("gradients", "gradients and accumulators", "#4f94cd"),
    ("optimizer_state", "optimizer state", "#8fbf6b"),
    ("activations", "activations", "#e3a63b"),
    ("temporary", "temporary", "#d96f4f"),
    ("io", "I/O", "#9a7fb8"),
    ("code", "code", "#8a8a8a"),
    ("imbalance", "uneven tiles", "#c9c9c9"),
)
_GOLDEN_ANGLE = 137.508  # keeps the colours of any number of IPUs apart
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}
h2{font-size:1.1rem;margin:2rem 0 .4rem}
.note{color:gray;margin:.2rem 0 1rem}
.tiles{display:flex;flex-wrap:wrap;gap:.6rem}
.tile{border:1px solid #8886;border-radius:8px;padding:.5rem .9rem;display:flex;flex-direction:column}
.tile span{color:gray;font-size:.8rem}
.legend span{margin-right:1rem;font-size:.85rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em;border-radius:2px}
svg{width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:currentColor}
svg text.on{fill:#fff;font-size:10px}
.limit{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:4 3}
.tree,.tree ul{list-style:none;padding-left:1.1rem;margin:.1rem 0}
.tree small{color:gray}
.tree summary{cursor:pointer}
i.ipu{font:600 11px system-ui;color:#fff;border-radius:4px;padding:1px 6px;margin-right:3px}
table{border-collapse:collapse;width:100%}
th,td{border-bottom:1px solid #8884;text-align:left;padding:.3rem .5rem;vertical-align:top}
code{font-size:.85em;overflow-wrap:anywhere}
"""
_MIB = 1 << 20
_WIDTH = 920
_LEFT = 64
_ROW = 26
_CYCLES = 24


def ipu_colour(ipu: int) -> str:
    """Return the colour of an IPU."""
    return f"hsl({(210 + ipu * _GOLDEN_ANGLE) % 360:.0f},52%,{44 if ipu % 2 else 52}%)"


def page_of(plan: Plan, plan_estimate: PlanEstimate) -> str:
    """Return the whole page."""
    title = f"{escape(plan.name)}: {plan_estimate.estimate.verdict.value} (estimate)"
    time = plan_estimate.estimate.time
    facts = (
        ("verdict", plan_estimate.estimate.verdict.value),
        ("throughput", f"{count_short(time.samples_per_second)} samples/s"),
        ("share of peak", f"{time.flops_share:.1%}"),
        ("IPUs", f"{plan.devices.replicas} x {plan.devices.per_replica}"),
        ("bubble", f"{timeline_of(plan_estimate.training).bubble:.0%}"),
        ("limited by", "the host" if time.host_bound else "the IPUs"),
    )
    tiles = "".join(f"<div class=tile><b>{escape(text)}</b><span>{label}</span></div>" for label, text in facts)
    sections = (
        _section("Memory by IPU", _legend(), _memory(plan_estimate.estimate.ipus)),
        _section("One update of the pipeline", _pipeline_legend(), _pipeline(plan_estimate.training)),
        _section("Modules by IPU", "", _tree(plan_estimate.training)),
        _section("Inference", "", _inference(plan_estimate)),
        _section("What would help", "", _remedies(plan_estimate)),
        _section("Assumptions", "", _assumptions(plan_estimate)),
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>"
        f"<h1>{title}</h1><p class=note>Every figure on this page is an estimate for "
        f"{escape(plan_estimate.training.machine.name)}; nothing was compiled or run.</p>"
        f"<div class=tiles>{tiles}</div>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, legend: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{legend}{body}</section>" if body else ""


def _legend() -> str:
    entries = "".join(f'<span><i style="background:{colour}"></i>{escape(label)}</span>' for _, label, colour in PARTS)
    return f"<p class=legend>{entries}</p>"


def _memory(ipus: Sequence[IpuMemory]) -> str:
    """Draw stacked bars, and the limit as a line."""
    most = max(1.1, *(ipu.share for ipu in ipus)) * ipus[0].limit
    scale = (_WIDTH - _LEFT - 120) / most
    height = _ROW * len(ipus) + 24
    shapes: List[str] = []
    for row, ipu in enumerate(ipus):
        top, left = row * _ROW + 20, float(_LEFT)
        shapes.append(_text(4, top + 14, f"IPU {ipu.ipu}"))
        for name, label, colour in PARTS:
            size = getattr(ipu, name)
            wide = size * scale
            shapes.append(_rect(left, top, wide, _ROW - 7, colour, f"IPU {ipu.ipu} {label}: {size / _MIB:,.0f} MiB"))
            left += wide
        shapes.append(
            _text(
                max(left, _LEFT + ipu.limit * scale) + 6, top + 14, f"{ipu.fullest / _MIB:,.0f} MiB, {ipu.share:,.0%}"
            )
        )
    at = _LEFT + ipus[0].limit * scale
    shapes.append(f"<line x1={at:.1f} x2={at:.1f} y1=14 y2={height} class=limit />")
    shapes.append(_text(at - 40, 11, f"{ipus[0].limit // _MIB} MiB"))
    return _svg(_WIDTH, height, shapes, "Memory of each IPU against the limit")


def _pipeline_legend() -> str:
    return (
        '<p class=legend><span><i style="background:#3b76c4"></i>forward</span>'
        '<span><i style="background:#d9822b"></i>backward, recomputation included</span></p>'
    )


def _pipeline(model: EstimatedModel) -> str:
    """Draw a Gantt chart of the first cycles."""
    num_ipus, timeline = model.layout.num_ipus, timeline_of(model)
    bars = gantt(model, _CYCLES)
    end = max((bar.start + bar.seconds for bar in bars), default=0.0)
    if not end:
        return ""
    scale = (_WIDTH - _LEFT - 10) / end
    shapes = [_text(4, ipu * _ROW + 16, f"IPU {ipu}") for ipu in range(num_ipus)]
    for bar in bars:
        colour = "#3b76c4" if bar.kind == "forward" else "#d9822b"
        label = f"{bar.kind} of micro-batch {bar.micro_batch}, stage {bar.stage}: {bar.seconds * 1e3:.3g} ms"
        left, top, wide = _LEFT + bar.start * scale, bar.ipu * _ROW, bar.seconds * scale
        shapes.append(_rect(left, top + 2, max(wide - 0.6, 0.3), _ROW - 6, colour, label))
        if wide > 15:
            shapes.append(f"<text x={left + 3:.1f} y={top + 15} class=on>{bar.micro_batch}</text>")
    drawn = _svg(_WIDTH, _ROW * num_ipus + 4, shapes, "Pipeline schedule")
    cycles = f"{timeline.fill} cycles to fill, {timeline.steady} steady, {timeline.drain} to drain"
    shown = min(_CYCLES, timeline.cycles) if timeline.stages > 1 else 1 + max(bar.micro_batch for bar in bars)
    what = "cycles" if timeline.stages > 1 else "forward and backward passes"
    note = f"{cycles}; bubble {timeline.bubble:.0%}. The first {shown} {what} are drawn; numbers are micro-batches."
    return f"{drawn}<p class=note>{note}</p>"


def _tree(model: EstimatedModel) -> str:
    """Return the modules as nested lists, each with the IPUs that run it."""
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
    return _branch("", children, ipus, {name: (flops[name] / total, sizes[name]) for name in ipus})


def _branch(
    name: str,
    children: Dict[str, List[str]],
    ipus: Dict[str, List[int]],
    shares: Dict[str, Tuple[float, int]],
) -> str:
    items = []
    for child in children.get(name, ()):
        marks = "".join(f'<i class=ipu style="background:{ipu_colour(ipu)}">{ipu}</i>' for ipu in ipus[child][:8])
        share, size = shares[child]
        label = (
            f"{marks} {escape(child.rpartition('.')[2])} <small>{share:.1%} of the work, {size:,} parameters</small>"
        )
        inner = _branch(child, children, ipus, shares)
        is_open = " open" if len(ipus[child]) > 1 or not name else ""
        items.append(
            f"<li><details{is_open}><summary>{label}</summary>{inner}</details></li>" if inner else f"<li>{label}</li>"
        )
    return f"<ul class=tree>{''.join(items)}</ul>" if items else ""


def _inference(plan_estimate: PlanEstimate) -> str:
    """Return evaluation and prediction as one line and one chart."""
    if plan_estimate.inference is None:
        return ""
    settings, found = plan_estimate.inference.settings, plan_estimate.inference.estimate
    batches = f"{settings.device_iterations} batches of {settings.micro_batch_size} per host call"
    bound = "the host" if found.time.host_bound else "the IPUs"
    speed = f"{count_short(found.time.samples_per_second)} samples/s in {batches}, limited by {bound}"
    return f"<p class=note>{found.verdict.value}; {speed}.</p>{_memory(found.ipus)}"


def _remedies(plan_estimate: PlanEstimate) -> str:
    rows = "".join(
        f"<tr><td>{escape(remedy.title)}<br><code>{escape(shlex.join(remedy.overrides))}</code></td>"
        f"<td>{change_text(remedy.saved_bytes)}</td><td>{remedy.speed:.2f}x</td>"
        f"<td>{remedy.verdict.value}</td></tr>"
        for remedy in plan_estimate.remedies
    )
    head = "<tr><th>change</th><th>fullest IPU</th><th>speed</th><th>verdict</th></tr>"
    return f"<table>{head}{rows}</table>" if rows else ""


def _assumptions(plan_estimate: PlanEstimate) -> str:
    found = assumptions_of(plan_estimate.training)
    items = "".join(f"<li><b>{escape(topic)}</b>: {escape(text)}</li>" for topic, text in found)
    return f"<ul>{items}</ul>"


def _svg(width: int, height: int, shapes: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role=img aria-label="{escape(label)}">{"".join(shapes)}</svg>'


def _rect(x: float, y: float, width: float, height: float, colour: str, label: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.2f}" height="{height:.1f}" fill="{colour}">'
        f"<title>{escape(label)}</title></rect>"
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
