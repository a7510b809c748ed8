"""How long the compile phase takes at the first and at the second start: the executable cache is to make it 5 times
shorter where it matters. Run it with ``make bench``.

Each start is a separate process, with one thread. Its CPU time is shown beside the wall time, since the machine is
shared. A start compiles for training and for inference, as `ipurun train` does. Where micro-batches are computed at
once, their graph is made and checked, or loaded, in the first call: what that call takes beyond the second one is
shown too.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List

CASES = {
    "bert_base, pipelined": [
        *("+recipe=bert", "model=bert_base", "devices=4", "pipeline.layers_per_ipu=[0,4,4,4]", "pipeline.head_ipu=0"),
        *("pipeline.embedding_ipu=0", "gradient_accumulation=16", "recompute.every=block"),
        "inference.device_iterations=5",
    ],
    "gpt2_small": ["+recipe=gpt", "model=gpt2_small"],
}
AT_ONCE = {
    "gpt_tiny, accumulation 8": ["+recipe=gpt", "gradient_accumulation=8"],
    "vit, accumulation 8": ["+recipe=vit", "gradient_accumulation=8"],
}


def start(words: List[str], calls: bool) -> Dict[str, Any]:
    """Compile a config in this process; return seconds and what the cache did.

    Args:
        words: The config.
        calls: Whether to train twice with the first batch, to see what only the first call does.
    """
    import torch

    from ipurun.build import build_run
    from ipurun.build.cached_executables import compile_and_report
    from ipurun.config.compose import points
    from ipurun.inspect.batch_items import as_call
    from ipurun.inspect.sampling import seeded
    from ipurun.runs.prepare import prepare

    torch.set_num_threads(1)
    gc.freeze()  # as the command does
    prepared = prepare(points(words).points[0])
    run = build_run(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)
    run.train_loader.start(0, 0)
    found: Dict[str, Any] = {"wall": 0.0, "cpu": 0.0}
    for mode in ("training", "inference"):
        if mode == "training":
            run.enter_training()
            batch = next(run.train_loader.epoch())
        else:
            run.enter_inference()
            batch, _ = next(iter(run.eval_loaders[run.eval_split or "train"]))
        wall, cpu = time.perf_counter(), time.process_time()
        args, kwargs = as_call(batch)
        with seeded(prepared.point.config.seed):
            found[mode] = compile_and_report(run, mode, args, kwargs).cache
        found["wall"] += time.perf_counter() - wall
        found["cpu"] += time.process_time() - cpu
        if calls and mode == "training":
            taken = []
            for _ in range(2):
                cpu = time.process_time()
                run.training_model(*args, **kwargs)
                taken.append(time.process_time() - cpu)
            found["first call"] = taken[0] - taken[1]
    run.close()
    return found


def in_child(words: List[str], calls: bool = False) -> Dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *(["--calls"] if calls else []), *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def main() -> None:
    print("compile phase of training and inference, seconds of CPU (and on the clock)")
    print(f"{'':<26} {'first start':>16} {'second start':>16} {'shorter':>8}")
    for name, words in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            first, second = (in_child([*words, "engine=cpu", f"cache.dir={folder}"]) for _ in range(2))
        assert (first["training"], second["training"]) == ("miss", "hit"), (first, second)
        shown = [f"{each['cpu']:.1f} ({each['wall']:.1f})" for each in (first, second)]
        print(f"{name:<26} {shown[0]:>16} {shown[1]:>16} {first['cpu'] / second['cpu']:>7.1f}x")
    print("micro-batches at once: seconds of CPU in the first call beyond the second one")
    for name, words in AT_ONCE.items():
        with tempfile.TemporaryDirectory() as folder:
            starts = [in_child([*words, "engine=cpu", f"cache.dir={folder}"], calls=True) for _ in range(2)]
        first, second = (max(each["first call"], 0.001) for each in starts)
        print(f"{name:<26} {first:>16.3f} {second:>16.3f} {first / second:>7.1f}x")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(start([word for word in sys.argv[1:] if word != "--calls"], "--calls" in sys.argv)))
    else:
        main()
