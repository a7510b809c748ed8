"""Whole runs beside Lightning: the same model, data, batches, optimizer, schedule and metric, progress and logs on.

Run it with ``make bench-lightning``, which makes an environment of its own: Lightning is not a dependency of ipurun.
Both train in this process, on one thread, in turns. The time of a step is that of a long run less that of a short one,
so that neither pays for its start; it is CPU time, since the machine is shared, and of each the best round counts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, NamedTuple, Tuple

import torch

ROUNDS = 4


class Case(NamedTuple):
    """A recipe and how much better than Lightning it is to be."""

    name: str
    micro_batch_size: int
    accumulation: int
    short_steps: int
    long_steps: int
    wanted: float

    @property
    def samples(self) -> int:
        """Samples that a long run has and a short one has not."""
        return self.micro_batch_size * self.accumulation * (self.long_steps - self.short_steps)


CASES = (Case("mnist", 10, 1, 50, 450, 1.8), Case("fashion_mnist", 16, 8, 10, 60, 2.0))


def train_with_ipurun(case: Case, steps: int) -> None:
    """Train as `ipurun train` does, without evaluation and checkpoints."""
    from ipurun.config import compose
    from ipurun.log.screen import make_screen
    from ipurun.runs.job import run_job
    from ipurun.runs.prepare import prepare_job

    words = [
        f"+recipe={case.name}",
        f"data.root={_digits()}",
        "engine=cpu",
        "threads=1",
        f"micro_batch_size={case.micro_batch_size}",
        f"gradient_accumulation={case.accumulation}",
        f"max_steps={steps}",
        "epochs=null",
        "metrics.accuracy.on=[train,eval]",
        "eval.every_epochs=null",
        "eval.at_end=false",
        "checkpoint.every_epochs=null",
        "checkpoint.at_end=false",
    ]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        run_job(prepare_job(compose.one(words)), make_screen(nowhere))


def train_with_lightning(case: Case, steps: int) -> None:
    """Train the same with Lightning's defaults."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from ipurun.recipes.mnist.dataset import splits

    data = splits(str(_digits()))["train"]
    loader = torch.utils.data.DataLoader(data, batch_size=case.micro_batch_size, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=case.accumulation,
        logger=CSVLogger("lightning"),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        with contextlib.redirect_stderr(nowhere):
            trainer.fit(_classifier(case, steps), loader)


def _classifier(case: Case, steps: int) -> Any:
    import lightning
    import torchmetrics

    from ipurun.recipes.fashion_mnist.model import ClothesNet
    from ipurun.recipes.mnist.model import DigitNet

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = DigitNet() if case.name == "mnist" else ClothesNet()
            self.loss = torch.nn.CrossEntropyLoss()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, labels = batch
            scores = self.model(images)
            loss = self.loss(scores, labels)
            self.accuracy(scores, labels)
            self.log("loss", loss, prog_bar=True)
            self.log("accuracy", self.accuracy, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            if case.name == "fashion_mnist":
                return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.002)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Classifier()


def _digits() -> Path:
    from ipurun.config.folders import recipes_folder

    return (recipes_folder() / "mnist" / "data").resolve()


def seconds(action: Callable[[], None]) -> float:
    """CPU time of a call."""
    begun = time.process_time()
    action()
    return time.process_time() - begun


def measure(case: Case) -> Dict[str, float]:
    """Best samples per second of both."""
    sides = {"ipurun": train_with_ipurun, "lightning": train_with_lightning}
    best: Dict[Tuple[str, int], float] = {}
    for _ in range(ROUNDS):
        for name, train in sides.items():
            for steps in (case.short_steps, case.long_steps):
                spent = seconds(functools.partial(train, case, steps))
                best[name, steps] = min(spent, best.get((name, steps), spent))
    return {name: case.samples / (best[name, case.long_steps] - best[name, case.short_steps]) for name in sides}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide Lightning's remarks."""
    import lightning.pytorch  # sets the level of its logger when it is imported

    logging.getLogger(lightning.pytorch.__name__).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, quiet():
        os.chdir(place)
        print(f"whole runs; samples per second of CPU time, best of {ROUNDS} rounds taken in turns")
        print(f"{'recipe':<14} {'accumulation':>12} {'lightning':>10} {'ipurun':>9} {'ratio':>6}  wanted")
        for case in CASES:
            found = measure(case)
            print(
                f"{case.name:<14} {case.accumulation:>12} {found['lightning']:>10,.0f} {found['ipurun']:>9,.0f} "
                f"{found['ipurun'] / found['lightning']:>6.2f}  {case.wanted}"
            )


if __name__ == "__main__":
    main()
