"""The search for a config: split, micro-batch, accumulation and replication for a number of IPUs and a batch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Collection, Iterator, List, Optional, Sequence, Set, Tuple

from ipurun.estimate.cuts import cells_of, cut_points, segment_memory, segments_ending_at
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import parameter_shares
from ipurun.estimate.settings import Words, resized
from ipurun.estimate.split import Split, solve_split
from ipurun.estimate.stages import single_ipu
from ipurun.estimate.types import Estimate, Settings, StageLayout, Verdict
from ipurun.inspect.traced_model import TracedModel

__all__ = [
    "Goal",
    "Needs",
    "Solution",
    "Variant",
    "needs_of",
    "powers_up_to",
    "ranked",
    "search",
    "split_for",
    "split_overrides",
    "variants_of",
]

_MOST_MICRO_BATCHES = 9
# Between the steps of a coarse search, around its best.
_MOST_FINER = 6
# A small share of tile memory for temporaries of matmuls, as published configs of large models have it.
_LEAN_PROPORTION = 0.2
# Micro-batches of one update for each stage, where nobody says how many samples an update has.
_FREE_ACCUMULATION = 16


@dataclass(frozen=True)
class Goal:
    """What is to be found.

    Args:
        devices: IPUs to use, a power of two.
        global_batch: Samples of one weight update; None: free.
        micro_batch: Samples of a micro-batch; None: free.
        largest_pipeline: Most IPUs of one replica; None: all.
        words: Overrides that undo what stands in the way.
    """

    devices: int
    global_batch: Optional[int] = None
    micro_batch: Optional[int] = None
    largest_pipeline: Optional[int] = None
    words: Words = Words()


@dataclass(frozen=True)
class Variant:
    """A way to save memory that a search may use.

    Args:
        settings: The settings with it.
        overrides: What to type for it.
        checkpoints: Operations whose results are kept where the rest is recomputed.
    """

    settings: Settings
    overrides: Tuple[str, ...] = ()
    checkpoints: Tuple[int, ...] = ()


@dataclass(frozen=True)
class Solution:
    """One config that was found.

    Args:
        settings: Its batch numbers and the rest.
        layout: Its layout.
        split: Its split; None: on one IPU.
        overrides: Exactly what to type for it.
        estimate: What it would take.
    """

    settings: Settings
    layout: StageLayout
    split: Optional[Split]
    overrides: Tuple[str, ...]
    estimate: Estimate

    @property
    def ipus(self) -> int:
        """IPUs of one replica."""
        return self.layout.num_ipus


def powers_up_to(most: int) -> List[int]:
    """1, 2, 4, ... up to a number."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def variants_of(settings: Settings, block_checkpoints: Sequence[int], kept: Sequence[int] = ()) -> List[Variant]:
    """Ways to run a model, from as it is to those that save most memory.

    Args:
        settings: As the config has it.
        block_checkpoints: Operations that end the layers of the model's repeated stacks.
        kept: Operations whose results the config keeps by itself where the rest is recomputed.
    """
    found = [Variant(settings, (), tuple(kept))]
    if not settings.training:
        return found
    recomputing = dataclasses.replace(settings, recompute="checkpoints")
    words: Tuple[str, ...] = ("recompute.mode=pipeline", "recompute.every=block")
    if not set(block_checkpoints) <= set(kept) or (block_checkpoints and settings.recompute != "checkpoints"):
        found.append(Variant(recomputing, words, tuple(sorted({*block_checkpoints, *kept}))))
    elif settings.recompute == "none":
        found.append(Variant(recomputing, words[:1], tuple(kept)))
    if settings.state_on_chip and settings.state_bytes:
        last = found[-1]
        off_chip = dataclasses.replace(last.settings, state_on_chip=False, state_sharded=True)
        moved = ("memory.optimizer_state.on_chip=false", "replication.tensor_sharding=true")
        found.append(Variant(off_chip, last.overrides + moved, last.checkpoints))
    last = found[-1]
    lean = dataclasses.replace(last.settings, available_proportion=(_LEAN_PROPORTION,))
    extra: Tuple[str, ...] = (f"memory.available_proportion={_LEAN_PROPORTION:g}",)
    if settings.compute_bytes == 2 and settings.accumulator_bytes != 2:
        lean = dataclasses.replace(lean, accumulator_bytes=2.0)
        extra += ("optimizer.accum_type=float16",)
    found.append(Variant(lean, last.overrides + extra, last.checkpoints))
    return found


def split_for(
    profile: TracedModel,
    num_ipus: int,
    settings: Settings,
    machine: Machine,
    names: Optional[Collection[str]] = None,
    checkpoints: Collection[int] = (),
) -> Optional[Split]:
    """The best split that fits or, failing that, the best that is tight."""
    scaled = profile.with_micro_batch(settings.micro_batch_size)
    limit, margin = machine.memory_bytes, machine.tight_margin

    def within(share: float) -> Optional[Split]:
        found = solve_split(
            scaled, num_ipus, settings, machine, names=names, checkpoints=checkpoints, room=share * limit
        )
        if found is None or found.leaner is None:
            return found
        return max(
            (found, found.leaner),
            key=lambda split: estimate(scaled, split.layout, settings, machine).time.samples_per_second,
        )

    quickest = within(1 + machine.over_margin)
    if quickest is None or quickest.fullest <= (1 - margin) * limit:
        return quickest
    return within(1 - margin) or within(1.0) or quickest


def search(
    profile: TracedModel,
    goal: Goal,
    variants: Sequence[Variant],
    machine: Machine,
    names: Optional[Collection[str]] = None,
) -> List[Solution]:
    """Configs that fit, the quickest first; tight ones come behind all that fit.

    Args:
        profile: The model.
        goal: What is to be found.
        variants: Ways to run it, from the quickest to the one that saves most memory; a later one is tried only with
            micro-batches at which no earlier one fits.
        machine: On what it runs.
        names: Modules at which a block can begin; None: any.
    """
    solutions: List[Solution] = []
    for ipus in powers_up_to(min(goal.devices, goal.largest_pipeline or goal.devices)):
        fitting: Set[int] = set()
        for variant in variants:
            found = list(_of_size(profile, goal, ipus, variant, machine, names, fitting))
            solutions += found
            fitting |= {x.settings.micro_batch_size for x in found if x.estimate.verdict is Verdict.FITS}
    return ranked(solutions)


def ranked(solutions: Sequence[Solution]) -> List[Solution]:
    """The quickest that fits first; tight ones come behind all that fit."""
    return sorted(solutions, key=_rank)


def _rank(solution: Solution) -> Tuple[int, float]:
    return int(solution.estimate.verdict is not Verdict.FITS), -solution.estimate.time.samples_per_second


def _of_size(
    profile: TracedModel,
    goal: Goal,
    ipus: int,
    variant: Variant,
    machine: Machine,
    names: Optional[Collection[str]],
    solved: Collection[int],
) -> Iterator[Solution]:
    """Solutions with one number of IPUs in a replica, one for each micro-batch not yet solved, as long as they fit.

    Of many possible micro-batches, some that are about twice as large each time come first, then those around the best.
    """
    batches = list(_batches(goal, ipus, goal.devices // ipus))
    coarse = _about_doubling(batches)
    found = list(_as_long_as_they_fit(profile, goal, ipus, variant, machine, names, solved, coarse))
    yield from found
    if found and len(coarse) < len(batches):
        best = min(found, key=_rank).settings.micro_batch_size
        around = [batch for batch in batches if best < 2 * batch[0] < 4 * best and batch not in coarse]
        yield from _as_long_as_they_fit(
            profile, goal, ipus, variant, machine, names, solved, _spread(around, _MOST_FINER)
        )


def _about_doubling(batches: Sequence[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """The largest micro-batches up to 1, 2, 4, ...; all of them where they are few."""
    if len(batches) <= _MOST_MICRO_BATCHES:
        return list(batches)
    steps = powers_up_to(1 << (_MOST_MICRO_BATCHES - 1))
    return sorted({max(batch for batch in batches if batch[0] <= step) for step in steps if batches[0][0] <= step})


def _spread(batches: Sequence[Tuple[int, int]], most: int) -> List[Tuple[int, int]]:
    """At most so many, from the first to the last."""
    if len(batches) <= most:
        return list(batches)
    return [batches[round(number * (len(batches) - 1) / (most - 1))] for number in range(most)]


def _as_long_as_they_fit(
    profile: TracedModel,
    goal: Goal,
    ipus: int,
    variant: Variant,
    machine: Machine,
    names: Optional[Collection[str]],
    solved: Collection[int],
    batches: Sequence[Tuple[int, int]],
) -> Iterator[Solution]:
    replicas = goal.devices // ipus
    for micro_batch, accumulation in batches:
        if micro_batch in solved:
            continue
        settings = dataclasses.replace(
            variant.settings,
            micro_batch_size=micro_batch,
            gradient_accumulation=accumulation,
            replicas=replicas,
            strategy="pipelined",
            accumulator_bytes=_accumulator_bytes(variant.settings, accumulation),
            available_proportion=resized(goal.words, variant.settings.available_proportion, ipus)[1],
        )
        if ipus == 1:
            split, layout = None, single_ipu(profile)
            layout = dataclasses.replace(layout, checkpoints=variant.checkpoints)
            if settings.recompute == "checkpoints" and not variant.overrides:
                settings = dataclasses.replace(settings, recompute="none")
        else:
            if settings.recompute == "none" and not variant.overrides:
                settings = dataclasses.replace(settings, recompute="checkpoints")  # PopTorch's default in a pipeline
            split = split_for(profile, ipus, settings, machine, names, variant.checkpoints)
            if split is None:
                return
            layout = split.layout
            if settings.training and accumulation < 2 * layout.num_stages - 1:
                continue
        found = estimate(profile, layout, settings, machine)
        if found.verdict is Verdict.DOES_NOT_FIT:
            return
        yield Solution(settings, layout, split, _overrides(goal, settings, split, variant), found)


def _accumulator_bytes(settings: Settings, accumulation: int) -> float:
    return (settings.accumulator_bytes or float(settings.compute_bytes)) if accumulation > 1 else 0.0


def _batches(goal: Goal, ipus: int, replicas: int) -> Iterator[Tuple[int, int]]:
    """(micro-batch, accumulation) that make the batch, small micro-batches first."""
    least = 2 * ipus - 1
    if goal.global_batch is None:
        accumulation = _FREE_ACCUMULATION * ipus if ipus > 1 else 1
        sizes = [goal.micro_batch] if goal.micro_batch else powers_up_to(1 << (_MOST_MICRO_BATCHES - 1))
        yield from ((size, accumulation) for size in sizes)
        return
    if goal.global_batch % replicas:
        return
    own = goal.global_batch // replicas
    sizes = [size for size in range(1, own + 1) if own % size == 0 and own // size >= least]
    if goal.micro_batch:
        sizes = [size for size in sizes if size == goal.micro_batch]
    yield from ((size, own // size) for size in sizes)


def _overrides(goal: Goal, settings: Settings, split: Optional[Split], variant: Variant) -> Tuple[str, ...]:
    own_keys = {word.partition("=")[0] for word in variant.overrides}
    ipus = 1 if split is None else split.layout.num_ipus
    typed, _ = resized(goal.words, variant.settings.available_proportion, ipus)
    kept = [word for word in typed if word.partition("=")[0] not in own_keys]
    words = [f"devices={goal.devices}", *split_overrides(split, goal.words), *kept]
    words += [
        f"micro_batch_size={settings.micro_batch_size}",
        f"gradient_accumulation={settings.gradient_accumulation}",
        *goal.words.batch,
    ]
    # PopART's recomputation for pipelines leaves a model on one IPU alone.
    own = [word.replace("mode=pipeline", "mode=standard") if split is None else word for word in variant.overrides]
    return (*words, *own)


def split_overrides(split: Optional[Split], words: Words) -> List[str]:
    """What to type for a split; None: everything on one IPU."""
    if split is None:
        return ["pipeline.split=[]", *words.placement, *words.blocks]
    returning = ", ".join(f"{module}: {ipu}" for module, ipu in split.returning.items())
    blocks = (f"pipeline.blocks={{{returning}}}",) if returning else words.blocks
    return [f"pipeline.split=[{','.join(split.modules)}]", *words.placement, *blocks]


@dataclass(frozen=True)
class Needs:
    """What it would take, all of it estimates.

    Args:
        parameter_bytes: Weights, accumulators and optimizer state on chip, of one replica.
        streaming_bytes: What lives in streaming memory, of one replica.
        least_ipus: IPUs whose memory holds the parameters alone, if nothing else were there.
        ipus: Fewest IPUs of one replica, a power of two, over which a split was found that fits; None: none was.
        tried: Largest number of IPUs that was tried.
        largest: (module, bytes) of the largest part that cannot be cut, where it is larger than an IPU; None: no such.
        overrides: Settings that all this supposes.
    """

    parameter_bytes: int
    streaming_bytes: int
    least_ipus: int
    ipus: Optional[int]
    tried: int
    largest: Optional[Tuple[str, int]]
    overrides: Tuple[str, ...]


def needs_of(
    profile: TracedModel,
    variant: Variant,
    devices: int,
    machine: Machine,
    names: Optional[Collection[str]] = None,
    most: int = 512,
) -> Needs:
    """What a model would take with a variant of its settings.

    Args:
        profile: The model.
        variant: The settings that save most memory.
        devices: IPUs that were found to be too few.
        machine: On what it runs.
        names: Modules at which a block can begin; None: any.
        most: Where to stop.
    """
    settings = dataclasses.replace(variant.settings, micro_batch_size=1, recompute="checkpoints", strategy="pipelined")
    scaled = profile.with_micro_batch(1)
    (share,) = parameter_shares(scaled, single_ipu(scaled), settings)
    fixed = share.weights + share.gradients + share.state
    points = cut_points(scaled, names)
    cells = cells_of(scaled, points, variant.checkpoints, settings, machine)
    modules = ["the beginning", *(point.module for point in points)]
    largest: Optional[Tuple[str, int]] = None
    for number in range(len(cells)):
        alone = segments_ending_at(number + 1, cells, scaled, settings, machine, 0.0)[0]
        size = segment_memory(alone, 1, machine)
        if size > machine.memory_bytes * (1 + machine.over_margin) and (largest is None or size > largest[1]):
            largest = (modules[number], round(size))
    least = max(math.ceil(fixed / machine.memory_bytes), 1)  # weights may all be in streaming memory
    number, found = max(2 * devices, 2), None
    while largest is None and number <= min(most, len(cells)) and found is None:
        if number >= least and split_for(scaled, number, settings, machine, names, variant.checkpoints) is not None:
            found = number
        number *= 2
    return Needs(fixed, share.streaming, least, found, number // 2, largest, variant.overrides)
