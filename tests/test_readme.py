"""What the README and the tutorials tell people to type, typed."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from ipurun.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
]
SHORT = ["max_steps=2", "eval.max_samples=20"]  # the pages train for longer
TRAINING = ("train", "plan", "validate")
READING = ("ls", "cat", "cp", "env")

BLOCK = re.compile(r"^```(?P<kind>sh|bash|console)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
# A block that names a file after its language is that file.
FILE = re.compile(r"^```\w+ (?P<path>[\w./]+)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)


def typed_lines(page):
    """The command lines of a page: all lines of shell blocks, and those after a $ in console blocks."""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        body = block["body"].replace("\\\n", " ")
        for line in body.splitlines():
            if block["kind"] == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            words = shlex.split(line, comments=True)
            if words:
                yield words


def shown_output(page, command):
    """What a console block of a page shows below a command."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.finditer(text):
        if block["kind"] == "console" and f"$ {command}\n" in block["body"]:
            return block["body"].split(f"$ {command}\n", 1)[1].split("\n$ ")[0].splitlines()
    raise LookupError(command)


def untrue_lines(page, command, written):
    """Lines that a page shows below a command and that the command did not write; `...` stands for what is left out."""
    real = written.splitlines()
    return [line for line in shown_output(page, command) if "..." not in line and line not in real]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [word for words in typed_lines(page) if words[0] == "make" for word in words[1:]]
    assert set(asked) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPURUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for file in FILE.finditer(page.read_text(encoding="utf-8")):
        Path(file["path"]).parent.mkdir(parents=True, exist_ok=True)
        Path(file["path"]).write_text(file["body"], encoding="utf-8")
    for words in typed_lines(page):
        if words[0] not in ("ipurun", ".venv/bin/ipurun"):
            continue
        command, rest = words[1], words[2:]
        assert command in COMMANDS or command.startswith("-"), words
        expected = 2 if "devices=6" in rest else 0
        if command == "train":
            # A sweep starts a process per point, which tests/sweep does; its points are checked here all the same.
            command = "validate" if "-m" in rest else command
            rest += SHORT
        if command in READING or (command in TRAINING and _is_complete(rest)):
            code = main([command, *rest])
            written = capsys.readouterr()
            assert code == expected, (words, written.err)
            if command == "plan":
                assert untrue_lines(page, shlex.join(words), written.out + written.err) == []


def _is_complete(words):
    """Whether a line can be typed as it is: folders of somebody's earlier run and words in capitals cannot."""
    return not any(word.startswith("resume=runs/") or re.search(r"=[A-Z_]{3,}$", word) for word in words)


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("tutorials/first-run.md", "ipurun ls"),
        ("how-to/plan-a-model.md", "ipurun plan +recipe=gpt model=gpt2_medium pipeline=gpt2_medium_4ipu"),
    ],
)
def test_the_output_that_a_page_shows_is_real(page, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    main(command.split()[1:])
    written = capsys.readouterr()
    assert untrue_lines(ROOT / "docs" / page, command, written.out + written.err) == []
