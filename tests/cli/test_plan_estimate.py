"""`plan` with its estimate: what it tells, what it exits with, and that what it tells to type does what it says."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, List, Tuple
from unittest import mock

import pytest

from ipurun import engine as engines
from ipurun.build.cached_executables import look_into_cache
from ipurun.cli.main import main
from ipurun.config.compose import one
from ipurun.estimate.estimate import assumptions_of
from ipurun.estimate.split import Splitter
from ipurun.inspect import trace
from ipurun.inspect.facts import LoadingRate
from ipurun.inspect.model_and_data import inspect
from ipurun.inspect.profiles import keep_loading_rate, stored_loading_rate
from ipurun.planning import artifacts, make_plan

# An IPU of little memory, so that a small model does not fit one.
SMALL = ["machine.tiles=8", "machine.tile_bytes=160000", "machine.tile_imbalance_bytes=1000"]
SMALL += ["machine.code_bytes_per_tile=1000", "machine.code_bytes_per_op=10", "machine.code_bytes_per_call=10"]
GPT = ["+recipe=gpt", "model=gpt_tiny", "micro_batch_size=1", "model.max_positions=32"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A plan shows what the disk has free, which other processes change between two plans.
    monkeypatch.setattr(artifacts.shutil, "disk_usage", lambda folder: mock.Mock(free=10**11))


def _json(capsys: Any, code: int, *argv: str) -> Any:
    assert main(["plan", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_every_figure_is_called_an_estimate(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "devices=4"]) == 0
    text = capsys.readouterr().out
    shown: List[str] = text[text.index("estimate for") :].splitlines()
    assert shown[0] == "estimate for GC200: fits"
    assert "memory of each IPU in MiB, of 897 (estimate)" in shown
    for label in ("throughput", "one update", "host I/O", "links"):
        (line,) = [line for line in shown if line.strip().startswith(label)]
        assert line.endswith("(estimate)")
    assert "assumptions" not in shown


def test_assumptions_are_listed_when_asked_for(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "assumptions" in text and "conf/machine" in text


def test_what_does_not_fit_exits_with_3_and_tells_what_helps(capsys: Any) -> None:
    assert main(["plan", *GPT, *SMALL, "devices=4", "gradient_accumulation=32"]) == 3
    text = capsys.readouterr().out
    assert "estimate for GC200: does not fit: IPU 0" in text
    assert "what would help it fit (each estimated)" in text


def test_solve_finds_each_split_once_and_writes_the_assumptions_once(capsys: Any, monkeypatch: Any) -> None:
    solved, written = [], []

    class Counted(Splitter):
        def __init__(self, traced: Any, num_ipus: int, settings: Any, *rest: Any) -> None:
            solved.append((num_ipus, settings, rest))
            super().__init__(traced, num_ipus, settings, *rest)

    def counted(model: Any) -> Any:
        written.append(model)
        return assumptions_of(model)

    monkeypatch.setattr("ipurun.estimate.search.Splitter", Counted)
    monkeypatch.setattr("ipurun.log.estimate_text.assumptions_of", counted)
    tiny = ["machine.tile_bytes=120000", "gradient_accumulation=32"]  # no single change fits: remedies search as well
    assert main(["plan", *GPT, *SMALL, *tiny, "devices=4", "--solve", "--explain"]) == 0
    assert "all ways to save memory" in capsys.readouterr().out
    assert len(written) == 1
    assert solved and all(solved.count(each) == 1 for each in solved)


def test_json_has_memory_time_and_remedies(capsys: Any) -> None:
    found = _json(capsys, 0, "+recipe=mnist", "devices=2")["estimate"]
    (ipu,) = found["ipus"]
    parts = ("weights", "gradients", "optimizer_state", "activations", "temporary", "io", "code")
    assert ipu["total"] == sum(ipu[part] for part in parts)
    assert ipu["limit"] == 1472 * 638976
    assert ipu["weights"] >= 46_730 * 4  # the recipe's model has as many float32 parameters
    assert found["is_estimate"] is True and found["verdict"] == "fits"
    assert found["time"]["samples_per_second"] > 0


def test_inference_needs_less_and_returns_more(capsys: Any) -> None:
    """No stash, no gradients, no optimizer; the scores of every sample go back to the host."""
    words = [*GPT, "devices=4", "pipeline=gpt_tiny_4ipu", "optimizer=adamw"]
    found = _json(capsys, 0, *words)["estimate"]
    inference = found["inference"]
    for trained, used in zip(found["ipus"], inference["ipus"]):
        assert used["gradients"] == used["optimizer_state"] == used["activations"] == 0
        assert used["weights"] == trained["weights"] and used["total"] < trained["total"]
    # Both ends are on IPU 0: a row of scores for each token goes out, and the head's input comes from IPU 3; tokens,
    # targets and the loss are little beside them.
    scores, hidden = 32 * 96, 32 * 64
    assert inference["ipus"][0]["io"] == pytest.approx(4 * (scores + hidden), rel=0.05)
    assert inference["schedule"]["micro_batches"] == 5 and inference["schedule"]["stages"] == 5
    assert sum(ipu["backward"] + ipu["recompute"] for ipu in inference["time"]["ipus"]) == 0
    assert main(["plan", *words, "--inference"]) == 0
    assert "inference on GC200: fits (estimate)" in capsys.readouterr().out


def test_inference_that_does_not_fit_is_reported(capsys: Any) -> None:
    words = [
        "+recipe=mnist",
        "machine.tiles=64",
        "machine.tile_imbalance_bytes=1000",
        "machine.code_bytes_per_tile=1000",
    ]
    assert main(["plan", *words, "inference.micro_batch_size=20000"]) == 3
    text = capsys.readouterr().out
    assert "estimate for GC200: fits" in text and "inference  does not fit: IPU 0" in text


@pytest.mark.parametrize(
    "words",
    [
        ["+recipe=mnist", "precision=16.16", "devices=2"],
        [*GPT, "pipeline=gpt_tiny_4ipu", "memory.serialize={lm_head: 2}"],
    ],
    ids=["mnist", "gpt"],
)
def test_the_cache_is_looked_into_for_this_very_program(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: List[str]
) -> None:
    monkeypatch.setenv("POPTORCH_EMULATOR_CACHE_SECONDS", "0")
    words = [*words, "engine=cpu", f"cache.dir={tmp_path}/cache", "eval.max_samples=8"]
    cache = _json(capsys, 0, *words)["estimate"]["cache"]
    assert (cache["training"], cache["executables"]) == ("miss", 0)
    assert not Path("cache").exists()  # a plan writes nothing
    assert main(["train", *words, "max_steps=1", "--quiet"]) == 0
    capsys.readouterr()
    cache = _json(capsys, 0, *words)["estimate"]["cache"]
    # One for each mode, and one for micro-batches that are computed at once.
    assert (cache["training"], cache["inference"], cache["executables"]) == ("hit", "hit", 4)
    changed = _json(capsys, 0, *words, "micro_batch_size=3", "inference.micro_batch_size=2")["estimate"]["cache"]
    assert (changed["training"], changed["inference"], changed["executables"]) == ("miss", "miss", 4)


def test_on_an_ipu_executables_are_only_counted(tmp_path: Path) -> None:
    """Their names are PopART's."""
    config = one(["+recipe=mnist", f"cache.dir={tmp_path}"]).config
    engine = engines.load("cpu")
    subject = inspect(config, engine)
    plan = make_plan(config, subject.facts)
    (tmp_path / "123.popef").touch()
    found = look_into_cache(config, plan, subject, dataclasses.replace(engine, kind="ipu"))
    assert (found.training, found.executables) == ("unknown", 1) and "PopART" in found.why


def test_every_remedy_does_what_it_says_when_typed(capsys: Any) -> None:
    words = [*GPT, *SMALL, "devices=4", "gradient_accumulation=32"]
    remedies = _json(capsys, 3, *words)["estimate"]["remedies"]
    assert len(remedies) > 3
    for remedy in remedies:
        code = 3 if remedy["verdict"] == "does not fit" else 0
        found = _json(capsys, code, *words, *remedy["overrides"])["estimate"]
        assert found["verdict"] == remedy["verdict"], remedy["overrides"]
        assert max(ipu["share"] for ipu in found["ipus"]) == pytest.approx(remedy["fullest_share"])
        assert found["time"]["samples_per_second"] == pytest.approx(remedy["samples_per_second"])


def test_a_solution_does_what_it_says_when_typed(capsys: Any) -> None:
    words = [*GPT, *SMALL, "devices=4", "global_batch_size=64"]
    document = _json(capsys, 0, *words, "--solve")
    solution = document["solutions"][0]
    assert document["estimate"]["verdict"] == "does not fit"
    again = _json(capsys, 0, *words, *solution["overrides"])
    assert again["training"]["samples_per_update"] == 64
    assert again["devices"]["total"] == 4
    assert again["estimate"]["verdict"] == solution["verdict"]
    assert again["estimate"]["time"]["samples_per_second"] == pytest.approx(solution["samples_per_second"])


def test_blocks_of_the_config_are_reset_by_a_solution(capsys: Any) -> None:
    """Hydra merges mappings, so that blocks of the config would stay beside those of a solution."""
    words = [*GPT, *SMALL, "devices=4", "gradient_accumulation=32", "pipeline.blocks={h.1: 1, lm_head: 0}"]
    solution = _json(capsys, 0, *words, "--solve")["solutions"][0]
    assert "pipeline.blocks=null" in solution["overrides"]
    again = _json(capsys, 0, *words, *solution["overrides"])
    assert again["estimate"]["time"]["samples_per_second"] == pytest.approx(solution["samples_per_second"])


@pytest.mark.parametrize(("machine", "ipus"), [([], 1), (SMALL, 4)])
def test_shares_by_ipu_hold_in_a_solution_too(capsys: Any, machine: List[str], ipus: int) -> None:
    """The preset lists its shares for 4 IPUs; a replica of another size takes the first of them for all."""
    words = [*GPT, "pipeline=gpt_tiny_4ipu", "devices=4", "memory.available_proportion=[0.5,0.1,0.2,0.3]", *machine]
    words += ["gradient_accumulation=null", "global_batch_size=128"]
    document = _json(capsys, 0, *words, "--solve")
    solutions = [solution for solution in document["solutions"] if solution["overrides"]]
    assert solutions[0]["ipus_per_replica"] == ipus
    for solution in solutions:
        is_first_for_all = "memory.available_proportion=0.5" in solution["overrides"]
        is_lean = "memory.available_proportion=0.2" in solution["overrides"]
        assert is_first_for_all == (solution["ipus_per_replica"] != 4 and not is_lean)
        found = _json(capsys, 0, *words, *solution["overrides"])["estimate"]
        assert found["time"]["samples_per_second"] == pytest.approx(solution["samples_per_second"], rel=1e-6)
        assert max(ipu["share"] for ipu in found["ipus"]) == pytest.approx(solution["fullest_share"], rel=1e-6)


def test_a_solution_is_never_slower_than_the_config_as_it_is(capsys: Any) -> None:
    document = _json(capsys, 0, *GPT, "pipeline=gpt_tiny_4ipu", "devices=4", "--solve")
    best = max(solution["samples_per_second"] for solution in document["solutions"])
    assert best >= document["estimate"]["time"]["samples_per_second"]
    assert [] in [solution["overrides"] for solution in document["solutions"]]


def test_a_solution_can_be_written_and_used(capsys: Any) -> None:
    words = [*GPT, *SMALL, "devices=4", "global_batch_size=64"]
    assert main(["plan", *words, "--solve=conf/recipe/solved.yaml"]) != 0  # its folder does not exist
    assert "cannot write" in capsys.readouterr().err
    Path("conf/recipe").mkdir(parents=True)
    assert main(["plan", *words, "--solve=conf/recipe/solved.yaml"]) == 0
    capsys.readouterr()
    written = Path("conf/recipe/solved.yaml").read_text(encoding="utf-8")
    assert "pipeline:\n  split: [" in written
    found = _json(capsys, 0, "+recipe=[gpt,solved]", *GPT[1:], *SMALL[:], "micro_batch_size=1")
    assert found["devices"]["per_replica"] > 1


def test_split_auto_is_solved(capsys: Any) -> None:
    words = [*GPT, "devices=4", "pipeline.ipus=4", "pipeline.split=auto", "gradient_accumulation=16"]
    found = _json(capsys, 0, *words)
    assert found["devices"]["per_replica"] == 4
    assert {placement["ipu"] for placement in found["placements"]} == {0, 1, 2, 3}  # the head shares IPU 0's embedding
    assert found["placements"][-1]["module"] == "lm_head"


def test_split_auto_takes_as_few_ipus_as_will_do(capsys: Any) -> None:
    words = [*GPT, "pipeline.split=auto", "gradient_accumulation=32"]
    assert _json(capsys, 0, *words)["devices"]["total"] == 1
    small = _json(capsys, 0, *words, *SMALL)
    assert small["devices"]["total"] > 1
    assert small["estimate"]["verdict"] != "does not fit"
    fewer = small["devices"]["total"] // 2
    assert main(["plan", *words, *SMALL, f"pipeline.ipus={fewer}", "--json"]) in (0, 3)
    assert json.loads(capsys.readouterr().out)["estimate"]["verdict"] != "fits"


def test_split_auto_that_finds_nothing_still_shows_a_plan(capsys: Any) -> None:
    words = [*GPT, *SMALL, "machine.tile_bytes=3000", "pipeline.split=auto", "devices=4", "gradient_accumulation=32"]
    found = _json(capsys, 3, *words)
    assert any("no split that fits" in note for note in found["notes"])
    assert found["estimate"]["needs"]["ipus"] is None
    assert main(["plan", *words]) == 3
    assert "devices    1 IPU of 4: no split fits" in capsys.readouterr().out


def test_a_model_that_cannot_be_traced_still_has_a_plan(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("untraceable.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(784, 10)\n"
        "    def forward(self, x):\n"
        "        raise RuntimeError('needs a moon in the third house')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    words = ["+recipe=mnist", "model._target_=untraceable.Net"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "no estimate: the model cannot be traced" in text and "untraceable.py:7" in text
    assert main(["plan", *words, "--solve"]) == 2
    assert "the model cannot be traced" in capsys.readouterr().err


def test_a_page_is_written(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "--html", "page.html", "--quiet"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and 'Plan of mnist <span class="badge good">fits</span>' in page


def test_split_auto_says_what_it_lacks(capsys: Any) -> None:
    words = [*GPT, *SMALL, "pipeline.split=auto", "pipeline.ipus=4", "gradient_accumulation=3"]
    assert main(["validate", *words]) == 2
    assert "gradient_accumulation=9, but it is 3" in " ".join(capsys.readouterr().err.split())


def test_a_second_plan_does_not_trace_again(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    words = ["plan", *GPT, "devices=2", "pipeline.layers_per_ipu=[1,2]", "gradient_accumulation=8"]
    assert main(words) == 0
    first = capsys.readouterr().out
    traces: List[Any] = []
    plain = trace.capture
    monkeypatch.setattr(trace, "capture", lambda *args, **kwargs: traces.append(args) or plain(*args, **kwargs))
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert traces == []
    assert main([*words, "model.max_positions=16"]) == 0  # another model
    assert traces


def test_broken_profiles_are_made_again(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["plan", "+recipe=mnist"]) == 0
    first = capsys.readouterr().out
    for path in (tmp_path / "cache" / "profiles").iterdir():
        path.write_text('{"fields": 3}', encoding="utf-8")
    assert main(["plan", "+recipe=mnist"]) == 0
    assert capsys.readouterr().out == first


def test_a_host_bound_plan_shows_how_many_workers_are_enough(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "machine.host_samples_per_second=1000", "device_iterations=100"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("host I/O")]
    assert "host-bound: loader.workers=" in line


def test_a_plan_uses_what_bench_measured_of_the_data(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    words = ["+recipe=mnist", "data=synthetic", "device_iterations=100"]

    def host_line(*more: str) -> str:
        assert main(["plan", *words, *more]) == 0
        shown = capsys.readouterr().out
        (line,) = [line for line in shown.splitlines() if line.strip().startswith("host I/O")]
        return line

    assert "which ipurun bench measures" in host_line()
    config = one(words).config
    keep_loading_rate(config, loaded(1000.0))
    slow = host_line()
    assert "host-bound: loader.workers=" in slow
    assert "one loads 1,000 samples/s, measured by ipurun bench on 2026-11-18" in slow
    needed = int(slow.partition("loader.workers=")[2].split()[0])
    assert "on more than the 64 CPUs of the host" in slow or needed <= 64
    assert "host-bound: loader.workers=" in host_line("loader.mode=async")
    assert stored_loading_rate(one(["+recipe=mnist"]).config) is None  # other data
    keep_loading_rate(config, loaded(1e9))
    assert "not host-bound" in host_line()
    assert "host calls take most of the time" in host_line("device_iterations=1")
    assert "one loads 5,000" in host_line("machine.host_samples_per_second=5000")


def loaded(samples_per_second: float, core_seconds: float = 1e-3, *, has_ipus: bool = True) -> LoadingRate:
    return LoadingRate(samples_per_second, cpus=64, day="2026-11-18", core_seconds=core_seconds, has_ipus=has_ipus)


def test_what_a_faster_machine_loads_is_converted_to_the_host_of_a_pod(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    words = ["+recipe=mnist", "data=synthetic", "device_iterations=100", "machine.host_core_seconds=3e-3"]

    def planned(*more: str) -> Tuple[str, float]:
        assert main(["plan", *words, *more]) == 0
        shown = capsys.readouterr().out
        return shown, _json(capsys, 0, *words, *more)["estimate"]["time"]["samples_per_second"]

    keep_loading_rate(one(words).config, loaded(500.0))
    shown, on_ipu_host = planned()
    assert "one loads 500 samples/s, measured by ipurun bench on 2026-11-18)" in shown
    keep_loading_rate(one(words).config, loaded(500.0, has_ipus=False))
    shown, elsewhere = planned()
    assert "one loads 167 samples/s, measured" in shown
    assert "on a CPU that is 3.0 times as fast as those of a Pod's host" in shown
    assert elsewhere == pytest.approx(on_ipu_host / 3, rel=0.05)  # loading takes nearly all of the time
    assert "of the host" in planned("machine.host_cpus=1")[0]
    given = ("machine.host_samples_per_second=5", "machine.host_cpus=8")
    enough, many = (planned(*given, f"loader.workers={workers}")[1] for workers in (8, 1000))
    assert enough == many  # they take turns
    shown = planned(*given)[0]
    assert "on more than the 8 CPUs of the host" in shown and "loader.workers=8\n" in shown
    assert planned("machine.host_core_seconds=0")[1] == on_ipu_host


def test_a_plan_that_leaves_loading_out_may_be_far_too_fast(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Published runs that load in the process that trains are up to 3.13 times slower than the device alone."""
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")

    def planned(*words: str) -> Tuple[float, float, str]:
        assert main(["plan", "+recipe=mnist", "device_iterations=100", *words]) == 0
        shown = capsys.readouterr().out
        (line,) = [line for line in shown.splitlines() if line.strip().startswith("throughput")]
        speed, low = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", line)[:2])
        return speed, speed / low, shown

    speed, unknown, shown = planned()
    assert unknown == pytest.approx(3.15, rel=0.01) and "since loading was not measured" in shown
    added = re.search(r"0\.1 ms a sample, between host calls, would add (\d+)% to the time", shown)
    assert added is not None
    slower, known, shown = planned("machine.host_samples_per_second=10000")  # 0.1 ms each
    assert speed / slower == pytest.approx(1 + int(added[1]) / 100, rel=0.01)
    assert known == pytest.approx(1.5, rel=0.01) and "loading was not measured" not in shown
    assert planned("data=synthetic")[1] == pytest.approx(1.5, rel=0.01)


def test_bench_keeps_how_fast_the_data_loads(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    words = ["+recipe=mnist", "data=synthetic"]
    assert main(["bench", *words, "--seconds=0.05", "--ladder=1", "--quiet", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["data_alone"]["median"]
    kept = stored_loading_rate(one([*words, "data.train_samples=77", "micro_batch_size=3"]).config)
    assert kept is not None and kept.samples_per_second == pytest.approx(measured)
    assert 0 < kept.core_seconds < 1 and not kept.has_ipus


def test_a_measurement_of_an_earlier_version_is_measured_again(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    config = one(["+recipe=mnist", "data=synthetic"]).config
    keep_loading_rate(config, loaded(1000.0))
    (path,) = (tmp_path / "cache" / "loading").iterdir()
    path.write_text('{"samples_per_second": 1000.0, "cpus": 64, "day": "2026-11-18"}', encoding="utf-8")
    assert stored_loading_rate(config) is None


def test_a_plan_suggests_workers_where_loading_is_the_limit(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    words = ["+recipe=resnet", "model=resnet18", "data=synthetic", "machine.host_samples_per_second=500"]
    assert main(["plan", *words]) == 0
    assert "to load data beside the device" in capsys.readouterr().out


def test_loading_between_host_calls_is_named_though_the_device_takes_longer(capsys: Any) -> None:
    words = ["+recipe=vit", "data=synthetic", "device_iterations=8", "gradient_accumulation=64"]
    assert main(["plan", *words, "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)["estimate"]["time"]["samples_per_second"]
    assert main(["plan", *words, f"machine.host_samples_per_second={4 * speed}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the device waits for data 20% of the time" in shown
    assert "loader.workers=1 would load beside it" in shown


def test_synthetic_data_plans_any_batch_size(capsys: Any) -> None:
    assert main(["plan", "+recipe=mnist", "data=synthetic", "gradient_accumulation=10000"]) == 0
    assert "to run it, set data.train_samples=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("instances", "noted"),
    [
        ([], "distributed.instances=4 distributed=poprun"),
        (["distributed=poprun", "distributed.instances=2"], "by 2 instances: PopTorch attaches 64 in one process"),
        (["distributed=poprun", "distributed.instances=4"], ""),
    ],
)
def test_256_ipus_need_four_instances(
    instances: List[str], noted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    words = ["+recipe=mnist", "data=synthetic", "data.train_samples=20000", "devices=256", *instances]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert (noted in shown) if noted else ("planned but not run" not in shown)
    assert "4 domains of 64 IPUs" in shown


def test_every_instance_has_its_own_workers(capsys: pytest.CaptureFixture[str]) -> None:
    def needed(*instances: str) -> int:
        words = ["+recipe=mnist", "devices=4", "device_iterations=10", "machine.host_samples_per_second=1000"]
        assert main(["plan", *words, "loader.workers=1", *instances]) == 0
        return int(capsys.readouterr().out.partition("host-bound: loader.workers=")[2].split()[0])

    assert needed("distributed=poprun", "distributed.instances=4") == pytest.approx(needed() / 4, abs=1)
