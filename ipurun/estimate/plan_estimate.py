"""All that is known of a plan before it is compiled, in one place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Dict, FrozenSet, List, Mapping, Optional, Tuple

from torch import nn

from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError
from ipurun.estimate.advice import PlanEstimate, Situation, remedies_for
from ipurun.estimate.calibration import FREE, Measurement, calibrate_to_run, measured_throughput
from ipurun.estimate.estimate import estimate
from ipurun.estimate.pipeline import timeline_of
from ipurun.estimate.search import (
    Goal,
    Solution,
    needs_of,
    powers_up_to,
    ranked,
    search,
    split_for,
    variants_of,
)
from ipurun.estimate.settings import block_checkpoints, layout_of_plan, machine_of, settings_of, words_of
from ipurun.estimate.split import Split
from ipurun.estimate.types import Settings, StageLayout, Verdict
from ipurun.inspect.data import first_sample, is_stream
from ipurun.inspect.facts import Facts, Purpose
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


def estimate_plan(config: RunConfig, plan: Plan, subject: ModelAndData) -> PlanEstimate:
    """Estimates a plan.

    Args:
        config: The config.
        plan: Its plan.
        subject: Its model and data.

    Raises:
        ConfigError: The model cannot be traced.
    """
    profile = _profile(config, subject, plan)
    machine = machine_of(config)
    settings = settings_of(plan)
    layout = layout_of_plan(profile, plan)
    found = estimate(profile, layout, settings, machine)
    situation = Situation(
        profile=profile,
        layout=layout,
        settings=settings,
        machine=machine,
        estimate=found,
        names=_cuttable(subject.model),
        block_checkpoints=block_checkpoints(profile, stacks(subject.facts)),
        words=words_of(config),
        is_batch_free=_is_batch_free(config),
        is_placed_in_code=bool(plan.user_blocks),
    )
    needs = None
    remedies = tuple(remedies_for(situation))
    if found.verdict is Verdict.DOES_NOT_FIT and all(r.verdict is Verdict.DOES_NOT_FIT for r in remedies):
        variant = variants_of(settings, situation.block_checkpoints, layout.checkpoints)[-1]
        needs = needs_of(profile, variant, plan.devices.total, machine, situation.names)
    return PlanEstimate(
        situation=situation,
        schedule=timeline_of(layout, settings, found.time),
        remedies=remedies,
        needs=needs,
        inference=_inference(config, plan, subject),
    )


def _inference(config: RunConfig, plan: Plan, subject: ModelAndData) -> Optional[Situation]:
    """Evaluation and prediction as `eval` and `predict` run them: no backward pass, no optimizer, and all outputs."""
    try:
        profile = _profile(config, subject, plan, training=False)
    except ConfigError:
        return None
    machine, settings = machine_of(config), settings_of(plan, training=False)
    layout = layout_of_plan(profile, plan, training=False)
    return Situation(profile, layout, settings, machine, estimate(profile, layout, settings, machine))


def calibrated_words(outlook: PlanEstimate, folder: Path) -> List[str]:
    """Overrides of machine constants with which the estimate agrees with a run of the same config on IPUs.

    Args:
        outlook: The estimate of that config.
        folder: The run folder.

    Raises:
        ConfigError: It is no run on IPUs, or it measured no throughput.
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
            seen=f"it ran on the engine {engine}, whose speed says nothing of an IPU",
        )
    own = outlook.situation
    row = Measurement("run", "run", own.profile, own.layout, own.settings, own.machine.clock_hz, measured)
    fitted = calibrate_to_run(row, own.machine)
    return [f"machine.{name}={getattr(fitted, name):.4g}" for name in FREE]


def solve(config: RunConfig, plan: Plan, outlook: PlanEstimate) -> List[Solution]:
    """Configs for the plan's number of IPUs and its global batch, the quickest that fits first.

    Raises:
        ConfigError: The model's own code places it, so that no config can do it otherwise.
    """
    if plan.user_blocks:
        names = [block.block_id or block.module or "a block without a name" for block in plan.user_blocks]
        raise ConfigError(
            "`--solve` finds a split, and the model's code has one already",
            seen=f"blocks begun in the code: {', '.join(dict.fromkeys(names))}",
            fix="take poptorch.Block and poptorch.BeginBlock out of the model, or plan without --solve",
        )
    batch = plan.training
    goal = Goal(
        devices=plan.devices.total,
        global_batch=None if _is_batch_free(config) else config.global_batch_size or batch.samples_per_update,
        words=words_of(config),
    )
    situation = outlook.situation
    variants = variants_of(situation.settings, situation.block_checkpoints, situation.layout.checkpoints)
    found = search(situation.profile, goal, variants, situation.machine, situation.names)
    if situation.estimate.verdict is not Verdict.DOES_NOT_FIT and plan.devices.idle == 0:
        as_it_is = Solution(situation.settings, situation.layout, None, (), situation.estimate)
        found = ranked([*found, as_it_is])
    return found


def auto_split(
    config: RunConfig, subject: ModelAndData, keys: Optional[Mapping[str, str]] = None
) -> Tuple[RunConfig, Facts]:
    """A config whose `pipeline.split=auto` is solved, and the facts with the solution; both as they were if it is not.

    Args:
        config: The config.
        subject: Its model and data. Where no split fits and their purpose is to plan, the model is left whole, so that
            the plan can show what it would take.
        keys: The keys that were set; None: those that differ from their defaults.
    """
    facts = subject.facts
    if not is_auto(config.pipeline.split):
        return config, facts
    unsplit = dataclasses.replace(config.pipeline, split=[], ipus=None)
    trial = dataclasses.replace(config, pipeline=unsplit, devices="auto", gradient_accumulation=None)
    trial = dataclasses.replace(trial, replication=dataclasses.replace(config.replication, factor=None))
    try:
        # Without their places, so that keys and setters that disagree are reported once, by the plan itself.
        taken_out = ("gradient_accumulation", "replication.factor")
        kept = None if keys is None else {key: "" for key in keys if key not in taken_out}
        plan = make_plan(trial, dataclasses.replace(facts, available_ipus=None), keys=kept)
        profile = _profile(config, subject, plan)
    except ConfigError as error:
        problem = error.problems[0]
        return config, dataclasses.replace(facts, unsolved=f"{problem.what}: {problem.seen} ({problem.where})")
    obstacles: Dict[str, None] = {}
    found = _best_auto(config, profile, settings_of(plan), plan, subject, obstacles)
    if found is None and facts.purpose is Purpose.PLAN:
        note = f"pipeline.split=auto found no split that fits; shown is the model as a whole: {'; '.join(obstacles)}"
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


def _best_auto(
    config: RunConfig,
    profile: TracedModel,
    settings: Settings,
    plan: Plan,
    subject: ModelAndData,
    obstacles: Dict[str, None],
) -> Optional[Tuple[Optional[Split], float]]:
    """The quickest split that fits, with its throughput, over the numbers of IPUs that the config allows.

    Why a number of IPUs has none is added to `obstacles`.
    """
    machine = machine_of(config)
    names = _cuttable(subject.model)
    devices = config.devices if isinstance(config.devices, int) else None
    best: Optional[Tuple[Optional[Split], float]] = None
    for ipus in _sizes(config, devices):
        replicas = max(1, (devices or ipus) // ipus)
        accumulation = config.gradient_accumulation or _accumulation(config, replicas, ipus)
        own = dataclasses.replace(
            settings,
            replicas=replicas,
            gradient_accumulation=accumulation,
            accumulator_bytes=settings.accumulator_bytes or (settings.compute_bytes if accumulation > 1 else 0.0),
            recompute="checkpoints" if config.recompute.mode is None and ipus > 1 else settings.recompute,
        )
        kept = layout_of_plan(profile, plan).checkpoints
        if ipus == 1:
            split: Optional[Split] = None
            layout: StageLayout = layout_of_plan(profile, plan)
        else:
            split = split_for(profile, ipus, own, machine, names, kept)
            if split is None:
                obstacles[f"no modules of the model begin {ipus} parts that fit, with shared weights on one IPU"] = None
                continue
            needed = 2 * split.layout.num_stages - 1
            if accumulation < needed and _is_batch_free(config):
                own = dataclasses.replace(own, gradient_accumulation=needed)
            elif accumulation < needed:
                obstacles[f"{ipus} IPUs need gradient_accumulation={needed}, and it is {accumulation}"] = None
                continue
            layout = split.layout
        found = estimate(profile, layout, own, machine)
        if found.verdict is Verdict.DOES_NOT_FIT and config.pipeline.ipus is None:
            obstacles[f"over {ipus} IPU{'s' if ipus > 1 else ''} it does not fit"] = None
            continue
        speed = found.time.samples_per_second
        if best is None or speed > best[1]:
            best = (split, speed)
        if devices is None:
            break  # as few IPUs as will do
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


def _profile(config: RunConfig, subject: ModelAndData, plan: Plan, *, training: bool = True) -> TracedModel:
    data = subject.splits.get("train")
    sample = None if data is None or is_stream(data) else first_sample(data)
    with seeded(config.seed):
        return trace_model(
            config,
            sample=sample,
            training=training,
            module_precision=plan.module_precision,
            strategy=strategy_of(plan.training_options if training else plan.inference_options),
        )


def _cuttable(model: nn.Module) -> FrozenSet[str]:
    """Modules at which a block may begin: those that are called, as a list of modules is not, and have parameters, as
    a dropout or an activation inside a layer has not.
    """
    return frozenset(
        name
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None
    )
