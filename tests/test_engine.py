"""The engine of a run, with and without a (fake) PopTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipurun import engine
from ipurun.emulator.install import shim_folder
from ipurun.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def poptorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a fake package called poptorch."""
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)

    def install(ipus: int = 0, body: str = "Options = DataLoader = trainingModel = object", core: bool = True) -> None:
        (tmp_path / "poptorch").mkdir()
        (tmp_path / "poptorch/__init__.py").write_text(
            f"__version__ = '3.4.0'\n{body}\ndef ipuHardwareIsAvailable(n=1):\n    return n <= {ipus}\n"
        )
        if core:
            (tmp_path / "poptorch/poptorch_core.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("poptorch", None)


def test_cpu_is_the_emulator() -> None:
    found = engine.load("cpu")
    assert found.kind == "cpu" and found.module.__name__ == "ipurun.emulator"
    assert found.version.startswith("emulator of PopTorch 3.4") and found.available_ipus is None


def test_auto_is_the_cpu_without_poptorch() -> None:
    assert engine.load("auto").kind == "cpu"


@pytest.mark.parametrize("choice", ["ipu", "ipu_model"])
def test_hardware_without_poptorch_is_one_clear_error(choice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.load(choice)
    assert len(caught.value.problems) == 1
    assert f"`engine={choice}` needs PopTorch" in str(caught.value) and "engine=cpu" in str(caught.value)


def test_the_emulator_in_its_place_is_not_taken_for_poptorch() -> None:
    engine.load("cpu")
    assert "poptorch" in sys.modules
    with pytest.raises(ConfigError, match="not installed"):
        engine.load("ipu")


def test_models_for_ipus_import_poptorch_on_the_cpu() -> None:
    code = "from ipurun import engine; engine.load('cpu'); import poptorch, poptorch.optim; print(poptorch.optim.SGD)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_real_hardware(poptorch) -> None:
    poptorch(ipus=16)
    for choice in ("auto", "ipu"):
        found = engine.load(choice)
        assert (found.kind, found.available_ipus, found.version) == ("ipu", 16, "PopTorch 3.4.0")
    assert engine.load("cpu").module.__name__ == "ipurun.emulator"


def test_poptorch_without_an_ipu(poptorch) -> None:
    poptorch(ipus=0)
    assert engine.load("auto").kind == "cpu"
    assert engine.load("ipu_model").kind == "ipu_model"
    with pytest.raises(ConfigError, match="no IPU is available"):
        engine.load("ipu")


def test_a_broken_sdk_shows_its_cause(poptorch) -> None:
    poptorch(body="raise ImportError('libpoplar.so: cannot open shared object file')")
    with pytest.raises(ConfigError, match=r"libpoplar\.so"):
        engine.load("ipu")
    found = engine.probe()
    assert found["poptorch"] is None and "libpoplar.so" in found["poptorch_problem"]
    assert found["engine"] == "cpu"


def test_auto_with_a_broken_sdk_is_an_error_rather_than_a_slow_run(poptorch) -> None:
    poptorch(body="raise ImportError('libpoplar.so')")
    with pytest.raises(ConfigError, match="cannot be imported"):
        engine.load("auto")


@pytest.mark.parametrize("has_init", [False, True])
def test_sources_of_poptorch_are_not_an_installed_poptorch(
    poptorch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_init: bool
) -> None:
    poptorch(ipus=16, core=False)
    if not has_init:  # the root of a clone
        (tmp_path / "poptorch/__init__.py").unlink()
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != shim_folder()])
    with pytest.raises(ConfigError) as caught:
        engine.load("ipu")
    assert "which is not installed" in str(caught.value)
    assert f"{tmp_path / 'poptorch'} is a folder of that name" in " ".join(str(caught.value).split())
    assert engine.probe()["poptorch"] is None
    assert engine.load("auto").kind == "cpu"


def test_another_package_called_poptorch_is_named(poptorch) -> None:
    poptorch(body="")
    with pytest.raises(ConfigError, match="is not Graphcore's PopTorch") as caught:
        engine.load("auto")
    assert "it has no Options" in str(caught.value)


def test_probe_reports_versions(poptorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    poptorch(ipus=4)
    found = engine.probe()
    assert found["poptorch"] == "3.4.0" and found["ipus"] == 4 and found["engine"] == "ipu"
    assert found["torch"] and found["python"]
    assert found["environment"]["POPTORCH_IPU_MODEL"] == "1"
