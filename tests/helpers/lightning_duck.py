"""Classes with the methods of Lightning's, written without it."""

from __future__ import annotations

import weakref
from typing import Any, List

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def tensors(first: int, last: int) -> TensorDataset:
    inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs[first:last], inputs[first:last, :3].argmax(dim=1))


class Loaders:
    """Double of a LightningDataModule."""

    def __init__(self, batch_size: int = 8, shuffle: bool = False, samples: int = 64) -> None:
        self.batch_size, self.shuffle, self.samples = batch_size, shuffle, samples

    def setup(self, stage: str) -> None:
        self.train = tensors(0, self.samples)
        self.val = tensors(100, 121)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Rows:
    """A data set whose samples are dicts, and a loader that joins them itself."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        inputs, target = tensors(0, 32)[index]
        return {"x": inputs, "y": target}


def join(rows: List[Any]) -> Any:
    return {"x": torch.stack([row["x"] for row in rows]) * 2, "labels": torch.stack([row["y"] for row in rows])}


class NamedLoaders:
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Rows(), 4, collate_fn=join, sampler=WeightedRandomSampler([1.0] * 32, 16))  # type: ignore[arg-type]


class Count(nn.Module):
    """A metric object, as torchmetrics makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.right, self.total = 0, 0

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        self.right += int((scores.argmax(dim=1) == targets).sum())
        self.total += len(targets)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.right / max(self.total, 1))

    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.update(scores, targets)
        return self.compute()


class Lit(nn.Module):
    """Double of a LightningModule."""

    def __init__(self, lr: float = 0.1, interval: str = "epoch", frequency: int = 1) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.accuracy = Count()
        self.lr, self.interval, self.frequency = lr, interval, frequency

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.relu(self.body(inputs)))
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        scores = self(inputs)
        loss = functional.cross_entropy(scores, target)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("right", (scores.argmax(dim=1) == target).float().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = batch
        scores = self(inputs)
        self.accuracy(scores, target)
        self.log_dict({"val_loss": functional.cross_entropy(scores, target), "val_acc": self.accuracy})

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": self.lr / 2}]
        optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        timed = {"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": timed}


class Peaks(Lit):
    """Logs what needs every micro-batch, and a metric object while training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        scores = self(inputs)
        self.accuracy.update(scores, target)
        self.log("acc", self.accuracy, on_step=True, on_epoch=True)
        self.log("peak", inputs.max(), on_step=False, on_epoch=True, reduce_fx=torch.max)
        return functional.cross_entropy(scores, target)


class Lists(Lit):
    """Module that keeps outputs in a list until the end of the epoch, as Lightning 2 recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: List[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        loss = functional.cross_entropy(self(inputs), target)
        self.kept.append({"loss": loss, "target": target})
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("kept_loss", torch.stack([item["loss"] for item in self.kept]).mean())
        self.log("rows", float(sum(len(item["target"]) for item in self.kept)))
        self.kept.clear()


class Ends(Lit):
    """Reduces what its steps return at the end of an epoch, as Lightning 1 does it on IPUs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        return functional.cross_entropy(self(inputs), target)

    def training_epoch_end(self, outputs: List[Any]) -> None:
        self.log("returned", torch.stack([output["loss"] for output in outputs]).mean())
        self.log("updates", float(self.trainer.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        return (self(inputs).argmax(dim=1) == target).float().mean()

    def validation_epoch_end(self, outputs: List[Any]) -> None:
        self.log("hits", torch.stack(outputs).mean())
        self.log("epoch_index", float(self.trainer.current_epoch))


class EndsWithRows(Ends):
    """Returns rows as well as numbers; its training does not read what its steps returned."""

    def training_epoch_end(self, _: Any) -> None:
        self.log("ended", 1.0)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        return {"val:loss": functional.cross_entropy(self(inputs), target), "target": target, "log": {"unused": 1.0}}

    def validation_epoch_end(self, outputs: List[Any]) -> None:
        self.log("losses", torch.stack([output["val:loss"] for output in outputs]).sum())
        self.log("rows", float(torch.cat([output["target"] for output in outputs]).numel()))


class Root(Lit):
    """Computes with the value of a metric object before it is logged, and reads it at the end."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = batch
        found = self.accuracy(self(inputs), target)
        self.log("val_loss", functional.cross_entropy(self(inputs), target))
        self.log("acc", found)
        self.log("missed", 100 * (1 - found.item()))
        self.log("root", torch.sqrt(found))

    def on_validation_epoch_end(self) -> None:
        self.log("seen", self.trainer.callback_metrics["val_loss"])


class Mixes(Root):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.accuracy(self(batch[0]), batch[1])
        self.log("acc", found * batch[0].mean())


class Reads(Lit):
    """Asks for its data module and its strategy, as modules that scale their rate do."""

    def configure_optimizers(self) -> Any:
        size = self.trainer.datamodule.batch_size * self.trainer.strategy.world_size
        return torch.optim.SGD(self.parameters(), lr=self.lr * size)


class Weak(Lit):
    """Does not keep its trainer alive, as those of Lightning 1."""

    _trainer: Any = None

    @property
    def trainer(self) -> Any:
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = weakref.proxy(trainer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr / self.trainer.max_epochs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        assert self.trainer.max_epochs  # torch's hooks look at all attributes
        return super().state_dict(*args, **kwargs)


class CosineOfNumpy(torch.optim.lr_scheduler._LRScheduler):
    """Computes rates with numpy, as much code does."""

    def get_lr(self) -> List[Any]:
        return [rate * numpy.cos(self.last_epoch / 10) for rate in self.base_lrs]


class Numpy(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": CosineOfNumpy(optimizer), "interval": "step"}]


class Infinite(Lit):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = super().forward(inputs)
        return scores.masked_fill(torch.isinf(scores), 0.0)


class Rate(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class PopTorchLoaders(Loaders):
    """Returns loaders of PopTorch, as Graphcore's examples for Lightning do."""

    def train_dataloader(self) -> DataLoader:
        import poptorch

        options = poptorch.Options()
        options.deviceIterations(4)
        options.replicationFactor(2)
        made: DataLoader = poptorch.DataLoader(options, self.train, self.batch_size, mode=poptorch.DataLoaderMode.Async)
        return made


class Named(Lit):
    """Takes batches by name, and trains only its head."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self(batch["x"]), batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=self.lr)


class OneCycle(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OfTrainer(Lit):
    """Takes its parameters from the trainer, as the template of Lightning with Hydra does."""

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.AdamW(params=self.trainer.model.parameters(), lr=self.lr)}


class Plateau(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Returns(Lit):
    """Returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Manual(Lit):
    automatic_optimization = False


class Two(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.body.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Clips(Lit):
    def configure_gradient_clipping(self, *args: Any) -> None: ...

    def optimizer_step(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...

    def transfer_batch_to_device(self, *args: Any) -> None: ...


class Watches(Lit):
    def on_epoch_end(self) -> None: ...

    def on_validation_model_eval(self) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...

    def transfer_batch_to_device(self, *args: Any) -> None: ...


class Alternates(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss * 2 if batch_idx % 2 == 0 else loss


class Shows(Lit):
    """Looks at the first batch only, without a change to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.trainer.logger.experiment.add_image("first", batch[0])
        return super().training_step(batch, batch_idx)


class Epochs(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 + self.trainer.current_epoch)


class Skips(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return None if torch.isnan(loss) else loss
