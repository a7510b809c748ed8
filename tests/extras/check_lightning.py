"""Real LightningModules, trained by Lightning on the CPU and by ipurun: the numbers are the same."""

import json
import logging
import math
import warnings
from pathlib import Path

import lightning
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import accuracy

import ipurun

EPOCHS = 2


class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
        target = inputs[:, :3].argmax(dim=1)
        parts = [(0, 160), (160, 205), (205, 240)]
        self.train, self.val, self.held_out = (TensorDataset(inputs[a:b], target[a:b]) for a, b in parts)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, self.hparams.batch_size)


class Classifier(lightning.LightningModule):
    """Groups of parameters, a scheduler by epoch, metric objects and every usual way to log."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU()), nn.Linear(16, 3)
        scores = {"acc": torchmetrics.Accuracy(task="multiclass", num_classes=3)}
        scores["f1"] = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
        self.scores = torchmetrics.MetricCollection(scores, prefix="val_")
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        scores = self(inputs)
        loss = functional.cross_entropy(scores, target)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log(
            "train_right", (scores.argmax(1) == target).float().sum(), on_step=False, on_epoch=True, reduce_fx="sum"
        )
        self.log("train_low", loss, on_step=False, on_epoch=True, reduce_fx="min")
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        scores = self(inputs)
        self.log("val_loss", functional.cross_entropy(scores, target))
        self.scores.update(scores, target)

    def on_validation_epoch_end(self):
        self.log_dict(self.scores.compute())
        self.scores.reset()

    def test_step(self, batch, batch_idx):
        inputs, target = batch
        self.test_acc(self(inputs), target)
        self.log("test_acc", self.test_acc)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(dim=1)

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Functional(Classifier):
    """Computes accuracy with a function inside the steps, and warms up by steps."""

    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        scores = self(inputs)
        self.log("val_loss", functional.cross_entropy(scores, target), prog_bar=True)
        self.log("val_acc", accuracy(scores.argmax(dim=1), target, task="multiclass", num_classes=3))

    def on_validation_epoch_end(self):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Collected(Classifier):
    """Logs a collection of metrics from its values, in both loops."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "extra": loss.detach()}

    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        scores = self(inputs)
        self.log("val_loss", functional.cross_entropy(scores, target), on_step=True, on_epoch=True)
        self.log_dict(self.scores(scores, target), on_step=False, on_epoch=True)

    def on_validation_epoch_end(self):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=False)


class Recorded(lightning.Callback):
    def __init__(self) -> None:
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def with_lightning(kind, **options):
    lightning.seed_everything(7)
    model, recorded = kind(), Recorded()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[recorded],
        **options,
    )
    trainer.fit(model, Data())
    return recorded.epochs, model, trainer


def with_ipurun(kind, **keys):
    ipurun.train(
        model={"_target_": f"check_lightning.{kind.__name__}"},
        data={"_target_": "check_lightning.Data"},
        epochs=EPOCHS,
        seed=7,
        cache={"enabled": False},
        overrides=["hydra.run.dir=run"],
        quiet=True,
        **keys,
    )
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line for line in lines if "train_loss_epoch" in line]
    return [{**a, **b} for a, b in zip(epochs, (line for line in lines if "val_loss" in line))]


@pytest.mark.parametrize("kind", [Classifier, Functional, Collected])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_numbers_are_those_of_lightning(kind, accumulation):
    theirs, model, _ = with_lightning(kind, accumulate_grad_batches=accumulation)
    sizes = {"inference": {"device_iterations": accumulation}}  # with padding in one call of several micro-batches
    ours = with_ipurun(kind, gradient_accumulation=accumulation, **sizes)
    assert len(ours) == len(theirs) == EPOCHS
    for our, their in zip(ours, theirs):
        compared = [name for name in their if name in our and not name.endswith("_step") and name != "train_loss"]
        assert {"train_loss_epoch", "train_right", "train_low", "val_loss", "val_acc"} <= set(compared)
        for name in compared:
            assert math.isclose(our[name], their[name], rel_tol=2e-4, abs_tol=1e-6), (name, our[name], their[name])
    for name, value in ipurun.load("run").model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=2e-5, rtol=2e-4)


def test_test_and_predict_steps():
    _, model, trainer = with_lightning(Classifier)
    with_ipurun(Classifier)
    data = Data()
    theirs = trainer.test(model, data, verbose=False)[0]
    ours = ipurun.evaluate("run", split="test", quiet=True)
    assert ours.metrics["test_acc"] == pytest.approx(theirs["test_acc"])
    predicted = torch.cat(trainer.predict(model, data.test_dataloader()))
    found = ipurun.predict("run", split="test", quiet=True)
    torch.testing.assert_close(found.outputs, predicted, atol=1e-4, rtol=1e-3)


def test_checkpoints_come_over_and_go_back():
    _, model, trainer = with_lightning(Classifier)
    trainer.save_checkpoint("theirs.ckpt")
    ipurun.train(
        model={"_target_": "check_lightning.Classifier"},
        data={"_target_": "check_lightning.Data"},
        init_from="theirs.ckpt",
        max_steps=1,
        optimizer={"_target_": "poptorch.optim.SGD", "lr": 0.0},
        overrides=["hydra.run.dir=run"],
        quiet=True,
    )
    exported = ipurun.export("run", "ours.ckpt", lightning=True, quiet=True)
    assert str(exported.files[0]) == "ours.ckpt"
    validated = trainer.validate(Classifier(), Data(), ckpt_path="ours.ckpt", verbose=False)[0]
    assert ipurun.evaluate("run", split="eval", quiet=True).metrics["val_loss"] == pytest.approx(validated["val_loss"])
    back = Classifier.load_from_checkpoint("ours.ckpt")
    assert back.hparams.lr == 0.01
    for name, value in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], value)


def test_the_model_that_lightning_tests_itself_with():
    """It has its own loaders, logs nothing, and returns dicts."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    made = BoringModel()
    model = {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
    keys = {"epochs": 1, "seed": 7, "log_every_steps": 1, "cache": {"enabled": False}, "quiet": True}
    ipurun.train(model=model, overrides=["hydra.run.dir=run"], **keys)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["loss"] for line in lines if "lr" in line]
    assert len(losses) == len(made.train_dataloader())
    assert len(set(losses)) == len(losses)  # at its learning rate it does not converge, in Lightning either
    assert json.loads(Path("run/summary.json").read_text(encoding="utf-8"))["status"] == "done"
