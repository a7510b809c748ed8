"""The wheel, installed where nothing of the clone is in reach."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
# Folder of the tree -> the folder it becomes in the wheel.
SHIPPED = {"ipurun": "ipurun", "conf": "ipurun/conf", "recipes": "ipurun/recipes"}
# A recipe that somebody adds to the tree: one YAML and one folder.
ADDED = {
    "conf/recipe/added.yaml": """\
# @package _global_
# Added by a test.
max_steps: 2
model: {_target_: ipurun.recipes.added.model.Net}
data: {_target_: ipurun.recipes.added.model.numbers}
loss: {name: MSELoss}
""",
    "recipes/added/__init__.py": "",
    "recipes/added/model.py": """\
from pathlib import Path
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

def numbers():
    values = torch.tensor([[float(line)] for line in (Path(__file__).parent / "data/v1/numbers.txt").open()])
    return torch.utils.data.TensorDataset(values, values)
""",
    "recipes/added/data/v1/numbers.txt": "1\n2\n3\n4\n",
}

needs_setuptools = pytest.mark.skipif(
    tuple(map(int, setuptools.__version__.split(".")[:2])) < (70, 1),
    reason="building a wheel without the network needs setuptools 70.1 or newer",
)


def shipped_files(tree):
    """Every file of a tree that belongs into the wheel, by its path in there."""
    for folder, target in SHIPPED.items():
        for path in sorted((tree / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{target}/{path.relative_to(tree / folder).as_posix()}"


def write_added_recipe(tree):
    for name, text in ADDED.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")


def build(kind, source, target):
    """Build a `wheel`, an `sdist` or an `editable` of a source folder as pip does, without the network."""
    program = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", program, target, cwd=source)
    [path] = target.iterdir()
    return path


def environment_with(wheel, folder):
    """Make an environment that has a wheel and the dependencies of this one; return the folder of its commands."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [site_packages] = folder.glob("lib/python*/site-packages")
    # Dependencies come from here rather than from the network. Path files in there (the editable ipurun) do not count.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


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


@pytest.fixture
def source(tmp_path_factory):
    """A copy of the tree, because a build leaves folders behind; compiled files are in it, as in any used clone."""
    copy = tmp_path_factory.mktemp("source")
    for folder in SHIPPED:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("ipurun", "recipes/mnist"):
        (copy / folder / "__pycache__").mkdir(exist_ok=True)
        (copy / folder / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"")
    return copy


@needs_setuptools
def test_the_wheel_holds_every_file_and_no_top_level_name_but_its_own(source, tmp_path_factory):
    names = zipfile.ZipFile(build("wheel", source, tmp_path_factory.mktemp("dist"))).namelist()
    packaged = [name for name in names if ".dist-info/" not in name]
    assert sorted(packaged) == sorted(shipped_files(ROOT))
    assert {name.split("/")[0] for name in packaged} == {"ipurun"}
    assert any(name.endswith("LICENSE") for name in names)


@needs_setuptools
def test_a_recipe_of_one_yaml_and_one_folder_is_in_sdist_and_wheel(source, tmp_path_factory, tmp_path):
    write_added_recipe(source)
    unpacked = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", source, tmp_path_factory.mktemp("dist"))) as archive:
        archive.extractall(unpacked)
    [from_sdist] = unpacked.iterdir()
    wheel = build("wheel", from_sdist, tmp_path_factory.mktemp("dist"))
    packaged = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(packaged) == sorted(shipped_files(source))
    commands = environment_with(wheel, tmp_path_factory.mktemp("environment"))
    assert "Added by a test." in run(commands / "ipurun", "ls", cwd=tmp_path)
    run(commands / "ipurun", "train", "+recipe=added", cwd=tmp_path, OMP_NUM_THREADS="1")


@needs_setuptools
def test_an_editable_install_finds_a_recipe_that_is_added_later(source, tmp_path_factory, tmp_path):
    wheel = build("editable", source, tmp_path_factory.mktemp("dist"))
    commands = environment_with(wheel, tmp_path_factory.mktemp("environment"))
    write_added_recipe(source)
    assert "Added by a test." in run(commands / "ipurun", "ls", cwd=tmp_path)
    assert "2 weight updates" in run(commands / "ipurun", "plan", "+recipe=added", cwd=tmp_path)
    beside = "import importlib.util as util; print([util.find_spec(name) for name in ('conf', 'recipes', 'tests')])"
    assert run(commands / "python", "-c", beside, cwd=tmp_path) == "[None, None, None]\n"


@needs_setuptools
def test_the_installed_wheel_works_from_an_empty_folder(source, tmp_path_factory, tmp_path):
    wheel = build("wheel", source, tmp_path_factory.mktemp("dist"))
    installed = environment_with(wheel, tmp_path_factory.mktemp("environment"))
    where = run(installed / "python", "-c", "import ipurun; print(ipurun.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert "mnist" in run(installed / "ipurun", "ls", cwd=tmp_path)
    assert "1,600 weight updates" in run(installed / "ipurun", "plan", "+recipe=mnist", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    run(installed / "ipurun", "train", "+recipe=mnist", "max_steps=2", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
