"""Weights & Biases logger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional, Sequence, Union

from ipurun.log.tracking import Record, Tracker, missing_package, stored_config
from ipurun.training.events import RunStart

__all__ = ["WandbLogger"]


class WandbLogger(Tracker):
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
    is_written_at_once = False  # a killed process loses what wandb has not yet written

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
        super().__init__(folder, "wandb")
        self._wandb: Any = wandb
        self._arguments = {"project": project, "entity": entity, "mode": mode, "tags": tags}
        self._run: Any = None

    def open_run(self, event: RunStart, known: Optional[str]) -> str:
        self._run = self._wandb.init(
            name=f"{event.name}/{self.folder.name}",
            dir=str(self.folder.resolve()),  # its service has its own working folder
            config=stored_config(self.folder),
            id=known,
            resume="allow" if known else None,
            **self._arguments,
        )
        # Not wandb's own count of steps, which cannot return to a checkpoint: a run that rolls back repeats steps.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def send(self, records: Sequence[Record]) -> None:
        for record in records:
            tables = {
                name: self._wandb.Table(columns=list(map(str, range(len(matrix)))), data=list(map(list, matrix)))
                for name, matrix in record.matrices.items()
            }
            values = {f"{record.split}/{name}": value for name, value in {**record.values, **tables}.items()}
            self._run.log({**values, "step": record.step})

    def close_run(self, status: str) -> None:
        # Also after a failure, not at the exit of the process: the next run of a notebook would be taken for this one.
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if status == "done" else 1)  # waits until wandb has written or sent everything
            self.confirm()
