"""The runner beside another PopTorch than the emulator: a double of the real package, as on an IPU host."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trace_rules import load_trace, rows_of
from warm_python import run_warm

ROOT = Path(__file__).resolve().parents[1]
TOY = ["data._target_=run_toys.pair", "loss.name=CrossEntropyLoss", "cache.enabled=false"]


@pytest.fixture
def host(tmp_path: Path):
    """Run a script or a command in a process that can import the double as `poptorch`."""
    folders = [ROOT, ROOT / "tests/helpers/double", ROOT / "tests/helpers"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}

    def run(*words: str, ipus: int = 8) -> subprocess.CompletedProcess:
        return run_warm(list(words), tmp_path, {**env, "DOUBLE_IPUS": str(ipus)})

    return run


def _script(host: Any, body: str, ipus: int = 8) -> Any:
    """Run Python code there and return what it passes to `show`."""
    code = "import json, ipurun\ndef show(value): print('SHOWN' + json.dumps(value))\n" + body
    done = host("-c", code, ipus=ipus)
    shown = [line[5:] for line in done.stdout.splitlines() if line.startswith("SHOWN")]
    assert shown, done.stdout + done.stderr
    return json.loads(shown[-1])


def test_the_double_is_taken_for_the_real_package(host) -> None:
    done = host("-m", "ipurun", "env")
    assert "engine      ipu" in done.stdout and "IPUs        8" in done.stdout
    assert "engine      cpu" in host("-m", "ipurun", "env", ipus=0).stdout


@pytest.mark.parametrize("engine", ["auto", "cpu"])
@pytest.mark.parametrize("model", ["WithBlocks", "WithStarts", "WithFunctions", "WithModuleBlocks"])
def test_blocks_of_the_real_package_are_planned_and_run(host, model: str, engine: str) -> None:
    words = [f"model._target_=ipu_models.{model}", *TOY, "devices=8", f"engine={engine}", "micro_batch_size=1"]
    words += ["gradient_accumulation=4", "max_steps=2", "inference.device_iterations=2"]
    done = host("-m", "ipurun", "train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 IPUs = 4 replicas x 2 IPUs, 2 stages" in done.stdout
    assert ("engine      ipu: PopTorch 3.4.0" in done.stdout) == (engine == "auto")


def test_a_host_without_free_ipus_runs_models_that_import_poptorch_on_the_cpu(host) -> None:
    words = ["model._target_=ipu_models.WithBlocks", *TOY, "devices=2", "gradient_accumulation=4", "max_steps=1"]
    done = host("-m", "ipurun", "train", *words, "micro_batch_size=1", "inference.device_iterations=2", ipus=0)
    assert done.returncode == 0 and "2 stages" in done.stdout and "engine      cpu" in done.stdout, done.stdout


def test_one_process_can_use_both_engines(host) -> None:
    body = f"""
import sys
def run(engine):
    ipurun.train(overrides=["model._target_=ipu_models.WithBlocks", *{TOY!r}, "inference.device_iterations=2",
                 "engine=" + engine, "max_steps=1", "micro_batch_size=1", "gradient_accumulation=4", "devices=2"])
    return sys.modules["poptorch"].__name__
show([run("cpu"), run("ipu"), run("cpu")])
"""
    assert _script(host, body)[:2] == ["ipurun.emulator", "poptorch"]


COMPARE = """
import torch
def weights(engine, *more):
    result = ipurun.train(overrides={words!r} + ["engine=" + engine, *more])
    return {{name: value.float() for name, value in result.load().model.state_dict().items()}}
on_ipu, on_cpu = weights("ipu"), weights("cpu")
still = weights("cpu", "optimizer.lr=0")
def apart(a, b):
    return {{name: float((a[name] - b[name]).abs().max()) for name in a}}
show([apart(on_ipu, on_cpu), apart(on_cpu, still)])
"""


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        (["+recipe=mnist"], 1e-6),
        (["+recipe=mnist", "precision=16.32", "loss_scaling=64"], 2e-4),
        (["+recipe=vit", "precision=16.32", "loss_scaling=64", "model.dropout=0"], 2e-4),
        (["+recipe=mnist", "gradient_accumulation=2", "device_iterations=2"], 1e-6),
    ],
    ids=["float", "mixed", "vit-mixed", "accumulated"],
)
def test_both_engines_train_to_the_same_weights(host, words, tolerance: float) -> None:
    words = [*words, "devices=2", "max_steps=4", "optimizer=sgd", "optimizer.lr=0.05", "cache.enabled=false"]
    differences, changes = _script(host, COMPARE.format(words=words))
    assert max(differences.values()) < tolerance and max(changes.values()) > 20 * tolerance, differences


def test_mixed_precision_computes_in_half_on_the_device(host) -> None:
    body = """
import poptorch
from poptorch import _poplar_executor
traces = []
trace = _poplar_executor.PoplarExecutor._trace
def kept(self, *args):
    trace(self, *args)
    traces.append(self.trace.operations)
_poplar_executor.PoplarExecutor._trace = kept
ipurun.train(overrides=["+recipe=mnist", "precision=16.32", "loss_scaling=64", "max_steps=1", "cache.enabled=false"])
products = [(name, str(types[0])) for name, _, types in traces[0] if name in ("convolution", "addmm", "mm")]
show(products)
"""
    products = _script(host, body)
    assert len(products) >= 4 and {kind for _, kind in products} == {"torch.float16"}, products


def test_the_learning_rate_is_sent_again_after_each_attach(host) -> None:
    body = """
import poptorch
words = ["+recipe=mnist", "max_steps=8", "eval.every_steps=2", "schedule=constant", "cache.enabled=false", "devices=8"]
ipurun.train(overrides=words)
show([[what, value] for what, value in poptorch.poptorch_core.sent if what in ("attach", "detach", "lr")])
"""
    events = [event[0] for event in _script(host, body)]
    attaches = [number for number, event in enumerate(events) if event == "attach"]
    training = attaches[::2]  # evaluation attaches in between: 8 replicas take all IPUs
    assert len(training) >= 4
    # The first one follows the compilation, with the rate that was compiled in.
    assert all(events[number + 1] == "lr" for number in training[1:]), events


def test_a_resumed_run_ends_with_the_weights_of_a_straight_one(host) -> None:
    body = """
import torch
words = ["+recipe=mnist", "devices=2", "cache.enabled=false", "epochs=null", "schedule=constant"]
straight = ipurun.train(overrides=[*words, "max_steps=8"])
half = ipurun.train(overrides=[*words, "max_steps=4"])
resumed = ipurun.train(overrides=[f"resume={half.folder}", "max_steps=8"])
a, b = straight.load().model.state_dict(), resumed.load().model.state_dict()
show([name for name in a if not torch.equal(a[name], b[name])])
"""
    assert _script(host, body) == []


@pytest.mark.parametrize("key", ["options.connectionType=Never", "options.useOfflineIpuTarget=2"])
@pytest.mark.parametrize("engine", ["ipu", "cpu"])
def test_an_offline_target_is_refused_before_the_run(host, tmp_path: Path, key: str, engine: str) -> None:
    done = host("-m", "ipurun", "train", "+recipe=mnist", key, f"engine={engine}")
    assert done.returncode == 2
    assert f"error: `{key.partition('=')[0]}`: the model could be compiled but not run" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


def test_hits_of_popart_are_judged_by_its_files_and_their_records(host, tmp_path: Path) -> None:
    """PopART does not say whether it loaded an executable. Compiling apart needs PopTorch and no IPU."""
    words = ["+recipe=mnist", "max_steps=1", "eval.max_samples=10", f"cache.dir={tmp_path}/cache", "devices=1"]
    body = f"""
import json, os
from ipurun.interface import compile_words, explain_cache_words
def run(*more):
    cache = ipurun.train(overrides=[*{words!r}, *more]).cache
    return [cache[mode]["state"] for mode in ("training", "inference")]
os.environ["DOUBLE_IPUS"] = "0"
made = [done.cache for done in compile_words([*{words!r}, "engine=ipu"], quiet=True).compiled.values()]
os.environ["DOUBLE_IPUS"] = "8"
asked = [each.state for each in explain_cache_words({words!r})[1]]
changed = explain_cache_words([*{words!r}, "device_iterations=2"])[1][0]
show([made, run(), run("seed=5", "optimizer.lr=0.1"), run("device_iterations=2"), asked, changed.differences])
"""
    made, first, second, changed, asked, differences = _script(host, body)
    assert made == ["miss", "miss"] and asked == ["hit", "hit"]
    assert first == second == ["hit", "hit"]
    assert changed == ["miss", "miss"] and differences == [["device_iterations", 2, 1]]
    records = [json.loads(path.read_text()) for path in (tmp_path / "cache" / "about").glob("*.json")]
    assert sorted((each["mode"], each["hits"]) for each in records if each["config"]["device_iterations"] == 1) == [
        ("inference", 2),
        ("training", 2),
    ]
    assert all(each["versions"]["poptorch"] == "PopTorch 3.4.0" for each in records)


def test_an_error_of_poplar_comes_with_remedies(host) -> None:
    body = """
import os
os.environ["DOUBLE_OUT_OF_MEMORY"] = "1"
words = ["+recipe=mnist", "machine.tiles=4", "machine.tile_imbalance_bytes=1000", "machine.code_bytes_per_tile=1000"]
try:
    ipurun.train(overrides=[*words, "micro_batch_size=100", "cache.enabled=false", "devices=1"])
except ipurun.RunError as error:
    show(error.problems[0].to_dict())
"""
    problem = _script(host, body)
    assert problem["what"] == "PopTorch failed while compiling the model for training"
    assert "638976 bytes" in problem["seen"]
    assert "what would help" in problem["fix"] and "micro_batch_size=" in problem["fix"]


def test_dithering_reaches_poplar_as_a_text(host) -> None:
    body = """
import poptorch
words = ["+recipe=mnist", "max_steps=1", "options.Training.setConvolutionDithering=true", "partials=half"]
ipurun.train(overrides=words)
show([value for what, value in poptorch.poptorch_core.sent if what == "options"][0])
"""
    assert _script(host, body)["convolutionOptions"] == {"partialsType": "half", "enableConvDithering": "true"}


def test_a_profiled_run_logs_phases_and_sensors(host, tmp_path: Path) -> None:
    reading = {"cards": [{"ipus": [{"id": "0", "ipu power": "101.5 W", "average board temp": "29.6 C"}]}]}
    script = tmp_path / "gc-monitor"
    script.write_text(f"#!/bin/sh\necho '{json.dumps(reading)}'\n")
    script.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ["train", "+recipe=mnist", "data=synthetic", "profile=trace", "max_steps=4"]
    program = (
        f"import os, sys\nos.environ['PATH'] = {path!r}\nfrom ipurun.cli.main import main\nsys.exit(main({words!r}))"
    )
    done = host("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "profile=graph records them" in done.stdout and "largest values: board celsius 29.6" in done.stdout
    (folder,) = (tmp_path / "runs/mnist").iterdir()
    rows = rows_of(load_trace(folder / "profile/trace.json"))
    assert {group for group, _ in rows} == {"host"}
    assert json.loads((folder / "ipus.jsonl").read_text().splitlines()[0])["power_watts"] == 101.5
