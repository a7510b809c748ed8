"""Samples per second of one run with two processes against one, on two cores: whole runs of `ipurun train`."""

import json
import os
import subprocess
import sys
import tempfile

RUNS = {
    "mnist, 8 replicas": ["+recipe=mnist", "devices=8", "device_iterations=8", "max_steps=400"],
    "gpt, 2 replicas": ["+recipe=gpt", "devices=2", "max_steps=60"],
    "gpt, 8 replicas": ["+recipe=gpt", "devices=8", "max_steps=16"],
    "vit, 4 replicas": ["+recipe=vit", "data=synthetic", "devices=4", "max_steps=48"],
}
COMMON = ["eval.every_epochs=null", "eval.at_end=false", "checkpoint.at_end=false", "--json"]
ROUNDS = 2


def speed(words: list, threads: int) -> float:
    """Return the samples per second that a run reports, without its start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ipurun", "train", *words, *COMMON, f"threads={threads}", f"runs_dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return float(json.loads(ran.stdout)["samples_per_second"])


def main() -> None:
    """Print a line for each run: the best of each, taken in turns."""
    print("samples/s                one process            two processes of a thread")
    print("                      1 thread 2 threads                 against 1, 2 threads")
    for name, words in RUNS.items():
        several = [*words, "distributed=torchrun", "distributed.instances=2"]
        ways = ((words, 1), (words, 2), (several, 1))
        taken = [[speed(*way) for way in ways] for _ in range(ROUNDS)]
        one, threads, two = (max(column) for column in zip(*taken))
        print(
            f"  {name:<18}{one:>10,.0f}{threads:>10,.0f}{two:>14,.0f}{two / one:>11.2f}{two / threads:>6.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
