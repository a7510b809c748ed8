"""Measure a config: throughput with its spread, device and data apart, and other numbers of device_iterations."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import torch

from ipurun.build import Run, build_run
from ipurun.config.compose import with_words
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.facts import LoadingRate, Purpose
from ipurun.log.format import batch_equation, count, duration, plural
from ipurun.planning.plan import BatchSizes
from ipurun.runs.prepare import PreparedRun, prepare
from ipurun.training.failures import explained

__all__ = ["DEFAULT_LADDER", "BenchReport", "Rate", "Rung", "bench", "bench_lines"]

DEFAULT_LADDER = (1, 2, 4, 8)
_WARM_UP_CALLS = 3
_FEWEST_CALLS = 5
_MOST_CALLS = 10_000
_HOST_BOUND_SHARE = 0.2
_WORTH_IT = 1.1
_CORE_SAMPLES, _CORE_VALUES = 64, 256
_CORE_REPEATS = 100


@dataclass(frozen=True)
class Rate:
    """Samples per second over several calls: the median, and where the middle half of the calls lies."""

    median: float
    low: float
    high: float
    calls: int


@dataclass(frozen=True)
class Rung:
    """One number of device_iterations.

    Args:
        device_iterations: The number.
        sizes: The batch arithmetic with it.
        rate: Throughput of training, with the wait for data.
        call_seconds: Median duration of a host call.
        wait_share: Part of the time in which the device waits for data.
        compile_seconds: Time to compile.
        skipped: Why it was not measured; "" if it was.
    """

    device_iterations: int
    sizes: Optional[BatchSizes] = None
    rate: Optional[Rate] = None
    call_seconds: float = 0.0
    wait_share: float = 0.0
    compile_seconds: float = 0.0
    skipped: str = ""


@dataclass
class BenchReport:
    """Measurements.

    Args:
        name: Name of the run.
        engine: Its engine, for display.
        devices: Total number of IPUs.
        configured: The rung of the config itself.
        ladder: All rungs, smallest first.
        device: Throughput with one batch again and again: what the device alone would do.
        data: Throughput of the data pipeline alone.
        warm_up_calls: Calls before each measurement that do not count.
    """

    name: str
    engine: str
    devices: int
    configured: Rung
    ladder: List[Rung]
    device: Rate
    data: Rate
    warm_up_calls: int = _WARM_UP_CALLS
    estimate: Dict[str, Any] = field(default_factory=dict)  # the planner's, for IPUs
    load: float = 0.0  # processes that wanted to run in the last minute
    cpus: int = 1
    core_seconds: float = 0.0  # what one of them takes for a fixed amount of work like that of a loader
    pod_core_seconds: float = 0.0  # what one of a Pod's host is taken to need for it; 0: unknown
    has_ipus: bool = False

    @property
    def is_host_bound(self) -> bool:
        """Whether the device waits for data for a good part of the time."""
        return self.configured.wait_share >= _HOST_BOUND_SHARE

    @property
    def verdict(self) -> str:
        """Return what limits the throughput."""
        share, data, device = self.configured.wait_share, self.data.median, self.device.median
        if self.is_host_bound:
            return f"host-bound: the device waits for data {share:.0%} of the time"
        slower = "" if data > device else ", although the data pipeline alone is slower than the device"
        return f"compute-bound: the device waits for data only {share:.0%} of the time{slower}"

    @property
    def advice(self) -> str:
        """Return the next thing to try."""
        measured = [rung for rung in self.ladder if rung.rate is not None]
        best = max(measured, key=lambda rung: rung.rate.median if rung.rate else 0.0)
        now = self.configured.rate
        if self.is_host_bound:
            return (
                "loader.workers=4 or loader.mode=async reads while the device computes; data=synthetic shows the limit"
            )
        if now is not None and best.rate is not None and best.rate.low > _WORTH_IT * now.median:
            return f"device_iterations={best.device_iterations} is {best.rate.median / now.median:.2f} times as fast"
        return "profile=trace shows which ops and stages take the time"

    def loading_rate(self, workers: int) -> LoadingRate:
        """Return how fast one process loads the data; `workers` loaded it, or one process."""
        processes = min(max(1, workers), self.cpus)
        return LoadingRate(
            samples_per_second=self.data.median / processes,
            cpus=self.cpus,
            day=time.strftime("%Y-%m-%d"),
            core_seconds=self.core_seconds,
            has_ipus=self.has_ipus,
        )

    def to_dict(self) -> Dict[str, Any]:
        """Return the document of `ipurun bench --json`."""

        def rate(value: Optional[Rate]) -> Optional[Dict[str, Any]]:
            return None if value is None else dict(vars(value))

        def rung(value: Rung) -> Dict[str, Any]:
            plain = {**vars(value), "rate": rate(value.rate)}
            del plain["sizes"]
            return {**plain, "samples_per_call": value.sizes.samples_per_call if value.sizes else None}

        return {
            "name": self.name,
            "engine": self.engine,
            "devices": self.devices,
            "configured": rung(self.configured),
            "ladder": [rung(each) for each in self.ladder],
            "device_alone": rate(self.device),
            "data_alone": rate(self.data),
            "warm_up_calls": self.warm_up_calls,
            "load": self.load,
            "cpus": self.cpus,
            "core_seconds": self.core_seconds,
            "verdict": self.verdict,
            "advice": self.advice,
            "estimate_for_ipus": self.estimate,
        }


def bench(prepared: PreparedRun, seconds: float, ladder: Sequence[int], report: Callable[[str], None]) -> BenchReport:
    """Measure a prepared config; nothing is written.

    Args:
        prepared: The config.
        seconds: Time for each measurement, after the warm-up.
        ladder: Numbers of device_iterations to measure beside the configured one.
        report: Called with what is being measured.

    Raises:
        ConfigError: The config itself cannot be measured.
        RunError: Compiling or running failed.
    """
    own = prepared.plan.training.device_iterations
    report(f"device_iterations={own}, the configured number")
    run = _built(prepared)
    try:
        configured = _measure(run, seconds)
        report("the device alone, with one batch again and again")
        device = _device_alone(run, seconds)
        report("the data pipeline alone")
        data = _data_alone(run, seconds)
        core_seconds = _core_seconds()
    finally:
        run.close()
    rungs = [configured]
    for iterations in sorted(set(ladder) - {own}):
        report(f"device_iterations={iterations}")
        rungs.append(_rung(prepared, iterations, seconds))
    rungs.sort(key=lambda rung: rung.device_iterations)
    plan = prepared.plan
    return BenchReport(
        plan.name,
        f"{plan.engine}: {plan.engine_version}",
        plan.devices.total,
        configured,
        rungs,
        device,
        data,
        load=os.getloadavg()[0],
        cpus=os.cpu_count() or 1,
        core_seconds=core_seconds,
        pod_core_seconds=prepared.point.config.machine.host_core_seconds,
        has_ipus=prepared.engine.kind == "ipu",
    )


def _rung(prepared: PreparedRun, iterations: int, seconds: float) -> Rung:
    try:
        point = with_words(prepared.point, [f"device_iterations={iterations}"])
        run = _built(prepare(point, Purpose.RUN, prepared))
    except ConfigError as error:  # such as a data set that is smaller than one host call
        return Rung(iterations, skipped=error.problems[0].what)
    try:
        return _measure(run, seconds)
    finally:
        run.close()


def _built(prepared: PreparedRun) -> Run:
    return build_run(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)


def _measure(run: Run, seconds: float) -> Rung:
    sizes = run.plan.training
    batches = _endless(run)
    run.enter_training()
    compile_seconds = _compile(run, next(batches))
    for _ in range(_WARM_UP_CALLS):
        _call(run, next(batches))
    waits: List[float] = []
    calls: List[float] = []
    begun = time.perf_counter()
    while _continues(len(calls), begun, seconds):
        before = time.perf_counter()
        batch = next(batches)
        arrived = time.perf_counter()
        _call(run, batch)
        waits.append(arrived - before)
        calls.append(time.perf_counter() - arrived)
    rate = _rate([wait + call for wait, call in zip(waits, calls)], sizes.samples_per_call)
    share = sum(waits) / (sum(waits) + sum(calls))
    return Rung(sizes.device_iterations, sizes, rate, statistics.median(calls), share, compile_seconds)


def _device_alone(run: Run, seconds: float) -> Rate:
    batch = next(_endless(run))
    durations: List[float] = []
    begun = time.perf_counter()
    while _continues(len(durations), begun, seconds):
        before = time.perf_counter()
        _call(run, batch)
        durations.append(time.perf_counter() - before)
    return _rate(durations, run.plan.training.samples_per_call)


def _data_alone(run: Run, seconds: float) -> Rate:
    batches = _endless(run)
    for _ in range(_WARM_UP_CALLS):
        next(batches)
    durations: List[float] = []
    begun = time.perf_counter()
    while _continues(len(durations), begun, seconds):
        before = time.perf_counter()
        next(batches)
        durations.append(time.perf_counter() - before)
    return _rate(durations, run.plan.training.samples_per_call)


def _core_seconds() -> float:
    """Return the seconds that one CPU takes for a fixed amount of what loaders do, undisturbed by other work.

    `machine.host_core_seconds` is in this unit: work that changes here needs another value there.
    """
    durations = []
    for _ in range(_CORE_REPEATS):
        before = time.perf_counter()
        samples = [[(31 * row + 17 * at) % 1009 for at in range(_CORE_VALUES)] for row in range(_CORE_SAMPLES)]
        torch.stack([torch.tensor(sample) for sample in samples])
        durations.append(time.perf_counter() - before)
    return min(durations)


def _endless(run: Run) -> Iterator[Any]:
    """Yield training batches, epoch after epoch."""
    module = run.engine.module
    with explained(module, "reading the training data"):
        run.train_loader.start()
    while True:
        epoch = run.train_loader.epoch()
        while True:
            with explained(module, "reading the training data"):
                batch = next(epoch, None)
            if batch is None:
                break
            yield batch


def _compile(run: Run, batch: Any) -> float:
    args, kwargs = as_call(batch)
    begun = time.perf_counter()
    with explained(run.engine.module, "compiling the model for training"):
        run.model_with_loss.tracing_flag.retry(lambda: run.training_model.compile(*args, **kwargs))
    return time.perf_counter() - begun


def _call(run: Run, batch: Any) -> None:
    args, kwargs = as_call(batch)
    with explained(run.engine.module, "training"):
        run.training_model(*args, **kwargs)


def _continues(calls: int, begun: float, seconds: float) -> bool:
    if calls >= _MOST_CALLS:
        return False
    return calls < _FEWEST_CALLS or time.perf_counter() - begun < seconds


def _rate(durations: Sequence[float], samples: int) -> Rate:
    rates = sorted(samples / max(duration, 1e-9) for duration in durations)
    quarter = len(rates) // 4
    return Rate(statistics.median(rates), rates[quarter], rates[-1 - quarter], len(rates))


def bench_lines(report: BenchReport) -> List[str]:
    """Return the report as lines for people."""
    own = report.configured
    assert own.sizes is not None
    lines = [
        f"bench of {report.name}",
        f"  engine      {report.engine}",
        f"  batch       {batch_equation(own.sizes)}",
        f"  training    {_rate_text(own.rate)}, after {plural(report.warm_up_calls, 'call')} to warm up",
        f"  device      {_rate_text(report.device)}, alone, with one batch again and again",
        f"  data        {_rate_text(report.data)}, the data pipeline alone",
        *_cpu_lines(report),
        f"  limit       {report.verdict}",
        "",
        "  device_iterations  samples/s         middle half   ms/call  data wait  compile",
    ]
    for rung in report.ladder:
        mark = " <- configured" if rung.device_iterations == own.device_iterations else ""
        if rung.rate is None:
            lines.append(f"  {rung.device_iterations:>17} not measured: {rung.skipped}")
            continue
        spread = f"{count(rung.rate.low)} to {count(rung.rate.high)}"
        call = f"{rung.call_seconds * 1000:,.2f}"
        lines.append(
            f"  {rung.device_iterations:>17} {count(rung.rate.median):>10} {spread:>19} {call:>9} "
            f"{rung.wait_share:>10.0%} {duration(rung.compile_seconds):>8}{mark}"
        )
    lines += ["", *_estimate_lines(report)]
    if report.load > report.cpus + 1:
        busy = f"other work shares this machine (load {report.load:.1f} on {plural(report.cpus, 'CPU')})"
        lines.append(f"  note        {busy}: its speed would be higher alone")
    lines.append(f"  try next    {report.advice}")
    return lines


def _cpu_lines(report: BenchReport) -> List[str]:
    """Tell by how much plans convert what was measured of the data; nothing on the host of IPUs, where they do not."""
    if report.has_ipus or not report.core_seconds:
        return []
    faster = report.pod_core_seconds / report.core_seconds
    text = f"{faster:.1f} times as fast as a Pod's host is taken to be; plans convert the speed of the data by that"
    return [f"  CPU         {text}"] if faster else []


def _rate_text(rate: Optional[Rate]) -> str:
    if rate is None:
        return "-"
    spread = f"middle half of {plural(rate.calls, 'call')}: {count(rate.low)} to {count(rate.high)}"
    return f"{count(rate.median)} samples/s ({spread})"


def _estimate_lines(report: BenchReport) -> List[str]:
    found = report.estimate
    if "samples_per_second" not in found:
        return [f"  estimate    none for IPUs: {found.get('why', 'the model was not traced')}"]
    where = f"{plural(report.devices, 'IPU')} of machine={found['machine']}"
    speed = f"{count(found['samples_per_second'])} samples/s on {where}"
    return [f"  estimate    {speed}, by the planner: an estimate for IPUs, not measured"]
