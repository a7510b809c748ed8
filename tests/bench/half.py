"""CPU time of recipes in half precision beside float32: wanted at most 1.2 times, 1.5 times with stochastic rounding.

The three kinds of run are calls of the same recipe on synthetic data; they take turns in one process, and the ratio is
that of their best rounds of the main thread's CPU time, since the machine is shared. Run it with ``make bench``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List

RECIPES = ["mnist", "fashion_mnist", "gpt", "vit", "resnet", "bert"]
HALF = ["precision=16.16", "loss_scaling=1024"]
KINDS = {"32.32": [], "16.16": HALF, "stochastic": [*HALF, "stochastic_rounding=true"]}
LAYOUTS = {
    "no accumulation": ["gradient_accumulation=1", "device_iterations=1"],
    "accumulation 8": ["gradient_accumulation=8", "device_iterations=1"],
}
ROUNDS = 5
SECONDS_A_ROUND = 0.4


def prepared_call(words: List[str]) -> Callable[[], Any]:
    """Compile the training of a config and return a function that makes one call on its first batch."""
    from ipurun.build import build_run
    from ipurun.config import compose
    from ipurun.runs.prepare import prepare_job

    prepared = prepare_job(compose.one(words))
    run = build_run(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)
    run.enter_training()
    run.train_loader.start()
    batch = next(iter(run.train_loader.epoch()))
    model = run.training_model
    call = (lambda: model(**batch)) if isinstance(batch, dict) else (lambda: model(*batch))
    call()
    return call


def seconds(calls: Dict[str, Callable[[], Any]]) -> Dict[str, float]:
    """Least CPU time of a call of each, measured in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begun, count = time.thread_time(), 0
            while count == 0 or time.thread_time() - begun < SECONDS_A_ROUND:
                call()
                count += 1
            best[name] = min(best[name], (time.thread_time() - begun) / count)
    return best


def main() -> None:
    recipes = sys.argv[1:] or RECIPES
    print("half precision beside float32: CPU ms a call, best of rounds taken in turns (ratio)")
    print(f"{'':<14} {'':<16} {'32.32':>9} {'16.16':>16} {'stochastic rounding':>20}")
    for recipe in recipes:
        for layout, words in LAYOUTS.items():
            common = [f"+recipe={recipe}", "data=synthetic", "engine=cpu", "threads=1", *words]
            best = seconds({kind: prepared_call([*common, *more]) for kind, more in KINDS.items()})
            cells = [f"{best[kind] * 1e3:.2f} ({best[kind] / best['32.32']:.2f})" for kind in ("16.16", "stochastic")]
            print(f"{recipe:<14} {layout:<16} {best['32.32'] * 1e3:>9.2f} {cells[0]:>16} {cells[1]:>20}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        main()
