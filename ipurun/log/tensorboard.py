"""TensorBoard logger: scalars by split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Union

from ipurun.errors import ConfigError
from ipurun.training.events import EvalEnd, Observer, StepEnd, Summary

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Observer):
    """Writes event files that ``tensorboard --logdir runs`` shows.

    Args:
        folder: The run folder.
        log_dir: Folder of the event files; None: ``tensorboard/`` in the run folder.

    Raises:
        ConfigError: If the package is not installed.
    """

    def __init__(self, folder: Union[str, Path], log_dir: Optional[str] = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as err:
            raise ConfigError(
                "`logger.tensorboard` needs a package that is not installed",
                seen=str(err),
                fix="pip install 'ipurun[tensorboard]', or remove the logger",
                key="logger.tensorboard",
            ) from err
        self._writer: Any = SummaryWriter(log_dir or str(Path(folder) / "tensorboard"))

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            values = {"loss": event.loss, "lr": event.lr, "samples_per_second": event.samples_per_second}
            for name, value in {**values, **event.metrics}.items():
                self._writer.add_scalar(f"train/{name}", value, event.step)

    def on_eval(self, event: EvalEnd) -> None:
        for name, value in event.metrics.items():
            self._writer.add_scalar(f"{event.split}/{name}", value, event.step)

    def on_end(self, event: Summary) -> None:
        self._writer.close()
