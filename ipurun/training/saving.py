"""Decide when a run saves a checkpoint and which one is the best."""

from __future__ import annotations

import math
import time
from typing import Optional

from ipurun.build import Run
from ipurun.checkpoint import Checkpoint, Folder, best, save
from ipurun.training.clock import Clock
from ipurun.training.events import CheckpointSaved, Observer
from ipurun.training.state import Progress, collect_state

__all__ = ["Saver", "falls_due"]


class Saver:
    """Writer of a run's checkpoints.

    Args:
        run: The run.
        folder: Its folder.
        progress: Its progress, kept up to date by the loop.
        observer: Notified of checkpoints.
        clock: Measures the time they take.
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
        """Path of the newest checkpoint, None if there is none."""
        return None if self.newest is None else str(self.newest)

    @property
    def best_path(self) -> Optional[str]:
        """Path of the best checkpoint, None if there is none."""
        found = best(self._folder)
        return None if found is None else str(found)

    @property
    def is_on(self) -> bool:
        """Whether the run saves at all."""
        config = self._run.config.checkpoint
        return bool(config.every_epochs or config.every_steps or config.at_end)

    @property
    def folder_path(self) -> str:
        """The run folder as the user would type it."""
        return str(getattr(self._folder, "path", self._folder.checkpoints))

    @property
    def resume_command(self) -> str:
        """The command that resumes from the newest checkpoint, empty if there is none."""
        return f"ipurun train resume={self.folder_path}" if self.newest is not None else ""

    def note_value(self, value: float) -> bool:
        """Record a value of the monitored metric, and return whether it is the best so far."""
        progress = self._progress
        if math.isnan(value):
            return False
        higher = self._run.eval_metrics.higher_is_better(self._run.monitor)
        if progress.best is not None and (value <= progress.best if higher else value >= progress.best):
            return False
        progress.best, progress.best_step = value, progress.step
        return True

    def save_if_due(self, ends_epoch: bool, is_done: bool, improved: bool) -> None:
        """Save after a host call if the config asks for it."""
        config, progress = self._run.config.checkpoint, self._progress
        if (
            (ends_epoch and falls_due(config.every_epochs, progress.epoch))
            or falls_due(self._run.plan.steps.save_every_calls, progress.call)
            or (is_done and config.at_end)
            or (improved and self.is_on)
        ):
            self.save(improved)

    def save(self, is_best: bool = False) -> None:
        """Save now, unless this step is already saved."""
        progress = self._progress
        if self.newest is not None and self.newest.step == progress.step and not is_best:
            return
        begun = time.perf_counter()
        with self._clock.measure("checkpoint"):
            self.newest = save(
                self._folder,
                progress.step,
                collect_state(self._run, progress),
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
    """Return whether an interval ends at a count; None never does."""
    return bool(every) and count % int(every or 1) == 0
