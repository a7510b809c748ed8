from pathlib import Path

from ipurun.config.reference import page
from ipurun.config.schema import RunConfig, walk_keys

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config-keys.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "the schema has changed: run `make docs`"


def test_every_key_has_a_row_with_its_meaning():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    keys = list(walk_keys(RunConfig))
    assert {row.split("`")[1] for row in rows} == {key.path for key in keys}
    assert [key.path for key in keys if not key.help.endswith(".")] == []
