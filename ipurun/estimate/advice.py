"""Changes that would make a config fit or run faster: each is tried by the estimator, then ranked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Collection, Iterator, List, Optional, Sequence, Tuple

from ipurun.estimate.costs import op_costs, proportion_of
from ipurun.estimate.estimate import estimate, worst
from ipurun.estimate.machine import Machine
from ipurun.estimate.pipeline import PipelineTimeline
from ipurun.estimate.search import Goal, Needs, Solution, search, split_for, split_overrides, variants_of
from ipurun.estimate.settings import Words, resized
from ipurun.estimate.stages import single_ipu
from ipurun.estimate.types import Estimate, Settings, StageLayout, Verdict
from ipurun.inspect.traced_model import TracedModel, TracedOp
from ipurun.planning.devices import MAX_IPUS

__all__ = ["PlanEstimate", "Change", "Remedy", "Situation", "remedies_for"]

_WORTH_SECONDS = 1.02
_WORTH_SHARE = 0.005  # of an IPU's memory
_PARTS = (4, 5, 6, 3, 8, 7, 2)  # numbers of parts, in the order in which they are tried
_PROPORTIONS = (0.3, 0.15)


@dataclass(frozen=True)
class Situation:
    """A config as the planner sees it.

    Args:
        profile: The model.
        layout: Where it runs.
        settings: How it runs.
        machine: On what it runs.
        estimate: What it takes as it is.
        names: Modules at which a block can begin; None: any.
        block_checkpoints: Operations that end the layers of the model's repeated stacks.
        words: Overrides that undo what stands in a change's way.
        is_batch_free: Whether nobody has said how many samples a weight update has.
        is_placed_in_code: Whether the model's own code begins blocks, so that no override gives another split.
    """

    profile: TracedModel
    layout: StageLayout
    settings: Settings
    machine: Machine
    estimate: Estimate
    names: Optional[Collection[str]] = None
    block_checkpoints: Tuple[int, ...] = ()
    words: Words = Words()
    is_batch_free: bool = False
    is_placed_in_code: bool = False


@dataclass(frozen=True)
class Change:
    """One thing to try.

    Args:
        title: In words.
        overrides: Exactly what to type.
        settings: The settings with it.
        layout: The layout with it.
    """

    title: str
    overrides: Tuple[str, ...]
    settings: Settings
    layout: StageLayout


@dataclass(frozen=True)
class Remedy:
    """A change that was tried and helps.

    Args:
        title: In words.
        overrides: Exactly what to type.
        verdict: With the change.
        saved_bytes: Less on the fullest IPU; negative: more.
        speed: Throughput over that without the change.
        samples_per_second: Throughput with the change.
        fullest_share: Part of the limit that the fullest IPU takes with it.
        devices: IPUs in all with it.
    """

    title: str
    overrides: Tuple[str, ...]
    verdict: Verdict
    saved_bytes: int
    speed: float
    samples_per_second: float
    fullest_share: float
    devices: int = 1


def remedies_for(situation: Situation) -> List[Remedy]:
    """Changes that help, those that help most first.

    Where a config does not fit, changes that make it fit come first, the quickest of them at the top, and behind them
    those that save most memory. Where it fits, all that is told makes it quicker and still fits. What takes more IPUs
    comes last.
    """
    before = situation.estimate
    found = []
    for change in _changes(situation):
        after = estimate(situation.profile, change.layout, change.settings, situation.machine)
        remedy = _remedy(change, before, after)
        if _helps(remedy, before):
            found.append(remedy)
    if before.verdict is not Verdict.FITS and all(remedy.verdict is not Verdict.FITS for remedy in found):
        found += [] if situation.is_placed_in_code else _together(situation)
    devices = situation.layout.num_ipus * situation.settings.replicas
    return sorted(found, key=lambda remedy: (remedy.devices > devices, *_rank(remedy, before)))


def _together(situation: Situation) -> List[Remedy]:
    """All that saves memory at once, over as many IPUs as that takes: what the solver finds best."""
    settings = situation.settings
    goal = Goal(
        devices=situation.layout.num_ipus * settings.replicas,
        global_batch=None if situation.is_batch_free else settings.global_batch_size,
        words=situation.words,
    )
    leanest = variants_of(settings, situation.block_checkpoints, situation.layout.checkpoints)[-1:]
    found: List[Solution] = []
    for size in dict.fromkeys((settings.micro_batch_size, 1)):
        goal = dataclasses.replace(goal, micro_batch=size)
        found = found or search(situation.profile, goal, leanest, situation.machine, situation.names)
    title = "all that saves memory, together with another split"
    remedies = [
        _remedy(Change(title, best.overrides, best.settings, best.layout), situation.estimate, best.estimate)
        for best in found[:1]
    ]
    return [remedy for remedy in remedies if _helps(remedy, situation.estimate)]


def _remedy(change: Change, before: Estimate, after: Estimate) -> Remedy:
    fullest = max(ipu.fullest for ipu in after.ipus)
    return Remedy(
        change.title,
        change.overrides,
        after.verdict,
        max(ipu.fullest for ipu in before.ipus) - fullest,
        after.time.samples_per_second / before.time.samples_per_second,
        after.time.samples_per_second,
        max(ipu.share for ipu in after.ipus),
        change.layout.num_ipus * change.settings.replicas,
    )


def _helps(remedy: Remedy, before: Estimate) -> bool:
    if before.verdict is Verdict.FITS:
        return remedy.verdict is Verdict.FITS and remedy.speed >= _WORTH_SECONDS
    return remedy.saved_bytes >= _WORTH_SHARE * before.ipus[0].limit


def _rank(remedy: Remedy, before: Estimate) -> Tuple[int, float]:
    if before.verdict is Verdict.FITS:
        return 0, -remedy.speed
    if remedy.verdict is Verdict.DOES_NOT_FIT:
        return 2, -remedy.saved_bytes
    return int(remedy.verdict is Verdict.TIGHT), -remedy.speed


def _changes(situation: Situation) -> Iterator[Change]:
    settings = situation.settings
    if settings.training:
        yield from _recomputation(situation)
        yield from _locations(situation)
    yield from _proportion(situation)
    yield from _serialisation(situation)
    yield from _batches(situation)
    if settings.strategy == "pipelined" and not situation.is_placed_in_code:
        yield from _splits(situation)


def _change(situation: Situation, title: str, overrides: Sequence[str], **settings: object) -> Change:
    changed = dataclasses.replace(situation.settings, **settings)  # type: ignore[arg-type]  # names are Settings' own
    return Change(title, tuple(overrides), changed, situation.layout)


def _recomputation(situation: Situation) -> Iterator[Change]:
    settings, layout, blocks = situation.settings, situation.layout, situation.block_checkpoints
    mode = "pipeline" if layout.num_stages > 1 else "standard"
    if settings.recompute == "none":
        title = "recompute activations"
        yield _change(situation, title, [f"recompute.mode={mode}"], recompute="checkpoints")
    else:
        yield _change(situation, "keep all activations", ["recompute.mode=none"], recompute="none")
    if blocks and not set(blocks) <= set(layout.checkpoints):
        words = ["recompute.every=block"]
        if settings.recompute != "checkpoints":
            words.insert(0, f"recompute.mode={mode}")
        kept = tuple(sorted({*layout.checkpoints, *blocks}))
        changed = dataclasses.replace(settings, recompute="checkpoints")
        yield Change("recompute layer by layer", tuple(words), changed, dataclasses.replace(layout, checkpoints=kept))


def _locations(situation: Situation) -> Iterator[Change]:
    settings = situation.settings
    off_chip = "memory.optimizer_state.on_chip=false"
    sharded = "replication.tensor_sharding=true"
    can_shard = settings.replicas > 1 and not settings.state_sharded
    if settings.state_bytes:
        if settings.state_on_chip:
            yield _change(situation, "optimizer state off chip", [off_chip], state_on_chip=False)
        else:
            on_chip = "memory.optimizer_state.on_chip=true"
            yield _change(situation, "optimizer state on chip", [on_chip], state_on_chip=True)
        if can_shard:
            title = "optimizer state shared out over replicas (RTS)"
            yield _change(situation, title, [sharded], state_sharded=True)
        if can_shard and settings.state_on_chip:
            title = "optimizer state off chip and shared out (RTS)"
            yield _change(situation, title, [off_chip, sharded], state_on_chip=False, state_sharded=True)
    if settings.accumulator_bytes > 2 and settings.compute_bytes == 2:
        title = "gradients accumulated in half precision"
        yield _change(situation, title, ["optimizer.accum_type=float16"], accumulator_bytes=2.0)


def _proportion(situation: Situation) -> Iterator[Change]:
    given = situation.settings.available_proportion or (situation.machine.default_proportion,)
    for share in _PROPORTIONS:
        if share < min(given) and situation.estimate.verdict is not Verdict.FITS:
            word = f"memory.available_proportion={share:g}"
            yield _change(situation, "less room for matmuls and convolutions", [word], available_proportion=(share,))


def _serialisation(situation: Situation) -> Iterator[Change]:
    """The matmul with the largest temporaries on the fullest IPU, done in parts."""
    profile, settings, machine = situation.profile, situation.settings, situation.machine
    fullest = max(situation.estimate.ipus, key=lambda ipu: ipu.fullest).ipu
    costs = op_costs(
        profile.with_micro_batch(settings.micro_batch_size),
        machine,
        settings,
        proportion_of(settings, machine, fullest),
    )
    products = [
        op
        for op in profile.ops
        if op.kind == "matmul" and op.parameters and op.module and situation.layout.ipu_of_op(op.index) == fullest
    ]
    if not products or situation.estimate.verdict is Verdict.FITS:
        return
    largest = max(products, key=lambda op: costs[op.index].temporary)
    factor = _parts_of(largest)
    if factor is not None and largest.module not in settings.serialized:
        parts = {**settings.serialized, largest.module: factor}
        words = ", ".join(f"{name}: {number}" for name, number in parts.items())
        title = f"{largest.module} done in {factor} parts"
        yield _change(situation, title, [f"memory.serialize={{{words}}}"], serialized=parts)


def _parts_of(op: TracedOp) -> Optional[int]:
    """Parts that a matmul can be done in: they have to be equal."""
    return next((parts for parts in _PARTS if op.dims and op.dims[2] % parts == 0), None)


def _batches(situation: Situation) -> Iterator[Change]:
    settings = situation.settings
    size, accumulation = settings.micro_batch_size, settings.gradient_accumulation
    least = 2 * situation.layout.num_stages - 1 if settings.strategy == "pipelined" and settings.training else 1
    if size % 2 == 0:
        yield _sized(situation, "smaller micro-batch, the same global batch", size // 2, accumulation * 2)
    if size % 4 == 0:
        yield _sized(situation, "much smaller micro-batch, the same global batch", size // 4, accumulation * 4)
    if accumulation % 2 == 0 and accumulation // 2 >= least:
        yield _sized(situation, "larger micro-batch, the same global batch", size * 2, accumulation // 2)
    if settings.training:
        title = "more accumulation (a global batch twice as large)"
        yield _sized(situation, title, size, accumulation * 2)
    time = situation.estimate.time
    if time.host > 0.02 * time.total:
        more = settings.device_iterations * 16
        yield _change(situation, "more updates per host call", [f"device_iterations={more}"], device_iterations=more)


def _sized(situation: Situation, title: str, size: int, accumulation: int) -> Change:
    settings = situation.settings
    words = [f"gradient_accumulation={accumulation}", *situation.words.batch]
    if size != settings.micro_batch_size:
        words.insert(0, f"micro_batch_size={size}")
    own = settings.accumulator_bytes or float(settings.compute_bytes)
    return _change(
        situation,
        title,
        words,
        micro_batch_size=size,
        gradient_accumulation=accumulation,
        accumulator_bytes=own if accumulation > 1 else 0.0,
    )


def _splits(situation: Situation) -> Iterator[Change]:
    """The solver's split over as many IPUs, over more and over fewer; the number of IPUs in all stays as it is.

    Where it does not fit and there is one replica, twice as many IPUs are tried, too.
    """
    settings, ipus = situation.settings, situation.layout.num_ipus
    total = ipus * settings.replicas
    sizes: List[int] = [ipus] if ipus > 1 else []
    if situation.estimate.verdict is not Verdict.FITS:
        sizes += [size for size in (2 * ipus, 4 * ipus) if total % size == 0]
        sizes += [2 * ipus] if settings.replicas == 1 and ipus < MAX_IPUS else []
    sizes += [ipus // 2] if ipus % 2 == 0 else []
    for size in sizes:
        replicas = max(1, total // size)
        samples = settings.gradient_accumulation * settings.replicas
        if samples % replicas:
            continue
        accumulation = samples // replicas
        changed = dataclasses.replace(
            settings,
            replicas=replicas,
            gradient_accumulation=accumulation,
            recompute="checkpoints" if size > 1 and settings.recompute == "none" else settings.recompute,
        )
        found = _split_change(situation, size, changed)
        if found is not None:
            yield found


def _split_change(situation: Situation, size: int, settings: Settings) -> Optional[Change]:
    ipus, kept = situation.layout.num_ipus, situation.layout.checkpoints
    words: List[str] = []
    if size != ipus:
        typed, proportions = resized(situation.words, settings.available_proportion, size)
        settings = dataclasses.replace(settings, available_proportion=proportions)
        words = [
            f"devices={size * settings.replicas}",
            *typed,
            f"gradient_accumulation={settings.gradient_accumulation}",
            *situation.words.batch,
        ]
    if size == 1:
        layout = dataclasses.replace(single_ipu(situation.profile), checkpoints=kept)
        own = split_overrides(None, situation.words)
        return Change("one IPU a replica, more replicas", (*own, *words), settings, layout)
    split = split_for(situation.profile, size, settings, situation.machine, situation.names, kept)
    if split is None or split.layout.stage_of_op == situation.layout.stage_of_op:
        return None
    if settings.training and settings.gradient_accumulation < 2 * split.layout.num_stages - 1:
        return None
    title = "another split"
    if size != ipus:
        replicas = "more" if size < ipus else "fewer" if settings.replicas < situation.settings.replicas else "as many"
        title = f"{size} IPUs a replica, {replicas} replicas"
    return Change(title, (*split_overrides(split, situation.words), *words), settings, split.layout)


@dataclass(frozen=True)
class PlanEstimate:
    """What the planner tells of a plan. Every figure is an estimate.

    Args:
        situation: Model, layout, settings, machine and estimate.
        schedule: The pipeline in cycles.
        remedies: Changes that help, best first.
        needs: What it would take, where no change makes it fit.
        inference: The same of evaluation and prediction; None where the model cannot be traced in eval mode.
    """

    situation: Situation
    schedule: PipelineTimeline
    remedies: Tuple[Remedy, ...] = ()
    needs: Optional[Needs] = None
    inference: Optional[Situation] = None

    @property
    def verdict(self) -> Verdict:
        """The worse of the verdicts of training and of inference."""
        return worst(each.estimate.verdict for each in (self.situation, self.inference) if each is not None)

    @property
    def estimate(self) -> Estimate:
        """The estimate of the plan."""
        return self.situation.estimate
