"""docs/explanation/architecture.md, compared with the code."""

import json
import re
import sys
from collections import Counter

import pytest
from test_imports import FLOW, MAY_PRINT, MODULES, ONLY_IMPORTED_IN, ROOT, WITHOUT_TORCH

import ipurun
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


def test_the_classes_that_the_page_names_exist():
    defined = {name for path in MODULES for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.M)}
    named = set(re.findall(r"`([A-Z][a-z]\w+)[`(]", PAGE))
    assert len(named) > 5
    assert named - defined == set()


def test_folders_are_small():
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in MODULES)
    del sizes["ipurun/emulator"]
    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}


def test_conf_and_recipes_are_links_to_the_folders_at_the_top():
    assert (ROOT / "ipurun/conf").resolve() == ROOT / "conf"
    assert (ROOT / "ipurun/recipes").resolve() == ROOT / "recipes"


@pytest.fixture(name="steps_of")
def fixture_steps_of(tmp_path, monkeypatch):
    """Run something; return the steps of the page that it took, in the order of their first calls."""
    monkeypatch.chdir(tmp_path)

    def run(action):
        names = {}

        def note(frame, event, _):
            if event == "call" and frame.f_code.co_filename.startswith(str(ROOT / "ipurun")):
                owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
                kind = owner if isinstance(owner, type) else type(owner)
                inside = "" if owner is None else f"{kind.__name__}."
                names.setdefault(f"{frame.f_globals['__name__']}.{inside}{frame.f_code.co_name}")

        sys.setprofile(note)
        try:
            action()
        finally:
            sys.setprofile(None)
        return [name for name in names if name in STEPS]

    return run


STEPS = [quoted(line)[0] for line in re.findall(r"^\d+\. .*", PAGE, re.MULTILINE)]


def test_a_training_run_takes_the_steps_of_the_page_in_their_order(steps_of):
    assert len(STEPS) == 12
    assert steps_of(lambda: main(["train", *RUN, "--quiet"])) == STEPS
    assert steps_of(lambda: ipurun.train("mnist", overrides=RUN[1:], quiet=True)) == STEPS[1:]


def test_validate_and_plan_take_the_steps_that_the_page_says(steps_of, monkeypatch):
    monkeypatch.setenv("POPTORCH_EMULATOR_CACHE_SECONDS", "0")
    assert main(["train", *RUN, "--quiet"]) == 0  # so that there is something to look for in the cache
    first, last = map(int, re.search(r"validate` takes steps (\d+) to (\d+)", PAGE).groups())
    built = int(re.search(r"plan` takes step (\d+) as well", PAGE)[1])
    checked = [STEPS[0], *STEPS[first - 1 : last]]
    assert steps_of(lambda: main(["validate", *RUN, "--quiet"])) == checked
    assert steps_of(lambda: main(["plan", *RUN, "--quiet"])) == [*checked, STEPS[built - 1]]


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
