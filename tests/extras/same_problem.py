"""A small model, its data and a way to train them: the same for ipurun, Lightning and the Trainer of transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ipurun
from ipurun import Callback
from ipurun.checkpoint import latest, load

BATCH = 8
STEPS_PER_EPOCH = 12

# The same updates of 8 samples, in every way in which ipurun can divide them.
LAYOUTS: Dict[str, Dict[str, Any]] = {
    "plain": {"micro_batch_size": 8},
    "device_iterations": {"micro_batch_size": 8, "device_iterations": 3},
    "replicas": {"micro_batch_size": 4, "devices": 2},
    "everything": {"micro_batch_size": 2, "devices": 2, "gradient_accumulation": 2, "device_iterations": 3},
}


class Points(Dataset):
    """Points of three overlapping classes."""

    def __init__(self, samples: int = BATCH * STEPS_PER_EPOCH, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (samples,), generator=generator)
        centres = torch.randn(3, 6, generator=torch.Generator().manual_seed(7))
        self.points = centres[self.labels] + torch.randn(samples, 6, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.points[index], self.labels[index]


def splits() -> Dict[str, Points]:
    return {"train": Points(), "eval": Points(40, seed=1)}


class Net(nn.Module):
    """A body and a head, with a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(points))


def initial_net() -> Net:
    """Return the model with the weights that every run starts from."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


class StopAt(Callback):
    """Saves and ends a run at a step: the first half of a run that is resumed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, event: Any) -> None:
        if event.step == self.step:
            self.run.save()
            self.run.stop("half of it")


class Ours(NamedTuple):
    """A finished run of ipurun."""

    folder: Path
    result: Any
    records: List[Dict[str, Any]]
    state: Dict[str, Any]

    def values(self, split: str, name: str) -> List[float]:
        return [record[name] for record in self.records if record["split"] == split]


def ours(layout: str, stop_at: Optional[int] = None, **keys: Any) -> Ours:
    """Train with ipurun in the working folder, in one go or resumed after a step."""
    torch.save(initial_net().state_dict(), "start.pt")
    fixed = {
        "model": {"_target_": "same_problem.Net"},
        "data": {"_target_": "same_problem.splits"},
        "loader": {"shuffle": False},
        "loss": {"name": "CrossEntropyLoss", "args": keys.pop("loss_args", {})},
        "metrics": {"accuracy": {}},
        "init_from": "start.pt",
        "eval": {"at_end": False},  # but at the end of each epoch: the first half of a run must not be evaluated twice
        "cache": {"enabled": False},
    }
    if stop_at is not None:
        keys["callbacks"] = {"half": {"_target_": "same_problem.StopAt", "step": stop_at}}
    result = ipurun.train(None, overrides=["hydra.run.dir=run"], quiet=True, **{**fixed, **LAYOUTS[layout], **keys})
    if stop_at is not None:
        assert result.step == stop_at
        result = ipurun.train(None, overrides=["resume=run"], quiet=True)
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    return Ours(Path("run"), result, [json.loads(line) for line in lines], load(latest(Path("run/checkpoints"))))


class Module(lightning.LightningModule):
    """The same in Lightning; what it is trained with is given from outside."""

    def __init__(
        self, optimizer: Callable[[Any], Any], scheduler: Optional[Callable[[Any], Any]] = None, smoothing: float = 0.0
    ) -> None:
        super().__init__()
        net = initial_net()
        self.backbone, self.head = net.body, net.head
        self.make_optimizer, self.make_scheduler, self.smoothing = optimizer, scheduler, smoothing
        self.rates: List[float] = []
        self.losses: List[float] = []
        self.evaluated: List[Dict[str, float]] = []

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(points))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = functional.cross_entropy(self(batch[0]), batch[1], label_smoothing=self.smoothing)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        scores = self(batch[0])
        self.log("loss", functional.cross_entropy(scores, batch[1]), batch_size=len(batch[1]))
        self.log("accuracy", (scores.argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        return self(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.evaluated.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def weights(self) -> Dict[str, torch.Tensor]:
        """Return the weights under the names of `Net`."""
        return {name.replace("backbone.", "body."): value.detach().clone() for name, value in self.state_dict().items()}


def theirs(module: Module, epochs: int, callbacks: Sequence[Any] = (), **keys: Any) -> Any:
    """Train with Lightning, in batches of 8, and return the trainer."""
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, lightning.pytorch.callbacks.ModelCheckpoint) for c in callbacks),
    }
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=list(callbacks), num_sanity_val_steps=0, **{**quiet, **keys}
    )
    data = splits()
    trainer.fit(module, DataLoader(data["train"], BATCH), DataLoader(data["eval"], BATCH))
    return trainer


def first_of_each(values: Sequence[float], every: int) -> List[float]:
    return list(itertools.islice(values, 0, None, every))


def assert_same_weights(found: Dict[str, torch.Tensor], expected: Dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].float(), value, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
