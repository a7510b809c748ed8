"""From a composed point to everything that is known before training: engine, model, data and plan.

Each package finds problems; here they are gathered, so that all are reported at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import List, Mapping, Optional

from ipurun import engine as engines
from ipurun.checkpoint import broken, latest
from ipurun.config.compose import Point
from ipurun.distributed.environment import launched
from ipurun.errors import ConfigError, Problem
from ipurun.inspect.facts import Facts, Purpose
from ipurun.inspect.lightning.checks import adopt
from ipurun.inspect.model_and_data import ModelAndData, inspect, inspect_again
from ipurun.inspect.targets import check_node
from ipurun.planning import make_plan
from ipurun.planning.devices import start_command
from ipurun.planning.placement.forms import is_auto
from ipurun.planning.plan import Plan
from ipurun.runs.folder import RunFolder, check_writable, find_latest
from ipurun.weights import load_initial_weights

__all__ = ["PreparedRun", "prepare", "prepare_job", "resumed_folder"]


@dataclass(frozen=True)
class PreparedRun:
    """A point that is ready to be built."""

    point: Point
    engine: engines.Engine
    inspected: ModelAndData
    plan: Plan


def prepare(
    point: Point,
    purpose: Purpose = Purpose.RUN,
    before: Optional[PreparedRun] = None,
    has_checkpoint: bool = False,
) -> PreparedRun:
    """Load the engine, make model and data, and plan the run.

    Args:
        point: The point.
        purpose: What it is prepared for.
        before: The same point with other words, prepared before: its model and data are used again.
        has_checkpoint: Whether the weights come from a checkpoint of the run, so that `init_from` is not read.

    Raises:
        ConfigError: With all problems that could be found.
    """
    problems: List[Problem] = list(point.problems)
    engine = inspected = plan = None
    config = point.config
    try:
        engine = engines.load(point.config.engine, offline=purpose is Purpose.COMPILE)
        if before is None:
            inspected = inspect(config, engine, purpose)
        else:
            inspected = inspect_again(config, engine, before.point.config, before.inspected)
        facts = inspected.facts
        config, facts = adopt(config, facts, inspected.splits, point.given)
        point, inspected = replace(point, config=config), replace(inspected, facts=facts)
        if config.init_from and not has_checkpoint and facts.initial_weights is None:
            initial = load_initial_weights(config, inspected.model, copies=purpose is Purpose.RUN)
            facts = replace(facts, initial_weights=initial)
            inspected = replace(inspected, facts=facts)
        if is_auto(config.pipeline.split):
            from ipurun.estimate.plan_estimate import auto_split  # deferred: other runs need no estimate

            config, facts = auto_split(config, inspected, point.given)
    except ConfigError as error:
        problems += _new_problems(error, problems)
        # Without the model and the data much can still be checked.
        facts = Facts("cpu", "", purpose=purpose)
        if engine is not None:
            facts = Facts(engine.kind, engine.version, engine.available_ipus, purpose=purpose)
    try:
        plan = make_plan(config, facts, keys=point.given)
    except ConfigError as error:
        problems += _new_problems(error, problems)
    if problems or engine is None or inspected is None or plan is None:
        raise ConfigError(point.complete(problems))
    if plan.instances.count > 1 and launched() is None:
        program = [sys.executable, "-m", "ipurun", "train", *point.overrides]
        command = tuple(start_command(config, plan, program))
        plan = replace(plan, instances=replace(plan.instances, command=command))
    return PreparedRun(point, engine, inspected, plan)


def prepare_job(point: Point, purpose: Purpose = Purpose.RUN) -> PreparedRun:
    """Prepare a point, and check what only a run needs: loggers, callbacks, its folder and the run that it resumes.

    Raises:
        ConfigError: With all problems.
    """
    problems = _observer_problems(point) + check_writable(point.run_dir or point.config.runs_dir)
    resumed = None
    try:
        resumed = resumed_folder(point)
    except ConfigError as error:
        problems += error.problems
    try:
        prepared = prepare(point, purpose, has_checkpoint=resumed is not None)
    except ConfigError as error:
        raise ConfigError([*error.problems, *point.complete(problems)]) from error
    if point.config.precompiled is not None:
        from ipurun.build.cached_executables import precompiled_problems  # deferred: few runs need it

        problems += precompiled_problems(point.config, prepared.plan.name, prepared.engine)
    if problems:
        raise ConfigError(point.complete(problems))
    return prepared


def resumed_folder(point: Point) -> Optional[RunFolder]:
    """Return the run that `resume` names, None where there is nothing to continue.

    Raises:
        ConfigError: Not a run folder, or one without a checkpoint.
    """
    resume = point.config.resume
    if not resume:
        return None
    if resume == "auto":
        folder = find_latest(point.config.runs_dir, point.config.name or "run")
        return RunFolder.open(folder.path) if folder is not None else None
    folder = RunFolder.open(resume)
    if latest(folder) is None:
        raise ConfigError(
            f"the run `{resume}` has no checkpoint to resume from",
            where="resume",
            seen="; ".join(f"{name}: {why}" for name, why in broken(folder).items())
            or f"no complete one in {folder.checkpoints}",
            fix="leave resume out to start from the beginning",
            key="resume",
        )
    return folder


def _new_problems(error: ConfigError, problems: List[Problem]) -> List[Problem]:
    """Return what an error adds: one problem for each key is enough."""
    reported = {problem.key for problem in problems if problem.key}
    return [problem for problem in error.problems if problem.key not in reported]


def _observer_problems(point: Point) -> List[Problem]:
    problems: List[Problem] = []
    for name, node in point.config.logger.items():
        if isinstance(node, Mapping):  # composing has reported others
            problems += check_node(node, f"logger.{name}", given=("folder",))
    for name, node in point.config.callbacks.items():
        if isinstance(node, Mapping):
            problems += check_node(node, f"callbacks.{name}")
    return problems
