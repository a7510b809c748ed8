"""Growth of capture time with the layers of a model, and of memory with the length of a run.

Capture is to take the same time for each layer, up to 96 of them, and a run the same memory at its end as after its
first steps. Times are CPU time, since the machine is shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import List, Tuple

LAYERS = (12, 24, 48, 96)
STEPS = 100_000
FIRST_STEPS = 10_000  # in which pools and buffers reach their size
MODEL = """
import torch


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


def data():
    return {"train": torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randint(0, 2, (32,)))}
"""
WORDS = [
    "+model._target_=tiny.Tiny",
    "+data._target_=tiny.data",
    "loss.name=CrossEntropyLoss",
    "optimizer=sgd",
    "schedule=cosine",
    "+metrics.accuracy._target_=ipurun.metrics.Accuracy",
    "+metrics.accuracy.on=[train]",
    "engine=cpu",
    "threads=1",
    f"max_steps={STEPS}",
    "checkpoint.every_epochs=null",
    f"checkpoint.every_steps={STEPS // 10}",
    "checkpoint.keep=1",
]


def capture_seconds(layers: int) -> float:
    """CPU time to compile a small transformer for training, best of some."""
    import torch

    from ipurun import emulator

    class Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.loss = torch.nn.MSELoss()

        def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
            out = self.layers(x)
            return out, self.loss(out, x)

    best = float("inf")
    for _ in range(3):
        model = Transformer()
        training = emulator.trainingModel(model, emulator.Options(), emulator.optim.SGD(model.parameters(), lr=0.01))
        begun = time.process_time()
        training.compile(torch.randn(2, 8, 16))
        best = min(best, time.process_time() - begun)
        training.destroy()
    return best


def memory_mib() -> float:
    """Memory of this process that is in use now."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_memory() -> List[Tuple[int, float]]:
    """Train a tiny model in the working folder, and return the memory in use along the way, with the steps."""
    from ipurun.config import compose
    from ipurun.log.screen import make_screen
    from ipurun.runs import job
    from ipurun.runs.prepare import prepare_job
    from ipurun.training.events import Observer, StepEnd

    seen: List[Tuple[int, float]] = []

    class Watch(Observer):
        def on_step(self, event: StepEnd) -> None:
            if event.step % FIRST_STEPS == 0:
                seen.append((event.step, memory_mib()))

    loggers = job._loggers
    job._loggers = lambda *args: [*loggers(*args), Watch()]  # this process ends with the run
    with open("tiny.py", "w", encoding="utf-8") as file, open(os.devnull, "w", encoding="utf-8") as nowhere:
        file.write(MODEL)
        file.flush()
        sys.path.insert(0, os.getcwd())
        job.run_job(prepare_job(compose.one(WORDS)), make_screen(nowhere))
    return seen


def main() -> None:
    if len(sys.argv) > 1:
        for step, mib in run_memory():
            print(step, mib)
        return
    print("capture of a transformer for training; CPU time, best of 3")
    for layers in LAYERS:
        spent = capture_seconds(layers)
        print(f"  {layers:>3} layers {spent * 1e3:7.0f} ms, {spent / layers * 1e3:5.2f} ms a layer")
    print(f"memory of a run of {STEPS:,} steps of a tiny model")
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, os.path.abspath(__file__), "run"]
        found = subprocess.run(words, cwd=place, check=True, capture_output=True, text=True).stdout.splitlines()
    memory = [(int(step), float(mib)) for step, mib in map(str.split, found)]
    for step, mib in memory[:: max(1, len(memory) // 5)]:
        print(f"  step {step:>7,} {mib:6.1f} MiB")
    print(f"  {memory[-1][1] - memory[0][1]:+.1f} MiB from step {memory[0][0]:,} to {memory[-1][0]:,}")


if __name__ == "__main__":
    main()
