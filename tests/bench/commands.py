"""CPU time in which commands answer, beside their budgets. Run it with ``make bench``.

Commands that need torch are measured in turns with `import torch` alone, which is taken off: the rest is ours.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from typing import Dict, List, NamedTuple, Optional

REPEATS = 5
_IMPORT_TORCH = "import torch"


class Case(NamedTuple):
    """A command line, and its budget in seconds."""

    name: str
    words: List[str]
    budget: Optional[float]
    needs_torch: bool = False
    typed: str = ""  # on a command line that is being completed


def cases() -> List[Case]:
    ipurun = [sys.executable, "-m", "ipurun"]
    return [
        Case("ipurun --help", [*ipurun, "--help"], 0.1),
        Case("ipurun ls", [*ipurun, "ls"], 0.1),
        Case("ipurun cat mnist", [*ipurun, "cat", "mnist"], 0.1),
        Case("completion", [*ipurun, "-sc", "query=bash"], 0.2, typed="ipurun train +recipe=m"),
        Case("completion, open keys", [*ipurun, "-sc", "query=bash"], 0.2, typed="ipurun train +recipe=gpt model."),
        Case(_IMPORT_TORCH, [sys.executable, "-c", "import torch"], None),
        Case("ipurun validate mnist", [*ipurun, "validate", "+recipe=mnist"], 0.7, True),
        Case("ipurun plan mnist", [*ipurun, "plan", "+recipe=mnist"], 0.7, True),
        Case("ipurun train mnist, 1 step", [*ipurun, "train", "+recipe=mnist", "max_steps=1"], 1.0, True),
    ]


def seconds(case: Case, place: str) -> float:
    """CPU time of a command, as where it is installed: with its bytecode at hand."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.update(COMP_LINE=case.typed, OMP_NUM_THREADS="1")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(case.words, env=environment, cwd=place, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    best: Dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for _ in range(REPEATS):
            for case in cases():
                best[case.name] = min(seconds(case, place), best.get(case.name, float("inf")))
    print(f"CPU time of commands in seconds, best of {REPEATS}, in turns; from validate on: beyond {_IMPORT_TORCH}")
    for case in cases():
        spent = best[case.name] - (best[_IMPORT_TORCH] if case.needs_torch else 0.0)
        budget = "" if case.budget is None else f"budget {case.budget:.1f}"
        print(f"  {case.name:<26} {spent:5.2f}  {budget}".rstrip())


if __name__ == "__main__":
    main()
