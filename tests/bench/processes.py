"""Samples per second of one run with two processes against one, on two cores: whole runs of `ipurun train`."""

import json
import os
import subprocess
import sys
import tempfile

RUNS = {
    "mnist, 2 replicas": ["+recipe=mnist", "devices=2", "device_iterations=8", "max_steps=800"],
    "mnist, 8 replicas": ["+recipe=mnist", "devices=8", "device_iterations=8", "max_steps=400"],
    "gpt, 2 replicas": ["+recipe=gpt", "devices=2", "max_steps=40"],
}
COMMON = ["threads=1", "eval.every_epochs=null", "eval.at_end=false", "checkpoint.at_end=false", "--json"]


def speed(words: list) -> float:
    """Return the samples per second that a run reports, without its start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ipurun", "train", *words, *COMMON, f"runs_dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return float(json.loads(ran.stdout)["samples_per_second"])


def main() -> None:
    """Print a line for each run: the best of three, alternating."""
    print("samples/s of two processes against one (one thread each)")
    for name, words in RUNS.items():
        one, two = [], []
        for _ in range(3):
            one.append(speed(words))
            two.append(speed([*words, "distributed=torchrun", "distributed.instances=2"]))
        print(f"  {name:<20}{max(one):>9,.0f}{max(two):>9,.0f}  {max(two) / max(one):.2f} times")


if __name__ == "__main__":
    main()
