"""The functions of `import ipurun`: what they take, what they return, and what they leave alone."""

from __future__ import annotations

import doctest
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

import ipurun
from ipurun.cli.main import main
from ipurun.interface import _words

TINY: Dict[str, Any] = {
    "devices": 2,
    "max_steps": 2,
    "model": {"channels": 2, "hidden": 8},
    "eval": {"max_samples": 40},
    "cache": {"enabled": False},
    "engine": "cpu",
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def in_a_fresh_python(program: str) -> str:
    """Return what a program prints in a separate interpreter."""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout


def test_import_is_light_and_lists_its_names() -> None:
    program = (
        "import sys, ipurun\n"
        "print(set(ipurun.__all__) <= set(dir(ipurun)), ipurun.train.__name__, ipurun.ConfigError.__name__)\n"
        "print({'torch', 'numpy', 'hydra', 'omegaconf', 'yaml', 'rich'} & set(sys.modules))\n"
        "print(hasattr(ipurun, 'trian'))"
    )
    assert in_a_fresh_python(program).splitlines() == ["True train ConfigError", "set()", "False"]


@pytest.mark.parametrize(
    "value",
    [
        8,
        1e-5,
        float("inf"),
        True,
        None,
        "adam",
        "",
        "16",
        "null",
        "a b",
        "a,b",
        "it's",
        'say "x"',
        "C:\\",
        "\\'",
        "a=b",
        "[x]",
        "{x:1}",
        " padded ",
        "ä",
        [1, "a b", None],
        [{"shape": [1, 2], "dtype": "int64"}, {}],
        [],
        {},
    ],
    ids=repr,
)
def test_hydra_reads_a_value_back_as_it_was(value: object) -> None:
    (word,) = _words(None, (), None, {"key": value})
    read = OverridesParser.create().parse_override(word).value()
    assert getattr(read, "text", read) == value or [getattr(item, "text", item) for item in read] == value


def test_calls_are_written_as_command_lines() -> None:
    keys = {"optimizer": {"lr": 0.1, "_target_": "poptorch.optim.SGD"}, "resume": Path("runs") / "a b"}
    words = _words("mnist", ["seed=1", "~logger"], Path("more"), {**keys, "devices": torch.tensor(4)})
    assert words == [
        "--config-dir",
        "more",
        "+recipe=mnist",
        "seed=1",
        "~logger",
        "optimizer.lr=0.1",
        "optimizer._target_=poptorch.optim.SGD",
        "resume='runs/a b'",
        "devices=4",
    ]
    assert _words(["mnist", "mine"], (), None, {}) == ["+recipe=[mnist,mine]"]


def test_patterns_can_be_keys_of_mappings() -> None:
    report = ipurun.plan("mnist", precision="16.32", precision_rules={"fc*": "32", "conv1": 32}, loss_scaling=8.0)
    assert report.plan.module_precision == {"fc1": "32", "fc2": "32", "conv1": "32"}


def test_a_run_is_trained_loaded_and_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = ipurun.train("mnist", **TINY)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert "mnist: finished" in capsys.readouterr().out
    assert (result.status, result.step, result.name) == ("done", 2, "mnist")
    assert result.folder.is_dir() and result.best == result.metrics["accuracy"]
    assert result.to_dict()["folder"] == str(result.folder)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers

    loaded = result.load()
    assert (loaded.step, loaded.metrics, loaded.config.devices) == (2, result.metrics, 2)
    assert not loaded.model.training and loaded.model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
    evaluated = ipurun.evaluate(result.folder, quiet=True)
    assert evaluated.metrics == pytest.approx(result.metrics) and evaluated.samples == 40
    assert str(evaluated).startswith("step 2 on test: loss ")
    assert ipurun.predict(result.folder, "test", quiet=True).outputs.shape == (40, 10)
    assert capsys.readouterr().out == ""

    resumed = ipurun.train(resume=result.folder, max_steps=3, quiet=True)
    assert (resumed.folder, resumed.step) == (result.folder, 3)
    assert capsys.readouterr().out == ""
    first = ipurun.load(result.folder, checkpoint="step-00000002.pt", overrides=["seed=5"])
    assert (first.step, first.config.seed) == (2, 5)


def test_load_needs_no_data_and_no_ipu() -> None:
    result = ipurun.train("mnist", **TINY, quiet=True)
    config = result.folder / "config.yaml"
    text = config.read_text().replace("engine: cpu", "engine: ipu")
    config.write_text(text.replace("mnist.dataset.splits", "mnist.dataset.gone"))
    assert ipurun.load(result.folder).step == 2


def test_errors_are_exceptions() -> None:
    with pytest.raises(ipurun.ConfigError, match="unknown key `device`") as caught:
        ipurun.train("mnist", device=8)
    assert isinstance(caught.value.problems[0], ipurun.Problem)
    with pytest.raises(ipurun.ConfigError, match="takes a list of words"):
        ipurun.train("mnist", overrides="devices=8")
    with pytest.raises(ipurun.ConfigError, match="`devices` cannot be given as set"):
        ipurun.plan("mnist", devices={1, 2})
    with pytest.raises(ipurun.ConfigError, match="not a sweep"):
        ipurun.train("mnist", overrides=["-m", "devices=1,2"])
    with pytest.raises(ipurun.ConfigError, match="is not a run folder"):
        ipurun.load("nowhere")
    with pytest.raises(ipurun.RunError, match="loss"):
        ipurun.train("mnist", **TINY, optimizer={"lr": 1e30}, quiet=True)
    assert not any(Path("runs/mnist").glob("*/checkpoints/*.pt"))


def test_validate_returns_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ipurun.validate("mnist", devices=8) == []
    found = ipurun.validate("mnist", devices=3, optimizer={"learning_rate": 1})
    assert [problem.key for problem in found] == ["optimizer.learning_rate", "devices"]
    assert [problem.what for problem in ipurun.validate("mnits")] == ["unknown recipe `mnits`"]
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "LOUD")
    assert "POPTORCH_LOG_LEVEL" in ipurun.validate("mnist")[0].what


def test_a_plan_is_what_the_command_shows(capsys: pytest.CaptureFixture[str]) -> None:
    report = ipurun.plan("mnist", devices=8)
    assert main(["plan", "+recipe=mnist", "devices=8"]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert report.plan.devices.total == 8 and report.fits is True and report.solutions is None
    assert report.estimate is not None and report.to_dict()["estimate"]["verdict"] == report.estimate.verdict.value
    assert not Path("runs").exists()


def test_a_plan_is_solved() -> None:
    report = ipurun.plan("mnist", devices=2, solve=True)
    assert report.fits and report.solutions
    assert report.solution_yaml().startswith("# @package _global_")


def test_config_dir_is_a_further_folder_of_configs() -> None:
    Path("more/recipe").mkdir(parents=True)
    Path("more/recipe/mine.yaml").write_text("# @package _global_\ndefaults: [mnist]\ndevices: 4\n")
    assert ipurun.plan("mine", config_dir="more").plan.devices.total == 4
    assert ipurun.validate("mine")[0].what == "unknown recipe `mine`"


def test_a_hydra_of_the_caller_stays_initialized(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert ipurun.validate("mnist") == []
        assert compose("own").a == 1
    assert not GlobalHydra.instance().is_initialized()


def test_calls_from_threads_wait_for_each_other() -> None:
    results: Dict[int, ipurun.Result] = {}

    def run(seed: int) -> None:
        results[seed] = ipurun.train("mnist", **TINY, seed=seed, quiet=True)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[seed].status for seed in (1, 2)] == ["done", "done"]
    assert results[1].loss != results[2].loss
    assert ipurun.train("mnist", **TINY, seed=1, quiet=True).loss == results[1].loss


def test_variables_that_a_run_sets_are_taken_back() -> None:
    before = dict(os.environ)
    ipurun.train("mnist", **TINY, profile="graph", quiet=True)
    os.environ.pop("OMP_WAIT_POLICY", None)
    before.pop("OMP_WAIT_POLICY", None)
    assert dict(os.environ) == before


MOVED = [
    ("ipurun.train.metrics.Accuracy", "ipurun.metrics.Accuracy"),
    ("ipurun.train.metrics.TopKAccuracy", "ipurun.metrics.TopKAccuracy"),
]


def test_old_paths_in_a_config_work_with_a_note() -> None:
    metrics = {"accuracy": {"_target_": MOVED[0][0]}, "top": {"_target_": MOVED[1][0], "k": 2}}
    schedule = {"_target_": "ipurun.train.schedule.linear"}
    report = ipurun.plan("mnist", metrics=metrics, schedule=schedule)
    for old, new in [*MOVED, ("ipurun.train.schedule.linear", "ipurun.schedules.linear")]:
        assert len([note for note in report.plan.notes if note.startswith(f"{old} is now {new};")]) == 1
    assert not any("is now" in note for note in ipurun.plan("mnist").plan.notes)


def test_old_paths_in_python_code_work_with_a_warning() -> None:
    Path("train").mkdir()  # as an earlier edition leaves it, with nothing but __pycache__
    program = (
        "import os, warnings, ipurun\n"
        "ipurun.__path__.append(os.getcwd())\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    from ipurun.train.events import Observer\n"
        "    import ipurun.train.metrics, ipurun.train.schedule\n"
        "print([str(warning.message) for warning in seen if warning.category is DeprecationWarning])\n"
        "import ipurun.metrics, ipurun.schedules, ipurun.training.events\n"
        "print(ipurun.train.metrics is ipurun.metrics, ipurun.train.schedule is ipurun.schedules)\n"
        "print(Observer is ipurun.training.events.Observer, ipurun.train is ipurun.interface.train)\n"
        "try:\n    import ipurun.train.loop\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    )
    assert in_a_fresh_python(program).splitlines() == [
        "['ipurun.train.events is now ipurun.training.events', 'ipurun.train.metrics is now ipurun.metrics', "
        "'ipurun.train.schedule is now ipurun.schedules']",
        "True True",
        "True True",
        "ipurun.train.loop",
    ]


def test_present_paths_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ipurun.validate("mnist") == []


def test_the_examples_of_the_page_are_true() -> None:
    page = Path(__file__).parents[1] / "docs" / "how-to" / "python-api.md"
    text = page.read_text(encoding="utf-8")
    session = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    example = doctest.DocTestParser().get_doctest(session, {}, page.name, str(page), 0)
    assert len(example.examples) > 10
    printed: List[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert results.failed == 0, "".join(printed)
