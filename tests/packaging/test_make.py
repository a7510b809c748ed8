"""The Python that `make` chooses, and what each target installs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Python of a version: it answers the question that the Makefile asks, and shows what it is asked to do.
STUB = """#!/bin/sh
case "$1" in -c) case "$2" in *"!= '{version}'"*) exit 0;; esac; exit 1;; esac
echo "Python {version}: $*"
exit 1
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def make(tmp_path):
    """Run make in a copy of the clone on a machine that has nothing but the given Pythons."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("make", "touch", "rm"):
        (programs / name).symlink_to(shutil.which(name))

    def run(*words, pythons=None, home=tmp_path):
        for name, version in (pythons or {}).items():
            stub = tmp_path / name if "/" in name else programs / name
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(STUB.format(version=version))
            stub.chmod(0o755)
        environment = {"PATH": str(programs), "HOME": str(home)}
        done = subprocess.run(
            [str(programs / "make"), *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3.8"}, "3.8"),
        ({"python3": "3.13"}, "3.13"),
        ({"python3": "3.14", "python3.9": "3.9"}, "3.9"),
        ({"python3": "3.8", "python3.11": "3.11", "python3.12": "3.12"}, "3.11"),
        ({"python3": "3.7", ".pyenv/versions/3.10.13/bin/python3.10": "3.10"}, "3.10"),
    ],
)
def test_make_takes_a_python_that_the_constraints_know(make, pythons, taken):
    assert f"Python {taken}: -m venv .venv" in make("dev", pythons=pythons)


def test_make_takes_the_python_that_is_named(make):
    pythons = {"python3.11": "3.11", "python3.12": "3.12"}
    assert "Python 3.12: -m venv .venv" in make("run", "PYTHON=python3.12", pythons=pythons)


@pytest.mark.parametrize("pythons", [{}, {"python3": "3.7"}, {"python3": "3.14"}])
def test_make_says_which_python_to_install(make, pythons):
    output = make("dev", pythons=pythons)
    assert "no Python 3.11 3.12 3.13 3.10 3.9 3.8 with venv found: install one, 3.11 for example" in output
    assert "venv .venv" not in output


@pytest.mark.parametrize(
    ("target", "installed"),
    [
        ("run", ["."]),
        ("bench", ["."]),
        ("test", [".", "'.[test]'"]),
        ("lint", [".", "'.[lint]'"]),
        ("typecheck", [".", "'.[lint]'"]),
        ("dev", [".", "'.[test]'", "'.[lint]'"]),
    ],
)
def test_a_target_installs_what_it_needs(make, target, installed):
    assert re.findall(r"--editable ([^\s;]+)", make("--dry-run", target)) == installed


def test_every_constraint_holds_for_one_version_of_a_python():
    requirements = pytest.importorskip("packaging.requirements")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    parsed = [requirements.Requirement(line) for line in lines]
    for version in ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13"):
        environment = {"python_version": version}
        holding = [entry.name for entry in parsed if entry.marker is None or entry.marker.evaluate(environment)]
        assert sorted(holding) == sorted({entry.name for entry in parsed})
