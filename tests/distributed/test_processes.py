"""Real processes against one: weights, data, metrics, resume, under torchrun's own command line."""

import json
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from project import CODE, KEYS, LIGHTNING, RUNS, words_of
from user_project import enter_project

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.emulator import processes
from ipurun.interface import train_words
from ipurun.runs.folder import RunFolder

COUNTS = (2, 4)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        enter_project(folder, patch, "dist_code", CODE, KEYS)
        recipe = Path("conf/recipe/tiny.yaml")
        text = recipe.read_text().replace(
            "data: {_target_: dist_code.splits}", "data: {_target_: dist_code.splits, kind: tensors}"
        )
        # The keys at the end replace those of the same name before them.
        lines = [
            line
            for line in text.splitlines()
            if not line.startswith(("optimizer: {_target_: poptorch.optim.SGD", "metrics: {", "micro_batch_size: 4"))
        ]
        recipe.write_text("\n".join(lines) + "\n")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'helpers'}")
        yield folder


@pytest.fixture(scope="module")
def alone(project):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in (*RUNS, *LIGHTNING):
        train_words(words_of(name, "alone"), quiet=True)
    torch.set_num_threads(threads)
    return project / "alone"


@pytest.fixture(scope="module", params=COUNTS)
def together(project, request):
    for path in project.glob("seen-*"):
        path.unlink()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]  # not torch's usual one, which tests that run beside these would use as well
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={request.param}",
        f"--master-port={port}",
    ]
    command += [str(Path(__file__).with_name("project.py")), f"together{request.param}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return project / f"together{request.param}"


def run_of(folder, name):
    (path,) = (folder / name).iterdir()
    return RunFolder(path)


def state_of(folder, name):
    return load(latest(run_of(folder, name)))


def test_no_thread_of_a_group_is_the_last_to_release_a_tensor():
    """It would need Python for that, where a process that is forked meanwhile could find it locked."""
    group = processes._connect(torch.distributed.HashStore(), 0, 1)
    sent = torch.ones(3)
    first = weakref.ref(sent)
    group.reduce_(sent)
    del sent
    assert first() is not None
    group.close()


@pytest.mark.parametrize("name", [name for name in (*RUNS, *LIGHTNING) if name != "quick"])
def test_the_weights_are_those_of_one_process_bit_for_bit(alone, together, name):
    one, several = state_of(alone, name), state_of(together, name)
    assert one["progress"]["samples"] == several["progress"]["samples"]
    for key, value in one["model"].items():
        assert torch.equal(value, several["model"][key]), key
        if name == "averaged":
            assert torch.equal(one["average"]["model"][key], several["average"]["model"][key]), key


def test_without_the_fixed_order_they_agree_within_rounding(alone, together):
    one, several = state_of(alone, "quick"), state_of(together, "quick")
    for key, value in one["model"].items():
        torch.testing.assert_close(value, several["model"][key])


@pytest.mark.parametrize("name", [name for name in RUNS if name != "half"])
def test_losses_and_metrics_cover_all_processes(alone, together, name):
    one, several = (state_of(folder, name)["progress"] for folder in (alone, together))
    assert several["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-5)
    readable = 35 if name.startswith("damaged") else 37  # 7 and 22 cannot be read
    assert int(several["metrics"]["top_two"]) == readable, "a sample of the evaluation is missing, or there twice"


@pytest.mark.parametrize("name", LIGHTNING)
def test_what_a_lightning_module_logs_covers_all_processes(alone, together, name):
    one, several = (logged(run_of(folder, name)) for folder in (alone, together))
    assert len(one) == len(several)
    for expected, found in zip(one, several):
        assert found == pytest.approx(expected, rel=1e-6)
    values = state_of(together, name)["progress"]["metrics"]
    assert ("rows" in values and values["rows"] == 21) if name == "lists" else "val_acc" in values


def logged(run):
    """Return what each line of a run's metrics says, without speeds and times."""
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    timed = ("second", "time", "wait", "call")
    return [
        {key: value for key, value in line.items() if isinstance(value, float) and not any(w in key for w in timed)}
        for line in lines
    ]


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("damaged")])
def test_samples_that_cannot_be_read_are_known_to_all_processes(alone, together, name):
    one, several = (json.loads(run_of(folder, name).summary_file.read_text()) for folder in (alone, together))
    assert several["skipped_samples"] == one["skipped_samples"]
    assert several["skipped_samples"][:6] == [7, 22, 37, 52, 67, 82]
    assert several["skipped_eval_samples"] == {"test": [7, 22]}


def test_each_sample_is_read_by_one_process(project, together):
    count = int(together.name[-1])
    seen = [(project / f"seen-{rank}").read_text().splitlines() for rank in range(count)]
    everything = [int(line) for lines in seen for line in lines]
    assert len({len(lines) for lines in seen}) == 1
    for index in set(everything) - {0}:  # every process looks at the first one
        assert everything.count(index) <= 2, "twice in an epoch"
    assert len(everything) >= 2 * 96, "of 100 samples a whole host call of 12 has 96"


def test_one_process_writes_and_each_has_a_log(together):
    run = run_of(together, "tensors")
    lines = run.metrics_file.read_text().splitlines()
    assert len(lines) == len(set(lines))
    count = int(together.name[-1])
    logs = sorted(path.name for path in (run.path / "logs").iterdir())
    assert logs == [f"instance-{rank}.log" for rank in range(1, count)]
    assert not list(run.path.glob("lock.json*"))


def test_a_run_resumes_exactly_with_another_number_of_processes(project, alone, together):
    whole = state_of(alone, "tensors")
    path = run_of(together, "half").path
    words = [f"resume={path}", "max_steps=null", "eval.at_end=true"]
    torch.set_num_threads(1)
    train_words(words, quiet=True)
    resumed = load(latest(RunFolder(path)))
    assert resumed["progress"]["step"] == whole["progress"]["step"]
    for key, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][key]), key


def test_evaluation_of_such_a_run_uses_one_process(project, together, capsys):
    assert main(["eval", str(run_of(together, "deep").path)]) == 0
    assert "accuracy" in capsys.readouterr().out
