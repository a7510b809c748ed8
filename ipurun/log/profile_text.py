"""Show what a profile found: where the time goes, and the next thing to try."""

from __future__ import annotations

from typing import List, Sequence

from ipurun.log.format import duration
from ipurun.profiling.report import Cost, ProfileReport, StageTime
from ipurun.profiling.schedule import MODELLED
from ipurun.training.phases import CHECKPOINT, COMPILE, DATA, EVALUATION, HOST_CALL

__all__ = ["profile_lines"]

_NAME_WIDTH = 44
_PHASES = {
    HOST_CALL: "device",
    DATA: "data wait",
    COMPILE: "compile",
    EVALUATION: "evaluation",
    CHECKPOINT: "checkpoint",
}


def profile_lines(report: ProfileReport) -> List[str]:
    """Return the report as lines."""
    of = f" of steps {report.steps}" if report.steps else ""
    lines = ["", f"profile={report.kind}{of}"]
    lines += _cost_lines("most expensive ops", "times", report.operations)
    lines += _cost_lines("most expensive modules", "ops", report.modules)
    lines += _stage_lines(report.stages, report)
    lines += _host_lines(report)
    lines += [f"  note      {note}" for note in report.notes]
    if report.opens:
        lines.append(f"  open      {report.opens}")
    lines.append(f"  try next  {report.advice}")
    return lines


def _cost_lines(title: str, counted: str, costs: Sequence[Cost]) -> List[str]:
    if not costs:
        return []
    lines = [f"  {title:<{_NAME_WIDTH}} {'ms':>10} {'share':>7} {counted:>9}"]
    for cost in costs:
        shown = cost.name if len(cost.name) <= _NAME_WIDTH - 2 else f"...{cost.name[5 - _NAME_WIDTH :]}"
        lines.append(
            f"    {shown:<{_NAME_WIDTH - 2}} {_milliseconds(cost.seconds):>10} {cost.share:>7.1%} {cost.times:>9,}"
        )
    return lines


def _stage_lines(stages: Sequence[StageTime], report: ProfileReport) -> List[str]:
    if not stages:
        return []
    columns = ("forward", "recompute", "backward", "update", "IPU waits")
    lines = ["  time by stage, in ms" + "".join(f"{column:>11}" for column in columns)]
    for stage in stages:
        times = (stage.forward, stage.recompute, stage.backward, stage.update, stage.wait)
        lines.append(
            f"    {f'stage {stage.stage} on IPU {stage.ipu}':<18}"
            + "".join(f"{_milliseconds(each):>11}" for each in times)
        )
    if len(stages) > 1:
        waits = ", ".join(f"{reason} {share:.0%}" for reason, share in report.waits.items())
        lines.append(f"    the IPUs wait {sum(report.waits.values()):.0%} of their time: {waits or 'never'}")
    lines.append(f"    {MODELLED}; an IPU has other proportions")
    return lines


def _host_lines(report: ProfileReport) -> List[str]:
    known = [(name, report.phases[phase]) for phase, name in _PHASES.items() if phase in report.phases]
    if not known:
        return []
    total = sum(seconds for _, seconds in known) or 1.0
    parts = [f"{name} {_duration(seconds)} ({seconds / total:.0%})" for name, seconds in known]
    return [f"  host and device, whole run: {', '.join(parts)}"]


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1.0 else duration(seconds)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.2f}"
