"""Overhead of the training loop: a budget of 3% at 200 steps per second. Run it with ``make bench``.

A run of `ipurun train` with progress, training metrics, a schedule and all its files is timed between the end of an
engine call and the start of the next one, and so is a loop that does nothing else; the difference is what the run adds.
The data loader and the call that sends the schedule's learning rate, which both have, are left out. The model is sized
for calls of some 5 ms, so that the loop's code is as cold as in a real run. Times are those of the main thread's CPU,
since the machine is shared, and of each the best of some rounds, taken in turns, counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pty
import statistics
import tempfile
import threading
import time
from typing import IO, Any, Callable, Iterator, List
from unittest import mock

STEPS = 300
ROUNDS = 3
BUDGET = 0.03
WORDS = [
    "+recipe=mnist",
    "data=synthetic",
    "engine=cpu",
    "threads=1",
    "micro_batch_size=24",
    "gradient_accumulation=1",
    "device_iterations=1",
    f"max_steps={STEPS}",
    "epochs=null",
    "metrics.accuracy.on=[train,eval]",
    "eval.every_epochs=null",
    "eval.at_end=false",
    "checkpoint.every_epochs=null",
    "checkpoint.at_end=false",
]


class Timer:
    """Times of engine calls, and of the loop between them."""

    def __init__(self) -> None:
        self.calls: List[float] = []
        self.gaps: List[float] = []
        self._ended = 0.0
        self._outside = 0.0  # since then, in the data loader and in the engine

    def call(self, action: Any) -> Any:
        begun = time.thread_time()
        if self._ended:
            self.gaps.append(begun - self._ended - self._outside)
        self._outside = 0.0
        result = action()
        self._ended = time.thread_time()
        self.calls.append(self._ended - begun)
        return result

    def outside(self, action: Any) -> Any:
        begun = time.thread_time()
        result = action()
        self._outside += time.thread_time() - begun
        return result

    def batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        while True:
            batch = self.outside(lambda: next(inner, None))
            if batch is None:
                return
            yield batch


@contextlib.contextmanager
def terminal() -> Iterator[IO[str]]:
    """A terminal that discards what is written to it."""
    ours, theirs = pty.openpty()
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    with os.fdopen(theirs, "w") as stream:
        yield stream


def _drain(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1 << 16):
            pass


def measure(run: Callable[[], None]) -> Timer:
    """Time the engine calls of a function and what it does between them."""
    from ipurun.build.loader import TrainLoader
    from ipurun.emulator._poplar_executor import PoplarExecutor

    timer = Timer()
    call, send, epoch = PoplarExecutor.__call__, PoplarExecutor.setOptimizer, TrainLoader.epoch
    with mock.patch.multiple(
        PoplarExecutor,
        __call__=lambda self, *args, **kwargs: timer.call(lambda: call(self, *args, **kwargs)),
        setOptimizer=lambda self, optimizer: timer.outside(lambda: send(self, optimizer)),
    ), mock.patch.object(TrainLoader, "epoch", lambda self: timer.batches(epoch(self))):
        run()
    return timer


def train(stream: IO[str]) -> None:
    """Run the config in the working folder."""
    from ipurun.config import compose
    from ipurun.log.screen import make_screen
    from ipurun.runs.job import run_job
    from ipurun.runs.prepare import prepare_job

    run_job(prepare_job(compose.one(WORDS)), make_screen(stream))


def bare() -> None:
    """Make the same engine calls with nothing between them."""
    from ipurun.build import build_run
    from ipurun.config import compose
    from ipurun.runs.prepare import prepare_job

    prepared = prepare_job(compose.one(WORDS))
    run = build_run(prepared.point.config, prepared.plan, prepared.inspected, prepared.engine)
    run.enter_training()
    run.train_loader.start()
    done = 0
    while done < STEPS:
        for batch in run.train_loader.epoch():
            run.training_model(*batch)
            run.training_model.setOptimizer(run.optimizer)
            done += 1
    run.close()


def main() -> None:
    os.environ["TERM"] = "xterm"
    with tempfile.TemporaryDirectory() as place, open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.chdir(place)
        print(f"training loop around {STEPS} engine calls, progress and metrics on; budget {BUDGET:.0%} at 200 steps/s")
        with terminal() as screen:
            sides = {
                "bare": bare,
                "lines": functools.partial(train, nowhere),
                "terminal": functools.partial(train, screen),
            }
            rounds = [{name: measure(side) for name, side in sides.items()} for _ in range(ROUNDS)]
        alone = min(statistics.mean(timers["bare"].gaps) for timers in rounds)
        call = min(statistics.median(timers["bare"].calls) for timers in rounds)
        for name in ("lines", "terminal"):
            added = min(statistics.mean(timers[name].gaps) for timers in rounds) - alone
            print(
                f"  {name:<9} call {call * 1e3:.2f} ms, loop {added * 1e6:.0f} us a step: {added / call:.1%} here, "
                f"{added / 0.005:.1%} at 200 steps/s"
            )


if __name__ == "__main__":
    main()
