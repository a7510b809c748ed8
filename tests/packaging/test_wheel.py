"""The wheel, installed where nothing of the clone is in reach."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import setuptools

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
# Folder of the tree -> the package it becomes.
MAPPED = {"ipurun": "ipurun", "conf": "ipurun.conf", "recipes": "ipurun.recipes"}

needs_setuptools = pytest.mark.skipif(
    tuple(map(int, setuptools.__version__.split(".")[:2])) < (70, 1),
    reason="building a wheel without the network needs setuptools 70.1 or newer",
)


def shipped_files():
    """Every file of the tree that belongs into the wheel, by its path in there."""
    for folder, package in MAPPED.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield Path(*package.split("."), path.relative_to(ROOT / folder)).as_posix()


def run(*command, cwd, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # A copy, because a build leaves folders behind.
    source = tmp_path_factory.mktemp("source")
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("dist")
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", program, target, cwd=source)
    [path] = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the commands of an environment that has the wheel and this one's dependencies."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=environment)
    [site_packages] = environment.glob("lib/python*/site-packages")
    # Dependencies come from here rather than from the network. Path files in there (the editable ipurun) do not count.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment / "bin"


def test_the_list_of_packages_is_the_tree():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        Path(name).parent.as_posix().replace("/", ".") for name in shipped_files() if name.endswith((".py", ".yaml"))
    }
    assert settings["packages"] == sorted(folders)
    assert settings["package-dir"] == {package: folder for folder, package in MAPPED.items()}


@needs_setuptools
def test_the_wheel_holds_every_file_and_no_top_level_name_but_its_own(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packaged = [name for name in names if ".dist-info/" not in name]
    assert sorted(packaged) == sorted(shipped_files())
    assert {name.split("/")[0] for name in packaged} == {"ipurun"}
    assert any(name.endswith("LICENSE") for name in names)


@needs_setuptools
def test_the_installed_wheel_works_from_an_empty_folder(installed, tmp_path):
    where = run(installed / "python", "-c", "import ipurun; print(ipurun.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert "mnist" in run(installed / "ipurun", "ls", cwd=tmp_path)
    assert "1,600 weight updates" in run(installed / "ipurun", "plan", "+recipe=mnist", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    run(installed / "ipurun", "train", "+recipe=mnist", "max_steps=2", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
