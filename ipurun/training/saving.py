"""When a run saves, and under which circumstances a checkpoint is its best one."""

from __future__ import annotations

import math
import time
from typing import Optional

from ipurun.build import Run
from ipurun.checkpoint import Checkpoint, Folder, best, save
from ipurun.training.clock import Clock
from ipurun.training.events import CheckpointSaved, Observer
from ipurun.training.state import Progress, gather

__all__ = ["Saver", "falls_due"]


class Saver:
    """Writes the checkpoints of a run.

    Args:
        run: The run.
        folder: Its folder.
        progress: How far it has come; kept up to date by the loop.
        observer: Hears of checkpoints.
        clock: Counts the time they take.
        newest: The checkpoint the run was resumed from.
    """

    def __init__(
        self,
        run: Run,
        folder: Folder,
        progress: Progress,
        observer: Observer,
        clock: Clock,
        newest: Optional[Checkpoint],
    ) -> None:
        self._run = run
        self._folder = folder
        self._progress = progress
        self._observer = observer
        self._clock = clock
        self.newest = newest

    @property
    def newest_path(self) -> Optional[str]:
        """Path of the newest checkpoint."""
        return None if self.newest is None else str(self.newest)

    @property
    def best_path(self) -> Optional[str]:
        """Path of the best checkpoint."""
        found = best(self._folder)
        return None if found is None else str(found)

    @property
    def is_on(self) -> bool:
        """Whether the run saves at all."""
        config = self._run.config.checkpoint
        return bool(config.every_epochs or config.every_steps or config.at_end)

    @property
    def folder_path(self) -> str:
        """The run folder as a user types it."""
        return str(getattr(self._folder, "path", self._folder.checkpoints))

    @property
    def resume_command(self) -> str:
        """What to type to go on from the newest checkpoint; empty where there is none."""
        return f"ipurun train resume={self.folder_path}" if self.newest is not None else ""

    def note_value(self, value: float) -> bool:
        """Take in a value of the monitored metric; tells whether it is the best so far."""
        progress = self._progress
        if math.isnan(value):
            return False
        higher = self._run.eval_metrics.higher_is_better(self._run.monitor)
        if progress.best is not None and (value <= progress.best if higher else value >= progress.best):
            return False
        progress.best, progress.best_step = value, progress.step
        return True

    def save_if_due(self, ends_epoch: bool, is_done: bool, improved: bool) -> None:
        """Save where the config asks for it after a host call."""
        config, progress = self._run.config.checkpoint, self._progress
        if (
            (ends_epoch and falls_due(config.every_epochs, progress.epoch))
            or falls_due(self._run.plan.steps.save_every_calls, progress.call)
            or (is_done and config.at_end)
            or (improved and self.is_on)
        ):
            self.save(improved)

    def save(self, is_best: bool = False) -> None:
        """Save now, unless this very step is on disk already."""
        progress = self._progress
        if self.newest is not None and self.newest.step == progress.step and not is_best:
            return
        begun = time.perf_counter()
        with self._clock.measure("checkpoint"):
            self.newest = save(
                self._folder,
                progress.step,
                gather(self._run, progress),
                keep=self._run.config.checkpoint.keep,
                info={
                    "epoch": progress.epoch,
                    "metrics": progress.metrics if progress.evaluated_step == progress.step else {},
                    "monitor": self._run.monitor,
                    "best": progress.best,
                    "best_step": progress.best_step,
                },
                is_best=is_best,
            )
        seconds = time.perf_counter() - begun
        self._observer.on_checkpoint(CheckpointSaved(progress.step, str(self.newest), seconds, is_best))


def falls_due(every: Optional[int], count: int) -> bool:
    """Whether an interval ends at a count; None never does."""
    return bool(every) and count % int(every or 1) == 0
