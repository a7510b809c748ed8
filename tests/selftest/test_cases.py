"""`ipurun selftest`: the cases, their table, their exit code and the file to send."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ipurun.emulator
from ipurun.cli.main import main
from ipurun.engine import load
from ipurun.module_search import python_command
from ipurun.selftest.cases import CASES, chosen
from ipurun.selftest.run import run_case

# The emulator under PopTorch's name, on a machine with one IPU, with a fault that depends on the optimizer.
FAULTY_POPTORCH = """
import importlib, os, time
import ipurun.emulator
globals().update({name: value for name, value in vars(ipurun.emulator).items() if not name.startswith("__")})
optim = importlib.import_module("poptorch.optim")
__version__ = "3.4.0"

def ipuHardwareIsAvailable(num_ipus=1):
    return num_ipus == 1

def trainingModel(model, options=None, optimizer=None):
    fault = type(optimizer).__name__
    if fault == "Adam":
        for group in optimizer.param_groups:
            group["lr"] *= 1.1
    elif fault == "AdamW":
        raise RuntimeError("refused, password=hunter2")
    elif fault == "LAMB":
        os.abort()
    elif fault == "RMSprop":
        time.sleep(1000)
    if "SPOILED_LAYER" in os.environ:
        layer = model.get_submodule(os.environ["SPOILED_LAYER"])
        layer.register_forward_hook(lambda module, args, output: output + 0.1)
    return ipurun.emulator.trainingModel(model, options, optimizer)
"""


@pytest.fixture(name="folder", autouse=True)
def fixture_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture(name="faulty_poptorch")
def fixture_faulty_poptorch(tmp_path, monkeypatch):
    """Install it for the processes that a self-test starts; nothing imports it here."""
    package = tmp_path / "sdk/poptorch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAULTY_POPTORCH)
    for module in ("optim", "poptorch_core"):
        (package / f"{module}.py").write_text(f"from ipurun.emulator.{module} import *\n")
    monkeypatch.syspath_prepend(str(package.parent))


def rows(text):
    """Return the result of every case in the table."""
    cells = [line.split() for line in text.splitlines()]
    results = ("agrees", "differs", "failed", "skipped")
    return {words[0]: words[1] for words in cells if len(words) > 3 and words[1] in results}


def reports():
    return sorted(Path().glob("ipurun-selftest-*.json"))


def test_the_cpu_engine_agrees_with_plain_torch(capsys):
    names = ["half", "resume"]
    assert main(["selftest", "engine=cpu", "--only", ",".join(names)]) == 0
    text = capsys.readouterr().out
    assert "engine=cpu, compared with plain torch" in text
    assert rows(text) == dict.fromkeys(names, "agrees")
    assert "2 cases: 2 agree" in text
    assert reports() == []


def test_a_wrong_engine_differs_fails_crashes_or_skips_and_says_so(capsys, faulty_poptorch, monkeypatch):
    monkeypatch.setenv("POPLAR_API_TOKEN", "s3cret")
    monkeypatch.setenv("HOME", os.getcwd())
    assert main(["selftest", "engine=ipu", "--only", "adam,adamw,lamb,predict,sgd"]) == 1
    text = capsys.readouterr().out
    assert "engine=ipu, compared with the CPU engine" in text and "PopTorch 3.4.0, 1 IPU" in text
    expected = {"sgd": "agrees", "adam": "differs", "adamw": "failed", "lamb": "failed", "predict": "skipped"}
    assert rows(text) == expected
    assert "needs 2 IPUs, 1 available" in text
    assert "lamb failed:\n  its process was killed by SIGABRT" in text
    assert "adam differs:\n  " in text and "\n  plain torch agrees with the CPU engine\n" in text
    (report,) = reports()
    assert f"report: {report}" in text
    written = report.read_text()
    assert "s3cret" not in written and "hunter2" not in written and os.getcwd() not in written
    document = json.loads(written)
    assert document["versions"]["torch"] and document["engine"]["kind"] == "ipu"
    found = {case["case"]: case for case in document["cases"]}
    adam = found["adam"]["evidence"]
    assert "_target_: poptorch.optim.Adam" in adam["config"]
    assert any(line.startswith("optimizer = poptorch.optim.Adam(") for line in adam["plan"]["poptorch"])
    (change,) = [item for item in found["adam"]["comparisons"] if item["what"].startswith("change of")]
    worst = next(iter(change["sides"].values()))
    assert worst["found"]["norm"] == pytest.approx(1.1 * worst["expected"]["norm"], rel=0.05)
    assert worst["values_that_differ_most"][0]["found"] != worst["values_that_differ_most"][0]["expected"]
    assert "RuntimeError: refused" in found["adamw"]["evidence"]["traceback"]
    crash = found["lamb"]["evidence"]
    assert "Fatal Python error: Aborted" in crash["log"] and "poptorch.optim.LAMB" in crash["config"]
    assert found["sgd"]["evidence"] == {}


def test_a_case_that_hangs_is_ended_and_shows_where(capsys, faulty_poptorch):
    assert main(["selftest", "engine=ipu", "--only", "rmsprop,predict", "--timeout", "5", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    hung, skipped = document["cases"]
    assert (hung["status"], hung["reason"]) == ("failed", "took longer than 5 s")
    assert "(most recent call first)" in hung["evidence"]["log"]
    assert skipped["status"] == "skipped"
    assert document["report"] == str(reports()[0])


@pytest.mark.parametrize(
    ("name", "changed"),
    [("sgd_decay", "weight_decay"), ("groups", "lr"), ("replicated_all", "lr"), ("output_final", "lr")],
)
def test_a_wrong_optimizer_of_the_cpu_engine_is_found(tmp_path, monkeypatch, name, changed):
    right = ipurun.emulator.trainingModel

    def wrong(model, options=None, optimizer=None):
        optimizer.param_groups[-1][changed] *= 1.01
        return right(model, options, optimizer)

    (case,) = chosen([name])
    assert run_case(case, load("cpu"), tmp_path / "right").status == "agrees"
    monkeypatch.setattr(ipurun.emulator, "trainingModel", wrong)
    outcome = run_case(case, load("cpu"), tmp_path / "wrong")
    assert outcome.status == "differs" and "change of" in outcome.reason


def test_ctrl_c_shows_what_is_known(folder):
    words = ["selftest", "engine=cpu", "--only", "sgd,mnist,resnet,bert,gpt"]
    command = [*python_command("ipurun.cli.main.console"), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("mnist"):
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors
    assert rows("".join(lines))["mnist"] == "agrees"
    assert "5 cases: " in rest and " not run" in rest


def test_the_first_wrong_layer_of_an_engine_is_named(faulty_poptorch, monkeypatch):
    monkeypatch.setenv("SPOILED_LAYER", "model.fc1.1")
    words = ["selftest", "engine=ipu", "+recipe=mnist", "data=synthetic", "--layers", "--quiet"]
    command = [*python_command("ipurun.cli.main.console"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "the first layer that differs is `fc1.1`" in done.stdout
    assert "plain torch agrees with the CPU engine" in done.stdout


def test_the_cases_are_listed(capsys):
    assert main(["selftest", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [case.name for case in CASES]
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_says_how_many_ipus_it_takes(case):
    asked = [int(word.partition("=")[2]) for word in case.words if word.startswith("devices=")]
    assert asked == ([] if case.ipus == 1 else [case.ipus])
    assert case.ipus % case.replicas == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "pipelind"], "there is no case `pipelind`"),
        (["--only", ","], "`--only` needs the name of a case"),
        (["--only"], "`--only` needs a value"),
        (["--only", "sgd", "--only=adam"], "`--only` is given more than once"),
        (["--timeout", "soon"], "`--timeout` cannot be `soon`"),
        (["--timeout=-1"], "`--timeout` cannot be `-1`"),
        (["engine=gpu"], "`engine` cannot be `gpu`"),
        (["mnist"], "`selftest` takes no `mnist`"),
        (["+recipe=mnist"], "ipurun selftest +recipe=mnist --layers"),
        (["+recipe=mnist", "--layers", "--only", "sgd"], "`--layers` and `--only` do not go together"),
        (["engine=ipu", "--only", "sgd"], "`engine=ipu` needs PopTorch"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_wrong_words_are_refused(capsys, words, message):
    assert main(["selftest", *words]) == 2
    assert message in capsys.readouterr().err
