"""The training loop: host calls, evaluations and checkpoints, told to observers."""

from __future__ import annotations

import math
import time
from typing import Any, Dict, Iterator, Optional, Sequence

from ipurun.build import Run
from ipurun.build.batch import as_call, pick, target_of
from ipurun.checkpoint import Checkpoint, best, save
from ipurun.checkpoint.store import Folder
from ipurun.errors import Problem, RunError
from ipurun.train.clock import Clock, Window
from ipurun.train.evaluate import evaluate
from ipurun.train.events import (
    CheckpointSaved,
    CompileEnd,
    CompileStart,
    EvalEnd,
    Note,
    Observer,
    Observers,
    RunStart,
    StepEnd,
    Summary,
)
from ipurun.train.failures import explained
from ipurun.train.interrupts import Interrupts
from ipurun.train.randomness import seed_everything
from ipurun.train.state import (
    Progress,
    gather,
    restore,
    restore_device,
    restore_host_randomness,
)

__all__ = ["train"]


def train(
    run: Run,
    folder: Folder,
    observers: Sequence[Observer] = (),
    resume_from: Optional[Checkpoint] = None,
) -> Summary:
    """Train to the planned end, or until Ctrl-C, and save what is needed to go on.

    Args:
        run: The engine objects.
        folder: The run folder; checkpoints go below it.
        observers: Hear of everything.
        resume_from: A checkpoint to go on from.

    Raises:
        RunError: The run failed; the newest checkpoint is as it was.
    """
    trainer = _Trainer(run, folder, Observers(observers), resume_from)
    try:
        with Interrupts() as interrupts:
            return trainer.run_to_end(interrupts)
    finally:
        run.train_loader.close()


class _Trainer:
    def __init__(self, run: Run, folder: Folder, observer: Observer, resume_from: Optional[Checkpoint]) -> None:
        self._run = run
        self._folder = folder
        self._observer = observer
        self._clock = Clock()
        self._window = Window()
        self._progress = Progress()
        self._restored: Optional[Dict[str, Any]] = None
        self._checkpoint = resume_from
        self._saved_step: Optional[int] = None
        self._evaluated_step: Optional[int] = None
        self._metrics: Dict[str, float] = {}
        self._loss: Optional[float] = None
        self._samples_here = 0
        self._calls_here = 0
        seed_everything(run.config.seed)
        if resume_from is not None:
            self._progress, self._restored = restore(run, resume_from)
            self._saved_step = self._progress.step

    def run_to_end(self, interrupts: Interrupts) -> Summary:
        run, progress = self._run, self._progress
        resumed = None if self._checkpoint is None else str(self._checkpoint)
        total = run.plan.steps.total_updates
        self._observer.on_start(RunStart(run.plan.name, _folder_path(self._folder), progress.step, total, resumed))
        self._say_what_to_know()
        run.enter_training()
        run.train_loader.start(progress.epoch, progress.position)
        if self._restored is not None:
            restore_host_randomness(self._restored)
        while not self._is_done() and not interrupts.asked:
            self._one_epoch(interrupts)
        return self._finish("interrupted" if interrupts.asked and not self._is_done() else "done")

    def _one_epoch(self, interrupts: Interrupts) -> None:
        progress = self._progress
        before = progress.call
        for batch in self._waited_for(self._run.train_loader.epoch()):
            self._one_call(batch)
            interrupts.arm()
            ends_epoch = progress.position == self._run.plan.steps.calls_per_epoch
            if ends_epoch:
                self._count_epoch()
            self._act_by_steps(ends_epoch)
            if interrupts.asked or self._is_done():
                return
            if ends_epoch:
                return
        if progress.call == before and not progress.position:
            raise RunError(Problem("the training data gave no batch in a whole epoch", fix="check `data`"))
        self._count_epoch()
        self._act_by_steps(ends_epoch=True)

    def _count_epoch(self) -> None:
        self._progress.epoch += 1
        self._progress.position = 0

    def _waited_for(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            begun = time.perf_counter()
            with explained(self._run.engine.module, "reading the training data"):
                batch = next(batches, None)
            if batch is None:
                return
            self._waited = time.perf_counter() - begun
            self._clock.add("data_wait", self._waited)
            yield batch

    def _one_call(self, batch: Any) -> None:
        run, progress = self._run, self._progress
        args, kwargs = as_call(batch)
        if not run.training_model.isCompiled():
            self._compile(args, kwargs)
        lr = run.schedule.lr
        begun = time.perf_counter()
        with self._explained("training"):
            result = run.training_model(*args, **kwargs)
        loss = self._mean_loss(result)
        seconds = time.perf_counter() - begun
        self._clock.add("train", seconds)
        batch_plan = run.plan.training
        progress.step += batch_plan.device_iterations
        progress.call += 1
        progress.position += 1
        progress.samples += batch_plan.samples_per_call
        self._samples_here += batch_plan.samples_per_call
        self._calls_here += 1
        self._loss = loss
        self._check_finite(loss, lr)
        if run.train_metrics:
            with self._explained("computing metrics"):
                run.train_metrics.update(self._output(result), target_of(batch, run.config.loss.target))
        if run.schedule.advance(batch_plan.device_iterations):
            run.training_model.setOptimizer(run.optimizer)
        self._window.add(batch_plan.samples_per_call, seconds, self._waited, loss)
        self._report(lr, loss, seconds)

    def _compile(self, args: Any, kwargs: Any) -> None:
        run = self._run
        self._observer.on_compile_start(CompileStart("training"))
        begun = time.perf_counter()
        with self._explained("compiling the model for training"):
            run.training_model.compile(*args, **kwargs)
        seconds = time.perf_counter() - begun
        self._clock.add("compile", seconds)
        self._observer.on_compile_end(CompileEnd("training", seconds))
        if self._restored is not None:
            restore_device(run, self._restored)
            self._restored = None

    def _report(self, lr: float, loss: float, seconds: float) -> None:
        run, progress, steps, window = self._run, self._progress, self._run.plan.steps, self._window
        logged = progress.call % steps.log_every_calls == 0 or self._is_done()
        metrics: Dict[str, float] = {}
        if logged and run.train_metrics:
            metrics = run.train_metrics.compute()
            run.train_metrics.reset()
        eta = None
        if steps.total_calls is not None:
            eta = (steps.total_calls - progress.call) * self._clock.training_seconds / self._calls_here
        self._observer.on_step(
            StepEnd(
                step=progress.step,
                call=progress.call,
                epoch=self._epochs_done(),
                samples=progress.samples,
                loss=window.mean_loss if logged else loss,
                lr=lr,
                metrics=metrics,
                samples_per_second=window.samples_per_second,
                call_seconds=window.call_seconds / window.calls,
                data_wait=window.data_wait,
                eta_seconds=eta,
                total_steps=steps.total_updates,
                logged=logged,
                checkpoint=None if self._checkpoint is None else str(self._checkpoint),
            )
        )
        if logged:
            self._window = Window()

    def _act_by_steps(self, ends_epoch: bool) -> None:
        run, progress, steps = self._run, self._progress, self._run.plan.steps
        config = run.config
        done = self._is_done()
        wants_eval = (
            (ends_epoch and _falls_due(config.eval.every_epochs, progress.epoch))
            or (not ends_epoch and _falls_due(steps.eval_every_calls, progress.call))
            or (done and config.eval.at_end)
        )
        improved = False
        if wants_eval and run.eval_split is not None:
            improved = self._evaluate()
        wants_save = (
            (ends_epoch and _falls_due(config.checkpoint.every_epochs, progress.epoch))
            or _falls_due(steps.save_every_calls, progress.call)
            or (done and config.checkpoint.at_end)
            or (improved and self._saves_at_all())
        )
        if wants_save:
            self._save(improved)
        if not done:
            run.enter_training()

    def _evaluate(self) -> bool:
        run, progress = self._run, self._progress
        if self._evaluated_step == progress.step:
            return False
        begun = time.perf_counter()
        result = evaluate(run, self._observer)
        self._clock.add("compile", result.compile_seconds)
        self._clock.add("eval", time.perf_counter() - begun - result.compile_seconds)
        self._evaluated_step = progress.step
        self._metrics = result.metrics
        value = result.metrics.get(run.monitor)
        if value is None:
            raise RunError(
                Problem(f"`monitor={run.monitor}` is no value of the evaluation", known=", ".join(result.metrics))
            )
        improved = self._is_better(value)
        if improved:
            progress.best, progress.best_step = value, progress.step
        if run.schedule.report(value):
            run.training_model.setOptimizer(run.optimizer)
        self._observer.on_eval(
            EvalEnd(
                progress.step,
                self._epochs_done(),
                result.split,
                result.metrics,
                result.samples,
                result.seconds,
                run.monitor,
                improved,
            )
        )
        return improved

    def _is_better(self, value: float) -> bool:
        best_so_far = self._progress.best
        if math.isnan(value):
            return False
        if best_so_far is None:
            return True
        return (
            value > best_so_far if self._run.eval_metrics.higher_is_better(self._run.monitor) else value < best_so_far
        )

    def _save(self, is_best: bool) -> None:
        progress = self._progress
        if self._saved_step == progress.step and not is_best:
            return
        begun = time.perf_counter()
        info = {
            "epoch": progress.epoch,
            "metrics": self._metrics if self._evaluated_step == progress.step else {},
            "monitor": self._run.monitor,
            "best": progress.best,
            "best_step": progress.best_step,
        }
        with self._clock.measure("checkpoint"):
            self._checkpoint = save(
                self._folder,
                progress.step,
                gather(self._run, progress),
                keep=self._run.config.checkpoint.keep,
                info=info,
                is_best=is_best,
            )
        self._saved_step = progress.step
        self._observer.on_checkpoint(
            CheckpointSaved(progress.step, str(self._checkpoint), time.perf_counter() - begun, is_best)
        )

    def _finish(self, status: str) -> Summary:
        if status == "interrupted" and self._saves_at_all():
            self._save(is_best=False)
        self._run.close()
        progress = self._progress
        favourite = best(self._folder)
        summary = Summary(
            status=status,
            step=progress.step,
            epoch=self._epochs_done(),
            samples=self._samples_here,
            loss=self._loss,
            metrics=self._metrics,
            monitor=self._run.monitor,
            best=progress.best,
            best_step=progress.best_step,
            samples_per_second=self._samples_here / max(self._clock.training_seconds, 1e-9),
            seconds=self._clock.seconds(),
            checkpoint=None if self._checkpoint is None else str(self._checkpoint),
            best_checkpoint=None if favourite is None else str(favourite),
            resume_command=self._resume_command(),
        )
        self._observer.on_end(summary)
        return summary

    def _say_what_to_know(self) -> None:
        run = self._run
        if run.eval_split is None:
            self._observer.on_note(Note("the data has no eval or test split: nothing is evaluated"))
        if not hasattr(run.optimizer, "variable_attrs") and self._saves_at_all():
            self._observer.on_note(
                Note(
                    "torch.optim keeps its state on the device, so a resumed run starts with an empty one; "
                    "poptorch.optim resumes exactly",
                    level="warning",
                )
            )

    def _mean_loss(self, result: Any) -> float:
        run = self._run
        if run.train_metrics:
            loss = result[1] if run.loss is not None else pick(result, run.config.loss.output, loss=True)
        else:
            loss = result
        mean = float(loss.double().mean())
        if run.plan.output_mode != "sum":
            return mean
        return mean / (run.plan.training.device_iterations * run.plan.training.gradient_accumulation)

    def _output(self, result: Any) -> Any:
        config = self._run.config.loss
        return pick(result[0], config.output) if self._run.loss is not None else pick(result, None)

    def _check_finite(self, loss: float, lr: float) -> None:
        if math.isfinite(loss) or not self._run.config.debug.stop_on_nonfinite:
            return
        last = "no checkpoint was saved before" if self._checkpoint is None else f"last checkpoint: {self._checkpoint}"
        raise RunError(
            Problem(
                f"the loss became {loss} at step {self._progress.step}",
                seen=f"lr {lr:g}, precision {self._run.plan.precision}; {last}",
                fix="a smaller optimizer.lr, or another loss_scaling; debug=nonfinite stops at the first operation "
                "that gives one; debug.stop_on_nonfinite=false goes on",
            )
        )

    def _explained(self, doing: str) -> Any:
        checkpoint = None if self._checkpoint is None else str(self._checkpoint)
        return explained(self._run.engine.module, doing, checkpoint, self._resume_command())

    def _resume_command(self) -> str:
        return f"ipurun train resume={_folder_path(self._folder)}" if self._checkpoint is not None else ""

    def _saves_at_all(self) -> bool:
        config = self._run.config.checkpoint
        return bool(config.every_epochs or config.every_steps or config.at_end)

    def _is_done(self) -> bool:
        steps, config = self._run.plan.steps, self._run.config
        if steps.total_calls is not None:
            return self._progress.call >= steps.total_calls
        return self._progress.epoch >= (config.epochs or 1)

    def _epochs_done(self) -> float:
        per_epoch = self._run.plan.steps.calls_per_epoch
        return self._progress.epoch + (self._progress.position / per_epoch if per_epoch else 0.0)


def _falls_due(every: Optional[int], count: int) -> bool:
    return bool(every) and count % every == 0


def _folder_path(folder: Folder) -> str:
    return str(getattr(folder, "path", folder.checkpoints))
