"""Report of a profiled run: the most expensive operations and modules, stages, host and device, and advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from ipurun.planning.plan import Plan
from ipurun.profiling.schedule import Schedule
from ipurun.training.phases import CHECKPOINT, DATA, EVALUATION, HOST_CALL

__all__ = ["Cost", "ProfileReport", "StageTime", "add_operations", "advise", "most_expensive"]

_MOST_ROWS = 10
_LARGE_SHARE = 0.2
_LARGE_IDLE = 0.3
_SHORT_CALL_SECONDS = 0.02
_UNEVEN = 1.3  # the slowest stage against the mean one


@dataclass(frozen=True)
class Cost:
    """An operation or a module.

    Args:
        name: Its name.
        seconds: Time in the recorded steps.
        share: Part of the time of all operations, 0 to 1.
        times: How often it ran.
    """

    name: str
    seconds: float
    share: float
    times: int


@dataclass(frozen=True)
class StageTime:
    """Time of one stage on its IPU in the recorded steps; the wait is that of the IPU."""

    stage: int
    ipu: int
    forward: float
    recompute: float
    backward: float
    update: float
    wait: float


@dataclass
class ProfileReport:
    """The result of profiling a run.

    Args:
        kind: graph, system, trace or torch.
        folder: Where its files are.
        files: What was written.
        opens: How to look at it.
        phases: Seconds of the whole run by phase of the host.
        first: Those of the first time of each phase, which also starts processes and fills caches.
        calls: Host calls of training.
        steps: The recorded weight updates, "" if there are none.
        operations: The most expensive operations.
        modules: The most expensive modules.
        stages: The stages, in order.
        waits: Share of the IPUs' time in which they wait, by reason.
        notes: What to know about these numbers.
        advice: The next thing to try.
    """

    kind: str
    folder: str = ""
    files: List[str] = field(default_factory=list)
    opens: str = ""
    phases: Dict[str, float] = field(default_factory=dict)
    first: Dict[str, float] = field(default_factory=dict)
    calls: int = 0
    steps: str = ""
    operations: List[Cost] = field(default_factory=list)
    modules: List[Cost] = field(default_factory=list)
    stages: List[StageTime] = field(default_factory=list)
    waits: Dict[str, float] = field(default_factory=dict)
    notes: List[str] = field(default_factory=list)
    advice: str = ""

    @property
    def data_share(self) -> float:
        """Part of the training time in which the device waits for data, after the first host call."""
        waiting, calling = (
            max(0.0, self.phases.get(phase, 0.0) - self.first.get(phase, 0.0)) for phase in (DATA, HOST_CALL)
        )
        return waiting / (waiting + calling) if waiting + calling else 0.0

    def to_dict(self) -> Dict[str, Any]:
        """Return the report as JSON-ready data."""
        plain = dict(vars(self))
        for name in ("operations", "modules", "stages"):
            plain[name] = [dict(vars(item)) for item in plain[name]]
        return {**plain, "data_share": self.data_share}


def most_expensive(items: Iterable[Tuple[str, float, int]]) -> List[Cost]:
    """Add up (name, seconds, times) by name, and return the largest."""
    seconds: Dict[str, float] = {}
    times: Dict[str, int] = {}
    for name, spent, count in items:
        seconds[name] = seconds.get(name, 0.0) + spent
        times[name] = times.get(name, 0) + count
    total = sum(seconds.values()) or 1.0
    ranked = sorted(seconds, key=lambda name: -seconds[name])
    return [Cost(name, seconds[name], seconds[name] / total, times[name]) for name in ranked[:_MOST_ROWS]]


def add_operations(report: ProfileReport, calls: Sequence[Any], schedules: Sequence[Schedule]) -> None:
    """Add what was measured in calls of the CPU engine.

    Args:
        report: The report.
        calls: `CallTimes` of the CPU engine.
        schedules: Their schedules.
    """
    operations: List[Tuple[str, float, int]] = []
    modules: List[Tuple[str, float, int]] = []
    for call in calls:
        runs = call.updates * call.micro_batches * call.replicas
        for operation in call.operations:
            operations.append((f"{operation.name} ({operation.kind})", operation.seconds * runs, runs))
            modules.append((operation.module or "(the model itself)", operation.seconds * runs, runs))
        updates = sum(update.seconds for update in call.parameters) * call.updates
        if call.parameters:
            operations.append(("weight update", updates, call.updates))
    report.operations = most_expensive(operations)
    report.modules = most_expensive(modules)
    report.stages = _stage_times(calls, schedules)
    report.waits = _wait_shares(schedules)


def _stage_times(calls: Sequence[Any], schedules: Sequence[Schedule]) -> List[StageTime]:
    spent: Dict[Tuple[int, int], Dict[str, float]] = {}
    for call in calls:
        runs = call.updates * call.micro_batches
        for operation in call.operations:
            kinds = spent.setdefault((operation.stage, operation.ipu), {})
            kinds[operation.kind] = kinds.get(operation.kind, 0.0) + operation.seconds * runs
        for update in call.parameters:
            stages = [key for key in spent if key[1] == update.ipu]
            if stages:
                kinds = spent[min(stages)]
                kinds["update"] = kinds.get("update", 0.0) + update.seconds * call.updates
    waits: Dict[int, float] = {}
    for schedule in schedules:
        for ipu, reasons in schedule.waits.items():
            waits[ipu] = waits.get(ipu, 0.0) + sum(reasons.values())
    return [
        StageTime(
            stage,
            ipu,
            forward=kinds.get("forward", 0.0),
            recompute=kinds.get("recompute", 0.0),
            backward=kinds.get("backward", 0.0),
            update=kinds.get("update", 0.0),
            wait=waits.get(ipu, 0.0),
        )
        for (stage, ipu), kinds in sorted(spent.items())
    ]


def _wait_shares(schedules: Sequence[Schedule]) -> Dict[str, float]:
    total = sum(schedule.seconds * len(schedule.waits) for schedule in schedules)
    shares: Dict[str, float] = {}
    for schedule in schedules:
        for reasons in schedule.waits.values():
            for reason, seconds in reasons.items():
                kind = reason if reason.startswith(("pipeline", "its")) else "slower IPUs"
                shares[kind] = shares.get(kind, 0.0) + seconds / total
    return shares


def advise(report: ProfileReport, plan: Plan, loader: Any) -> str:
    """Return the next thing to try: the first of the usual causes that this run shows.

    Args:
        report: The report.
        plan: The plan of the run.
        loader: The loader's keys.
    """
    for cause in (_slow_data, _waiting_ipus, _short_calls, _long_pauses, _recomputing):
        advice = cause(report, plan, loader)
        if advice:
            return advice
    if report.operations:
        first, module = report.operations[0], report.modules[:1]
        where = f"; {module[0].name} is the most expensive module ({module[0].share:.0%})" if module else ""
        return f"{first.name} takes {first.share:.0%} of the time of all ops{where}: look there first"
    return "nothing stands out: `ipurun bench` tries other numbers of device_iterations"


def _slow_data(report: ProfileReport, plan: Plan, loader: Any) -> Optional[str]:
    if report.data_share < _LARGE_SHARE:
        return None
    what = f"the device waits for data {report.data_share:.0%} of the time"
    if loader.mode == "sync" and not loader.workers:
        return f"{what}: loader.workers=4, or loader.mode=async; `ipurun bench` measures the data pipeline alone"
    return f"{what}: more loader.workers than {loader.workers}, or less work for each sample"


def _waiting_ipus(report: ProfileReport, plan: Plan, loader: Any) -> Optional[str]:
    idle = sum(report.waits.values())
    if plan.stages < 2 or idle < _LARGE_IDLE:
        return None
    bubble = sum(share for reason, share in report.waits.items() if reason.startswith("pipeline"))
    if report.waits.get("its turn", 0.0) > idle / 2:
        return f"the IPUs wait {idle:.0%} of their time for their turn: pipeline.strategy=pipelined lets them overlap"
    if bubble >= idle / 2:
        more = 2 * plan.training.gradient_accumulation
        return (
            f"the IPUs wait {idle:.0%} of their time, mostly while the pipeline fills and drains: "
            f"gradient_accumulation={more}, with a smaller micro_batch_size for the same global batch"
        )
    times = {stage: stage.forward + stage.recompute + stage.backward for stage in report.stages}
    slowest = max(report.stages, key=lambda stage: times[stage])
    if times[slowest] * len(times) > _UNEVEN * sum(times.values()):
        return (
            f"the IPUs wait {idle:.0%} of their time, mostly for IPU {slowest.ipu} (stage {slowest.stage}): move "
            "layers away from it, with pipeline.split or pipeline.layers_per_ipu; `ipurun plan --solve` balances it"
        )
    return f"the IPUs wait {idle:.0%} of their time: `ipurun plan --solve` looks for a better split"


def _short_calls(report: ProfileReport, plan: Plan, loader: Any) -> Optional[str]:
    seconds = report.phases.get(HOST_CALL, 0.0) / max(1, report.calls)
    if plan.engine == "cpu" or seconds >= _SHORT_CALL_SECONDS or not report.calls:
        return None
    more = plan.training.device_iterations * 4
    return f"a host call takes only {seconds * 1000:.1f} ms: device_iterations={more} makes fewer and longer ones"


def _long_pauses(report: ProfileReport, plan: Plan, loader: Any) -> Optional[str]:
    training = report.phases.get(DATA, 0.0) + report.phases.get(HOST_CALL, 0.0)
    for phase, key in ((EVALUATION, "eval.every_epochs"), (CHECKPOINT, "checkpoint.every_epochs")):
        spent = report.phases.get(phase, 0.0)
        if training and spent > training:
            return f"{phase} takes longer than training ({spent:.1f} s against {training:.1f} s): a larger {key}"
    return None


def _recomputing(report: ProfileReport, plan: Plan, loader: Any) -> Optional[str]:
    recompute = sum(stage.recompute for stage in report.stages)
    total = sum(stage.forward + stage.recompute + stage.backward for stage in report.stages)
    if not total or recompute / total < _LARGE_SHARE:
        return None
    return (
        f"recomputation takes {recompute / total:.0%} of the time of all ops: if memory allows, keep more with "
        "recompute.checkpoints or recompute.every=block, or recompute.mode=none; `ipurun plan` estimates the memory"
    )
