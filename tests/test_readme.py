"""README.md and docs/: their commands work and print what they show; their links, names and files exist."""

import importlib
import re
import sys

import pytest
from docs_examples import (
    INTERRUPT,
    PAGES,
    ROOT,
    Example,
    Stale,
    Stamps,
    anonymous,
    examples,
    refresh,
    refreshed,
    unknown_labels,
    untrue_lines,
    write_files,
)

from ipurun.cli.main import COMMANDS, main
from ipurun.errors import ConfigError
from ipurun.inspect.targets import locate

SHORT = ["max_steps=2", "eval.max_samples=20"]  # the pages train for longer
RESUMED = ["max_steps=4", "eval.max_samples=20"]
LOGGED = ("train", "eval", "predict", "export", "selftest", "env", "bench")  # times and versions differ from run to run
READING = ("plan", "validate", "ls", "cat", "cp")

LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "recipes").rglob("*.md"))]
linked_pages = pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@pages
def test_make_targets_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    typed = [example.words for example in examples(page.read_text(encoding="utf-8"))]
    asked = [word for words in typed if words[0] == "make" for word in words[1:] if "=" not in word]
    assert set(asked) <= set(targets)


@pages
def test_the_commands_of_a_page_work_in_their_order(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    home, folder = tmp_path / "home", tmp_path / "work"
    folder.mkdir()
    write_files(text, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COLUMNS", "110")
    for name in ("XDG_CACHE_HOME", "IPURUN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    stamps = Stamps()
    for example in examples(text):
        if not example.can_run:
            continue
        _, command, *rest = Example(stamps.replace(example.command), []).words
        assert command in COMMANDS or command.startswith("-"), example.command
        if command == "train" and not example.fails:
            # A sweep starts a process per point, which tests/sweep does; its points are checked here all the same.
            command = "validate" if "-m" in rest else command
            rest += RESUMED if any(word.startswith("resume=") for word in rest) else SHORT
        if command == "selftest" and "--layers" not in rest:
            rest += ["--only", "mnist,batch_norm_replicated,half"]  # the page runs all cases
        if command == "bench":
            rest += ["--seconds=0.01"]
        if command not in LOGGED + READING:
            continue
        code = main([command, *rest])
        written = capsys.readouterr()
        printed = anonymous((written.out + written.err).splitlines(), home)
        assert code == (2 if example.fails else 0), (example.command, written.err)
        stamps.learn(example.shown, printed)
        if command in LOGGED and not example.fails:
            unknown = unknown_labels(example, printed)
            if INTERRUPT in example.shown:  # here the run is short and ends before it could be interrupted
                unknown = [line for line in unknown if not line.startswith("  resume ")]
            assert unknown == [], example.command
        elif example.shown and "-m" not in rest:
            assert untrue_lines(example, printed) == [], f"{example.command}: run `make docs`"


@pages
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(import ipurun\n.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        exec(block, {})


def anchors(page):
    """Return the anchors of a page's headings, as web pages of Markdown have them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page):
    """Yield the page and the anchor of every relative link."""
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        yield (page.parent / path).resolve() if path else page, anchor


@linked_pages
def test_links_lead_to_pages_and_headings(page):
    dead = [
        f"{target}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert dead == []


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            waiting += [target for target, _ in links(page)]
    assert set(PAGES) - reached == set()


@pages
def test_names_and_files_of_ipurun_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w/.-])ipurun(?:\.[A-Za-z_]\w*)+", text):
        try:
            locate(name, "page")
        except ConfigError:
            importlib.import_module(name)
    files = re.findall(r"`((?:ipurun|tests)/[\w./]+)`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


OUTPUT = """\
plan of digits
  batch  8 x 4 = 32
  steps  100

step 10/100  loss 0.5  ETA 9 s
step 20/100  loss 0.4  ETA 8 s
step 30/100  loss 0.3  ETA 7 s
digits: finished
  final  loss 0.3  accuracy 0.9
  folder  runs/digits/2026-01-02_03-04-05""".splitlines()


def test_a_refreshed_example_keeps_its_gaps_and_takes_new_and_changed_lines():
    shown = [
        "plan of digits",
        "  batch  8 x 4 = 64",
        "",
        "...",
        "step 30/100  loss 0.9  ...",
        "digits: finished",
        "...",
    ]
    new = ["plan of digits", "  batch  8 x 4 = 32", "", "...", "step 30/100  loss 0.3 ...", "digits: finished", "..."]
    assert refreshed(shown, OUTPUT) == new
    assert refreshed(["plan of letters", "  final  loss 1"], OUTPUT) == OUTPUT
    with pytest.raises(Stale, match="memory of each IPU"):
        refreshed(["...", "memory of each IPU", "..."], OUTPUT)


def test_a_refreshed_page_names_the_folders_of_its_new_runs():
    page = """\
Some text.
```console
$ ipurun train +recipe=digits
...
  folder  runs/digits/2025-12-31_23-59-59
$ ipurun eval runs/digits/2025-12-31_23-59-59 --split NAME
as it was
```
```text
$ not an example
```
"""
    assert refresh(page, lambda example: OUTPUT) == page.replace("2025-12-31_23-59-59", "2026-01-02_03-04-05")
