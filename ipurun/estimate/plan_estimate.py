"""Estimate a plan from a trace of its model, solve for a better one, and solve `pipeline.split=auto`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError
from ipurun.estimate.advice import PlanEstimate, remedies_for
from ipurun.estimate.calibration import FREE, Measurement, calibrate_to_run, measured_throughput
from ipurun.estimate.estimate import estimate
from ipurun.estimate.search import Goal, Search, Solution, powers_up_to, ranked, variants_of
from ipurun.estimate.settings import block_checkpoints, layout_of_plan, machine_of, resets_of, settings_of
from ipurun.estimate.split import Split
from ipurun.estimate.types import EstimatedModel, Verdict
from ipurun.inspect.data import first_sample, is_stream
from ipurun.inspect.facts import Facts, Purpose
from ipurun.inspect.model import cut_modules
from ipurun.inspect.model_and_data import ModelAndData
from ipurun.inspect.sampling import seeded
from ipurun.inspect.trace import strategy_of, trace_model
from ipurun.inspect.traced_model import TracedModel
from ipurun.planning import make_plan
from ipurun.planning.devices import MAX_IPUS
from ipurun.planning.layers import stacks
from ipurun.planning.placement.forms import is_auto
from ipurun.planning.plan import Plan

__all__ = ["auto_split", "calibrated_words", "estimate_plan", "solve"]


def estimate_plan(config: RunConfig, plan: Plan, inspected: ModelAndData) -> PlanEstimate:
    """Estimate a plan.

    Args:
        config: The config.
        plan: Its plan.
        inspected: Its model and data.

    Raises:
        ConfigError: The model cannot be traced.
    """
    training = _estimated(config, plan, inspected)
    traced = training.traced
    search = Search(
        traced,
        training.machine,
        cut_modules(inspected.model),
        block_checkpoints(traced, stacks(inspected.facts)),
        resets_of(config),
    )
    remedies = tuple(
        remedies_for(
            training,
            search,
            is_batch_free=_is_batch_free(config),
            is_placed_in_code=bool(plan.user_blocks),
        )
    )
    requirements = None
    verdicts = [training.estimate.verdict, *(remedy.verdict for remedy in remedies)]
    if all(verdict is Verdict.DOES_NOT_FIT for verdict in verdicts):
        variant = variants_of(training.settings, search.block_checkpoints, training.layout.checkpoints)[-1]
        requirements = search.requirements(variant, plan.devices.total)
    try:
        inference: Optional[EstimatedModel] = _estimated(config, plan, inspected, training=False)
    except ConfigError:
        inference = None
    return PlanEstimate(training, search, remedies, requirements, inference)


def _estimated(config: RunConfig, plan: Plan, inspected: ModelAndData, *, training: bool = True) -> EstimatedModel:
    """Estimate training, or evaluation and prediction: no backward pass, no optimizer, and all outputs."""
    traced = _trace(config, inspected, plan, training=training)
    machine, settings = machine_of(config), settings_of(plan, training=training)
    layout = layout_of_plan(traced, plan, training=training)
    return EstimatedModel(traced, layout, settings, machine, estimate(traced, layout, settings, machine))


def calibrated_words(plan_estimate: PlanEstimate, folder: Path) -> List[str]:
    """Return overrides of machine constants with which the estimate agrees with a run of the same config on IPUs.

    Args:
        plan_estimate: The estimate of that config.
        folder: The run folder.

    Raises:
        ConfigError: The folder is not a run on IPUs, or has no throughput.
    """
    try:
        engine = json.loads((folder / "env.json").read_text(encoding="utf-8"))["engine"]["kind"]
        measured = measured_throughput(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "`--calibrate` needs the folder of a run", "command line", seen=str(error), fix="--calibrate RUN_FOLDER"
        ) from error
    if engine != "ipu":
        raise ConfigError(
            "`--calibrate` needs a run on IPUs",
            str(folder),
            seen=f"it ran on the engine {engine}, whose speed says nothing about an IPU",
        )
    own = plan_estimate.training
    row = Measurement("run", "run", own.traced, own.layout, own.settings, own.machine.clock_hz, measured)
    fitted = calibrate_to_run(row, own.machine)
    return [f"machine.{name}={getattr(fitted, name):.4g}" for name in FREE]


def solve(config: RunConfig, plan: Plan, plan_estimate: PlanEstimate) -> List[Solution]:
    """Return configs for the plan's number of IPUs and its global batch, the fastest that fits first.

    Raises:
        ConfigError: The model's code places it, so that no config can change the split.
    """
    if plan.user_blocks:
        names = [block.block_id or block.module or "a block without a name" for block in plan.user_blocks]
        raise ConfigError(
            "`--solve` finds a split, but the model's code already has one",
            seen=f"blocks begun in the code: {', '.join(dict.fromkeys(names))}",
            fix="take poptorch.Block and poptorch.BeginBlock out of the model, or plan without --solve",
        )
    global_batch = None if _is_batch_free(config) else config.global_batch_size or plan.training.samples_per_update
    training, search = plan_estimate.training, plan_estimate.search
    variants = variants_of(training.settings, search.block_checkpoints, training.layout.checkpoints)
    found = search.solutions(Goal(plan.devices.total, global_batch), variants)
    if training.estimate.verdict is not Verdict.DOES_NOT_FIT and plan.devices.idle == 0:
        unchanged = Solution(training.settings, training.layout, None, (), training.estimate)
        found = ranked([*found, unchanged])
    return found


def auto_split(
    config: RunConfig, inspected: ModelAndData, keys: Optional[Mapping[str, str]] = None
) -> Tuple[RunConfig, Facts]:
    """Solve `pipeline.split=auto`: return the config and the facts with the solution; unchanged for other splits.

    Args:
        config: The config.
        inspected: Its model and data. If no split fits and their purpose is to plan, the model is left whole, so that
            the plan can show what it would need.
        keys: The keys that were set; None: those that differ from their defaults.
    """
    facts = inspected.facts
    if not is_auto(config.pipeline.split):
        return config, facts
    unsplit = dataclasses.replace(config.pipeline, split=[], ipus=None)
    trial = dataclasses.replace(config, pipeline=unsplit, devices="auto", gradient_accumulation=None)
    trial = dataclasses.replace(trial, replication=dataclasses.replace(config.replication, factor=None))
    try:
        # Keys have no places here, so that conflicts between keys and setters are reported once, by the plan.
        taken_out = ("gradient_accumulation", "replication.factor")
        kept = None if keys is None else {key: "" for key in keys if key not in taken_out}
        plan = make_plan(trial, dataclasses.replace(facts, available_ipus=None), keys=kept)
        traced = _trace(config, inspected, plan)
    except ConfigError as error:
        problem = error.problems[0]
        return config, dataclasses.replace(facts, unsolved=f"{problem.what}: {problem.seen} ({problem.where})")
    obstacles: Dict[str, None] = {}
    found = _fastest_split(config, plan, Search(traced, machine_of(config), cut_modules(inspected.model)), obstacles)
    if found is None and facts.purpose is Purpose.PLAN:
        note = f"pipeline.split=auto found no split that fits; the whole model is shown: {'; '.join(obstacles)}"
        return config, dataclasses.replace(facts, solved_split=(), is_left_whole=True, notes=(*facts.notes, note))
    if found is None:
        return config, dataclasses.replace(facts, unsolved="; ".join(obstacles))
    split = found[0]
    if split is None:
        return config, dataclasses.replace(facts, solved_split=())
    if split.returning:
        blocks = {**dict(config.pipeline.blocks or {}), **split.returning}
        config = dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, blocks=blocks))
    return config, dataclasses.replace(facts, solved_split=split.modules)


def _fastest_split(
    config: RunConfig, plan: Plan, search: Search, obstacles: Dict[str, None]
) -> Optional[Tuple[Optional[Split], float]]:
    """Return the fastest split that fits, with its throughput, for the numbers of IPUs that the config allows.

    The reason why a number of IPUs has none is added to `obstacles`.
    """
    settings, whole = settings_of(plan), layout_of_plan(search.traced, plan)
    devices = config.devices if isinstance(config.devices, int) else None
    best: Optional[Tuple[Optional[Split], float]] = None
    for ipus in _sizes(config, devices):
        replicas = max(1, (devices or ipus) // ipus)
        accumulation = config.gradient_accumulation or _accumulation(config, replicas, ipus)
        own = dataclasses.replace(
            settings,
            replicas=replicas,
            gradient_accumulation=accumulation,
            accumulator_bytes=settings.accumulator_bytes_for(accumulation),
            recompute="checkpoints" if config.recompute.mode is None and ipus > 1 else settings.recompute,
        )
        split, layout = None, whole
        if ipus > 1:
            split = search.split(ipus, own, whole.checkpoints)
            if split is None:
                obstacles[f"no modules of the model begin {ipus} parts that fit, with shared weights on one IPU"] = None
                continue
            layout = split.layout
            needed = layout.least_accumulation
            if accumulation < needed and _is_batch_free(config):
                own = dataclasses.replace(own, gradient_accumulation=needed)
            elif accumulation < needed:
                obstacles[f"{ipus} IPUs need gradient_accumulation={needed}, but it is {accumulation}"] = None
                continue
        found = estimate(search.traced, layout, own, search.machine)
        if found.verdict is Verdict.DOES_NOT_FIT and config.pipeline.ipus is None:
            obstacles[f"it does not fit on {ipus} IPU{'s' if ipus > 1 else ''}"] = None
            continue
        speed = found.time.samples_per_second
        if best is None or speed > best[1]:
            best = (split, speed)
        if devices is None:
            break  # the fewest IPUs that fit
    return best


def _sizes(config: RunConfig, devices: Optional[int]) -> List[int]:
    if config.pipeline.ipus is not None:
        return [config.pipeline.ipus]
    if devices is not None and config.replication.factor:
        return [max(1, devices // config.replication.factor)]
    return powers_up_to(devices or MAX_IPUS)


def _accumulation(config: RunConfig, replicas: int, ipus: int) -> int:
    if config.global_batch_size is None:
        return 2 * ipus + 1 if ipus > 1 else 1
    return config.global_batch_size // (config.micro_batch_size * replicas)


def _is_batch_free(config: RunConfig) -> bool:
    return config.global_batch_size is None and config.gradient_accumulation is None


def _trace(config: RunConfig, inspected: ModelAndData, plan: Plan, *, training: bool = True) -> TracedModel:
    data = inspected.splits.get("train")
    sample = None if data is None or is_stream(data) else first_sample(data)
    with seeded(config.seed):
        return trace_model(
            config,
            sample=sample,
            training=training,
            module_precision=plan.module_precision,
            strategy=strategy_of(plan.training_options if training else plan.inference_options),
        )
