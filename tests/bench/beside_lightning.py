"""Whole runs beside Lightning: the same model, data, batches, optimizer, schedule and metric, progress and logs on.

Run it with ``make bench-lightning``, which makes a separate environment: Lightning is not a dependency of ipurun.
Both train in this process, on one thread, in turns. The time is that between two steps of a run, so that neither pays
for its start; it is CPU time, since the machine is shared, and of each the best round counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple
from unittest import mock

import torch

ROUNDS = 4


class Case(NamedTuple):
    """A recipe and how much better than Lightning it is to be."""

    name: str
    micro_batch_size: int
    accumulation: int
    first_step: int  # of those that are measured
    steps: int
    wanted: float

    @property
    def samples(self) -> int:
        """Samples of the steps that are measured."""
        return self.micro_batch_size * self.accumulation * (self.steps - self.first_step)


class Watch:
    """CPU time between two steps of a run."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.seconds = 0.0

    def on_step(self, step: int) -> None:
        """Take the time after the first and after the last step that is measured."""
        if self.seconds == 0.0 and step == self._case.first_step:
            self.seconds = -time.process_time()
        elif self.seconds < 0.0 and step == self._case.steps:
            self.seconds += time.process_time()


CASES = (Case("mnist", 10, 1, 50, 450, 1.8), Case("fashion_mnist", 16, 8, 10, 60, 2.0))


def train_with_ipurun(case: Case, watch: Watch) -> None:
    """Train as `ipurun train` does, without evaluation and checkpoints."""
    from ipurun.config import compose
    from ipurun.log.screen import make_screen
    from ipurun.runs import job
    from ipurun.runs.prepare import prepare_job
    from ipurun.training.events import Observer, StepEnd

    class Steps(Observer):
        def on_step(self, event: StepEnd) -> None:
            watch.on_step(event.step)

    words = [
        f"+recipe={case.name}",
        f"data.root={_digits()}",
        "engine=cpu",
        "threads=1",
        f"micro_batch_size={case.micro_batch_size}",
        f"gradient_accumulation={case.accumulation}",
        f"max_steps={case.steps}",
        "epochs=null",
        "metrics.accuracy.on=[train,eval]",
        "eval.every_epochs=null",
        "eval.at_end=false",
        "checkpoint.every_epochs=null",
        "checkpoint.at_end=false",
    ]
    loggers = job._loggers
    with open(os.devnull, "w", encoding="utf-8") as nowhere, mock.patch.object(
        job, "_loggers", lambda *args: [*loggers(*args), Steps()]
    ):
        job.run_job(prepare_job(compose.one(words)), make_screen(nowhere))


def train_with_lightning(case: Case, watch: Watch) -> None:
    """Train the same with Lightning's defaults."""
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from ipurun.recipes.mnist.dataset import splits

    class Steps(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            watch.on_step(trainer.global_step)

    data = splits(str(_digits()))["train"]
    loader = torch.utils.data.DataLoader(data, batch_size=case.micro_batch_size, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=case.steps,
        callbacks=[Steps()],
        accumulate_grad_batches=case.accumulation,
        logger=CSVLogger("lightning"),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        with contextlib.redirect_stderr(nowhere):
            trainer.fit(_classifier(case), loader)


def _classifier(case: Case) -> Any:
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
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Classifier()


def _digits() -> Path:
    from ipurun.config.folders import recipes_folder

    return (recipes_folder() / "mnist" / "data").resolve()


def measure(case: Case) -> Dict[str, float]:
    """Best samples per second of both."""
    best: Dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, train in (("ipurun", train_with_ipurun), ("lightning", train_with_lightning)):
            watch = Watch(case)
            train(case, watch)
            best[name] = max(case.samples / watch.seconds, best.get(name, 0.0))
    return best


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
