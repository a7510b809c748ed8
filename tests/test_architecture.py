"""docs/explanation/architecture.md, compared with the code."""

import json
import re
import sys
from collections import Counter

import pytest
from test_imports import FLOW, MAY_PRINT, MODULES, ONLY_IMPORTED_IN, ROOT, WITHOUT_TORCH

from ipurun.cli.main import main

PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
LARGEST_FOLDER = int(re.search(r"at most (\d+) modules", PAGE)[1])
RUN = ["+recipe=mnist", "devices=8", "max_steps=2", "eval.max_samples=10"]


def table(header):
    """Return the cells of a table of the page, row by row."""
    rows = PAGE.split(f"| {header} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def test_the_packages_are_listed_in_the_order_of_the_flow():
    assert [quoted(row[0]) for row in table("Package")] == [
        [f"ipurun/{name}/" if (ROOT / "ipurun" / name).is_dir() else f"ipurun/{name}.py"] for name in FLOW
    ]


def test_each_package_must_not_import_what_the_tests_refuse():
    refused = {quoted(row[0])[0].split("/")[1]: quoted(row[2])[:1] for row in table("Package")}
    expected = {"emulator": ["ipurun"], **{name: ["torch"] for name in WITHOUT_TORCH}}
    assert {name: names for name, names in refused.items() if names} == expected


def test_the_places_of_rare_imports_are_those_of_the_tests():
    expected = {f"`import {package}`": list(places) for package, places in ONLY_IMPORTED_IN.items()}
    expected["`print`, `sys.exit`"] = list(MAY_PRINT)
    assert {row[0]: quoted(row[1]) for row in table("What")} == expected


def test_folders_are_small():
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in MODULES)
    del sizes["ipurun/emulator"]
    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}


def test_conf_and_recipes_are_links_to_the_folders_at_the_top():
    assert (ROOT / "ipurun/conf").resolve() == ROOT / "conf"
    assert (ROOT / "ipurun/recipes").resolve() == ROOT / "recipes"


@pytest.fixture(name="called")
def fixture_called(tmp_path, monkeypatch):
    """Run a command; return the functions of ipurun that it called, in the order of their first calls."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        names = {}
        package = str(ROOT / "ipurun")

        def note(frame, event, _):
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(package):
                owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
                kind = owner if isinstance(owner, type) else type(owner)
                inside = f"{kind.__name__}." if owner is not None else ""
                names.setdefault(f"{frame.f_globals['__name__']}.{inside}{code.co_name}")

        sys.setprofile(note)
        try:
            code = main(list(argv))
        finally:
            sys.setprofile(None)
        assert code == 0
        return list(names)

    return run


STEPS = [quoted(line)[0] for line in re.findall(r"^\d+\. .*", PAGE, re.MULTILINE)]


def test_a_training_run_takes_the_steps_of_the_page_in_their_order(called):
    assert len(STEPS) > 10
    assert [name for name in called("train", *RUN, "--quiet") if name in STEPS] == STEPS


def test_validate_and_plan_stop_where_the_page_says(called):
    validated = int(re.search(r"validate` stops after step (\d+)", PAGE)[1])
    planned = int(re.search(r"plan` runs step (\d+)", PAGE)[1])
    assert [name for name in called("validate", *RUN, "--quiet") if name in STEPS] == STEPS[:validated]
    assert [name for name in called("plan", *RUN, "--quiet") if name in STEPS][-1] == STEPS[planned - 1]


def test_the_calls_of_a_stored_plan_are_those_that_plan_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *RUN, "--json"]) == 0
    stored = (tmp_path / json.loads(capsys.readouterr().out)["folder"] / "plan.txt").read_text(encoding="utf-8")
    assert main(["plan", *RUN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["poptorch"] == [
        line.strip() for line in stored.split("in PopTorch\n")[1].splitlines()
    ]


def test_training_and_inference_take_turns_on_the_device(tmp_path, monkeypatch):
    """With this variable the emulator refuses a second executor on an IPU while one is attached to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POPTORCH_EMULATOR_HARDWARE", "1")
    assert main(["train", *RUN, "options.useIpuId=0", "eval.every_steps=1", "--quiet"]) == 0
