"""Rules for imports between packages, and modules that a quick command must not load."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("ipurun", "recipes") for path in (ROOT / folder).rglob("*.py"))


def imported(path):
    """Yield every module that a file imports anywhere, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def offenders(package, is_allowed):
    """Return the imports of a package in files that may not import it."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if not is_allowed(path.relative_to(ROOT).as_posix())
        for name, line in imported(path)
        if name == package or name.startswith(package + ".")
    ]


# docs/explanation/architecture.md shows these tables and the flow; tests/test_architecture.py compares them.
ONLY_IMPORTED_IN = {
    "poptorch": ("ipurun/engine.py",),
    "hydra": ("ipurun/config/",),
    "hydra._internal": (),
    "ipurun.emulator": (
        "ipurun/emulator/",
        "ipurun/distributed/",
        "ipurun/engine.py",
        "ipurun/inspect/",
        "ipurun/build/cached_executables.py",
        "ipurun/cli/exec.py",
    ),
}
MAY_PRINT = (
    "ipurun/cli/",
    "ipurun/emulator/",
    "ipurun/config/hydra_main.py",
    "ipurun/sweep/forks.py",
    "ipurun/sweep/worker.py",
    "ipurun/selftest/worker.py",
)
WITHOUT_TORCH = ("api", "config", "planning", "estimate")


@pytest.mark.parametrize("package", ONLY_IMPORTED_IN)
def test_a_package_is_imported_only_where_the_table_allows(package):
    assert offenders(package, lambda file: file.startswith(ONLY_IMPORTED_IN[package])) == []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_pure_packages_never_import_torch(package):
    assert offenders("torch", lambda file: not file.startswith(f"ipurun/{package}/")) == []


def test_the_emulator_imports_nothing_else_of_ipurun():
    foreign = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if path.relative_to(ROOT).as_posix().startswith("ipurun/emulator/")
        for name, line in imported(path)
        if name.split(".")[0] == "ipurun" and not name.startswith("ipurun.emulator")
    ]
    assert foreign == []


def test_private_modules_of_the_emulator_are_imported_only_inside_it():
    private = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if not path.relative_to(ROOT).as_posix().startswith("ipurun/emulator/")
        for name, line in imported(path)
        if name.startswith("ipurun.emulator.") and any(part.startswith("_") for part in name.split("."))
    ]
    assert private == []


# A run flows down this list, never back: config > inspect > planning > [estimate] > build > training.
FLOW = (
    "emulator",
    "errors",
    "files",
    "executables",
    "module_search",
    "moved",
    "api",
    "config",
    "datasets",
    "distributed",
    "engine",
    "host",
    "metrics",
    "schedules",
    "table_parts",
    "inspect",
    "planning",
    "estimate",
    "checkpoint",
    "weights",
    "build",
    "training",
    "profiling",
    "log",
    "runs",
    "sweep",
    "pages",
    "interface",
    "selftest",
    "cli",
)


def test_no_package_imports_a_later_one():
    backward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in MODULES
        if path.relative_to(ROOT).parts[0] == "ipurun" and path.relative_to(ROOT / "ipurun").parts[0][:2] != "__"
        for name, line in imported(path)
        if name.startswith("ipurun.") and name.split(".")[1] in FLOW
        if FLOW.index(name.split(".")[1]) > FLOW.index(path.relative_to(ROOT / "ipurun").with_suffix("").parts[0])
    ]
    assert backward == []


def test_every_package_has_its_place_in_the_flow():
    names = {path.relative_to(ROOT / "ipurun").with_suffix("").parts[0] for path in (ROOT / "ipurun").rglob("*.py")}
    assert {name for name in names if not name.startswith("__")} - {"conf", "recipes"} == set(FLOW)


def test_a_plain_run_loads_no_estimate_and_no_sweep(tmp_path):
    program = (
        "from ipurun.cli.main import main\n"
        "assert main(['train', '+recipe=mnist', 'data=synthetic', 'max_steps=1', '--quiet']) == 0"
    )
    loaded = modules_after(program, tmp_path)
    assert [name for name in loaded if name.startswith(("ipurun.estimate", "ipurun.sweep"))] == []


def test_validate_loads_nothing_that_only_a_run_needs(tmp_path):
    program = "from ipurun.cli.main import main\nassert main(['validate', '+recipe=mnist', '--quiet']) == 0"
    loaded = modules_after(program, tmp_path)
    assert [name for name in loaded if name.startswith(("rich", "ipurun.build", "ipurun.training.loop"))] == []


def called_name(node):
    """Return the name that is called, plain or dotted: ``print``, ``sys.exit``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def modules_after(program, cwd, **environment):
    """Return the modules that a fresh interpreter has loaded after a program."""
    code = f"import sys, json\n{program}\nsys.stderr.write(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def loaded_after(program, cwd, **environment):
    """Return the top-level packages that a fresh interpreter has loaded after a program."""
    return {name.split(".")[0] for name in modules_after(program, cwd, **environment)}


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["ls"],
        ["ls", "keys"],
        ["ls", "groups"],
        ["cat", "mnist"],
        ["cp", "mnist", "copied"],
        ["train", "--help"],
        ["plan", "--help"],
        ["validate", "--help"],
        ["eval", "--help"],
        ["selftest", "--help"],
        ["selftest", "--list"],
    ],
    ids=" ".join,
)
def test_quick_commands_load_neither_torch_nor_hydra(tmp_path, words):
    program = f"from ipurun.cli.main import main\nassert main({words!r}) == 0"
    loaded = loaded_after(program, tmp_path)
    assert loaded & {"torch", "numpy", "hydra", "omegaconf", "rich", "yaml", "poptorch"} == set()


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("ipurun tr", set()),
        ("ipurun train +recipe=", set()),
        ("ipurun plan +recipe=mnist optim", set()),
        ("ipurun plan +recipe=mnist precision=", set()),
        ("ipurun plan +recipe=mnist optimizer.", {"omegaconf", "yaml"}),
        ("ipurun plan +recipe=mnist optimizer.lr=", {"hydra", "omegaconf", "yaml"}),
    ],
)
def test_completion_loads_hydra_only_where_a_config_must_be_composed(tmp_path, line, allowed):
    program = "from ipurun.cli.main import main\nassert main(['-sc', 'query=bash']) == 0"
    loaded = loaded_after(program, tmp_path, COMP_LINE=line, COMP_POINT=str(len(line)))
    assert loaded & {"torch", "numpy", "poptorch", "hydra", "omegaconf", "rich", "yaml"} == allowed


@pytest.mark.parametrize("package", ["api", "config", "planning"])
def test_pure_packages_load_no_torch_through_others(tmp_path, package):
    names = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").replace(".__init__", "")
        for path in MODULES
        if ROOT / "ipurun" / package in path.parents
    ]
    program = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    assert loaded_after(program, tmp_path) & {"torch", "poptorch"} == set()


def test_only_the_command_line_and_a_few_others_print_or_exit():
    found = []
    for path in MODULES:
        if path.relative_to(ROOT).as_posix().startswith(MAY_PRINT):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and called_name(node.func) in ("print", "sys.exit", "exit"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
