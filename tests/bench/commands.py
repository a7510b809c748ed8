"""How long commands take to answer: the budgets are 0.2 s without Hydra, 0.5 s with it. Run it with ``make bench``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Dict, List

REPEATS = 5


def seconds(words: List[str], environment: Dict[str, str]) -> float:
    """Best wall time of a command."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        subprocess.run(words, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    ipurun = [sys.executable, "-m", "ipurun"]
    cases = {
        "ipurun --help": ([*ipurun, "--help"], {}),
        "ipurun ls": ([*ipurun, "ls"], {}),
        "ipurun ls keys": ([*ipurun, "ls", "keys"], {}),
        "ipurun cat mnist": ([*ipurun, "cat", "mnist"], {}),
        "completion": ([*ipurun, "-sc", "query=bash"], {"COMP_LINE": "ipurun train +recipe=m"}),
        "python -c 'import torch'": ([sys.executable, "-c", "import torch"], {}),
        "ipurun validate mnist": ([*ipurun, "validate", "+recipe=mnist"], {}),
        "ipurun plan mnist": ([*ipurun, "plan", "+recipe=mnist"], {}),
    }
    print(f"best of {REPEATS}, seconds")
    for name, (words, environment) in cases.items():
        print(f"  {name:<26} {seconds(words, environment):.2f}")


if __name__ == "__main__":
    main()
