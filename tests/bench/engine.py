"""Speed and memory of the CPU engine beside a hand-written torch loop over the same micro-batches.

Each model runs in a separate process with one thread. Loop and engine take turns in short rounds and are timed by the
CPU time of the process, since the machine is shared; the ratio is that of their best rounds, and more is better. Beside
it stands what the loop itself gains from the best of some larger batches, where no operation mixes rows: with torch's
own kernels, computing micro-batches at once gives no more on this machine. Memory is the peak of a process that runs
only one of the two. Run it with ``make bench``; arguments are names of models.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

ROUNDS = 5
SECONDS_A_ROUND = 0.25
# Device iterations, accumulation, replicas.
LAYOUTS = [(8, 1, 1), (1, 8, 1), (1, 8, 8)]
# Micro-batches that the hand-written loop concatenates to one.
FOLDED = [8, 16, 32]
LOADER_BUDGET = 0.05
# Time per sample must not grow along these; the first one is the base.
GROWING = [(1, 1, 1), (16, 1, 1), (64, 1, 1), (1, 16, 1), (1, 64, 1), (1, 1, 16), (1, 1, 64)]


class Case(NamedTuple):
    """A model of the table, the size of its micro-batches and the ratios that issue 11 asks for."""

    config: str
    changes: Dict[str, Any]
    micro_batch_size: int
    wanted: Tuple[float, float, float]
    mixes_rows: bool = False


CASES = {
    "gpt": Case("gpt_tiny", {}, 4, (1.0, 1.35, 1.35)),
    "gpt, dropout 0.1": Case("gpt_tiny", {"dropout": 0.1}, 4, (1.0, 1.25, 1.25)),
    "vit": Case("vit_digits", {}, 4, (1.0, 2.2, 3.0)),
    "resnet, batch norm": Case("resnet_tiny", {}, 4, (1.0, 1.2, 1.2), mixes_rows=True),
    "resnet, group norm": Case("resnet_tiny", {"norm": "group"}, 4, (1.1, 2.2, 2.4)),
    "fashion_mnist": Case("clothes_net", {}, 16, (1.05, 1.8, 2.0)),
    "mnist": Case("digit_net", {}, 16, (1.0, 1.05, 1.1)),
}


def build(case: Case) -> Any:
    """Return the model of a case with its loss, as one module."""
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from ipurun.recipes.gpt.loss import next_token_loss

    config = OmegaConf.load(f"{ROOT}/conf/model/{case.config}.yaml")
    config = OmegaConf.merge(config.get("model", config), case.changes)
    loss = next_token_loss if case.config.startswith("gpt") else torch.nn.functional.cross_entropy

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = instantiate(config)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self.model(x), y)

    torch.manual_seed(0)
    return WithLoss()


def batch(case: Case, micro_batches: int) -> Tuple[Any, Any]:
    """Return inputs and targets of some micro-batches."""
    import torch

    rows = micro_batches * case.micro_batch_size
    if case.config.startswith("gpt"):
        return torch.randint(0, 96, (rows, 64)), torch.randint(0, 96, (rows, 64))
    shape = (3, 32, 32) if case.config.startswith("resnet") else (1, 28, 28)
    return torch.randn(rows, *shape), torch.randint(0, 10, (rows,))


def calls(case: Case, layout: Tuple[int, int, int]) -> Dict[str, Callable[[], Any]]:
    """Return the functions that run one call of the loop and of the engine."""
    import torch

    from ipurun import emulator

    device_iterations, accumulation, replicas = layout
    micro_batches = accumulation * replicas
    inputs, targets = batch(case, device_iterations * micro_batches)
    wrapped = build(case)

    def plain_loop(folded: int) -> Callable[[], None]:
        plain = build(case)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
        rows, per_update = case.micro_batch_size * folded, micro_batches // folded
        pieces = list(zip(inputs.split(rows), targets.split(rows)))

        def loop() -> None:
            for start in range(0, len(pieces), per_update):
                optimizer.zero_grad()
                for x, y in pieces[start : start + per_update]:
                    (plain(x, y) / per_update).backward()
                optimizer.step()

        return loop

    options = emulator.Options().replicationFactor(replicas).deviceIterations(device_iterations)
    options.Training.gradientAccumulation(accumulation)
    options.broadcastBuffers(False)
    training = emulator.trainingModel(wrapped, options, emulator.optim.AdamW(wrapped.parameters(), lr=1e-4))
    folded = [] if case.mixes_rows else [size for size in FOLDED if size <= micro_batches]
    return {
        "loop": plain_loop(1),
        "engine": lambda: training(inputs, targets),
        **{f"folded {size}": plain_loop(size) for size in folded},
    }


def best_times(functions: Dict[str, Callable[[], Any]]) -> Dict[str, float]:
    """Return the CPU seconds of one call of each function: the best of rounds taken in turns."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
        function()
    for _ in range(ROUNDS):
        for name, function in functions.items():
            begun, count = time.process_time(), 0
            while time.process_time() - begun < SECONDS_A_ROUND:
                function()
                count += 1
            best[name] = min(best[name], (time.process_time() - begun) / count)
    return best


def measure(name: str, what: str) -> Any:
    """Measure one case in this process."""
    import torch

    torch.set_num_threads(1)
    case = CASES[name]
    if what == "speed":
        times = [best_times(calls(case, layout)) for layout in LAYOUTS]
        best = [min((t for n, t in each.items() if n.startswith("folded")), default=None) for each in times]
        folded = [seconds and each["loop"] / seconds for each, seconds in zip(times, best)]
        return [(each["loop"] / each["engine"], bound) for each, bound in zip(times, folded)]
    if what == "loader":
        return loader_times()
    if what == "growth":
        engines = {str(layout): calls(case, layout)["engine"] for layout in GROWING}
        times = best_times(engines)
        each = [times[str(layout)] / (layout[0] * layout[1] * layout[2]) for layout in GROWING]
        return [seconds / each[0] for seconds in each]
    function = calls(case, LAYOUTS[-1])[what]
    for _ in range(3):
        function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def loader_times() -> Tuple[float, float]:
    """Return the median CPU seconds of a batch from tensors in memory, in sync mode, and of the step that it is for."""
    import os
    import statistics
    import tempfile

    from ipurun.build import build_run
    from ipurun.config import compose
    from ipurun.runs.prepare import prepare_job

    os.chdir(tempfile.mkdtemp())
    prepared = prepare_job(compose.one(["+recipe=mnist", "engine=cpu", "threads=1", "loader.mode=sync"]))
    run = build_run(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)
    run.enter_training()
    run.train_loader.start()
    times: List[List[float]] = [[], []]
    for _ in range(2):
        batches = iter(run.train_loader.epoch())
        while True:
            begun = time.thread_time()
            batch = next(batches, None)
            if batch is None:
                break
            read = time.thread_time()
            run.training_model(*batch)
            times[0].append(read - begun)
            times[1].append(time.thread_time() - begun)
    run.close()
    return statistics.median(times[0]), statistics.median(times[1])


def in_child(name: str, what: str) -> Any:
    """Measure one case in a separate process."""
    words = [sys.executable, __file__, "--measure", name, what]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(names: List[str]) -> None:
    """Print the table."""
    print("CPU engine / hand-written loop, AdamW, one thread: measured (wanted), what folding gives the loop itself")
    print(f"{'':20} {'8 iterations':>14} {'accumulation 8':>20} {'.. replicas 8':>20} {'peak memory':>12}")
    for name in names:
        pairs = in_child(name, "speed")
        memory = in_child(name, "engine") / in_child(name, "loop")
        cells = [f"{ratio:.2f} ({wanted:.2f})" for (ratio, _), wanted in zip(pairs, CASES[name].wanted)]
        cells = [f"{cell}{f', {bound:.2f}' if bound else ''}" for cell, (_, bound) in zip(cells, pairs)]
        print(f"{name:20} {cells[0]:>14} {cells[1]:>20} {cells[2]:>20} {memory:>11.2f}x", flush=True)
    batch_seconds, step_seconds = in_child(names[-1], "loader")
    print(
        f"Data loader, sync mode, tensors in memory, mnist recipe: {batch_seconds * 1e6:.0f} us, "
        f"{batch_seconds / step_seconds:.1%} of a step (wanted: under {LOADER_BUDGET:.0%})"
    )
    print("Time per sample, compared with a call of one micro-batch (wanted: at most 1)")
    print(f"{'':20} " + " ".join(f"{'x'.join(map(str, layout)):>8}" for layout in GROWING))
    for name in names[-1:]:
        print(f"{name:20} " + " ".join(f"{ratio:8.2f}" for ratio in in_child(name, "growth")))


if __name__ == "__main__":
    ROOT = __file__.rsplit("/tests/", 1)[0]
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main(sys.argv[1:] or list(CASES))
