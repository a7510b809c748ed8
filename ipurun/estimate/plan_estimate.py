"""Estimate a plan from a trace of its model, solve for a better one, and solve `pipeline.split=auto`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ipurun.api.calls import last_call
from ipurun.config.schema import RunConfig
from ipurun.errors import ConfigError, Problem
from ipurun.estimate.advice import PlanEstimate, Remedy, remedies_for
from ipurun.estimate.calibration import FREE, Measurement, calibrate_to_run, measured_throughput
from ipurun.estimate.estimate import estimate
from ipurun.estimate.search import MOST_SOLUTIONS, Goal, Search, Solution, powers_up_to, ranked, variants_of
from ipurun.estimate.settings import block_checkpoints, layout_of_plan, loading_of, machine_of, resets_of, settings_of
from ipurun.estimate.split import Split
from ipurun.estimate.types import EstimatedModel, Trial, Verdict
from ipurun.inspect.data import first_sample, is_stream
from ipurun.inspect.facts import Facts, Purpose
from ipurun.inspect.model import cut_modules
from ipurun.inspect.model_and_data import ModelAndData, TraceKey, own_collate
from ipurun.inspect.profiles import stored_loading_rate
from ipurun.inspect.sampling import seeded
from ipurun.inspect.trace import strategy_of, trace_model
from ipurun.inspect.traced_model import TracedModel
from ipurun.planning import make_plan
from ipurun.planning.devices import MAX_IPUS
from ipurun.planning.layers import stacks
from ipurun.planning.placement.forms import is_auto
from ipurun.planning.plan import Plan

__all__ = [
    "PlannedConfig",
    "Promises",
    "auto_split",
    "calibrated_words",
    "estimate_plan",
    "solve",
]

# Part of the fullest IPU's memory below which a trace of another micro-batch is accurate enough.
_FITS_FOR_SURE = 0.5
_MOST_FASTER = 3  # tight solutions that are planned to find one that is faster than those that fit


@dataclass(frozen=True)
class PlannedConfig:
    """A config with its plan, its model and its data."""

    config: RunConfig
    plan: Plan
    inspected: ModelAndData


# Plans a config with further overrides exactly as a command line with them would; raises ConfigError if it is refused.
Replan = Callable[[Sequence[str]], PlannedConfig]


class Promises:
    """Plan and estimate a config with further overrides before they are suggested. Each set is planned once.

    Args:
        replan: Plans the config with overrides.
    """

    def __init__(self, replan: Replan) -> None:
        self._replan = replan
        self._found: Dict[Tuple[str, ...], Union[Trial, Problem]] = {}

    def trial(self, overrides: Sequence[str]) -> Union[Trial, Problem]:
        """Return the estimate of the plan with overrides, or the problem for which it is refused."""
        key = tuple(overrides)
        if key not in self._found:
            try:
                self._found[key] = _trial(self._replan(key))
            except ConfigError as error:
                self._found[key] = error.problems[0]
        return self._found[key]

    def planned(self, overrides: Sequence[str]) -> Optional[Trial]:
        """Return the estimate of the plan with overrides; None if it is refused."""
        found = self.trial(overrides)
        return found if isinstance(found, Trial) else None

    def solution(self, proposed: Solution) -> Union[Solution, str]:
        """Return a solution with the figures of its plan, or why it is none."""
        found = self.trial(proposed.overrides)
        if not isinstance(found, Trial):
            return f"{found.what}: {found.seen}" if found.seen else found.what
        training, inference = found.training, found.inference
        if training.estimate.verdict is Verdict.DOES_NOT_FIT:
            return f"training takes {training.estimate.fullest.share:.0%} of the fullest IPU"
        if inference is not None and inference.estimate.verdict is Verdict.DOES_NOT_FIT:
            return f"inference takes {inference.estimate.fullest.share:.0%} of the fullest IPU"
        return dataclasses.replace(
            proposed,
            settings=training.settings,
            layout=training.layout,
            estimate=training.estimate,
            inference=None if inference is None else inference.estimate,
        )

    def solution_or_none(self, proposed: Solution) -> Optional[Solution]:
        """Return a solution with the figures of its plan; None if it is refused or does not fit."""
        found = self.solution(proposed)
        return found if isinstance(found, Solution) else None


def estimate_plan(planned: PlannedConfig, promises: Promises) -> PlanEstimate:
    """Estimate a plan.

    Args:
        planned: The plan.
        promises: Plans it with further overrides.

    Raises:
        ConfigError: The model cannot be traced.
    """
    config, plan, inspected = planned.config, planned.plan, planned.inspected
    now = _trial(planned)
    training = now.training
    search = Search(
        training.traced,
        training.machine,
        cut_modules(inspected.model),
        block_checkpoints(training.traced, stacks(inspected.facts)),
        resets_of(config),
    )
    remedies = _remedies(planned, now, search, promises)
    requirements = None
    verdicts = [training.estimate.verdict, *(remedy.verdict for remedy in remedies)]
    if all(verdict is Verdict.DOES_NOT_FIT for verdict in verdicts):
        variants = variants_of(training.settings, search.block_checkpoints, training.layout.checkpoints, search.tables)
        requirements = search.requirements(variants[-1], plan.devices.total, promises.solution_or_none)
    return PlanEstimate(training, now.inference, search, tuple(remedies), requirements)


def _remedies(planned: PlannedConfig, now: Trial, search: Search, promises: Promises) -> List[Remedy]:
    """Return changes that help; those that an earlier command found for the same estimate are only planned again."""
    profiles, training = planned.inspected.profiles, now.training
    own = (training.settings, training.layout, training.machine, search.resets, planned.plan.devices)
    inference = None if now.inference is None else (now.inference.settings, now.inference.layout)
    key = (own, inference, _is_batch_free(planned.config), planned.config.data)
    known = None if profiles is None else profiles.suggestions(key)
    found = remedies_for(
        now,
        search,
        promises.planned,
        is_batch_free=_is_batch_free(planned.config),
        is_placed_in_code=bool(planned.plan.user_blocks),
        known=known,
    )
    if profiles is not None and known is None:
        profiles.keep_suggestions([(remedy.title, remedy.overrides) for remedy in found], key)
    return found


def _trial(planned: PlannedConfig) -> Trial:
    training = _estimated(planned)
    try:
        return Trial(training, _estimated_inference(planned))
    except ConfigError:
        return Trial(training, None)


def _estimated_inference(planned: PlannedConfig) -> EstimatedModel:
    """Estimate evaluation and prediction, from the trace of another micro-batch if there is no doubt that it fits."""
    own = _trace_key(planned.plan, training=False)
    traces = planned.inspected.traces
    for key in [key for key in traces if not key.training and key != own and own not in traces]:
        if dataclasses.replace(key, micro_batch_size=own.micro_batch_size) == own:
            found = _estimated(planned, traces[key].with_micro_batch(own.micro_batch_size), training=False)
            if found.estimate.fullest.share < _FITS_FOR_SURE:
                return found
    return _estimated(planned, training=False)


def _estimated(
    planned: PlannedConfig, traced: Optional[TracedModel] = None, *, training: bool = True
) -> EstimatedModel:
    """Estimate training, or evaluation and prediction: no backward pass, no optimizer, and all outputs."""
    config, plan = planned.config, planned.plan
    traced = traced or _trace(config, planned.inspected, plan, training=training)
    machine = machine_of(config)
    is_synthetic = planned.inspected.facts.is_synthetic
    loading = loading_of(config, machine, stored_loading_rate(config), plan.instances.count, is_synthetic)
    settings = settings_of(plan, training=training, loading=loading)
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


def solve(planned: PlannedConfig, plan_estimate: PlanEstimate, promises: Promises) -> Tuple[List[Solution], str]:
    """Return the best configs for the plan's number of IPUs and its global batch, the fastest that fits first.

    Each is planned as if it had been typed, until there are enough; the fastest that is tight is one of them.

    Returns:
        The configs and, if there are none, the reason.

    Raises:
        ConfigError: The model's code places it, so that no config can change the split.
    """
    config, plan = planned.config, planned.plan
    if plan.user_blocks:
        names = [block.block_id or block.module or "a block without a name" for block in plan.user_blocks]
        raise ConfigError(
            "`--solve` finds a split, but the model's code already has one",
            seen=f"blocks begun in the code: {', '.join(dict.fromkeys(names))}",
            fix="take poptorch.Block and poptorch.BeginBlock out of the model, or plan without --solve",
        )
    global_batch = None if _is_batch_free(config) else config.global_batch_size or plan.training.samples_per_update
    training, search = plan_estimate.training, plan_estimate.search
    variants = variants_of(training.settings, search.block_checkpoints, training.layout.checkpoints, search.tables)
    proposed = search.solutions(Goal(plan.devices.total, global_batch), variants)
    found: List[Solution] = []
    if plan_estimate.verdict is not Verdict.DOES_NOT_FIT and plan.devices.idle == 0:
        inference = plan_estimate.inference
        own = None if inference is None else inference.estimate
        found.append(Solution(training.settings, training.layout, None, (), training.estimate, own))
    reason = ""
    for solution in proposed:
        held = promises.solution(solution) if not _is_enough(found, solution) else ""
        if isinstance(held, Solution):
            found.append(held)
        reason = reason or (held if isinstance(held, str) else "")
    if found:
        quickest = sorted(proposed, key=lambda each: -each.estimate.time.samples_per_second)
        best = max(each.estimate.time.samples_per_second for each in found)
        faster = [each for each in quickest if each.estimate.time.samples_per_second > best][:_MOST_FASTER]
        held_faster = (promises.solution_or_none(each) for each in faster)
        found += itertools.islice((each for each in held_faster if each is not None and each not in found), 1)
    return ranked(found), "" if found else reason


def _is_enough(found: Sequence[Solution], proposed: Solution) -> bool:
    """Return whether no further solution like a proposed one has to be planned."""
    if proposed.estimate.verdict is Verdict.FITS:
        return sum(bool(each.overrides) and each.estimate.verdict is Verdict.FITS for each in found) >= MOST_SOLUTIONS
    return sum(bool(each.overrides) for each in found) >= MOST_SOLUTIONS


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
    search = Search(traced, machine_of(config), cut_modules(inspected.model))
    given = None if keys is None else dict.fromkeys(keys, "")
    found = _best_split(config, facts, plan, search, given, obstacles)
    if found is not None:
        return found
    if facts.purpose is Purpose.PLAN:
        note = f"pipeline.split=auto found no split that fits; the whole model is shown: {'; '.join(obstacles)}"
        return config, dataclasses.replace(facts, solved_split=(), is_left_whole=True, notes=(*facts.notes, note))
    return config, dataclasses.replace(facts, unsolved="; ".join(obstacles))


def _best_split(
    config: RunConfig,
    facts: Facts,
    plan: Plan,
    search: Search,
    keys: Optional[Mapping[str, str]],
    obstacles: Dict[str, None],
) -> Optional[Tuple[RunConfig, Facts]]:
    """Return the config and the facts with the fastest split that fits, for the numbers of IPUs that the config allows.

    Each split is planned before it is chosen; one that is tight is chosen if none fits. The reason why a number of IPUs
    has none is added to `obstacles`.
    """
    settings, whole = settings_of(plan), layout_of_plan(search.traced, plan)
    devices = config.devices if isinstance(config.devices, int) else None
    best: Optional[Tuple[RunConfig, Facts]] = None
    best_rank = (math.inf, math.inf)
    for ipus in _sizes(config, devices):
        replicas = max(1, (devices or ipus) // ipus)
        accumulation = config.gradient_accumulation or _accumulation(config, replicas, ipus)
        own = dataclasses.replace(
            settings,
            replicas=replicas,
            gradient_accumulation=accumulation,
            recompute="checkpoints" if config.recompute.mode is None and ipus > 1 else settings.recompute,
        )
        split, trial = None, config
        if ipus > 1:
            split = search.split(ipus, own, whole.checkpoints)
            if split is None:
                obstacles[f"no modules of the model begin {ipus} parts that fit, with shared weights on one IPU"] = None
                continue
            needed = split.layout.least_accumulation
            if accumulation < needed and not _is_batch_free(config):
                obstacles[f"{ipus} IPUs need gradient_accumulation={needed}, but it is {accumulation}"] = None
                continue
            if _is_batch_free(config):  # the plan asks for an accumulation that is enough
                trial = dataclasses.replace(config, gradient_accumulation=max(accumulation, needed))
        solved = dataclasses.replace(facts, solved_split=() if split is None else split.modules)
        try:
            planned = make_plan(_with_returning(trial, split), solved, keys=keys)
        except ConfigError as error:
            problem = error.problems[0]
            obstacles[f"{_ipus_text(ipus)}: {problem.what}{f' ({problem.seen})' if problem.seen else ''}"] = None
            continue
        layout = layout_of_plan(search.traced, planned)
        found = estimate(search.traced, layout, settings_of(planned), search.machine)
        if found.verdict is Verdict.DOES_NOT_FIT:
            obstacles[f"it does not fit on {_ipus_text(ipus)}"] = None
            continue
        speed = found.time.samples_per_second if devices is not None else -ipus
        rank = (found.verdict is not Verdict.FITS, -speed)
        if rank < best_rank:
            best, best_rank = (_with_returning(config, split), solved), rank
        if devices is None and found.verdict is Verdict.FITS:
            break  # the fewest IPUs that fit
    return best


def _with_returning(config: RunConfig, split: Optional[Split]) -> RunConfig:
    """Return a config with the blocks of a split that return to an earlier IPU."""
    if split is None or not split.returning:
        return config
    blocks = {**dict(config.pipeline.blocks or {}), **split.returning}
    return dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, blocks=blocks))


def _ipus_text(ipus: int) -> str:
    return f"{ipus} IPU{'s' if ipus > 1 else ''}"


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
    options = plan.training_options if training else plan.inference_options
    key = _trace_key(plan, training=training)
    if key not in inspected.traces:
        profiles = inspected.profiles
        found = None if profiles is None else profiles.trace(key)
        if found is None:
            data = inspected.splits.get("train")
            with seeded(config.seed):
                found = trace_model(
                    config,
                    sample=None if data is None or is_stream(data) else first_sample(data),
                    training=training,
                    module_precision=plan.module_precision,
                    strategy=strategy_of(options),
                    collate=own_collate(inspected.splits, "train"),
                )
            if profiles is not None:
                profiles.keep_trace(found, key)
        inspected.traces[key] = found
    return inspected.traces[key]


def _trace_key(plan: Plan, *, training: bool) -> TraceKey:
    options = plan.training_options if training else plan.inference_options
    batch = plan.training if training else plan.inference
    # The strategy places only blocks of the model's own code.
    strategy = last_call("setExecutionStrategy", options) if plan.user_blocks else None
    return TraceKey(training, batch.micro_batch_size, repr(plan.module_precision), repr(strategy))
