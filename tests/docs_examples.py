"""The examples in README.md and docs/: the commands of a page and the output that it shows.

A `console` block is a terminal session: commands after `$`, and their output. A line of `...` is a gap; a line that
ends with ` ...` is cut short; `^C` is an interrupt, sent when the line above it is printed. Blocks whose language is
followed by a file name (```yaml conf/recipe/mine.yaml) are files that the commands of the page need.

`python tests/docs_examples.py PAGE...` runs the commands of pages and writes their output into the blocks; without a
page, it does so for all pages (`make docs`).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GAP = "..."
INTERRUPT = "^C"

_SHELL = re.compile(r"^```(?:sh|bash)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^```\w+ (?P<path>[\w./]+)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")


class Example(NamedTuple):
    """A command of a page and the output that the page shows for it, if any."""

    command: str
    shown: List[str]

    @property
    def words(self) -> List[str]:
        return shlex.split(self.command, comments=True)

    @property
    def can_run(self) -> bool:
        """Whether it can be typed as it is: words in capitals are placeholders."""
        return self.words[:1] == ["ipurun"] and not re.search(r"(?:^|[ =])[A-Z_]{3,}(?: |$)", self.command)

    @property
    def fails(self) -> bool:
        return any(line.startswith("error:") for line in self.shown)


def write_files(page: str, folder: Path) -> None:
    """Write the files that a page shows."""
    for file in _FILE.finditer(page):
        path = folder / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file["body"], encoding="utf-8")


def examples(page: str) -> Iterator[Example]:
    """Yield the commands of a page in order, including those of shell blocks."""
    blocks = [*_SHELL.finditer(page), *_CONSOLE.finditer(page)]
    for block in sorted(blocks, key=lambda block: block.start()):
        if block.re is _CONSOLE:
            yield from _session(block["body"])
        else:
            for line in block["body"].replace("\\\n", " ").splitlines():
                if shlex.split(line, comments=True):
                    yield Example(line, [])


def _session(body: str) -> Iterator[Example]:
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield Example(command, shown)


class Stamps:
    """The run folders that a page names by date and time, and those that running its commands made."""

    def __init__(self) -> None:
        self._made: Dict[str, str] = {}

    def learn(self, shown: List[str], printed: List[str]) -> None:
        """Match the folders of an output with those on the page, in the order of their first appearance."""
        old, new = (list(dict.fromkeys(_STAMP.findall("\n".join(lines)))) for lines in (shown, printed))
        self._made.update(zip(old, new))

    def replace(self, command: str) -> str:
        return _STAMP.sub(lambda stamp: self._made.get(stamp[0], stamp[0]), command)


class Stale(Exception):
    """A line of a page has no counterpart in the present output of its command."""


def refreshed(shown: List[str], printed: List[str]) -> List[str]:
    """Return the lines of an output to show: those between the same gaps as on the page."""
    result: List[str] = []
    start = 0
    for stretch, is_first, is_last in _stretches(shown):
        if not is_first:
            result.append(stretch.pop(0))  # the gap
        blanks = len(stretch) - len("\n".join(stretch).rstrip("\n").splitlines())
        stretch = stretch[: len(stretch) - blanks]
        if not stretch:
            continue
        first = 0 if is_first else _find(stretch[0], printed, start)
        last = len(printed) - 1 if is_last else _find(stretch[-1], printed, first)
        cut = {_shape(line[: -len(GAP)]): line for line in stretch if line.endswith(f" {GAP}")}
        result += [_cut_like(line, cut) for line in printed[first : last + 1]]
        result += [] if is_last else [""] * blanks
        start = last + 1
    return result


def _stretches(shown: List[str]) -> Iterator[Tuple[List[str], bool, bool]]:
    """Yield the lines between gaps, all but the first with the gap before them, and whether they are first or last."""
    gaps = [index for index, line in enumerate(shown) if line.strip() in (GAP, INTERRUPT)]
    edges = [0, *gaps, len(shown)]
    for number, (begin, end) in enumerate(zip(edges, edges[1:])):
        yield shown[begin:end], number == 0, number == len(gaps)


def _find(line: str, printed: List[str], start: int) -> int:
    """Return the index of the printed line that is most like a shown line: the same beginning, other numbers."""
    wanted = line[: -len(GAP)] if line.endswith(f" {GAP}") else line
    candidates = [index for index in range(start, len(printed)) if _label(printed[index]) == _label(line)]
    if not candidates:
        raise Stale(line)
    return max(
        candidates,
        key=lambda index: (
            printed[index].split()[:2] == wanted.split()[:2],
            _shape(printed[index]).startswith(_shape(wanted)),
            _common_length(printed[index], wanted),
            -index,
        ),
    )


def _common_length(one: str, other: str) -> int:
    return next((index for index, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def _shape(line: str) -> str:
    """Return a line without its numbers, bars and column widths."""
    return " ".join(re.sub(r"[#.]{3,}", "#", _NUMBER.sub("0", line)).split())


def _label(line: str) -> str:
    """Return the first word of a line, which identifies lines of a kind in any run."""
    return _NUMBER.sub("0", line.split()[0]) if line.strip() else ""


def _cut_like(line: str, cut: Dict[str, str]) -> str:
    """Cut a printed line where the page cuts it."""
    for shape, shown in cut.items():
        if _shape(line).startswith(shape):
            return "".join(re.findall(r"\s*\S+", line)[: len(shown.split()) - 1]) + f" {GAP}"
    return line


def untrue_lines(example: Example, printed: List[str]) -> List[str]:
    """Return the lines that differ between a page and the output of its command."""
    try:
        new = refreshed(example.shown, printed)
    except Stale as stale:
        return [str(stale)]
    return [line for line in example.shown if line not in new] + [line for line in new if line not in example.shown]


def unknown_labels(example: Example, printed: List[str]) -> List[str]:
    """Return the lines of a page whose first word does not occur in a shorter run of its command."""
    known = {_label(line) for line in printed}
    return [line for line in example.shown if line.strip() not in (GAP, INTERRUPT) and _label(line) not in known]


def run(example: Example, folder: Path) -> List[str]:
    """Run a command in a folder; return its output."""
    home = folder.parent / "home"
    environment = {**os.environ, "HOME": str(home), "COLUMNS": "110", "NO_COLOR": "1"}
    environment.pop("XDG_CACHE_HOME", None)
    program = Path(sys.executable).parent / "ipurun"
    process = subprocess.Popen(
        [str(program), *example.words[1:]],
        cwd=str(folder),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert process.stdout is not None
    last = example.shown[example.shown.index(INTERRUPT) - 1].split()[:2] if INTERRUPT in example.shown else None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if last is not None and line.split()[:2] == last:
            process.send_signal(signal.SIGINT)
    process.wait()
    if (process.returncode == 0) == (example.fails or last is not None):
        raise Stale(f"$ {example.command}: exit code {process.returncode}\n" + "\n".join(lines))
    return anonymous(lines, home)


def anonymous(lines: List[str], home: Path) -> List[str]:
    """Replace the paths of this machine with neutral ones."""
    return [line.replace(str(home), "/home/me").replace(str(ROOT), "/home/me/ipurun") for line in lines]


def refresh(page: str, run: Callable[[Example], List[str]]) -> str:
    """Return the text of a page with the present output of every example."""
    stamps = Stamps()

    def block(match: re.Match[str]) -> str:
        lines = ["```console"]
        for example in _session(match["body"]):
            current = Example(stamps.replace(example.command), example.shown)
            lines.append(f"$ {current.command}")
            if not current.shown or not current.can_run:
                lines += current.shown
                continue
            printed = run(current)
            stamps.learn(current.shown, printed)
            lines += refreshed(current.shown, printed)
        return "\n".join([*lines, "```"])

    return _CONSOLE.sub(block, page)


def main(paths: List[str]) -> int:
    """Refresh pages, by default all; a page with a line that no output resembles is left unchanged."""
    failed = 0
    for path in [Path(name) for name in paths] or PAGES:
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "work"
            folder.mkdir()
            write_files(text, folder)
            try:
                path.write_text(refresh(text, lambda example, folder=folder: run(example, folder)), encoding="utf-8")
            except Stale as stale:
                failed = 1
                print(f"{path}: rewrite this line by hand, nothing like it is printed: {stale}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
