"""Weights & Biases logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Mapping, Optional, Union

from ipurun.log.tracking import kept_id, missing_package, step_values, store_id, stored_config
from ipurun.training.events import EvalEnd, Observer, RunStart, StepEnd, Summary

__all__ = ["WandbLogger"]


class WandbLogger(Observer):
    """Sends metrics to Weights & Biases. A resumed run continues the run that it has there.

    Args:
        folder: The run folder, where wandb keeps its files.
        project: The project.
        entity: The team or user.
        mode: ``online``, ``offline`` (``wandb sync`` sends the files later) or ``disabled``; None: as the variable
            WANDB_MODE says, else online.
        tags: Tags of the run.

    Raises:
        ConfigError: If the package is not installed.
    """

    takes_steps_late = True

    def __init__(
        self,
        folder: Union[str, Path],
        project: str = "ipurun",
        entity: Optional[str] = None,
        mode: Optional[str] = None,
        tags: Optional[List[str]] = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing_package("wandb", error) from error
        self._wandb: Any = wandb
        self._arguments = {"project": project, "entity": entity, "mode": mode, "tags": tags}
        self._folder = Path(folder)
        self._run: Any = None

    def on_start(self, event: RunStart) -> None:
        known = kept_id(self._folder, "wandb")
        self._run = self._wandb.init(
            name=f"{event.name}/{self._folder.name}",
            dir=str(self._folder.resolve()),  # its service has a working folder of its own
            config=stored_config(self._folder),
            id=known,
            resume="allow" if known else None,
            **self._arguments,
        )
        store_id(self._folder, "wandb", self._run.id)
        # Not wandb's own count of steps, which cannot return to a checkpoint: a resumed run repeats steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            self._log("train", step_values(event), event.step)

    def on_eval(self, event: EvalEnd) -> None:
        tables = {
            name: self._wandb.Table(
                columns=[str(number) for number in range(len(matrix))], data=list(map(list, matrix))
            )
            for name, matrix in event.matrices.items()
        }
        self._log(event.split, {**event.metrics, **tables}, event.step)

    def on_end(self, event: Summary) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if event.status == "done" else 1)

    def _log(self, split: str, values: Mapping[str, Any], step: int) -> None:
        self._run.log({**{f"{split}/{name}": value for name, value in values.items()}, "step": step})
