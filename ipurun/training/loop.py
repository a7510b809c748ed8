"""The training loop: host calls, evaluations and checkpoints, reported to observers."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from ipurun.build import Run
from ipurun.build.cached_executables import compile_and_report
from ipurun.checkpoint import Checkpoint, Folder
from ipurun.errors import RunError, in_short, listing
from ipurun.inspect.batch_items import as_call, map_tensors, pick, target_of
from ipurun.inspect.sampling import seed_everything, seed_of, seeded
from ipurun.training.averaging import WeightAverage
from ipurun.training.callbacks import Callback, Callbacks
from ipurun.training.clock import Clock, Window
from ipurun.training.evaluate import (
    Evaluation,
    add_to_metrics,
    computed_metrics,
    evaluate,
    output_of,
    report_skipped,
)
from ipurun.training.events import (
    CompileEnd,
    CompileStart,
    DeviceWait,
    EvalEnd,
    Note,
    Observer,
    Observers,
    RolledBack,
    RunFailed,
    RunStart,
    StepEnd,
    Summary,
)
from ipurun.training.failures import DeviceFault, explained, when_free
from ipurun.training.interrupts import Interrupts, WaitStoppedError
from ipurun.training.phases import COMPILE, DATA, EVALUATION, Phases
from ipurun.training.saving import NonfiniteError, Saver
from ipurun.training.state import (
    Progress,
    apply_factors,
    attach_training,
    collect_state,
    keeps_torch_optimizer,
    restore,
    restore_device,
    restore_random_state,
    restore_state,
)
from ipurun.training.when import Minutes, falls_due, note_for_stopping, reason_to_stop

__all__ = ["train"]

_SECONDS_BETWEEN_CHECKS = 0.1  # for an interrupt, while a recovery waits
_SECONDS_BETWEEN_REPORTS = 0.1  # of host calls that are shorter
_MOST_UNREPORTED_CALLS = 100
_MOST_UNREPORTED_NUMBERS = 1 << 20


def train(
    run: Run,
    folder: Folder,
    observers: Sequence[Observer] = (),
    resume_from: Optional[Checkpoint] = None,
    deadline: Optional[float] = None,
    phases: Optional[Phases] = None,
    callbacks: Optional[Mapping[str, Callback]] = None,
) -> Summary:
    """Train to the planned end, an interrupt or the deadline, and save what is needed to resume.

    If the IPU system fails and can recover, or if the loss becomes NaN or infinite and `on_nonfinite` is ``rollback``,
    the run returns to its last checkpoint, a limited number of times.

    Args:
        run: The engine objects.
        folder: The run folder, which holds the checkpoints.
        observers: Notified of all events.
        resume_from: A checkpoint to resume from.
        deadline: When to save and stop, by `time.monotonic`; None: never.
        phases: A profiler.
        callbacks: The user's callbacks by name, notified before the observers.

    Raises:
        RunError: The run failed; the newest checkpoint is intact.
    """
    with Interrupts(deadline, is_shared=not run.team.is_alone) as interrupts:
        everyone = Observers(observers)
        trainer = None
        try:
            place = Path(getattr(folder, "path", folder.checkpoints))
            called = Callbacks(callbacks or {}, run, place, everyone)
            everyone = Observers([called, *observers]) if called else everyone
            trainer = _Trainer(run, folder, everyone, called, resume_from, interrupts, phases or Phases())
            return trainer.run_to_end()
        except BaseException as error:
            with contextlib.suppress(RunError):  # of a metric or a callback: what is being raised came first
                everyone.flush()
            everyone.on_failure(RunFailed(0 if trainer is None else trainer.step, in_short(error)))
            raise
        finally:
            if trainer is not None:
                trainer.settle()
            run.close_loaders()


class _HostCall(NamedTuple):
    """Values captured at the end of a host call for its report."""

    step: int
    call: int
    epoch: float
    samples: int
    loss: float
    lr: float
    seconds: float
    waited: float
    mean_seconds: float  # of all host calls so far, with the wait for their data
    logged: bool
    checkpoint: Optional[str]
    result: Any  # for metrics, as the target
    target: Any
    ended_epoch: Optional[int] = None  # number of the epoch whose last one it is


class _Trainer:
    def __init__(
        self,
        run: Run,
        folder: Folder,
        observer: Observers,
        callbacks: Callbacks,
        resume_from: Optional[Checkpoint],
        interrupts: Interrupts,
        phases: Phases,
    ) -> None:
        self._run = run
        self._team = run.team
        self._phases = phases
        self._observer = observer
        self._callbacks = callbacks
        # Known from the beginning: a callback that fails in one process may remain in the others.
        self._shares_requests = bool(callbacks) and not run.team.is_alone
        self._interrupts = interrupts
        self._folder = folder
        self._clock = Clock()
        self._window = Window()
        self._waited = 0.0
        self._unreported: List[_HostCall] = []
        self._most_unreported: Optional[int] = None  # known after the first host call
        self._reported = -math.inf  # when host calls were last reported
        self._samples_here = 0
        self._calls_here = 0
        self._stopped_waiting = False
        self._rollbacks = 0
        self._nonfinite_times = 0
        self._nonfinite_step = -1  # of the last time
        self._nonfinite_from: Optional[int] = None  # checkpoint to which the run returned then
        self._recoveries = 0  # since the checkpoint of `_recovered_step`
        self._recovered_step: Optional[int] = None
        self._resumed_from = resume_from
        self._restored: Optional[Dict[str, Any]] = None
        self._progress = Progress()
        self._average = WeightAverage(run) if run.config.averaging.kind != "none" else None
        self._stop_reason = ""
        self._epoch_values: Dict[str, float] = {}  # of an epoch whose end was not known in advance
        self._eval_minutes = Minutes(run.config.eval.every_minutes, run.team)
        self._log_minutes = Minutes(run.config.log_every_minutes, run.team)
        self._calls_differ = self._restore(resume_from)
        self._saver = Saver(run, folder, self._progress, observer, self._clock, resume_from, phases, self._added_state)
        self._reading, self._training = self._explained("reading the training data"), self._explained("training")
        observer.before_others = self._report_calls
        callbacks.advice = self._saver.advice

    def _restore(self, checkpoint: Optional[Checkpoint], failed: Optional[Progress] = None) -> bool:
        """Take the state of a checkpoint, or of the beginning; return whether its host calls had another size.

        Args:
            checkpoint: The checkpoint.
            failed: The progress before a rollback: what it lowered stays lowered.
        """
        run = self._run
        seed_everything(run.config.seed)
        self._progress, self._restored = Progress(), None
        if checkpoint is not None:
            self._progress, self._restored = restore(run, checkpoint)
        if failed is not None:
            self._progress.lr_factor = failed.lr_factor
            self._progress.loss_scale_factor = failed.loss_scale_factor
        apply_factors(run, self._progress)
        state = self._restored or {}
        if self._average is not None:
            self._average.restore(state.get("average"))
        self._callbacks.restore(None if self._restored is None else state.get("callbacks", {}))
        run.eval_metrics.directions.update(state.get("directions", {}))
        run.train_metrics.restore(state.get("logged", {}))
        self._window = Window(**state.get("window", {}))
        self._stop_reason = self._early_stop_reason()
        return self._progress.recount(run.plan.training)

    def _added_state(self) -> Dict[str, Any]:
        """Return what a checkpoint holds besides the state of the run."""
        self._report_calls()  # their losses belong to the window
        return {
            "average": {} if self._average is None else self._average.state(),
            "callbacks": self._callbacks.state(),
            "directions": dict(self._run.eval_metrics.directions),
            "logged": self._run.train_metrics.state(),
            "window": {"loss": self._window.loss, "losses": self._window.losses},
        }

    def settle(self) -> None:
        """Wait for a checkpoint that is still being written."""
        self._saver.settle()

    @property
    def step(self) -> int:
        """Weight updates done."""
        return self._progress.step

    def run_to_end(self) -> Summary:
        run, progress = self._run, self._progress
        resumed = None if self._resumed_from is None else str(self._resumed_from)
        total = run.plan.steps.total_updates
        self._observer.on_start(RunStart(run.plan.name, self._saver.folder_path, progress.step, total, resumed))
        self._report_notes()
        while True:
            try:
                return self._run_from_here()
            except DeviceFault as fault:
                self._recover(fault)
            except NonfiniteError as error:
                self._lower_and_roll_back(error)

    def _run_from_here(self) -> Summary:
        run = self._run
        if self._progress.owes_evaluation:
            improved = self._evaluate()
            self._saver.save_if_due(False, self._is_done(), improved)
        if not self._is_done():
            self._start_training()
        while not self._is_done() and not self._interrupts.requested:
            if run.unfreezes_at(self._progress.step):
                self._unfreeze()
            self._one_epoch()
        is_cut_short = self._interrupts.requested and (self._progress.owes_evaluation or not self._is_done())
        if is_cut_short:
            self._report_interrupt()
        return self._finish("interrupted" if is_cut_short else "done")

    def _start_training(self) -> None:
        """Switch the device to training, and open the data where the progress says."""
        with self._explained("switching the device to training"):
            self._run.enter_training()
        with self._reading:
            self._run.train_loader.start(self._progress.epoch, self._progress.position)
        if self._restored is not None:
            restore_random_state(self._restored["random"])  # after opening the data, before reading from it

    def _unfreeze(self) -> None:
        """Add parameters to those that are trained, as a new process would that resumes from a checkpoint made here."""
        run, step = self._run, self._progress.step
        if self._saver.is_on:
            self._saver.save()
        with self._explained("copying the weights to the host"):
            state = collect_state(run, self._progress)
        self._report_calls()
        run.rebuild(step)
        restore_state(run, state)
        apply_factors(run, self._progress)
        self._restored = state
        self._observer.on_note(Note(f"unfreeze: more parameters are trained after step {step}"))
        self._start_training()

    def _recover(self, fault: DeviceFault) -> None:
        """Reset the device as PopTorch asks for, and return to the last checkpoint.

        Raises:
            DeviceFault: The reset is left to the user, or the limit of attempts is reached.
        """
        config = self._run.config.recovery
        self._saver.settle()
        newest = None if self._saver.newest is None else self._saver.newest.step
        if newest != self._recovered_step:
            self._recoveries, self._recovered_step = 0, newest
        resets_itself = fault.action == "IPU_RESET"  # attaching again does it
        gives_up = self._recoveries >= config.max_attempts or not self._team.is_alone  # others need a new start, too
        if gives_up or not (resets_itself or config.reset_command):
            raise fault
        self._recoveries += 1
        seconds = config.backoff_seconds * 2 ** (self._recoveries - 1)
        reason = f"the IPU system failed while {fault.doing} ({fault.action})"
        attempt = f"attempt {self._recoveries} of {config.max_attempts}"
        self._observer.on_note(Note(f"{reason}; recovering in {seconds:g} s, {attempt}", level="warning"))
        with self._clock.measure("recovery"):
            self._pause(seconds)
            if not resets_itself:
                _reset(str(config.reset_command), fault)
            self._roll_back(reason)

    def _lower_and_roll_back(self, error: NonfiniteError) -> None:
        """Lower the learning rate or the loss scale, and return to the last checkpoint.

        A run that comes no further than the last time returns further back than it did then. Checkpoints whose weights
        are not finite are passed over.

        Raises:
            NonfiniteError: The run is to stop, or the limit is reached.
        """
        config, progress = self._run.config.rollback, self._progress
        if self._run.config.nonfinite_action != "rollback" or self._nonfinite_times >= config.max_times:
            raise error
        self._saver.settle()
        self._nonfinite_times += 1
        if config.lower == "lr":
            progress.lr_factor *= config.factor
            lowered = f"the learning rate is now {progress.lr_factor:g} of the planned one"
        else:
            progress.loss_scale_factor *= config.factor
            lowered = f"the loss scale is now {progress.loss_scale_factor:g} of the planned one"
        reason = f"{error.problems[0].what}; {lowered} ({self._nonfinite_times} of {config.max_times})"
        with self._clock.measure("recovery"):
            came_further = progress.step > self._nonfinite_step
            abandoned = self._saver.go_back(None if came_further else self._nonfinite_from)
            self._nonfinite_from = None if self._saver.newest is None else self._saver.newest.step
            self._nonfinite_step = progress.step
            if abandoned:
                reason += f"; abandoning {listing(abandoned)}, which led to it or holds such weights"
            self._roll_back(reason)

    def _roll_back(self, reason: str) -> None:
        """Return to the newest checkpoint, or to the beginning, as a new process would resume."""
        self._rollbacks += 1
        self._report_calls()
        self._run.rebuild(0 if self._saver.newest is None else self._saver.newest.step)
        self._restore(self._saver.newest, self._progress)
        self._saver.roll_back(self._progress)
        self._observer.flush()
        self._observer.on_rollback(RolledBack(self._progress.step, self._saver.newest_path, reason))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._interrupts.requested and time.monotonic() < end:
            time.sleep(min(_SECONDS_BETWEEN_CHECKS, max(end - time.monotonic(), 0.0)))

    def _one_epoch(self) -> None:
        progress = self._progress
        before = progress.call
        for batch in self._waited_for(self._run.train_loader.epoch()):
            self._one_call(batch)
            ends_epoch = progress.position == self._run.plan.steps.calls_per_epoch
            if ends_epoch:
                self._count_epoch()
            self._evaluate_and_save(ends_epoch)
            stops = ends_epoch or self._interrupts.requested or self._is_done()
            if stops or self._run.unfreezes_at(progress.step):
                return
        if self._stopped_waiting:
            return
        if progress.call == before and not progress.position:
            raise RunError("the training data returned no batch in a whole epoch", fix="check `data`")
        self._count_epoch()
        self._evaluate_and_save(ends_epoch=True)

    def _count_epoch(self) -> None:
        run, progress = self._run, self._progress
        if run.train_metrics.has_epoch_values and progress.position != run.plan.steps.calls_per_epoch:
            self._report_calls()
            run.train_metrics.moved_to(progress.epoch, progress.step)
            self._epoch_values = run.train_metrics.end_epoch()
        progress.epoch += 1
        progress.position = 0
        if run.schedule.end_epoch():
            run.training_model.setOptimizer(run.optimizer)

    def _waited_for(self, batches: Iterator[Any]) -> Iterator[Any]:
        reading = self._reading
        # Reading here may change the random state, and must come to its end.
        # Several processes stop together, after a host call.
        get = self._next if self._run.train_loader.uses_processes and self._team.is_alone else next
        while True:
            begun = time.perf_counter()
            with self._phases.span(DATA), reading:
                batch = get(batches, None)
            if batch is None:
                return
            self._waited = time.perf_counter() - begun
            self._clock.add("data_wait", self._waited)
            yield batch

    def _next(self, batches: Iterator[Any], end: None) -> Any:
        """Return the next batch, or `end` after the data or the wait for it."""
        try:
            with self._interrupts.stop_waiting():
                return next(batches, end)
        except WaitStoppedError:
            self._stopped_waiting = True
            return end

    def _one_call(self, batch: Any) -> None:
        run, progress, sizes = self._run, self._progress, self._run.plan.training
        model = run.training_model
        self._saver.poll()
        report_skipped(run, self._observer)
        args, kwargs = as_call(batch)
        if not model.isCompiled():
            self._compile(args, kwargs)
        lr = run.schedule.lr
        begun = time.perf_counter()
        last_step = progress.step + sizes.device_iterations
        with self._phases.host_call(model, progress.step + 1, last_step), self._training:
            if not model.isAttachedToDevice():
                self._when_free(lambda: attach_training(run))  # an evaluation used the device
            result = model(*args, **kwargs)
        self._interrupts.arm()
        loss = self._mean_loss(result)
        if not self._team.is_alone:
            loss, stops = self._team.after_call(loss, self._interrupts.wanted)
            self._interrupts.agree(stops)
        ended = time.perf_counter()
        seconds = ended - begun
        self._clock.add("train", seconds)
        progress.step = last_step
        progress.call += 1
        progress.position += 1
        samples = sizes.samples_per_call
        progress.samples += samples
        progress.loss = loss
        self._samples_here += samples
        self._calls_here += 1
        self._check_finite(loss, lr)
        if run.schedule.advance(sizes.device_iterations):
            model.setOptimizer(run.optimizer)
        if self._average is not None:
            with self._explained("averaging the weights"), self._clock.measure("averaging"):
                self._average.read_if_due(progress.step, progress.call)
        logged = self._report_later(batch, result, lr, loss, seconds)
        # Several processes report together: their metrics are exchanged.
        may_wait = self._team.is_alone and self._observer.takes_steps_late and not self._callbacks
        may_wait = may_wait and not self._is_much_unreported()
        if not may_wait or ended - self._reported >= _SECONDS_BETWEEN_REPORTS:
            self._report_calls()
            self._reported = ended
        if logged:
            self._log_minutes.restart()

    def _compile(self, args: Any, kwargs: Any) -> None:
        run = self._run
        self._observer.on_compile_start(CompileStart("training"))
        begun = time.perf_counter()
        # Whatever `forward` draws on the host is a constant of the program: the same one in a run that was resumed.
        compiling = self._explained("compiling the model for training")
        with self._phases.span(COMPILE), compiling, seeded(run.config.seed):
            compiled = self._when_free(lambda: compile_and_report(run, "training", args, kwargs))
            if self._restored is not None:
                restore_device(run, self._restored)
                self._restored = None
        seconds = time.perf_counter() - begun
        self._clock.add("compile", seconds)
        self._observer.on_compile_end(
            CompileEnd("training", seconds, compiled.cache, compiled.saved_seconds, compiled.why)
        )

    def _report_later(self, batch: Any, result: Any, lr: float, loss: float, seconds: float) -> bool:
        """Keep what a report of the host call that has just ended needs; return whether it is one to log.

        Short host calls are reported together: one at a time, their metrics and observers would find the CPU's caches
        full of the model, and take three times as long.
        """
        run, progress = self._run, self._progress
        ends_epoch = progress.position == run.plan.steps.calls_per_epoch
        logged = self._is_logged() or (ends_epoch and run.train_metrics.has_epoch_values)
        target = None
        if run.train_metrics:
            target = target_of(batch, run.config.loss.target)
            if run.config.loader.mode != "sync":
                target = map_tensors(torch.clone, target)  # PopTorch's background process writes to it again
        else:
            result = None
        self._unreported.append(
            _HostCall(
                progress.step,
                progress.call,
                self._epochs_done(),
                progress.samples,
                loss,
                lr,
                seconds,
                self._waited,
                self._clock.training_seconds / self._calls_here,
                logged,
                self._saver.newest_path,
                result,
                target,
                progress.epoch if ends_epoch else None,
            )
        )
        return logged

    def _is_much_unreported(self) -> bool:
        if self._most_unreported is None:
            sizes: List[int] = []
            map_tensors(lambda tensor: sizes.append(tensor.numel()), self._unreported[0].result)
            self._most_unreported = min(_MOST_UNREPORTED_CALLS, _MOST_UNREPORTED_NUMBERS // max(sum(sizes), 1))
        return len(self._unreported) >= self._most_unreported

    def _report_calls(self) -> None:
        """Report the host calls that have ended since the last report."""
        calls, self._unreported = self._unreported, []
        for call in calls:
            self._report(call)

    def _report(self, call: _HostCall) -> None:
        run, steps, window = self._run, self._run.plan.steps, self._window
        window.add(run.plan.training.samples_per_call, call.seconds, call.waited, call.loss)
        metrics: Dict[str, float] = {}
        if run.train_metrics:
            with self._explained("computing metrics"):
                add_to_metrics(run.train_metrics, run.team, output_of(run, call.result), call.target)
            if call.logged:
                with self._explained("computing metrics"):
                    metrics = {**self._epoch_values, **computed_metrics(run.train_metrics, run.team)[0]}
                    if call.ended_epoch is not None:
                        run.train_metrics.moved_to(call.ended_epoch, call.step)
                        metrics.update(run.train_metrics.end_epoch())
                run.train_metrics.reset()
                self._epoch_values = {}
        eta = None if steps.total_calls is None else (steps.total_calls - call.call) * call.mean_seconds
        event = StepEnd(
            step=call.step,
            call=call.call,
            epoch=call.epoch,
            samples=call.samples,
            loss=window.mean_loss if call.logged else call.loss,
            lr=call.lr,
            metrics=metrics,
            samples_per_second=window.samples_per_second,
            call_seconds=window.call_seconds / window.calls,
            data_wait=window.data_wait,
            eta_seconds=eta,
            total_steps=steps.total_updates,
            logged=call.logged,
            checkpoint=call.checkpoint,
        )
        if self._callbacks:
            event = self._callbacks.after_step(event)
        self._observer.on_step(event)
        if call.logged:
            self._window = Window()

    def _is_logged(self) -> bool:
        """Return whether the host call that has just ended is one to log."""
        progress, steps = self._progress, self._run.plan.steps
        if steps.log_every_calls is not None and progress.call % steps.log_every_calls == 0:
            return True
        ends_epoch = progress.position == steps.calls_per_epoch  # not known for a stream
        by_epoch = ends_epoch and falls_due(self._run.config.log_every_epochs, progress.epoch + 1)
        return by_epoch or self._log_minutes.are_over or self._is_done()

    def _evaluate_and_save(self, ends_epoch: bool) -> None:
        run, progress, config = self._run, self._progress, self._run.config.eval
        asked = self._requests()
        self._stop_reason = self._stop_reason or asked.stop
        done = self._is_done()
        wants_eval = (
            (ends_epoch and falls_due(config.every_epochs, progress.epoch))
            or falls_due(run.plan.steps.eval_every_calls, progress.call)
            or (done and config.at_end)
            or self._eval_minutes.are_over
            or asked.evaluate
        )
        asked.evaluate = False
        fresh = wants_eval and progress.evaluated_step != progress.step
        evaluates = fresh and run.eval_split is not None
        improved = evaluates and self._evaluate()
        self._stop_reason = self._stop_reason or self._requests().stop
        done = self._is_done()  # the evaluation may end the run
        self._saver.save_if_due(ends_epoch, done, improved, asked.save)
        asked.save = False
        if evaluates and not done and not self._interrupts.requested:
            with self._explained("switching the device to training"):
                run.enter_training()

    def _requests(self) -> Any:
        """Return what the callbacks ask for, of all processes."""
        asked = self._callbacks.requests
        if self._shares_requests:
            for others in self._team.exchanged((asked.stop, asked.evaluate, asked.save)):
                asked.stop = asked.stop or others[0]
                asked.evaluate, asked.save = asked.evaluate or others[1], asked.save or others[2]
        return asked

    def _evaluate(self) -> bool:
        """Evaluate, and return whether the monitored metric is the best so far."""
        run, progress = self._run, self._progress
        self._report_calls()  # metric objects of a LightningModule may serve training and evaluation
        run.eval_metrics.moved_to(progress.epoch if progress.position else max(progress.epoch - 1, 0), progress.step)
        begun = time.perf_counter()
        result = self._evaluation()
        progress.owes_evaluation = result is None
        if result is None:
            return False
        self._eval_minutes.restart()
        self._clock.add("compile", result.compile_seconds)
        self._clock.add("eval", time.perf_counter() - begun - result.compile_seconds)
        progress.evaluated_step, progress.metrics = progress.step, dict(result.metrics)
        if run.monitor not in result.metrics and not (run.config.monitor or run.config.checkpoint.best):
            run.monitor = run.eval_metrics.monitor_among(result.metrics) or run.monitor
        value = result.metrics.get(run.monitor)
        improved = value is not None and self._saver.note_value(value)
        event = EvalEnd(
            progress.step,
            self._epochs_done(),
            result.split,
            result.metrics,
            result.samples,
            result.seconds,
            run.monitor,
            improved,
            result.matrices,
        )
        if self._callbacks:
            event = self._callbacks.after_eval(event)
        if self._shares_requests:  # what callbacks add may differ; all decide by the same values
            event = replace(event, metrics=self._team.from_first(event.metrics))
        if self._callbacks or self._shares_requests:
            progress.metrics = dict(event.metrics)
        if value is None:  # from a callback, or of an average
            value = self._metric("monitor", run.monitor, event.metrics)
            improved = value is not None and self._saver.note_value(value)
            event = replace(event, is_best=improved)
        if run.schedule.report(value, event.metrics):
            run.training_model.setOptimizer(run.optimizer)
        self._consider_stopping(event.metrics)
        self._observer.on_eval(event)
        return improved

    def _evaluation(self) -> Optional[Evaluation]:
        """Evaluate the weights, their average, or both; return None if an interrupt stopped it."""
        average, which = self._average, self._run.config.averaging.evaluate
        if average is None or not average.exists or which == "raw":
            return self._one_evaluation()
        raw = self._one_evaluation() if which == "both" else None
        if which == "both" and raw is None:
            return None
        with self._explained("switching the device to inference"):
            self._run.enter_inference()
        with average.in_use():
            averaged = self._one_evaluation()
        if raw is None or averaged is None:
            return averaged
        prefix = self._run.config.averaging.prefix
        return replace(
            raw,
            metrics={**raw.metrics, **{prefix + name: value for name, value in averaged.metrics.items()}},
            seconds=raw.seconds + averaged.seconds,
        )

    def _one_evaluation(self) -> Optional[Evaluation]:
        # Not from the random states of training: an evaluation that an interrupt put off must not change them.
        with self._phases.span(EVALUATION), seeded(seed_of(self._run.config.seed, self._progress.step)):
            return evaluate(
                self._run,
                self._observer,
                should_stop=self._stops_evaluation,
                explain=self._explained,
                waiting=self._interrupts.stop_waiting if self._team.is_alone else contextlib.nullcontext,
                phases=self._phases,
            )

    def _stops_evaluation(self) -> bool:
        if not self._team.is_alone:
            self._interrupts.agree(self._interrupts.requested or self._team.any(self._interrupts.wanted))
        return self._interrupts.requested

    def _consider_stopping(self, metrics: Mapping[str, float]) -> None:
        config = self._run.config.early_stopping
        if config.patience is None and config.threshold is None:
            return
        name, higher = self._stopping_metric()
        value = self._metric("early_stopping.metric", name, metrics)
        if value is not None:
            note_for_stopping(config, self._progress, value, higher)
            self._stop_reason = self._early_stop_reason() or self._stop_reason

    def _metric(self, key: str, name: str, metrics: Mapping[str, float]) -> Optional[float]:
        """Return a metric of the evaluation; None for an average that has not begun, or if there are no metrics."""
        prefix = self._run.config.averaging.prefix
        if name not in metrics and prefix and name.startswith(prefix):
            return None
        if not metrics and key == "monitor" and self._run.config.monitor is None:
            return None  # a LightningModule may log nothing in its validation step
        if name not in metrics:
            known = ", ".join(metrics)
            raise RunError(f"`{key}={name}` is not one of the evaluation metrics", known=known, key=key)
        return metrics[name]

    def _stopping_metric(self) -> Tuple[str, bool]:
        """Return the metric of `early_stopping`, and whether higher values are better."""
        config = self._run.config.early_stopping
        name = config.metric or self._run.monitor
        if config.mode is not None:
            return name, config.mode == "max"
        return name, self._run.eval_metrics.higher_is_better(name)

    def _early_stop_reason(self) -> str:
        return reason_to_stop(self._run.config.early_stopping, self._progress, *self._stopping_metric())

    def _finish(self, status: str) -> Summary:
        if status == "interrupted" and self._saver.is_on:
            self._saver.save()
        self._saver.wait()
        report_skipped(self._run, self._observer)
        self._run.close()
        progress, skipped = self._progress, self._run.skipped
        summary = Summary(
            status=status,
            step=progress.step,
            epoch=self._epochs_done(),
            samples=self._samples_here,
            loss=progress.loss,
            metrics=progress.metrics,
            monitor=self._run.monitor,
            best=progress.best,
            best_step=progress.best_step,
            samples_per_second=self._samples_here / max(self._clock.training_seconds, 1e-9),
            seconds=self._clock.seconds(),
            checkpoint=self._saver.newest_path,
            best_checkpoint=self._saver.best_path,
            resume_command="" if status == "done" else self._saver.resume_command,
            rollbacks=self._rollbacks,
            skipped_samples=skipped.indices("train"),
            skipped_eval_samples={name: skipped.indices(name) for name in self._run.splits if name != "train"},
            padding_share=self._run.train_loader.padding_share,
            cache={mode: _cache_record(event) for mode, event in self._observer.compiled.items() if event.cache},
            stop_reason=self._stop_reason if status == "done" else "",
        )
        self._observer.on_end(summary)
        return summary

    def _report_interrupt(self) -> None:
        """Record why the run ends here."""
        minutes = self._run.config.max_minutes
        reason = f"max_minutes={minutes:g} has passed" if minutes and not self._interrupts.received else ""
        self._observer.on_note(Note(f"{reason or self._interrupts.received}: saving and stopping"))

    def _report_notes(self) -> None:
        run = self._run
        if run.eval_split is None:
            self._observer.on_note(Note("the data has no eval or test split: nothing is evaluated"))
        if self._calls_differ:
            self._observer.on_note(
                Note(
                    "samples per host call changed since the checkpoint; resuming at the nearest whole call",
                    level="warning",
                )
            )
        if not hasattr(run.optimizer, "variable_attrs") and self._saver.is_on:
            self._observer.on_note(_note_on_torch_optim(keeps_torch_optimizer(run)))
        if run.config.debug.print_options and hasattr(self._folder, "log"):
            self._folder.log(f"training {run.training_options!r}\ninference {run.inference_options!r}")

    def _mean_loss(self, result: Any) -> float:
        run = self._run
        loss = result
        if run.train_metrics:
            loss = result[1] if run.loss is not None else pick(result, run.config.loss.output, loss=True)
        mean = float(loss) if loss.numel() == 1 else float(loss.double().mean())
        if run.plan.output_mode != "sum":
            return mean
        return mean / (run.plan.training.device_iterations * run.plan.training.gradient_accumulation)

    def _check_finite(self, loss: float, lr: float) -> None:
        if math.isfinite(loss) or self._run.config.nonfinite_action == "continue":
            return
        self._saver.settle()
        newest = self._saver.newest_path
        last = "no checkpoint saved yet" if newest is None else f"last checkpoint: {newest}"
        go_back = "on_nonfinite=rollback returns to the last checkpoint with a lower one, "
        if self._run.config.nonfinite_action == "rollback":
            go_back = "a larger rollback.max_times allows more returns, "
        raise NonfiniteError(
            f"the loss became {loss} at step {self._progress.step}",
            seen=f"lr {lr:g}, precision {self._run.plan.precision}; {last}",
            fix=f"a smaller optimizer.lr, or another loss_scaling; {go_back}on_nonfinite=continue ignores it; "
            "debug=nonfinite stops at the first operation whose result is not finite",
        )

    def _when_free(self, action: Callable[[], Any]) -> Any:
        wait = self._run.config.poplar.wait_for_ipu_minutes
        module, interrupts = self._run.engine.module, self._interrupts
        return when_free(action, module, wait, self._report_wait, lambda: interrupts.requested)

    def _report_wait(self, seconds_left: float) -> None:
        self._observer.on_device_wait(DeviceWait(seconds_left))

    def _explained(self, doing: str) -> ContextManager[None]:
        return explained(self._run.engine.module, doing, self._saver.advice)

    def _is_done(self) -> bool:
        steps, config = self._run.plan.steps, self._run.config
        if self._stop_reason:
            return True
        if steps.total_calls is not None:
            return self._progress.call >= steps.total_calls
        return self._progress.epoch >= (config.epochs or 1)

    def _epochs_done(self) -> float:
        per_epoch = self._run.plan.steps.calls_per_epoch
        return self._progress.epoch + (self._progress.position / per_epoch if per_epoch else 0.0)


def _cache_record(event: CompileEnd) -> Dict[str, object]:
    """Return what the executable cache did as flat data, without what is unknown."""
    record = {"state": event.cache, "saved_seconds": event.saved_seconds, "why": event.why}
    return {key: value for key, value in record.items() if value not in (None, "")}


def _note_on_torch_optim(is_kept: bool) -> Note:
    if is_kept:
        return Note(
            "the state of torch.optim is saved on the CPU engine only: PopTorch does not expose it on an IPU, where a "
            "resumed run starts with an empty one; poptorch.optim resumes exactly on both"
        )
    return Note(
        "torch.optim keeps its state on the device, so a resumed run starts with an empty one; "
        "poptorch.optim resumes exactly",
        level="warning",
    )


def _reset(command: str, fault: DeviceFault) -> None:
    """Run the user's command that resets the IPU system.

    Raises:
        RunError: It failed.
    """
    environment = {**os.environ, "IPURUN_RECOVERY_ACTION": fault.action}
    try:
        subprocess.run(shlex.split(command), env=environment, check=True, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        problem = fault.problems[0]
        raise RunError(
            f"{problem.what}; the command that resets it failed",
            where=f"recovery.reset_command={command}",
            seen=str(error),
            fix=problem.fix,
            key="recovery.reset_command",
        ) from error
