"""TensorBoard logger: scalars by split, hyperparameters, the config and matrices as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

from ipurun.log.tracking import chosen_keys, missing_package, step_values
from ipurun.training.events import EvalEnd, Observer, RolledBack, RunFailed, RunStart, StepEnd, Summary

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Observer):
    """Writes event files that ``tensorboard --logdir runs`` shows.

    Args:
        folder: The run folder.
        log_dir: Folder of the event files; None: ``tensorboard/`` in the run folder.

    Raises:
        ConfigError: If the package is not installed.
    """

    takes_steps_late = True

    def __init__(self, folder: Union[str, Path], log_dir: Optional[str] = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", error) from error
        self._make_writer: Any = SummaryWriter
        self._folder = Path(folder)
        self._log_dir = log_dir or str(self._folder / "tensorboard")
        self._writer: Any = None
        self._has_parameters = False

    def on_start(self, event: RunStart) -> None:
        # Steps after the checkpoint are about to be repeated: TensorBoard then ignores what was written of them.
        self._open(event.start_step + 1 if event.resumed_from else None)
        text = (self._folder / "config.yaml").read_text(encoding="utf-8")
        self._writer.add_text("config", "```yaml\n" + text + "```", event.start_step)

    def on_rollback(self, event: RolledBack) -> None:
        self._writer.close()
        self._open(event.step + 1)

    def on_step(self, event: StepEnd) -> None:
        if event.logged:
            for name, value in step_values(event).items():
                self._writer.add_scalar(f"train/{name}", value, event.step)

    def on_eval(self, event: EvalEnd) -> None:
        self._write_parameters({f"{event.split}/{name}": value for name, value in event.metrics.items()})
        for name, value in event.metrics.items():
            self._writer.add_scalar(f"{event.split}/{name}", value, event.step)
        for name, matrix in event.matrices.items():
            self._writer.add_text(f"{event.split}/{name}", _table(matrix), event.step)

    def flush(self) -> None:
        self._writer.flush()

    def on_end(self, event: Summary) -> None:
        self._write_parameters({"train/loss": event.loss or 0.0})
        self._writer.close()

    def on_failure(self, event: RunFailed) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, purge_step: Optional[int]) -> None:
        self._writer = self._make_writer(self._log_dir, purge_step=purge_step)

    def _write_parameters(self, metrics: Mapping[str, float]) -> None:
        """Write the chosen keys for the page of hyperparameters, next to the scalars that it shows with them."""
        if self._has_parameters:
            return
        from torch.utils.tensorboard.summary import hparams

        # Not `add_hparams`, which would make a second run of it in a separate folder.
        for part in hparams(chosen_keys(self._folder), dict(metrics)):
            self._writer.file_writer.add_summary(part)
        self._has_parameters = True


def _table(matrix: Sequence[Sequence[float]]) -> str:
    """Return a matrix as a table in Markdown: a row for each true class, a column for each predicted one."""
    numbers = range(len(matrix[0]) if matrix else 0)
    lines = ["| |" + "".join(f" {number} |" for number in numbers), "|---|" + "---|" * len(numbers)]
    lines += [f"| **{number}** |" + "".join(f" {value:g} |" for value in row) for number, row in enumerate(matrix)]
    return "\n".join(lines)
