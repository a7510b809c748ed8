"""Speed and memory of the CPU engine beside a hand-written torch loop over the same micro-batches.

Each case is measured in a process of its own; loop and engine take turns in short rounds within one process, since the
machine is shared, and the ratio is that of their best rounds. Run it with ``make bench``.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Callable, Dict, List

ROUNDS = 7
SECONDS_A_ROUND = 1.0


def rounds(calls: Dict[str, Callable[[], None]], samples_a_call: int) -> Dict[str, float]:
    """Best samples per second of each, measured in turns."""
    best = dict.fromkeys(calls, 0.0)
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begun, count = time.perf_counter(), 0
            while time.perf_counter() - begun < SECONDS_A_ROUND:
                call()
                count += 1
            best[name] = max(best[name], count * samples_a_call / (time.perf_counter() - begun))
    return best


def measure(accumulation: int, replicas: int, which: List[str]) -> Dict[str, float]:
    """Samples per second of the loop and of the engine, and this process's peak memory."""
    import torch

    from ipurun import emulator
    from ipurun.recipes.fashion_mnist.model import ClothesNet

    torch.manual_seed(0)
    micro_batches = accumulation * replicas
    images, labels = torch.randn(16 * micro_batches, 1, 28, 28), torch.randint(0, 10, (16 * micro_batches,))

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ClothesNet()
            self.loss = torch.nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(self.model(x), y)

    plain = WithLoss()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.001, momentum=0.9)

    def loop() -> None:
        plain_optimizer.zero_grad()
        for x, y in zip(images.split(16), labels.split(16)):
            (plain(x, y) / micro_batches).backward()
        plain_optimizer.step()

    options = emulator.Options().replicationFactor(replicas)
    options.Training.gradientAccumulation(accumulation)
    wrapped = WithLoss()
    optimizer = emulator.optim.SGD(wrapped.parameters(), lr=0.001, momentum=0.9)
    training = emulator.trainingModel(wrapped, options, optimizer)
    calls = {"loop": loop, "engine": lambda: training(images, labels)}
    speeds = rounds({name: calls[name] for name in which}, 16 * micro_batches)
    return {**speeds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def in_child(accumulation: int, replicas: int, which: List[str]) -> Dict[str, float]:
    words = [sys.executable, __file__, str(accumulation), str(replicas), *which]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    print("fashion_mnist classifier, micro-batch 16; samples/s, best of rounds taken in turns")
    print(f"{'accumulation':>12} {'replicas':>8} {'loop':>9} {'engine':>9} {'ratio':>6}   peak memory (loop, engine)")
    for accumulation, replicas in [(1, 1), (8, 1), (8, 8)]:
        both = in_child(accumulation, replicas, ["loop", "engine"])
        alone = {name: in_child(accumulation, replicas, [name])["peak_mib"] for name in ("loop", "engine")}
        print(
            f"{accumulation:>12} {replicas:>8} {both['loop']:>9,.0f} {both['engine']:>9,.0f} "
            f"{both['engine'] / both['loop']:>6.2f}   {alone['loop']:,.0f} MiB, {alone['engine']:,.0f} MiB "
            f"({alone['engine'] / alone['loop']:.2f}x)"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
    else:
        main()
