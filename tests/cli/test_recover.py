"""Runs that were killed, deleted or moved, or whose environment is gone: what `ipurun` does with them next."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from user_project import enter_project

from ipurun.checkpoint import latest, listed
from ipurun.cli.main import main
from ipurun.runs.folder import RunFolder

CODE = """
from ipurun import Callback
from ipurun.training.events import Observer

class Points(torch.utils.data.Dataset):
    def __init__(self, samples=24, seconds=0.0):
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
        self.seconds = seconds
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.x[index], int(self.x[index].argmax()) % 3

def splits(samples=24, seconds=0.0, token=None):
    if token == "fail":
        raise OSError(f"{token} does not work")
    return {"train": Points(samples, seconds), "test": Points(8)}

class Remote(Observer):
    def __init__(self, folder, api_key):
        self.key = api_key
        assert api_key, "the key is missing"
    def on_step(self, event):
        with open("sent.txt", "a") as stream:
            stream.write(self.key + " ")
        if os.path.exists("break") and event.step > 2:
            raise ValueError("refused: " + self.key)

class Sender(Callback):
    def __init__(self, api_key):
        self.key = api_key
    def on_step(self, event):
        if os.path.exists("break") and event.step > 2:
            raise ValueError("refused: " + self.key)
"""


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_project(tmp_path, monkeypatch, "recover_code", CODE)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _train(*argv: str) -> int:
    return main(["train", *argv, "--quiet"])


def _start(*argv: str, at_step: int = 1) -> subprocess.Popen:
    """Start a training in another process, and wait until it has saved a step."""
    command = [sys.executable, "-m", "ipurun", "train", "+recipe=tiny", "checkpoint.every_steps=1", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not any(item.step >= at_step for path in Path("runs/tiny").glob("*") for item in listed(RunFolder(path))):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return process


def _run(name: str = "tiny") -> RunFolder:
    (path,) = Path("runs", name).iterdir()
    return RunFolder(path)


def _everything(folder: Path = Path("runs")) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())


def test_a_run_with_interpolations_is_used_again_without_its_environment_and_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setenv("MY_SEED", "7")
    words = ["seed=${oc.env:MY_SEED}", "name=run_${seed}", "eval.max_samples=${micro_batch_size}", "max_steps=3"]
    assert _train("+recipe=tiny", *words, "runs_dir=runs/${now:%Y}") == 0
    monkeypatch.delenv("MY_SEED")
    (path,) = Path("runs").glob("*/run_7/*")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = Path(shutil.move(str(tmp_path / path), "moved"))
    assert main(["eval", str(moved), "--quiet"]) == 0
    assert main(["predict", str(moved), "--quiet", "--out", "x.pt"]) == 0
    assert _train(f"resume={moved}", "max_steps=5") == 0, capsys.readouterr().err
    assert latest(RunFolder(moved)).step == 5
    assert RunFolder(moved).overrides()[1] == "seed=${oc.env:MY_SEED}"


def test_a_finished_run_does_not_offer_to_resume_and_an_interrupted_one_does(capsys: Any) -> None:
    assert main(["train", "+recipe=tiny", "max_steps=2"]) == 0
    assert "reproduce" in capsys.readouterr().out.rpartition("finished")[2]
    assert "resume" not in _run().log_file.read_text() and _run().summary()["resume_command"] == ""
    process = _start("+data.seconds=0.02", "name=tiny", at_step=3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert "  resume      ipurun train resume=runs/tiny/" in out


def test_reproduce_names_each_key_once() -> None:
    assert _train("+recipe=tiny", "seed=1", "max_steps=2", "seed=2") == 0
    assert _run().summary()["reproduce_command"] == "ipurun train +recipe=tiny max_steps=2 seed=2"
    assert _train(f"resume={_run()}", "max_steps=3") == 0
    assert _train(f"resume={_run()}", "max_steps=4", "optimizer=sgd", "optimizer.lr=0.1") == 0
    assert _train(f"resume={_run()}", "optimizer=sgd", "max_steps=5") == 0
    assert _run().summary()["reproduce_command"] == "ipurun train +recipe=tiny seed=2 optimizer=sgd max_steps=5"


def test_a_run_folder_that_is_deleted_under_a_run_is_an_error() -> None:
    process = _start("+data.seconds=0.01", "epochs=100")
    Path("runs/tiny").rename("deleted")  # at once: the run writes while a folder is deleted file by file
    shutil.rmtree("deleted", ignore_errors=True)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1 and "was deleted" in err and "inside ipurun" not in err
    assert not Path("runs/tiny").exists()


def test_a_second_process_is_refused_and_read_only_commands_are_not(capsys: Any) -> None:
    process = _start("+data.seconds=0.02", "epochs=100")
    try:
        before = {path.name: path.read_bytes() for path in _run().path.glob("*.yaml")}
        assert _train(f"resume={_run()}") == 2
        err = capsys.readouterr().err
        assert f"process {process.pid} on" in err and "is in use" in err
        assert _train("+recipe=tiny", "resume=auto") == 2
        assert {path.name: path.read_bytes() for path in _run().path.glob("*.yaml")} == before
        assert main(["eval", str(_run()), "--quiet"]) == 0
        assert main(["predict", str(_run()), "--quiet", "--out", "x.pt"]) == 0
        assert main(["plan", "+recipe=tiny", "--quiet"]) == 0
    finally:
        process.kill()
        process.communicate()
    assert _train("+recipe=tiny", "resume=auto", "max_steps=60", "checkpoint.every_steps=100", "epochs=100") == 0
    assert len(list(Path("runs/tiny").iterdir())) == 1 and not (_run().path / "lock.json").exists()


def test_a_broken_checkpoint_that_is_skipped_is_named(capsys: Any) -> None:
    assert _train("+recipe=tiny", "max_steps=4", "checkpoint.every_steps=1", "checkpoint.keep=3") == 0
    content = bytearray(latest(_run()).path.read_bytes())
    content[len(content) // 2] ^= 1
    latest(_run()).path.write_bytes(bytes(content))
    capsys.readouterr()
    assert main(["eval", str(_run())]) == 1  # older weights would give numbers that nobody asked for
    said = "warning: the checkpoint step-00000004.pt is skipped: its contents do not match their checksum"
    assert main(["train", f"resume={_run()}", "max_steps=5"]) == 0
    assert "resuming after step 3" in capsys.readouterr().out
    assert said in _run().log_file.read_text()
    (_run().checkpoints / "step-00000009.pt").touch()
    assert main(["eval", str(_run())]) == 0
    assert "warning: the checkpoint step-00000009.pt is skipped: no readable" in capsys.readouterr().out
    for item in listed(_run()):
        item.path.write_bytes(b"x" * item.path.stat().st_size)
    assert _train(f"resume={_run()}", "max_steps=6") == 1
    assert "step-00000005.pt: its contents" in " ".join(capsys.readouterr().err.split())


def test_a_kill_at_any_moment_of_a_resume_leaves_a_run_that_resumes() -> None:
    """Kills before some of the renames of a resume that changes keys."""
    assert _train("+recipe=tiny", "max_steps=2") == 0
    code = """
import os, signal, sys
from ipurun.cli.main import main
left, rename = int(sys.argv[1]), os.replace
def count(*names):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)
os.replace = count
sys.path.insert(0, "")
sys.exit(main(["train", "resume=" + sys.argv[2], "max_steps=3", "optimizer.lr=0.05", "--quiet"]))
"""
    for moment in (1, 4, 6):  # the description; the checkpoint's tensors; the summary
        copy = Path(shutil.copytree(_run().path, f"copy/{moment}"))
        done = subprocess.run([sys.executable, "-c", code, str(moment), str(copy)], capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert _train(f"resume={copy}", "max_steps=4") == 0
        assert latest(RunFolder(copy)).step == 4 and json.loads((copy / "summary.json").read_text())["status"] == "done"
        assert not (copy / "lock.json").exists()


KEY = {"MY_KEY": "topsecret-1"}
LOGGER = "+logger.remote={_target_:recover_code.Remote,api_key:${oc.env:MY_KEY}}"
CALLBACK = "+callbacks.sender={_target_:recover_code.Sender,api_key:${oc.env:MY_KEY}}"


def _with(monkeypatch: pytest.MonkeyPatch, variables: Dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_secret_of_the_environment_is_in_no_file_and_is_read_again(monkeypatch: Any, capsys: Any) -> None:
    _with(monkeypatch, KEY)
    assert main(["train", "+recipe=tiny", "max_steps=2", LOGGER]) == 0
    assert "topsecret-1" not in _everything() + capsys.readouterr().out
    assert "topsecret-1" in Path("sent.txt").read_text()
    monkeypatch.delenv("MY_KEY")
    assert main(["eval", str(_run()), "--quiet"]) == 0
    assert _train(f"resume={_run()}", "max_steps=4") == 2
    err = capsys.readouterr().err
    assert "environment variable MY_KEY, which is not set" in " ".join(err.split()) and f"{_run()}/config.yaml" in err
    monkeypatch.setenv("MY_KEY", "another-one")
    assert _train(f"resume={_run()}", "max_steps=4") == 0
    assert Path("sent.txt").read_text().split()[2:] == ["another-one"] * 2
    assert "another-one" not in _everything()


def test_a_secret_that_was_typed_must_be_given_again(capsys: Any) -> None:
    words = ["+logger.remote={_target_:recover_code.Remote,api_key:typed-it-1}", "+data.token=typed-it-2"]
    assert main(["train", "+recipe=tiny", "max_steps=2", *words]) == 0
    assert "typed-it" not in _everything() + capsys.readouterr().out
    assert _train(f"resume={_run()}", "max_steps=4") == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "`data.token` is a secret that was not stored" in err and "logger.remote.api_key=VALUE" in err
    again = ["data.token=typed-it-3", "logger.remote.api_key=typed-it-4"]
    assert _train(f"resume={_run()}", "max_steps=4", *again) == 0
    assert "typed-it" not in _everything() and "typed-it-4" in Path("sent.txt").read_text()


def test_a_secret_in_a_traceback_is_not_logged(monkeypatch: Any, capsys: Any) -> None:
    _with(monkeypatch, KEY)
    Path("break").touch()
    assert _train("+recipe=tiny", "max_steps=4", CALLBACK) == 1
    assert "refused: ***" in _run().log_file.read_text() and "callback `sender`" in _run().summary()["reason"]
    err = capsys.readouterr().err
    assert "refused: ***" in err and "topsecret-1" not in _everything() + err


def test_a_secret_in_the_warning_about_a_logger_is_not_logged(monkeypatch: Any, capsys: Any) -> None:
    _with(monkeypatch, KEY)
    Path("break").touch()
    assert _train("+recipe=tiny", "max_steps=4", LOGGER) == 0
    assert "refused: ***" in _run().log_file.read_text()
    captured = capsys.readouterr()
    assert "topsecret-1" not in _everything() + captured.out + captured.err


def test_a_sweep_keeps_secrets_out_of_its_files_and_its_points_have_them(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.getcwd()]))
    _with(monkeypatch, KEY)
    words: List[str] = ["+recipe=tiny", "max_steps=2", "optimizer.lr=0.1,0.2", LOGGER, "+data.token=typed-it-1"]
    assert main(["train", "-m", *words]) == 0
    assert "topsecret-1" not in _everything() + capsys.readouterr().out
    assert "typed-it" not in _everything()
    assert Path("sent.txt").read_text().split() == ["topsecret-1"] * 4
    assert main(["train", "-m", *words[:-1], "+data.token=typed-it-2", "resume=auto"]) == 0
    assert "2 of 2 points are finished" in capsys.readouterr().out
    Path("break").touch()
    assert main(["train", "-m", *words, CALLBACK, "max_steps=4"]) == 1
    captured = capsys.readouterr()
    assert "topsecret-1" not in _everything() + captured.out + captured.err


def test_a_sweep_in_use_is_refused(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    words = ["+recipe=tiny", "seed=1,2", "+data.seconds=0.05", "epochs=1000"]
    command = [sys.executable, "-m", "ipurun", "train", "-m", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 240
        while not list(Path("runs").glob("tiny/sweeps/*/000/log.txt")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        assert main(["train", "-m", *words, "resume=auto"]) == 2
        assert f"process {process.pid} on" in capsys.readouterr().err
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert not list(Path("runs").rglob("lock.json"))
