"""Compile a run without a device, and what would help where the engine cannot compile it."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

from ipurun.build import build_run
from ipurun.build.cached_executables import Compiled, compile_and_report, export
from ipurun.config.compose import with_words
from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import as_call
from ipurun.inspect.facts import Purpose
from ipurun.inspect.sampling import seeded
from ipurun.log.console import console_for
from ipurun.log.screen import Screen
from ipurun.planning.plan import Plan
from ipurun.runs.prepare import PreparedRun, prepare
from ipurun.training.events import CompileEnd, CompileStart
from ipurun.training.failures import CompileError, explained

if TYPE_CHECKING:
    from ipurun.estimate.plan_estimate import PlannedConfig, Promises

__all__ = ["CompiledJob", "compile_job", "estimable", "with_remedies"]

_MOST_REMEDIES = 3


@dataclass(frozen=True)
class CompiledJob:
    """Result of `compile_job`.

    Args:
        plan: The plan that was compiled.
        compiled: What each mode took, and what the cache did.
        files: The exported files, by mode; empty without an export.
    """

    plan: Plan
    compiled: Dict[str, Compiled]
    files: Dict[str, Path]


def compile_job(prepared: PreparedRun, screen: Screen, file: Optional[Path] = None) -> CompiledJob:
    """Compile training and inference; nothing runs and no device is attached.

    Args:
        prepared: The point, prepared with `Purpose.COMPILE`.
        screen: Where progress is shown.
        file: Write PopTorch exports instead of filling the cache: this file, and one for inference beside it.

    Raises:
        ConfigError: Nothing would be left of the compilation.
        RunError: Compiling failed.
    """
    config, plan, engine = prepared.point.config, prepared.plan, prepared.engine
    if file is None and plan.cache_dir is None:
        fix = "cache.enabled=true, or --export FILE"
        raise ConfigError("the executable cache is off: compiling would leave nothing", fix=fix, key="cache.enabled")
    run = build_run(config, plan, prepared.inspected, engine)
    console = console_for(plan, screen)
    compiled: Dict[str, Compiled] = {}
    files: Dict[str, Path] = {}
    try:
        for mode in ("training", "inference"):
            if mode == "training":
                run.enter_training()
                run.train_loader.start(0, 0)
                batch = next(run.train_loader.epoch())
            else:
                run.enter_inference()
                batch, _ = next(iter(run.eval_loaders[run.eval_split or "train"]))
            args, kwargs = as_call(batch)
            console.on_compile_start(CompileStart(mode))
            doing = f"compiling the model for {mode}"
            with explained(engine.module, doing), seeded(config.seed):
                if file is not None:
                    begun = time.perf_counter()
                    files[mode] = export(run, mode, args, kwargs, file)
                    compiled[mode] = Compiled(time.perf_counter() - begun, "")
                else:
                    compiled[mode] = compile_and_report(run, mode, args, kwargs)
            done = compiled[mode]
            console.on_compile_end(CompileEnd(mode, done.seconds, done.cache, done.saved_seconds, done.why))
    except CompileError as error:
        raise with_remedies(error, prepared) from error
    finally:
        run.close()
    return CompiledJob(plan, compiled, files)


def with_remedies(error: CompileError, prepared: PreparedRun) -> CompileError:
    """Return the error with what the planner advises for exactly this config."""
    # Of the model's code: no other sizes would help.
    is_of_model = error.problems[0].where or "poptorch_py_error" in error.problems[0].seen
    lines = [] if is_of_model else _remedies(prepared)
    if not lines:
        return error
    problem = error.problems[0]
    return CompileError([replace(problem, fix="\n".join(filter(None, [problem.fix, *lines])))])


def _remedies(prepared: PreparedRun) -> List[str]:
    from ipurun.estimate import plan_estimate  # deferred: other runs need no estimate

    try:
        planned, promises = estimable(prepared)
        found = plan_estimate.estimate_plan(planned, promises)
    except (ConfigError, ValueError):  # the model cannot be traced, or the config is a stored one
        return []
    share = found.estimate.fullest.share
    lines = [f"the planner estimates the fullest IPU at {share:.0%} of its memory (estimate); what would help:"]
    for remedy in found.remedies[:_MOST_REMEDIES]:
        lines.append(f"{remedy.title} ({remedy.fullest_share:.0%}): {shlex.join(remedy.overrides)}")
    return lines if len(lines) > 1 else []


def estimable(prepared: PreparedRun) -> Tuple[PlannedConfig, Promises]:
    """Return a prepared run for the planner, and how it plans the run with further overrides."""
    from ipurun.estimate.plan_estimate import PlannedConfig, Promises

    def planned(item: PreparedRun) -> PlannedConfig:
        return PlannedConfig(item.point.config, item.plan, item.inspected)

    def replan(overrides: Sequence[str]) -> PlannedConfig:
        return planned(prepare(with_words(prepared.point, overrides), Purpose.PLAN, prepared))

    return planned(prepared), Promises(replan)
