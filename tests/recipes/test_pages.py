"""The commands and tables on the pages of recipes."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from recipe_runs import parameters_of

from ipurun.config.compose import one

PAGES = sorted((Path(__file__).parents[2] / "recipes").glob("*/README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_command_composes(page):
    [block] = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    for program, command, *words in commands:
        if (program, command) == ("python", "-m"):
            assert importlib.util.find_spec(words[0])
            continue
        assert (program, command) in [("ipurun", "train"), ("ipurun", "plan")]
        assert words[0].startswith("+recipe=")
        assert one(words).problems == ()
    assert f"+recipe={page.parent.name}" in {words[0] for _, _, *words in commands}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_table_names_models_and_their_sizes(page):
    rows = re.findall(r"^\| (`[^|]*) \| ([\d,; ]+) \|", page.read_text(), re.MULTILINE)
    assert rows
    for names, sizes in rows:
        options = re.findall(r"`(\w+)`", names)
        assert [f"{parameters_of(option):,}" for option in options] == sizes.split("; ")
