"""`ipurun train`, one run: what it shows, what files it leaves, how it stops and resumes."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest
import torch
from user_project import enter_project

from ipurun.checkpoint import latest, load
from ipurun.cli.main import main
from ipurun.cli.train import _set_environment
from ipurun.runs.folder import RunFolder

CODE = """
class Points(torch.utils.data.Dataset):
    def __init__(self, samples=24, seconds=0.0, bad=False):
        random = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 4, generator=random)
        self.y = self.x.argmax(1) % 3
        self.seconds, self.bad = seconds, bad
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        if self.bad and index == 20:
            raise OSError("sample 20 is broken")
        time.sleep(self.seconds)
        return self.x[index], self.y[index]

def splits(samples=24, seconds=0.0, bad=False):
    print("a data set may print")
    return {"train": Points(samples, seconds, bad), "test": Points(10)}
"""


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "tiny_code", CODE, "epochs: 2\n")


def _train(*argv: str) -> int:
    return main(["train", "+recipe=tiny", *argv])


def _only_run(name: str = "tiny") -> RunFolder:
    (path,) = Path("runs", name).iterdir()
    return RunFolder(path)


def _steps(folder: RunFolder) -> List[int]:
    records = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    return [record["step"] for record in records if record["split"] == "train"]


def _weights(folder: RunFolder) -> Dict[str, torch.Tensor]:
    checkpoint = latest(folder)
    assert checkpoint is not None
    return load(checkpoint)["model"]


def test_a_run_shows_panel_steps_and_summary_in_order(capsys: Any) -> None:
    assert _train("device_iterations=2") == 0
    folder = _only_run()
    text = capsys.readouterr().out
    marks = [
        "ipurun train: tiny",
        "device_iterations=2  (command line)",
        "micro-batch 4 x device_iterations 2 x accumulation 1 x replicas 1 = 8 samples per host call",
        f"run folder  {folder}",
        "compiling for training",
        "compiled for training in",
        "step 2/12",
        "test: loss",
        "step 12/12",
        "tiny: finished",
        "final ",
        "time ",
        "checkpoint  ",
        "reproduce   ipurun train +recipe=tiny device_iterations=2",
    ]
    places = [text.find(mark) for mark in marks]
    assert -1 not in places and places == sorted(places), list(zip(marks, places))
    assert "\x1b[" not in text


def test_the_run_folder_holds_everything() -> None:
    assert _train("seed=5") == 0
    folder = _only_run()
    names = {path.name for path in folder.path.iterdir()}
    assert names >= {
        "config.yaml",
        "overrides.yaml",
        "plan.txt",
        "env.json",
        "metrics.jsonl",
        "log.txt",
        "checkpoints",
        "summary.json",
    }
    assert "seed: 5" in folder.config_file.read_text()
    assert _steps(folder) == list(range(1, 13))
    log = folder.log_file.read_text()
    assert "ipurun train: tiny" in log and "tiny: finished" in log
    summary = folder.summary()
    assert summary["status"] == "done" and summary["step"] == 12
    assert set(summary["seconds"]) >= {"compile", "train", "eval", "checkpoint", "data_wait", "total"}


def test_quiet_is_one_line(capsys: Any) -> None:
    code = Path("tiny_code.py")
    code.write_text(code.read_text().replace('print("a data set may print")', "pass"))
    assert _train("--quiet") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tiny: finished after 12 steps, loss ")


def test_json_is_one_document_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ipurun", "train", "+recipe=tiny", "max_steps=2", "--json"],
        capture_output=True,
        check=True,
        env=_environment(),
    )
    document = json.loads(done.stdout)
    assert document["status"] == "done" and document["step"] == 2
    assert document["folder"] == str(_only_run().path)
    assert b"a data set may print" in done.stderr


def test_resuming_a_stopped_run_gives_the_weights_of_one_that_was_not(capsys: Any) -> None:
    assert _train("name=whole") == 0
    assert _train("name=parts", "max_steps=5") == 0
    stopped = _only_run("parts")
    assert main(["train", f"resume={stopped}", "max_steps=null"]) == 0
    assert "resuming after step 5" in capsys.readouterr().out
    resumed = _only_run("parts")  # in the same folder
    assert _steps(resumed) == list(range(1, 13))
    whole = _weights(_only_run("whole"))
    for name, weight in _weights(resumed).items():
        assert torch.equal(weight, whole[name]), name
    assert "max_steps: null" in resumed.config_file.read_text()


def test_resume_auto_takes_the_unfinished_run_or_starts_a_new_one(capsys: Any) -> None:
    assert _train("max_steps=3") == 0
    first = _only_run()
    first.write_summary({"status": "interrupted"})
    assert _train("resume=auto") == 0
    assert _only_run().path == first.path and first.summary()["step"] == 12
    capsys.readouterr()
    assert _train("resume=auto", "max_steps=1") == 0
    assert "resume=auto finds no unfinished run" in capsys.readouterr().out
    assert len(list(Path("runs/tiny").iterdir())) == 2


def test_resuming_a_finished_run_says_that_nothing_is_left(capsys: Any) -> None:
    assert _train() == 0
    folder = _only_run()
    before = folder.summary()
    assert main(["train", f"resume={folder}"]) == 0
    assert "all steps are done" in capsys.readouterr().out
    assert folder.summary()["metrics"] == before["metrics"] and before["metrics"]


@pytest.mark.parametrize("word", ["resume=runs/none", "resume=conf"])
def test_resuming_from_nothing_is_a_config_error(capsys: Any, word: str) -> None:
    assert _train(word) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_failed_run_keeps_its_traceback_in_the_log(capsys: Any) -> None:
    assert _train("+data.bad=true", "loader.shuffle=false") == 1
    captured = capsys.readouterr()
    assert "sample 20 is broken" in captured.err and "Traceback" not in captured.err
    folder = _only_run()
    assert "Traceback" in folder.log_file.read_text() and "tiny_code.py" in folder.log_file.read_text()
    assert folder.summary()["status"] == "failed"
    assert _steps(folder) == list(range(1, 6))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["devices=3"], "power of two"),
        (["+logger.mine._target_=nowhere.Logger"], "`logger.mine._target_`"),
        (["micro_batch_size=100"], "100"),
        (["+data.smaples=3"], "smaples"),
        (["resume=runs/gone", "devices=3"], "is not a run folder"),
    ],
)
def test_a_config_error_leaves_no_folder(capsys: Any, words: List[str], message: str) -> None:
    assert _train(*words) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_logger_that_cannot_be_made_leaves_no_folder(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert _train("logger=wandb") == 2
    assert "ipurun[wandb]" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_runs_folder_that_is_a_file_is_reported_with_other_problems(capsys: Any) -> None:
    Path("runs").touch()
    assert _train("devices=3") == 2
    text = capsys.readouterr().err
    assert "cannot be made" in text and "power of two" in text


def test_loggers_from_the_config_are_fed() -> None:
    assert _train("logger=csv", "max_steps=2") == 0
    assert (_only_run().path / "metrics.csv").read_text().startswith("step,epoch,split,name,value\n1,")


def test_a_chosen_run_folder_is_used() -> None:
    assert _train("hydra.run.dir=here/it/is", "max_steps=1") == 0
    assert RunFolder("here/it/is").finished and not Path("runs").exists()


def test_resuming_with_another_model_leaves_the_run_as_it_was(capsys: Any) -> None:
    assert _train("max_steps=2") == 0
    folder = _only_run()
    before = folder.config_file.read_text()
    other = ["model._target_=torch.nn.Linear", "+model.in_features=4", "+model.out_features=7"]
    assert main(["train", "+recipe=tiny", *other, f"resume={folder}", "max_steps=4"]) == 2
    assert "the checkpoint does not fit the model" in capsys.readouterr().err
    assert folder.config_file.read_text() == before
    assert main(["train", f"resume={folder}", "max_steps=4"]) == 0


def test_a_full_disk_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ipurun.runs.job.train", fill)
    monkeypatch.setattr(RunFolder, "write_summary", fill)
    assert _train() == 1
    message = capsys.readouterr().err
    assert f"the run folder `{_only_run()}` can no longer be written" in message
    assert "No space left on device" in message and "inside ipurun" not in message


def test_hydra_answers_its_own_questions(capsys: Any) -> None:
    assert _train("--cfg", "job", "--resolve") == 0
    assert "micro_batch_size: 4" in capsys.readouterr().out
    assert not Path("runs").exists()


@pytest.mark.parametrize(("engine", "starts_over"), [("cpu", False), ("ipu", True)])
def test_variables_are_set_before_a_device_engine_is_loaded(
    monkeypatch: pytest.MonkeyPatch, engine: str, starts_over: bool
) -> None:
    started: List[Any] = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    monkeypatch.setenv("PVTI_OPTIONS", "old")
    plan: Any = SimpleNamespace(environment={"PVTI_OPTIONS": "new"}, engine=engine)
    _set_environment(plan, ["+recipe=tiny", "profile=system"])
    assert os.environ["PVTI_OPTIONS"] == "new"
    assert len(started) == int(starts_over)
    for program, command in started:
        assert program == command[0] == sys.executable
        assert command[-3:] == ["train", "+recipe=tiny", "profile=system"]
        help_text = subprocess.run([*command[:-2], "--help"], stdout=subprocess.PIPE, check=True).stdout
        assert b"usage: ipurun train" in help_text
    _set_environment(plan, [])  # set by now: starting over must not go round for ever
    assert len(started) == int(starts_over)


def test_ctrl_c_saves_and_the_run_can_be_resumed() -> None:
    process = _start("+recipe=tiny", "+data.seconds=0.02", "epochs=1000", "checkpoint.every_epochs=null")
    _wait_for(lambda: any(path.stat().st_size for path in Path().glob("runs/tiny/*/metrics.jsonl")), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    folder = _only_run()
    checkpoint = latest(folder)
    assert checkpoint is not None and checkpoint.step == _steps(folder)[-1]
    assert "tiny: interrupted" in out and f"ipurun train resume={folder}" in out
    assert folder.summary()["status"] == "interrupted"


def _environment() -> Dict[str, str]:
    package_folder = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": package_folder, "OMP_NUM_THREADS": "1"}


def _start(*argv: str) -> Any:
    command = [sys.executable, "-m", "ipurun", "train", *argv]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, env=_environment()
    )


def _wait_for(condition: Callable[[], bool], process: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)


def test_a_lost_terminal_saves_and_ends_as_ctrl_c_does() -> None:
    command = [sys.executable, "-m", "ipurun", "train", "+recipe=tiny", "+data.seconds=0.02", "epochs=1000"]
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, command, {**_environment(), "TERM": "xterm"})
    while not any(path.stat().st_size for path in Path().glob("runs/tiny/*/metrics.jsonl")):
        assert os.read(terminal, 65536)
    os.close(terminal)  # the kernel sends SIGHUP, and nothing can be written any more
    _, status = os.waitpid(process, 0)
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 130
    folder = _only_run()
    assert folder.summary()["status"] == "interrupted" and latest(folder) is not None
