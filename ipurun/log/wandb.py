"""Weights & Biases logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional, Union

from ipurun.errors import ConfigError
from ipurun.training.events import EvalEnd, Observer, RunStart, StepEnd, Summary

__all__ = ["WandbLogger"]


class WandbLogger(Observer):
    """Sends metrics to Weights & Biases.

    Args:
        folder: The run folder, where wandb keeps its files.
        project: The project.
        entity: The team or user.
        mode: ``online``, ``offline`` or ``disabled``.
        tags: Tags of the run.

    Raises:
        ConfigError: If the package is not installed.
    """

    def __init__(
        self,
        folder: Union[str, Path],
        project: str = "ipurun",
        entity: Optional[str] = None,
        mode: str = "online",
        tags: Optional[List[str]] = None,
    ) -> None:
        try:
            import wandb
        except ImportError as err:
            raise ConfigError(
                "`logger.wandb` needs a package that is not installed",
                seen=str(err),
                fix="pip install 'ipurun[wandb]', or remove the logger",
                key="logger.wandb",
            ) from err
        self._wandb: Any = wandb
        self._arguments = {"project": project, "entity": entity, "mode": mode, "tags": tags}
        self._folder = Path(folder)
        self._run: Any = None

    def on_start(self, event: RunStart) -> None:
        from omegaconf import OmegaConf

        stored = OmegaConf.load(self._folder / "config.yaml")
        self._run = self._wandb.init(
            name=f"{event.name}/{self._folder.name}",
            dir=str(self._folder),
            config=OmegaConf.to_container(stored),
            **self._arguments,
        )

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            values = {"loss": event.loss, "lr": event.lr, "samples_per_second": event.samples_per_second}
            self._log("train", {**values, **event.metrics}, event.step)

    def on_eval(self, event: EvalEnd) -> None:
        self._log(event.split, event.metrics, event.step)

    def on_end(self, event: Summary) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if event.status == "done" else 1)

    def _log(self, split: str, values: Any, step: int) -> None:
        self._run.log({f"{split}/{name}": value for name, value in values.items()}, step=step)
