"""`profile=trace`: the file, its rows, and that a profiled run computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from run_harness import Folder, built
from trace_rules import load_trace, rows_of

from ipurun.profiling.recorders import Profiler
from ipurun.profiling.report import ProfileReport, advise
from ipurun.training.loop import train

PIPELINE: Dict[str, Any] = {
    "devices": 2,
    "gradient_accumulation": 4,
    "device_iterations": 1,
    "micro_batch_size": 2,
    "pipeline__split": ["second"],
}


def profiled(folder: Path, **changes: Any) -> tuple:
    run = built(**changes)
    profiler = Profiler(run, folder)
    train(run, Folder(folder), phases=profiler.phases)
    return run, profiler.finish()


def traced(folder: Path, **changes: Any) -> tuple:
    _, report = profiled(folder, profile__kind="trace", **changes)
    return report, rows_of(load_trace(folder / "profile" / "trace.json"))


def ipu_rows(rows: Dict[Any, List[Any]]) -> List[List[Any]]:
    return [spans for (group, _), spans in rows.items() if "emulated IPUs" in group]


def test_the_host_row_has_every_phase(tmp_path: Path) -> None:
    report, rows = traced(tmp_path)
    names = {event["name"] for event in rows["host", "main thread: phases"]}
    assert {"data", "host call", "compile", "evaluation", "inference call", "checkpoint"} <= names
    assert ("host", "background: checkpoints") in rows
    assert report.steps == "2 to 4"


def test_each_emulated_ipu_has_a_row_with_its_passes(tmp_path: Path) -> None:
    _, rows = traced(tmp_path, **PIPELINE)
    assert [name for _, name in rows if name.startswith("IPU")] == ["IPU 0, stage 0", "IPU 1, stage 1"]
    for spans in ipu_rows(rows):
        assert {"forward", "backward", "recompute", "update", "wait"} >= {event["cat"] for event in spans}
        assert {"forward", "backward", "update"} <= {event["cat"] for event in spans}
    first, second = ipu_rows(rows)
    assert "wait: pipeline drains" in {event["name"] for event in second}
    assert "wait: pipeline fills" in {event["name"] for event in second}
    # Four micro-batches in each of three steps.
    assert sum(event["name"].startswith("forward ") for event in first) == 12
    assert {event["args"]["module"] for event in first if event["name"] == "addmm"} == {"first"}


def test_the_group_of_the_ipus_says_that_its_schedule_is_modelled(tmp_path: Path) -> None:
    _, rows = traced(tmp_path, **PIPELINE)
    groups = {group for group, _ in rows} - {"host"}
    assert groups == {"emulated IPUs (schedule modelled from op times measured on this CPU)"}


def test_replicas_have_separate_rows(tmp_path: Path) -> None:
    _, rows = traced(tmp_path, devices=2, micro_batch_size=2)
    assert len(ipu_rows(rows)) == 2


def test_the_same_micro_batch_passes_the_stages_in_order(tmp_path: Path) -> None:
    _, rows = traced(tmp_path, **PIPELINE)
    first, second = ipu_rows(rows)
    begun = {
        (ipu, event["name"]): event["ts"]
        for ipu, spans in enumerate((first, second))
        for event in reversed(spans)
        if event["name"] in ("forward 0", "backward 0")
    }
    order = [(0, "forward 0"), (1, "forward 0"), (1, "backward 0"), (0, "backward 0")]
    assert sorted(begun, key=lambda key: begun[key]) == order


def test_only_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    report, rows = traced(tmp_path, profile__start_step=5, profile__steps=1)
    measured = [event for event in rows["host", "main thread: phases"] if event["cat"] == "profiler"]
    assert report.steps == "5" and len(measured) == 1


def test_a_run_that_ends_before_the_first_step_says_so(tmp_path: Path) -> None:
    report, rows = traced(tmp_path, profile__start_step=500)
    assert not ipu_rows(rows)
    assert "profile.start_step=500" in report.notes[0]


RUNS: Dict[str, Dict[str, Any]] = {
    "plain": {},
    "pipelined": PIPELINE,
    "accumulated": {"gradient_accumulation": 4, "device_iterations": 2, "micro_batch_size": 2},
    "random": {"gradient_accumulation": 4, "model": {"_target_": "run_toys.Net", "dropout": 0.5}},
    "writes buffers": {"model": {"_target_": "run_toys.CountingNet"}},
    "half, rounded stochastically": {"precision": "16.16", "stochastic_rounding": True, "optimizer__lr": 0.01},
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=list(RUNS))
def test_profiling_leaves_the_weights_bit_for_bit_as_they_are(tmp_path: Path, changes: Dict[str, Any]) -> None:
    changes = dict(changes)
    rate = changes.pop("optimizer__lr", 0.1)
    changes["optimizer"] = {"_target_": "poptorch.optim.SGD", "lr": rate, "momentum": 0.9}
    plain, _ = profiled(tmp_path / "plain", **changes)
    expected = plain.user_model.state_dict()
    for kind in ("trace", "torch"):
        profile = {"profile__kind": kind, "profile__start_step": 1, "profile__steps": 100}
        seen, _ = profiled(tmp_path / kind, **profile, **changes)
        got = seen.user_model.state_dict()
        assert all(torch.equal(expected[name], got[name]) for name in expected), kind


def test_data_workers_have_rows(tmp_path: Path) -> None:
    _, rows = traced(tmp_path, loader__workers=1, epochs=1)
    (spans,) = [spans for (_, name), spans in rows.items() if name.startswith("data worker 0")]
    assert {"micro-batch", "read samples", "collate"} == {event["name"] for event in spans}


def test_reading_in_this_process_is_shown_as_well(tmp_path: Path) -> None:
    _, rows = traced(tmp_path, epochs=1)
    assert len([e for e in rows["host", "data, read in this process"] if e["name"] == "micro-batch"]) == 8


def test_the_report_ranks_ops_and_modules(tmp_path: Path) -> None:
    report, _ = traced(tmp_path, **PIPELINE)
    for costs in (report.operations, report.modules):
        seconds = [cost.seconds for cost in costs]
        assert 0 < len(costs) <= 10 and seconds == sorted(seconds, reverse=True)
    assert {cost.name for cost in report.modules} >= {"first", "second"}
    assert [(stage.stage, stage.ipu) for stage in report.stages] == [(0, 0), (1, 1)]
    assert (tmp_path / "profile" / "report.json").is_file() and report.advice


def test_torch_profiler_writes_for_tensorboard(tmp_path: Path) -> None:
    _, report = profiled(tmp_path, profile__kind="torch", profile__steps=2, **PIPELINE)
    (file,) = report.files
    assert file.endswith(".pt.trace.json") and "tensorboard --logdir" in report.opens
    assert any(cost.name.startswith("aten::") for cost in report.operations)
    assert report.steps == "2 to 3"
    events = json.loads(Path(file).read_text())["traceEvents"]
    assert [event["name"] for event in events].count("ipurun host call") == 2
    # torch.profiler knows no modules: the engine measures them once, before it starts.
    assert {cost.name for cost in report.modules} >= {"first", "second"}
    assert [(stage.stage, stage.ipu) for stage in report.stages] == [(0, 0), (1, 1)]
    assert any("modules and stages are those of step 2" in note for note in report.notes)


class FakePvti:
    """Graphcore's libpvti, as PopTorch uses it."""

    def __init__(self) -> None:
        self.seen: List[str] = []

    def createTraceChannel(self, name: str) -> str:
        return name

    def Tracepoint(self, channel: str, label: str) -> Any:
        self.seen.append(f"{channel}: {label}")
        return torch.autograd.set_grad_enabled(torch.is_grad_enabled())


def test_phases_are_channels_of_pvti(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePvti()
    monkeypatch.setenv("PVTI_OPTIONS", '{"enable":"true"}')
    monkeypatch.setattr("ipurun.emulator.profiling._pvti", fake)
    profiled(tmp_path, epochs=1)
    channels = {entry.split(":")[0] for entry in fake.seen}
    assert {"ipurun.data", "ipurun.host call", "ipurun.evaluation", "ipurun.checkpoint"} <= channels
    assert "ipurun.host call: ipurun.host call.steps 1 to 1" in fake.seen


def report_with(**values: Any) -> ProfileReport:
    return ProfileReport("trace", **values)


def test_advice_names_the_key_that_helps(tmp_path: Path) -> None:
    run = built(**PIPELINE)
    loader = run.config.loader
    slow = report_with(phases={"data": 5.0, "host call": 5.0})
    assert "loader.workers=4" in advise(slow, run.plan, loader)
    bubble = report_with(phases={"host call": 5.0}, waits={"pipeline fills": 0.2, "pipeline drains": 0.2})
    assert "gradient_accumulation=8" in advise(bubble, run.plan, loader)
    turns = report_with(phases={"host call": 5.0}, waits={"its turn": 0.5})
    assert "pipeline.strategy=pipelined" in advise(turns, run.plan, loader)
