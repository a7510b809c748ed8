"""`env` and `exec`."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any, Iterator
from unittest import mock

import pytest
import torch

import ipurun
from ipurun.cli.main import main


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        yield


def test_env_is_text_for_a_bug_report(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "WARN")
    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["ipurun"] == ipurun.__version__
    assert rows["torch"] == torch.__version__
    assert rows["Python"].startswith(platform.python_version())
    assert rows["variable"] == "POPTORCH_LOG_LEVEL=WARN"


def test_env_answers_scripts(capsys: Any) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"] == torch.__version__ and found["engine"] in ("cpu", "ipu")


def test_env_takes_no_words(capsys: Any) -> None:
    assert main(["env", "devices=8"]) == 2
    assert "`env` takes no `devices=8`" in capsys.readouterr().err


def test_a_program_gets_its_arguments_and_the_emulator(capsys: Any) -> None:
    Path("program.py").write_text(
        "import sys, poptorch\n"
        "print(__name__, sys.argv[1:], poptorch.Options().deviceIterations(3).device_iterations)\n"
        "sys.exit(7)\n"
    )
    assert main(["exec", "program.py", "--help", "--json", "-m"]) == 7
    assert capsys.readouterr().out == "__main__ ['--help', '--json', '-m'] 3\n"


def test_a_module_runs_as_python_would_run_it(capsys: Any) -> None:
    Path("tool.py").write_text("import sys\nif __name__ == '__main__':\n    print('ran', sys.argv[1:])\n")
    assert main(["exec", "-m", "tool", "word"]) == 0
    assert capsys.readouterr().out == "ran ['word']\n"


def test_a_failing_program_shows_its_own_traceback(capsys: Any) -> None:
    Path("broken.py").write_text("import poptorch\nraise ValueError('mine')\n")
    assert main(["exec", "broken.py"]) == 1
    text = capsys.readouterr().err
    assert "broken.py" in text and "ValueError: mine" in text and "ipurun/cli" not in text


@pytest.mark.parametrize("argv", [[], ["-m"], ["--epochs"]])
def test_exec_without_a_program_says_what_it_needs(capsys: Any, argv: list) -> None:
    assert main(["exec", *argv]) == 2
    assert "`exec` needs" in capsys.readouterr().err


def test_an_installed_poptorch_is_named(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sdk/poptorch").mkdir(parents=True)
    Path("sdk/poptorch/__init__.py").write_text("raise RuntimeError('the real one must not be loaded')\n")
    Path("program.py").write_text("import poptorch\nprint(poptorch.Options().deviceIterations(2).device_iterations)\n")
    monkeypatch.syspath_prepend(str(Path("sdk").absolute()))
    assert main(["exec", "program.py"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "2\n"
    assert "ipurun.emulator here, not the one installed at" in captured.err and "sdk/poptorch" in captured.err
