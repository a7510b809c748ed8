"""Profilers: what is notified of the phases of a run, and what is written at its end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from ipurun.build import Run
from ipurun.profiling.report import ProfileReport, add_operations, advise, most_expensive
from ipurun.profiling.schedule import MODELLED, Schedule, schedule_of
from ipurun.profiling.trace_file import Span, Trace
from ipurun.training.phases import HOST_CALL, Phases, SeveralPhases

__all__ = ["Profiler"]

_MOST_SPANS = 200_000  # of host phases: a longer run is traced up to there
_MOST_OPERATIONS = 300_000  # shown as spans; all are counted
_HOST = "host"
_MAIN = "main thread: phases"
_MEASURING = "measure ops (profiler only)"
_FILES = {"graph": "*.pop", "system": "*.pvti", "trace": "trace.json", "torch": "*.pt.trace.json"}
_OPENS = {
    "graph": "{file} in PopVision's Graph Analyser",
    "system": "{file} in PopVision's System Analyser",
    "trace": "{file} at https://ui.perfetto.dev or in chrome://tracing",
    "torch": "tensorboard --logdir {folder} (with the plugin torch-tb-profiler), or {file} at https://ui.perfetto.dev",
}
_NO_OPERATIONS = "ops and modules on an IPU are not visible from the host: profile=graph records them"
_ON_THE_CPU = {
    "graph": "PopVision's reports come from Poplar: on the CPU engine nothing is recorded",
    "system": "PopVision's traces come from Graphcore's libpvti: on the CPU engine nothing is recorded",
}


class _PhaseTimes(Phases):
    """Adds up the time of each phase; one inside another counts for the outer one."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self.first: Dict[str, float] = {}  # of the first time, which also starts processes and fills caches
        self.calls = 0
        self._depth = 0

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            spent = time.perf_counter() - begin
            if not self._depth:
                self.first.setdefault(phase, spent)
                self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
            self.calls += phase == HOST_CALL


class _PvtiChannels(Phases):
    """Shows the phases in PopVision's System Analyser: a channel for each."""

    def __init__(self, engine_module: Any) -> None:
        self._make = engine_module.profiling.Channel
        self._channels: Dict[str, Any] = {}

    def span(self, phase: str) -> ContextManager[Any]:
        return self._tracepoint(phase, phase)

    def host_call(self, executor: Any, first_step: int, last_step: int) -> ContextManager[Any]:
        return self._tracepoint(HOST_CALL, f"steps {first_step} to {last_step}")

    def _tracepoint(self, phase: str, label: str) -> ContextManager[Any]:
        if phase not in self._channels:
            self._channels[phase] = self._make(f"ipurun.{phase}")
        tracepoint: ContextManager[Any] = self._channels[phase].tracepoint(label)
        return tracepoint


class _ChosenSteps(Phases):
    """Base of the profilers that record some steps."""

    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._last = first + count - 1
        self.recorded: List[Tuple[int, int]] = []

    def chooses(self, first_step: int, last_step: int) -> bool:
        """Whether a host call has one of the chosen steps."""
        chosen = first_step <= self._last and last_step >= self._first
        if chosen:
            self.recorded.append((first_step, last_step))
        return chosen

    @property
    def steps_text(self) -> str:
        """The recorded steps: ``2 to 4``, "" for none."""
        if not self.recorded:
            return ""
        first, last = self.recorded[0][0], self.recorded[-1][1]
        return str(first) if first == last else f"{first} to {last}"


class _TraceRecorder(_ChosenSteps):
    """Recorder of the spans of the host, and on the CPU engine of the operations of the chosen steps."""

    def __init__(self, run: Run) -> None:
        config = run.config.profile
        super().__init__(config.start_step, config.steps)
        self._run = run
        self.spans: List[Span] = []
        self.background: List[Span] = []
        self.calls: List[Any] = []

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._keep(Span(phase, begin, time.perf_counter() - begin, phase))

    @contextlib.contextmanager
    def host_call(self, executor: Any, first_step: int, last_step: int) -> Iterator[None]:
        begin = time.perf_counter()
        chosen = self.chooses(first_step, last_step)
        before = len(self.calls)
        try:
            if chosen and self._run.engine.kind == "cpu":
                with self._run.engine.module.profiling.record_operations(executor) as calls:
                    try:
                        yield
                    finally:
                        self.calls += calls
            else:
                yield
        finally:
            details = {"first step": first_step, "last step": last_step}
            self._keep(Span(HOST_CALL, begin, time.perf_counter() - begin, HOST_CALL, details))
            for call in self.calls[before:]:
                self._keep(Span(_MEASURING, begin, call.begin - begin, "profiler"))

    def in_background(self, phase: str, begin: float, end: float) -> None:
        self.background.append(Span(phase, begin, end - begin, phase))

    def _keep(self, span: Span) -> None:
        if len(self.spans) < _MOST_SPANS:
            self.spans.append(span)

    @property
    def measuring_seconds(self) -> float:
        """Time that only the profiler needed."""
        return sum(span.seconds for span in self.spans if span.name == _MEASURING)

    def write(self, path: Path, about: Dict[str, str], report: ProfileReport) -> None:
        """Write the trace, and add what it shows to the report."""
        trace = Trace({**about, "recorded steps": self.steps_text or "none"})
        for span in self.spans:
            trace.add(trace.row(_HOST, _MAIN), span)
        for span in self.background:
            trace.add(trace.row(_HOST, "background: checkpoints"), span)
        self._add_reading(trace)
        schedules = self._add_ipus(trace)
        trace.write(path)
        add_operations(report, self.calls, schedules)
        if len(self.spans) >= _MOST_SPANS:
            report.notes.append(f"the trace ends after {_MOST_SPANS:,} phases of the host")

    def _add_reading(self, trace: Trace) -> None:
        times = self._run.reading_times
        for number, (pid, batches) in enumerate(_by_process([] if times is None else times.collect()).items()):
            here = pid == os.getpid()
            row = trace.row(_HOST, "data, read in this process" if here else f"data worker {number} (process {pid})")
            for batch in batches[:_MOST_SPANS]:
                details = {"samples": batch["samples"]}
                begin, collated, end = batch["begin"], batch["collated"], batch["end"]
                trace.add(row, Span("micro-batch", begin, end - begin, "reading", details))
                if collated > begin:
                    trace.add(row, Span("read samples", begin, collated - begin, "reading"))
                trace.add(row, Span("collate", collated, end - collated, "reading"))

    def _add_ipus(self, trace: Trace) -> List[Schedule]:
        """Add the rows of the IPUs: a call begins where it began, or where the modelled one before it ends."""
        schedules, free, shown = [], 0.0, 0
        for call in self.calls:
            schedule = schedule_of(call)
            schedules.append(schedule)
            start = max(call.begin, free)
            free = start + schedule.seconds
            for replica in range(call.replicas):
                for ipu, spans in schedule.spans.items():
                    row = _ipu_row(trace, call, replica, ipu)
                    inside = schedule.operations[ipu] if not replica and shown < _MOST_OPERATIONS else []
                    shown += len(inside)
                    for span in (*spans, *inside):
                        moved = Span(span.name, start + span.begin, span.seconds, span.kind, span.details)
                        trace.add(row, moved)
        return schedules


def _ipu_row(trace: Trace, call: Any, replica: int, ipu: int) -> Tuple[str, str]:
    stages = sorted({operation.stage for operation in call.operations if operation.ipu == ipu})
    which = f"replica {replica}: " if call.replicas > 1 else ""
    same = "; ops as in replica 0" if replica else ""
    return trace.row(f"{which}emulated IPUs ({MODELLED}{same})", f"IPU {ipu}, stage {', '.join(map(str, stages))}")


def _by_process(batches: Sequence[Dict[str, Any]]) -> Dict[int, List[Dict[str, Any]]]:
    found: Dict[int, List[Dict[str, Any]]] = {}
    for batch in batches:
        found.setdefault(batch["pid"], []).append(batch)
    return found


class _TorchRecorder(_ChosenSteps):
    """Recorder that runs torch.profiler from the first to the last chosen host call.

    torch.profiler sees operations without modules: the CPU engine runs a graph. So the first of these calls is also
    measured operation by operation, on copies, before torch.profiler starts.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        config = run.config.profile
        super().__init__(config.start_step, config.steps)
        self._run = run
        self._folder = folder
        self._profiler: Optional[torch.profiler.profile] = None
        self.operations: List[Tuple[str, float, int]] = []
        self.calls: List[Any] = []
        self.measuring_seconds = 0.0

    def span(self, phase: str) -> ContextManager[Any]:
        return contextlib.nullcontext() if self._profiler is None else torch.profiler.record_function(f"ipurun {phase}")

    @contextlib.contextmanager
    def host_call(self, executor: Any, first_step: int, last_step: int) -> Iterator[None]:
        chosen = self.chooses(first_step, last_step)
        begin = time.perf_counter()
        try:
            if chosen and self._profiler is None and self._run.engine.kind == "cpu":
                with contextlib.ExitStack() as running:

                    def start() -> None:
                        self._start()
                        running.enter_context(self.span(HOST_CALL))

                    with self._run.engine.module.profiling.record_operations(executor, start) as self.calls:
                        yield
                self.measuring_seconds = sum(call.begin - begin for call in self.calls[:1])
            else:
                if chosen and self._profiler is None:
                    self._start()
                with self.span(HOST_CALL):
                    yield
        finally:
            if not chosen or last_step >= self._last:
                self.stop()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(self._folder)),
        )
        self._profiler.start()

    def stop(self) -> None:
        """Write what was recorded, unless that has been done."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        for item in profiler.key_averages():
            if not item.key.startswith("ipurun "):
                self.operations.append((item.key, item.self_cpu_time_total / 1e6, item.count))


class Profiler:
    """The profiler of a run.

    Args:
        run: The run.
        folder: The run folder, for files of a profile without `profile.dir`.
    """

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self.kind = run.config.profile.kind
        self.folder = Path(run.config.profile.dir) if run.config.profile.dir else folder / "profile"
        self._times = _PhaseTimes()
        self._trace = _TraceRecorder(run) if self.kind == "trace" else None
        self._torch = _TorchRecorder(run, self.folder) if self.kind == "torch" else None
        listeners: List[Phases] = [self._times] if self.kind != "none" else []
        listeners += [recorder for recorder in (self._trace, self._torch) if recorder is not None]
        if "PVTI_OPTIONS" in os.environ:
            listeners.append(_PvtiChannels(run.engine.module))
        self.phases = SeveralPhases(listeners) if listeners else Phases()

    def finish(self) -> Optional[ProfileReport]:
        """Write the files of the profile, and return what it found; None without a profile."""
        if self.kind == "none":
            return None
        plan = self._run.plan
        times = self._times
        report = ProfileReport(self.kind, str(self.folder), phases=dict(times.seconds), calls=times.calls)
        report.first = dict(times.first)
        if self._trace is not None:
            self._finish_trace(self._trace, report)
        elif self._torch is not None:
            self._finish_torch(self._torch, report)
        elif plan.engine == "cpu":
            report.notes.append(f"{_ON_THE_CPU[self.kind]}; profile=trace shows every op")
        report.files = self._files()
        if self.kind in ("trace", "torch") and not report.steps:
            first = self._run.config.profile.start_step
            report.notes.append(f"no step was recorded: the run ended before profile.start_step={first}")
        if report.files:
            report.opens = _OPENS[self.kind].format(file=report.files[0], folder=report.folder)
        report.advice = advise(report, plan, self._run.config.loader)
        if self.kind in ("trace", "torch"):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report.to_dict(), indent=2) + "\n"
            (self.folder / "report.json").write_text(text, encoding="utf-8")
        return report

    def _finish_torch(self, recorder: _TorchRecorder, report: ProfileReport) -> None:
        recorder.stop()
        report.steps = recorder.steps_text
        if recorder.calls:
            add_operations(report, recorder.calls, [schedule_of(call) for call in recorder.calls])
            report.phases[HOST_CALL] = report.phases.get(HOST_CALL, 0.0) - recorder.measuring_seconds
            first, last = recorder.recorded[0]
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            report.notes.append(f"modules and stages are those of {steps}, measured op by op by the CPU engine")
        elif recorder.recorded and self._run.plan.engine != "cpu":
            report.notes.append(_NO_OPERATIONS)
        report.operations = most_expensive(recorder.operations)

    def _finish_trace(self, recorder: _TraceRecorder, report: ProfileReport) -> None:
        plan = self._run.plan
        about = {
            "run": plan.name,
            "engine": f"{plan.engine}: {plan.engine_version}",
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads of torch",
        }
        if plan.engine == "cpu":
            about["rows of IPUs"] = MODELLED
        report.phases[HOST_CALL] = report.phases.get(HOST_CALL, 0.0) - recorder.measuring_seconds
        report.steps = recorder.steps_text
        recorder.write(self.folder / "trace.json", about, report)
        if plan.engine != "cpu":
            report.notes.append(_NO_OPERATIONS)
        if self._run.reading_times is not None:
            self._run.reading_times.close()

    def _files(self) -> List[str]:
        return [str(path) for path in sorted(self.folder.rglob(_FILES[self.kind]))]
