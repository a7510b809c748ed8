"""Show a run on a screen: the panel before, the compile bar, the live view, the summary after."""

from __future__ import annotations

import math
import statistics
import textwrap
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.compose import ChangedKey, Point
from ipurun.errors import listing, visible
from ipurun.executables import entries
from ipurun.log.format import (
    batch_equation,
    count,
    devices_text,
    duration,
    epochs_text,
    fitted,
    learning_rate,
    metric,
    plural,
    rate,
    spelled_duration,
    value_text,
)
from ipurun.log.plan_text import initial_rows
from ipurun.log.profile_text import profile_lines
from ipurun.log.screen import Screen, TrainingState, show_progress
from ipurun.planning.plan import Plan
from ipurun.profiling.report import ProfileReport
from ipurun.training.events import (
    CheckpointSaved,
    CompileEnd,
    CompileStart,
    DeviceWait,
    EvalEnd,
    EvalProgress,
    Note,
    Observer,
    RolledBack,
    RunStart,
    StepEnd,
    Summary,
)
from ipurun.training.interrupts import announce_to

__all__ = ["Console", "console_for", "final_line"]

_MOST_CHANGES = 6  # shown of one file; config.yaml has all
_LONGEST_CHANGE = 70
_COMMAND_LINE = "command line"
_DERIVED = "derived"


class Console(Observer):
    """Shows the events of a run on a screen.

    Args:
        screen: The screen.
        engine_draws_bar: Whether PopTorch draws a compile bar, so that a second one must not be drawn.
        plan: The plan of the run, for the folder of its executables.
    """

    takes_steps_late = True

    def __init__(self, screen: Screen, engine_draws_bar: bool = False, plan: Optional[Plan] = None) -> None:
        self._screen = screen
        self._engine_draws_bar = engine_draws_bar and screen.draws_over
        self._plan = plan
        self._state = TrainingState()
        self._is_followed = False  # by a live view, which needs no more than the state

    def show_panel(self, point: Point, plan: Plan, folder: str) -> None:
        """Show the panel before compilation, and the plan's notes."""
        self._screen.panel(f"ipurun train: {plan.name}", panel_rows(point, plan, folder))
        self._state.save_intervals = _save_intervals(point, plan)
        self._screen.notes(plan.notes)

    def on_start(self, event: RunStart) -> None:
        if event.resumed_from:
            self._screen.line(f"resuming after step {count(event.start_step)}, from {event.resumed_from}")
        if event.total_steps is not None and event.start_step >= event.total_steps:
            self._screen.remark("note: all steps are done; set a larger epochs= or max_steps= to train longer")

    def on_note(self, event: Note) -> None:
        prefix = "warning" if event.level == "warning" else "note"
        self._screen.remark(f"{prefix}: {event.text}")

    def on_compile_start(self, event: CompileStart) -> None:
        self._pause()
        if self._engine_draws_bar:
            self._screen.close()
            self._screen.line(f"compiling for {event.mode} ...")
            return
        earlier = self._earlier_seconds(event.mode) if self._screen.draws_over else None
        took = "" if earlier is None else f" (took {spelled_duration(earlier)} before)"
        self._screen.begin(f"compiling for {event.mode}{took}")

    def on_compile_end(self, event: CompileEnd) -> None:
        verb = "loaded" if event.cache in ("hit", "precompiled") else "compiled"
        self._screen.end(f"{verb} for {event.mode} in {duration(event.seconds)}{_cache_text(event)}")
        if self._state.step is not None and not self._is_followed:  # an evaluation compiled: training is under way
            self._follow()

    def on_device_wait(self, event: DeviceWait) -> None:
        self._screen.live([f"waiting for IPUs that are in use: {duration(event.seconds_left)} left"])

    def on_step(self, event: StepEnd) -> None:
        self._state.step = event
        if self._is_followed or self._follow():
            return
        fraction = event.step / event.total_steps if event.total_steps else None
        if self._screen.wants_live(fraction):
            self._screen.live(live_parts(event, self._state.saved_step), fraction)

    def show_progress(self, doing: str, done: int, total: Optional[int], unit: str) -> None:
        """Show how far a long task is; see `ipurun.log.screen.show_progress`."""
        show_progress(self._screen, doing, done, total, unit)

    def on_eval_progress(self, event: EvalProgress) -> None:
        self._state.evaluating = event
        if self._is_followed:
            return
        fraction = event.samples / event.total_samples if event.total_samples else None
        if self._screen.wants_waiting():
            total = "" if event.total_samples is None else f"/{count(event.total_samples)}"
            self._screen.waiting(f"evaluating {count(event.samples)}{total} samples", fraction)

    def on_eval(self, event: EvalEnd) -> None:
        self._state.evaluating, self._state.evaluation = None, event
        if event.is_best:
            self._state.best = event
        values = "  ".join(f"{name} {metric(value)}" for name, value in without_classes(event.metrics).items())
        best = "  (best so far)" if event.is_best else ""
        self._screen.result(
            f"step {count(event.step)}  epoch {event.epoch:.2f}  {event.split}: {values}{best}  "
            f"[{plural(event.samples, 'sample')}, {duration(event.seconds)}]",
            event.is_best,
        )

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        self._state.saved_step = event.step

    def on_rollback(self, event: RolledBack) -> None:
        source = "the beginning" if event.checkpoint is None else event.checkpoint
        self._screen.remark(f"warning: {event.reason}; back to step {count(event.step)}, from {source}")

    def on_end(self, event: Summary) -> None:
        self._pause()
        self._screen.close()

    def _follow(self) -> bool:
        """Begin the live view, on a screen that has one."""
        self._is_followed = self._screen.follow(self._state)
        if self._is_followed:
            announce_to(self._state.announce)
        return self._is_followed

    def _pause(self) -> None:
        """End the live view; the next host call, or the end of a compilation, brings it back."""
        if self._is_followed:
            announce_to(None)
        self._is_followed = False

    def _earlier_seconds(self, mode: str) -> Optional[float]:
        """Return what the compilations of this run's cache folder took, the median of them."""
        if self._plan is None or not self._plan.cache_dir:
            return None
        engine = "cpu" if self._plan.engine == "cpu" else "ipu"
        found = [entry for entry in entries(self._plan.cache_dir, engine) if entry.mode == mode]
        times = [entry.compile_seconds for entry in found if entry.compile_seconds is not None]
        return statistics.median(times) if times else None

    def show_summary(self, summary: Summary, name: str, folder: str, reproduce: str) -> None:
        """Show the summary after a run."""
        title = {"done": "finished", "interrupted": "interrupted"}.get(summary.status, summary.status)
        self._screen.panel(f"{name}: {title}", summary_rows(summary, folder))
        # Outside the panel, which would break a long command over several lines.
        if summary.resume_command:
            self._screen.line(f"  resume      {summary.resume_command}", to_copy=True)
        self._screen.line(f"  reproduce   {reproduce}", to_copy=True)

    def show_profile(self, report: ProfileReport) -> None:
        """Show what a profile found."""
        for line in fitted(profile_lines(report), 12):
            self._screen.line(line)


def console_for(plan: Plan, screen: Screen) -> Console:
    """Return the console of a run: PopTorch draws a compile bar, the CPU engine does not."""
    return Console(screen, engine_draws_bar=plan.engine != "cpu", plan=plan)


def live_parts(event: StepEnd, saved_step: Optional[int]) -> List[str]:
    """Return the parts of the live line, most important first."""
    total = f"/{count(event.total_steps)}" if event.total_steps else ""
    parts = [
        f"step {count(event.step)}{total}",
        f"loss {metric(event.loss)}",
        f"lr {learning_rate(event.lr)}",
        f"{rate(event.samples_per_second)} samples/s",
        f"{_milliseconds(event.call_seconds)} ms/call",
        f"data wait {event.data_wait:.0%}",
        f"ETA {duration(event.eta_seconds)}",
        "not saved yet" if saved_step is None else f"saved at {count(saved_step)}",
    ]
    parts += [f"{name} {metric(value)}" for name, value in event.metrics.items()]
    return parts


def _save_intervals(point: Point, plan: Plan) -> List[int]:
    """Return the weight updates between checkpoints: by steps, and by epochs where the data has a length."""
    found = []
    if plan.steps.save_every_calls is not None:
        found.append(plan.steps.save_every_calls * plan.training.device_iterations)
    if point.config.checkpoint.every_epochs and plan.steps.updates_per_epoch:
        found.append(point.config.checkpoint.every_epochs * plan.steps.updates_per_epoch)
    return found


def panel_rows(point: Point, plan: Plan, folder: str) -> List[Tuple[str, str]]:
    """Return the rows of the panel before a run."""
    rows = [("recipe", ", ".join(point.recipes) or "none (all keys set by hand)")]
    rows += _changed_rows(point.changed)
    rows += [
        ("engine", f"{plan.engine}: {plan.engine_version}"),
        ("devices", devices_text(plan.devices, plan.stages)),
        ("batch", batch_equation(plan.training)),
        ("precision", plan.precision),
    ]
    if plan.steps.total_updates is not None:
        epochs = "" if plan.steps.epochs is None else f" ({epochs_text(plan.steps.epochs)})"
        calls = plural(plan.steps.total_calls or 0, "host call")
        rows.append(("steps", f"{plural(plan.steps.total_updates, 'weight update')} in {calls}{epochs}"))
    rows += initial_rows(plan.initial_weights)
    rows.append(("run folder", folder))
    return rows


def summary_rows(summary: Summary, folder: str) -> List[Tuple[str, str]]:
    """Return the rows of the summary after a run."""
    seconds = summary.seconds
    rows = [("steps", f"{plural(summary.step, 'weight update')}, {epochs_text(summary.epoch)}")]
    final = dict(summary.metrics)
    if summary.loss is not None:
        final = without_classes(final)
        evaluated = {"eval loss" if key == "loss" else key: value for key, value in final.items()}
        final = {"train loss": summary.loss, **evaluated}
    if final:
        rows.append(("final", "  ".join(f"{name} {metric(value)}" for name, value in final.items())))
    if summary.best is not None:
        at = "" if summary.best_step is None else f" at step {count(summary.best_step)}"
        rows.append(("best", f"{summary.monitor} {metric(summary.best)}{at}"))
    if summary.stop_reason:
        rows.append(("stopped", summary.stop_reason))
    rows.append(("speed", f"{rate(summary.samples_per_second)} samples/s, excluding compilation"))
    rows.append(("time", f"{duration(seconds.get('total'))}: {_time_split(seconds)}"))
    if summary.rollbacks:
        rows.append(("rollbacks", f"{plural(summary.rollbacks, 'return')} to the last checkpoint"))
    for split, indices in {"train": summary.skipped_samples, **summary.skipped_eval_samples}.items():
        if indices:
            of_split = "" if split == "train" else f" of {split}"
            which = listing(map(str, indices))
            rows.append(("skipped", f"{plural(len(indices), 'sample')}{of_split} that could not be read: {which}"))
    if summary.padding_share is not None:
        rows.append(("padding", f"{summary.padding_share:.1%} of the positions in the batches"))
    if summary.checkpoint:
        rows.append(("checkpoint", summary.checkpoint))
    if summary.best_checkpoint and summary.best_checkpoint != summary.checkpoint:
        rows.append(("", f"best: {summary.best_checkpoint}"))
    rows.append(("run folder", folder))
    return rows


def without_classes(metrics: Mapping[str, float]) -> Dict[str, float]:
    """Return metrics without the values of single classes (``f1/3``) where there is one for all (``f1``)."""
    return {name: value for name, value in metrics.items() if name.rpartition("/")[0] not in metrics}


def final_line(summary: Summary, name: str, folder: str) -> str:
    """Return the one line of a quiet run, which cannot change the terminal."""
    word = {"done": "finished"}.get(summary.status, summary.status)
    parts = [f"{name}: {word} after {count(summary.step)} steps"]
    parts += [f"{key} {metric(value)}" for key, value in without_classes(summary.metrics).items()]
    if summary.best is not None:
        parts.append(f"best {summary.monitor} {metric(summary.best)}")
    parts += [f"{rate(summary.samples_per_second)} samples/s", duration(summary.seconds.get("total")), folder]
    return visible(", ".join(parts))


def _changed_rows(changed: Sequence[ChangedKey]) -> List[Tuple[str, str]]:
    """Return changed keys by origin: the command line, then recipes, then the chosen files of groups."""
    by_origin: Dict[str, List[str]] = {}
    choices: Dict[str, str] = {}
    for change in changed:
        source, _, line = change.origin.rpartition(":")
        path = Path(source if line.isdigit() else change.origin)
        if path.suffix == ".yaml" and path.parent.name == change.key.split(".")[0]:
            choices[path.parent.name] = path.stem
            continue
        if change.origin == _DERIVED or (change.origin != _COMMAND_LINE and _is_plumbing(change.key)):
            continue
        text = f"{change.key}={value_text(change.value)}"
        by_origin.setdefault(str(path), []).append(textwrap.shorten(text, _LONGEST_CHANGE, placeholder="..."))
    rows: List[Tuple[str, str]] = []
    for origin in sorted(by_origin, key=lambda text: (text != _COMMAND_LINE, text)):
        shown = by_origin[origin]
        if origin != _COMMAND_LINE and len(shown) > _MOST_CHANGES:
            shown = shown[:_MOST_CHANGES] + [f"and {len(shown) - _MOST_CHANGES} more"]
        rows.append(("" if rows else "changed", f"{', '.join(shown)}  ({origin})"))
    if choices:
        text = ", ".join(f"{group}={name}" for group, name in choices.items())
        rows.append(("" if rows else "changed", f"{text}  (groups)"))
    return rows or [("changed", "nothing")]


def _is_plumbing(key: str) -> bool:
    """Whether a key of a recipe is an implementation detail rather than a choice."""
    return key == "sample" or key.endswith("._target_")


def _cache_text(event: CompileEnd) -> str:
    """Return what the executable cache did; nothing where it was off or is of no use, as for quick compilations."""
    if event.cache == "precompiled":
        return f" from {event.why}"
    if event.cache not in ("hit", "miss"):
        return ""
    text = f"; executable cache: {event.cache} for {event.mode}"
    if event.saved_seconds is not None and event.saved_seconds > 0:
        text += f", saved {spelled_duration(event.saved_seconds)}"
    return f"{text} ({event.why})" if event.why else text


def _time_split(seconds: Mapping[str, float]) -> str:
    kinds = [kind for kind in ("compile", "train", "eval", "checkpoint", "data_wait") if kind in seconds]
    kinds += [kind for kind in ("averaging", "recovery") if seconds.get(kind)]
    return ", ".join(f"{kind.replace('_', ' ')} {duration(seconds[kind])}{_saving(kind, seconds)}" for kind in kinds)


def _saving(kind: str, seconds: Mapping[str, float]) -> str:
    """Return what part of a run's time checkpoints took, and the time in which they were written meanwhile."""
    written = seconds.get("checkpoint_write", 0.0)
    if kind != "checkpoint" or not written or not seconds.get("total"):
        return ""
    return f" ({seconds[kind] / seconds['total']:.1%}; {duration(written)} in the background)"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return "-" if not math.isfinite(value) else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
