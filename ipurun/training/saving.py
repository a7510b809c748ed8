"""Decide when a run saves a checkpoint and which one is the best, and write it in the background."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional

import torch

from ipurun.build import Run
from ipurun.checkpoint import Checkpoint, Folder, best, latest, listed, load, save, set_aside
from ipurun.errors import RunError
from ipurun.training.clock import Clock
from ipurun.training.events import CheckpointSaved, Observer
from ipurun.training.failures import explained
from ipurun.training.phases import CHECKPOINT, CHECKPOINT_WRITE, Phases
from ipurun.training.state import Progress, collect_state
from ipurun.training.when import Minutes, falls_due

__all__ = ["NonfiniteError", "Saver"]


class NonfiniteError(RunError):
    """The loss or a weight became NaN or infinite."""


class Saver:
    """Writer of a run's checkpoints.

    Training waits only while the state is copied to the host. A thread writes the copy, one at a time; what it raises
    is raised by the next call here. `newest` is the newest checkpoint that is whole.

    Args:
        run: The run.
        folder: Its folder.
        progress: Its progress, kept up to date by the loop.
        observer: Notified of checkpoints.
        clock: Measures the time they take.
        newest: The checkpoint the run was resumed from.
        phases: A profiler.
        added_state: Returns what checkpoints hold besides the state of the run.
    """

    def __init__(
        self,
        run: Run,
        folder: Folder,
        progress: Progress,
        observer: Observer,
        clock: Clock,
        newest: Optional[Checkpoint],
        phases: Optional[Phases] = None,
        added_state: Callable[[], Dict[str, Any]] = dict,
    ) -> None:
        self._run = run
        self._phases = phases or Phases()
        self._folder = folder
        self._observer = observer
        self._clock = clock
        self._write: Optional[_Write] = None
        self._last_step: Optional[int] = None if newest is None else newest.step
        self._added_state = added_state
        self._minutes = Minutes(run.config.checkpoint.every_minutes, run.team)
        self.progress = progress
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
        return bool(config.every_epochs or config.every_steps or config.every_minutes or config.at_end)

    @property
    def folder_path(self) -> str:
        """The run folder as the user would type it."""
        return str(getattr(self._folder, "path", self._folder.checkpoints))

    @property
    def resume_command(self) -> str:
        """The command that resumes from the newest checkpoint, empty if there is none."""
        return f"ipurun train resume={self.folder_path}" if self.newest is not None else ""

    def advice(self) -> str:
        """Return how to continue after a failure: the command that resumes and the checkpoint that it takes."""
        self.settle()
        newest = self.newest if self._run.team.is_first else latest(self._folder) or self.newest
        if newest is None:
            return "start again: no checkpoint was saved"
        return f"ipurun train resume={self.folder_path} resumes from {newest}"

    def note_value(self, value: float) -> bool:
        """Record a value of the monitored metric, and return whether it is the best so far."""
        progress = self.progress
        if math.isnan(value):
            return False
        higher = self._run.eval_metrics.higher_is_better(self._run.monitor)
        if progress.best is not None and (value <= progress.best if higher else value >= progress.best):
            return False
        progress.best, progress.best_step = value, progress.step
        return True

    def save_if_due(self, ends_epoch: bool, is_done: bool, improved: bool, asked: bool = False) -> None:
        """Save after a host call if the config or a callback asks for it."""
        config, progress = self._run.config.checkpoint, self.progress
        if (
            (ends_epoch and falls_due(config.every_epochs, progress.epoch))
            or falls_due(self._run.plan.steps.save_every_calls, progress.call)
            or (is_done and config.at_end)
            or (improved and self.is_on)
            or self._minutes.are_over
            or asked
        ):
            self.save(improved)

    def save(self, is_best: bool = False) -> None:
        """Copy the state to the host and write it in the background, unless this step is already saved.

        Raises:
            RunError: The previous checkpoint could not be written.
            NonfiniteError: A weight is not finite, and the run is to roll back in that case.
        """
        progress = self.progress
        if self._last_step == progress.step and not is_best:
            return
        begun = time.perf_counter()
        self._minutes.restart()
        self.wait()
        if not self._run.team.is_first and self._run.config.nonfinite_action != "rollback":
            self._last_step = progress.step
            return  # the first process writes
        with self._phases.span(CHECKPOINT), self._clock.measure("checkpoint"), self._explained():
            state = {**collect_state(self._run, progress), **self._added_state()}
            if self._run.config.nonfinite_action == "rollback":
                _check_finite(self._weights_in(state), progress.step)
        info = {
            "epoch": progress.epoch,
            "metrics": progress.metrics if progress.evaluated_step == progress.step else {},
            "monitor": self._run.monitor,
            "best": progress.best,
            "best_step": progress.best_step,
        }
        keep, hours, step = self._run.config.checkpoint.keep, self._run.config.checkpoint.keep_hours, progress.step
        self._last_step = step
        if not self._run.team.is_first:
            return
        self._observer.flush()  # a resumed run does not repeat the steps before its checkpoint
        self._write = _Write(
            lambda: save(self._folder, step, state, keep=keep, keep_hours=hours, info=info, is_best=is_best),
            step,
            begun,
            is_best,
        )
        self._write.start()

    def poll(self) -> None:
        """Report a checkpoint that has been written since the last call.

        Raises:
            RunError: It could not be written.
        """
        if self._write is not None and not self._write.is_alive():
            self._finish_write()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is whole.

        Raises:
            RunError: It could not be written.
        """
        if self._write is not None:
            with self._phases.span(CHECKPOINT), self._clock.measure("checkpoint"):
                self._write.join()
            self._finish_write()

    def settle(self) -> None:
        """Wait as `wait` does, after a failure that matters more than a checkpoint that could not be written."""
        with contextlib.suppress(RunError):
            self.wait()

    def roll_back(self, progress: Progress) -> None:
        """Save from here on what is repeated after the newest checkpoint."""
        self.progress = progress
        self._last_step = None if self.newest is None else self.newest.step

    def go_back(self, failed_step: Optional[int] = None) -> List[str]:
        """Make `newest` the newest checkpoint whose weights are finite, and set the ones after it aside.

        Args:
            failed_step: A checkpoint that led to a loss that is not finite: take an older one, if there is one.

        Returns:
            The names of those set aside.
        """
        abandoned = self._go_back(failed_step) if self._run.team.is_first else []
        if not self._run.team.is_alone:
            self.newest, abandoned = self._run.team.from_first((self.newest, abandoned))
        return abandoned

    def _go_back(self, failed_step: Optional[int]) -> List[str]:
        if self.newest is None:
            return []
        saved = [checkpoint for checkpoint in reversed(listed(self._folder)) if checkpoint.step <= self.newest.step]
        older = [checkpoint for checkpoint in saved if failed_step is None or checkpoint.step < failed_step]
        self.newest = next((checkpoint for checkpoint in [*older, *saved] if self._is_finite(checkpoint)), None)
        return set_aside(self._folder, None if self.newest is None else self.newest.step)

    def _is_finite(self, checkpoint: Checkpoint) -> bool:
        try:
            _check_finite(self._weights_in(load(checkpoint)), checkpoint.step)
        except RunError:  # not finite, or damaged
            return False
        return True

    def _weights_in(self, state: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
        """Return the parameters of a state; a buffer, such as a mask, may well be infinite."""
        buffers = {name for name, _ in self._run.user_model.named_buffers()}
        return {name: value for name, value in state["model"].items() if name not in buffers and torch.is_tensor(value)}

    def _finish_write(self) -> None:
        assert self._write is not None
        write, self._write = self._write, None
        self._clock.add("checkpoint_write", write.seconds)
        self._phases.in_background(CHECKPOINT_WRITE, write.ended - write.seconds, write.ended)
        if write.error is not None:
            self._last_step = None if self.newest is None else self.newest.step
            raise write.error
        self.newest = write.checkpoint
        path = str(self.newest)
        self._observer.on_checkpoint(CheckpointSaved(write.step, path, write.ended - write.begun, write.is_best))

    def _explained(self) -> ContextManager[None]:
        return explained(self._run.engine.module, "copying the weights to the host", self.advice)


class _Write(threading.Thread):
    """Writer of one checkpoint.

    A daemon, so that a disk that hangs cannot keep a process from ending: an interrupted file is not a checkpoint.
    """

    def __init__(self, action: Callable[[], Checkpoint], step: int, begun: float, is_best: bool) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._action: Optional[Callable[[], Checkpoint]] = action
        self.step = step
        self.begun = begun
        self.ended = begun
        self.is_best = is_best
        self.seconds = 0.0
        self.checkpoint: Optional[Checkpoint] = None
        self.error: Optional[BaseException] = None

    def run(self) -> None:
        started = time.perf_counter()
        try:
            assert self._action is not None
            self.checkpoint = self._action()
        except BaseException as error:  # raised again in the main thread
            self.error = error
        self._action = None  # frees the copy of the state
        self.ended = time.perf_counter()
        self.seconds = self.ended - started


def _check_finite(weights: Dict[str, torch.Tensor], step: int) -> None:
    """Raise NonfiniteError if a weight is NaN or infinite: a rollback to such a checkpoint would never end."""
    for name, value in weights.items():
        if not bool(torch.isfinite(value).all()):
            raise NonfiniteError(
                f"`{name}` is no longer finite after step {step}",
                fix="a smaller optimizer.lr, or another loss_scaling",
            )
