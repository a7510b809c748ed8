"""The table of emulated names: its contents, and that the page in docs is up to date."""

import os

import coverage_table as coverage
import pytest

import ipurun
from ipurun.api.manifest import load as load_manifest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(ipurun.__file__)))
TESTS = os.path.join(ROOT, "tests", "emulator")
PAGE = os.path.join(ROOT, "docs", "reference", "emulator-coverage.md")


@pytest.fixture(scope="module")
def statuses():
    return {(row.module, row.name): row for row in coverage.rows(load_manifest(), TESTS)}


def test_every_function_and_class_of_the_manifest_has_a_row(statuses):
    for module, entry in load_manifest()["modules"].items():
        for name in [*entry.get("functions", {}), *entry.get("classes", {})]:
            assert (module, name) in statuses


def test_nothing_is_missing(statuses):
    assert [row.name for row in statuses.values() if row.status == "missing"] == []


def test_recorded_and_executed_names(statuses):
    assert statuses["poptorch.options", "Options.syncPattern"].status == "recorded"
    assert statuses["poptorch.options", "_TensorLocationOptions.numIOTiles"].status == "recorded"
    assert statuses["poptorch.options", "Options.deviceIterations"].status == "executed"
    assert statuses["poptorch.optim", "LAMB"].status == "executed"


def test_missing_names_and_tests_are_reported(tmp_path):
    (tmp_path / "test_some.py").write_text("def helper():\n    nop\n\ndef test_it():\n    helper()\n")
    manifest = {
        "version": "3.4.0",
        "modules": {
            "poptorch": {"functions": {"nop": {}, "fly": {}}, "classes": {"Options": {"methods": {"sail": {}}}}}
        },
    }
    assert [row[1:] for row in coverage.rows(manifest, str(tmp_path))] == [
        ("nop", "executed", "test_some.py::test_it"),
        ("fly", "missing", None),
        ("Options", "executed", None),
        ("Options.sail", "missing", None),
    ]
    page = coverage.make_table(manifest, str(tmp_path))
    assert "| `fly` | missing | - |" in page
    assert "2 are executed,\n0 recorded and 2 missing; 1 of them (25 %) have a test." in page


@pytest.mark.skipif(not os.path.isdir(os.path.dirname(PAGE)), reason="docs are not part of an installed package")
def test_the_page_is_up_to_date():
    with open(PAGE, encoding="utf-8") as file:
        written = file.read()
    assert written == coverage.make_table(load_manifest(), TESTS), "run: make docs"
