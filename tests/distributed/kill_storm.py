"""Kill each instance of runs with several at random moments; every run must end with the weights of an undisturbed one.

It must also have named the instance that was killed.

`python kill_storm.py [ROUNDS [INSTANCES]]`
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from ipurun.checkpoint import latest, load
from ipurun.runs.folder import RunFolder

KEYS = [
    "+recipe=mnist",
    "max_steps=120",
    "checkpoint.every_steps=10",
    "eval.every_epochs=null",
    "distributed.deterministic=true",
]


def weights(runs: Path) -> dict:
    """Return the weights of the newest run below a folder."""
    return load(latest(RunFolder(max(runs.glob("mnist/*")))))["model"]


def disturbed(place: Path, rank: int, count: int) -> str:
    """Run with one kill of an instance, and return how it went."""
    command = [
        sys.executable,
        "-m",
        "ipurun",
        "train",
        *KEYS,
        f"devices={count}",
        f"runs_dir={place}",
        "distributed=torchrun",
    ]
    command += [f"distributed.instances={count}", "distributed.max_restarts=3", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    moment = time.monotonic() + random.uniform(0.0, 8.0)
    killed = False
    while process.poll() is None:
        found = list(place.parent.glob(f"ipurun-launch-*/0/{rank}.pid"))
        if found and not killed and time.monotonic() > moment:
            with_pid = found[0].read_text()
            try:
                os.kill(int(with_pid), signal.SIGKILL)
                killed = True
            except OSError:
                pass
        time.sleep(0.02)
    out, err = process.communicate()
    left = subprocess.run(
        ["pgrep", "-f", f"runs_dir={place}"], capture_output=True, text=True, check=False
    ).stdout.split()
    if process.returncode or left:
        return f"exit code {process.returncode}, left behind {left}: {err[-1500:]}"
    if killed:
        (run,) = (place / "mnist").iterdir()
        named = re.findall("instance [0-9]+ [^:]*: all instances were started again", (run / "log.txt").read_text())
        if not (len(named) == 1 and named[0].startswith(f"instance {rank} was killed")):
            return f"other instance named: {named}"
    return f"ok, {'killed' if killed else 'ended before'}, status {json.loads(out)['status']}"


def main() -> int:
    """Run the storm, and return the number of runs that went wrong."""
    rounds, count = (int(word) for word in (sys.argv[1:] + ["3", "2"][len(sys.argv) - 1 :]))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TMPDIR=folder, OMP_NUM_THREADS="1")
        reference = Path(folder) / "reference"
        words = [*KEYS, f"devices={count}", f"runs_dir={reference}", "--quiet"]
        subprocess.run([sys.executable, "-m", "ipurun", "train", *words], check=True)
        expected = weights(reference)
        for number in range(rounds * count):
            place = Path(folder) / f"runs{number}"
            how = disturbed(place, number % count, count)
            same = how.startswith("ok") and all(torch.equal(v, weights(place)[n]) for n, v in expected.items())
            wrong += not same
            print(
                f"instance {number % count} of {count}: {how}{', same weights' if same else ', OTHER WEIGHTS'}",
                flush=True,
            )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
