"""Search for configs: split, micro-batch, accumulation and replication for a number of IPUs and a global batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Callable, Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from ipurun.estimate.costs import parts_of_readers, proportion_of
from ipurun.estimate.cuts import Cell, cells_of, cut_points, segment_memory, segment_of
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import parameter_shares
from ipurun.estimate.settings import Resets
from ipurun.estimate.split import Split, Splitter
from ipurun.estimate.stages import single_ipu
from ipurun.estimate.types import Estimate, Settings, StageLayout, Verdict
from ipurun.inspect.traced_model import TracedModel

__all__ = [
    "MOST_SOLUTIONS",
    "Goal",
    "Requirements",
    "Search",
    "Solution",
    "Variant",
    "powers_up_to",
    "ranked",
    "serialize_override",
    "split_overrides",
    "variants_of",
]

MOST_SOLUTIONS = 3  # that are shown, besides a faster one that is tight
_MOST_MICRO_BATCHES = 9
_MOST_FINER = 6  # micro-batches tried around the best of a coarse search
# A small share of tile memory for temporaries of matmuls, as in published configs of large models.
_LEAN_PROPORTION = 0.2
# Micro-batches per update and stage, if the global batch is free.
_FREE_ACCUMULATION = 16
_MOST_IPUS = 512
# A table whose two moments take more of an IPU than this is worth updating in parts.
_LARGE_UPDATE = 0.5
_MOMENTS_BYTES = 8


@dataclass(frozen=True)
class Goal:
    """Limits of a search.

    Args:
        devices: IPUs to use, a power of two.
        global_batch: Samples of one weight update; None: free.
        micro_batch: Samples of a micro-batch; None: free.
    """

    devices: int
    global_batch: Optional[int] = None
    micro_batch: Optional[int] = None


@dataclass(frozen=True)
class Variant:
    """Settings that a search may use, to save memory.

    Args:
        settings: The settings.
        overrides: Overrides that give them.
        checkpoints: Operations whose results are kept while the rest is recomputed.
    """

    settings: Settings
    overrides: Tuple[str, ...] = ()
    checkpoints: Tuple[int, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A config that a search found.

    Args:
        settings: Its settings, batch sizes included.
        layout: Its layout.
        split: Its split; None: on one IPU.
        overrides: Overrides that give it.
        estimate: Its estimate.
        inference: The estimate of its evaluation and prediction; None if unknown.
    """

    settings: Settings
    layout: StageLayout
    split: Optional[Split]
    overrides: Tuple[str, ...]
    estimate: Estimate
    inference: Optional[Estimate] = None

    @property
    def ipus(self) -> int:
        """IPUs of one replica."""
        return self.layout.num_ipus


def powers_up_to(most: int) -> List[int]:
    """Return 1, 2, 4, ... up to a number."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def variants_of(
    settings: Settings,
    block_checkpoints: Sequence[int],
    kept: Sequence[int] = (),
    tables: Optional[Mapping[str, int]] = None,
) -> List[Variant]:
    """Return variants of settings, from the config's own to the one that saves most memory.

    Args:
        settings: The settings of the config.
        block_checkpoints: Last operations of the layers of the model's repeated stacks.
        kept: Operations that the config already keeps while the rest is recomputed.
        tables: Large embeddings and heads, and the parts in which each can be computed and updated.
    """
    found = [Variant(settings, (), tuple(kept))]
    if not settings.training:
        return found
    recomputing = dataclasses.replace(settings, recompute="checkpoints")
    overrides: Tuple[str, ...] = ("recompute.mode=pipeline", "recompute.every=block")
    if not set(block_checkpoints) <= set(kept) or (block_checkpoints and settings.recompute != "checkpoints"):
        found.append(Variant(recomputing, overrides, tuple(sorted({*block_checkpoints, *kept}))))
    elif settings.recompute == "none":
        found.append(Variant(recomputing, overrides[:1], tuple(kept)))
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
    added = {name: parts for name, parts in (tables or {}).items() if name not in settings.serialized}
    if added and lean.state_bytes:
        last = found[-1]
        in_parts = dataclasses.replace(lean, serialized={**settings.serialized, **added})
        found.append(Variant(in_parts, (*last.overrides, serialize_override(added)), last.checkpoints))
    return found


def serialize_override(parts: Mapping[str, int]) -> str:
    """Return the override that computes modules in parts."""
    shown = ", ".join(f"{name}: {number}" for name, number in parts.items())
    return f"memory.serialize={{{shown}}}"


class Search:
    """Search for configs of one model. Splits are remembered, since different goals ask for the same ones.

    Args:
        traced: The model.
        machine: The device.
        cut_modules: Modules at which a block can begin; None: any.
        block_checkpoints: Last operations of the layers of the model's repeated stacks.
        resets: Overrides that reset conflicting keys of the config.
    """

    def __init__(
        self,
        traced: TracedModel,
        machine: Machine,
        cut_modules: Optional[Collection[str]] = None,
        block_checkpoints: Tuple[int, ...] = (),
        resets: Optional[Resets] = None,
    ) -> None:
        self.traced = traced
        self.machine = machine
        self.cut_modules = cut_modules
        self.block_checkpoints = block_checkpoints
        self.resets = resets or Resets()
        self._splits: Dict[Tuple[int, str, Tuple[int, ...]], Optional[Split]] = {}

    @functools.cached_property
    def tables(self) -> Dict[str, int]:
        """Embeddings, and heads that are as large, whose update takes much of an IPU, and the parts for each."""
        traced, trained = self.traced, [item for item in self.traced.parameters if item.trainable]
        embeddings = [item for item in trained if any(traced.ops[op].kind == "gather" for op in item.ops)]
        largest = max((item.elements for item in embeddings), default=0)
        if largest * _MOMENTS_BYTES < _LARGE_UPDATE * self.machine.memory_bytes:
            return {}
        large = [parts_of_readers(traced, item) for item in trained if item.elements >= largest]
        return {name: parts for each in large for name, parts in each.items()}

    def split(self, num_ipus: int, settings: Settings, checkpoints: Collection[int] = ()) -> Optional[Split]:
        """Return the best split that fits or, failing that, the best that is tight."""
        key = (num_ipus, repr(settings), tuple(checkpoints))  # settings hold mappings, which cannot be hashed
        if key not in self._splits:
            self._splits[key] = self._best_split(num_ipus, settings, checkpoints)
        return self._splits[key]

    def _best_split(self, num_ipus: int, settings: Settings, checkpoints: Collection[int]) -> Optional[Split]:
        scaled, machine = self.traced.with_micro_batch(settings.micro_batch_size), self.machine
        splitter = Splitter(scaled, num_ipus, settings, machine, self.cut_modules, checkpoints)

        def within(share: float) -> Optional[Split]:
            found = splitter.within(share * machine.memory_bytes)
            if found is None or found.leaner is None:
                return found
            return max(
                (found, found.leaner),
                key=lambda split: estimate(scaled, split.layout, settings, machine).time.samples_per_second,
            )

        fastest = within(1 + machine.over_margin)
        if fastest is None or fastest.fullest <= (1 - machine.tight_margin) * machine.memory_bytes:
            return fastest
        return within(1 - machine.tight_margin) or within(1.0) or fastest

    def solutions(self, goal: Goal, variants: Sequence[Variant]) -> List[Solution]:
        """Return configs that fit, fastest first, followed by tight ones.

        Args:
            goal: The limits of the search.
            variants: Settings from the fastest to the one that saves most memory; a later one is tried only with
                micro-batches for which no earlier one fits.
        """
        found: List[Solution] = []
        for ipus in powers_up_to(goal.devices):
            fitting: Set[int] = set()
            for variant in variants:
                solved = list(self._solutions_with(goal, ipus, variant, fitting))
                # A variant may ask for what the config does already.
                found += [each for each in solved if not any(_is_same(each, other) for other in found)]
                fitting |= {each.settings.micro_batch_size for each in solved if each.estimate.verdict is Verdict.FITS}
        return ranked(found)

    def _solutions_with(self, goal: Goal, ipus: int, variant: Variant, solved: Collection[int]) -> Iterator[Solution]:
        """Yield solutions with this many IPUs in a replica, one per micro-batch not yet solved, as long as they fit.

        If many micro-batches are possible, each about twice the one before comes first, then those around the best.
        """
        batches = _batches(goal, ipus)
        coarse = _about_doubling(batches)
        found = list(self._while_they_fit(goal, ipus, variant, [each for each in coarse if each[0] not in solved]))
        yield from found
        if found:
            best = min(found, key=_rank).settings.micro_batch_size
            around = [each for each in batches if best < 2 * each[0] < 4 * best and each not in coarse]
            finer = [each for each in _spread(around, _MOST_FINER) if each[0] not in solved]
            yield from self._while_they_fit(goal, ipus, variant, finer)

    def _while_they_fit(
        self, goal: Goal, ipus: int, variant: Variant, batches: Sequence[Tuple[int, int]]
    ) -> Iterator[Solution]:
        given = variant.settings
        for micro_batch, accumulation in batches:
            settings = dataclasses.replace(
                given,
                micro_batch_size=micro_batch,
                gradient_accumulation=accumulation,
                replicas=goal.devices // ipus,
                strategy="pipelined",
                available_proportion=self.resets.for_ipus(ipus, given.available_proportion)[1],
            )
            if not variant.overrides and settings.recompute in ("none", "checkpoints"):
                # PopTorch recomputes in pipelines by default.
                settings = dataclasses.replace(settings, recompute="checkpoints" if ipus > 1 else "none")
            if ipus == 1:
                split = None
                layout = dataclasses.replace(single_ipu(self.traced), checkpoints=variant.checkpoints)
            else:
                split = self.split(ipus, settings, variant.checkpoints)
                if split is None:
                    return
                layout = split.layout
                if settings.training and accumulation < layout.least_accumulation:
                    continue
            found = estimate(self.traced, layout, settings, self.machine)
            if found.verdict is Verdict.DOES_NOT_FIT:
                return
            yield Solution(settings, layout, split, self._overrides(goal, settings, split, variant), found)

    def _overrides(self, goal: Goal, settings: Settings, split: Optional[Split], variant: Variant) -> Tuple[str, ...]:
        own_keys = {override.partition("=")[0] for override in variant.overrides}
        ipus = 1 if split is None else split.layout.num_ipus
        resets, _ = self.resets.for_ipus(ipus, variant.settings.available_proportion)
        # PopART's recomputation for pipelines does nothing for a model on one IPU.
        own = [each.replace("mode=pipeline", "mode=standard") if split is None else each for each in variant.overrides]
        return (
            f"devices={goal.devices}",
            *split_overrides(split, self.resets),
            *(override for override in resets if override.partition("=")[0] not in own_keys),
            f"micro_batch_size={settings.micro_batch_size}",
            f"gradient_accumulation={settings.gradient_accumulation}",
            *self.resets.batch,
            *own,
        )

    def requirements(
        self, variant: Variant, devices: int, planned: Callable[[Solution], Optional[Solution]]
    ) -> Requirements:
        """Return the memory and IPUs that a model would need.

        Args:
            variant: The settings that save most memory.
            devices: IPUs that were too few.
            planned: Plans a solution as if it had been typed; None: it is refused or does not fit.
        """
        machine = self.machine
        settings = dataclasses.replace(
            variant.settings, micro_batch_size=1, recompute="checkpoints", strategy="pipelined"
        )
        scaled = self.traced.with_micro_batch(1)
        (share,) = parameter_shares(scaled, single_ipu(scaled), settings)
        points = cut_points(scaled, self.cut_modules)
        cells = cells_of(scaled, points, variant.checkpoints, settings, machine, proportion_of(settings, machine, 0))
        modules = ["the beginning", *(point.module for point in points)]
        sizes = [round(segment_memory(segment_of(cell, scaled, settings, machine), 1, machine)) for cell in cells]
        module, size = max(zip(modules, sizes), key=lambda sized: sized[1])
        is_too_large = size > machine.memory_bytes * (1 + machine.over_margin)
        largest = (module, size) if is_too_large else None
        tensor = _largest_tensor(scaled, cells[sizes.index(size)]) if is_too_large else ""
        least = max(math.ceil(share.on_chip / machine.memory_bytes), 1)  # weights may all be in streaming memory
        number = max(2 * devices, 2)
        found: Optional[Solution] = None
        while largest is None and number <= min(_MOST_IPUS, len(cells)) and found is None:
            if number >= least:
                found = self._alone(number, settings, variant, planned)
            number *= 2
        assumed = variant.overrides if found is None else ()
        return Requirements(share.on_chip, share.streaming, least, found, number // 2, largest, assumed, tensor)

    def _alone(
        self,
        ipus: int,
        settings: Settings,
        variant: Variant,
        planned: Callable[[Solution], Optional[Solution]],
    ) -> Optional[Solution]:
        """Return a config of one replica on this many IPUs, if there is one and its plan fits."""
        settings = dataclasses.replace(settings, replicas=1)
        split = self.split(ipus, settings, variant.checkpoints)
        if split is None:
            return None
        accumulation = max(settings.gradient_accumulation, split.layout.least_accumulation)
        settings = dataclasses.replace(settings, gradient_accumulation=accumulation)
        overrides = self._overrides(Goal(ipus), settings, split, variant)
        found = estimate(self.traced, split.layout, settings, self.machine)
        return planned(Solution(settings, split.layout, split, overrides, found))


@dataclass(frozen=True)
class Requirements:
    """Memory and IPUs that a model would need; all figures are estimates.

    Args:
        parameter_bytes: Weights, accumulators and optimizer state of one replica on chip.
        streaming_bytes: Streaming memory of one replica.
        least_ipus: IPUs whose memory holds the parameters alone.
        solution: A config on the fewest IPUs, a power of two, for which a split fits; None: none was found.
        tried: Largest number of IPUs that was tried.
        largest: (module, bytes) of the largest part that cannot be cut, if it is larger than an IPU.
        overrides: Overrides that these figures assume, if there is no such config.
        tensor: What takes most in that part: a parameter with its size, or the result of an operation.
    """

    parameter_bytes: int
    streaming_bytes: int
    least_ipus: int
    solution: Optional[Solution]
    tried: int
    largest: Optional[Tuple[str, int]]
    overrides: Tuple[str, ...]
    tensor: str = ""


def _largest_tensor(traced: TracedModel, cell: Cell) -> str:
    """Return the largest parameter or result of a part of a model, with its size in half or single precision."""
    inside = range(cell.first, cell.end)
    results = [(traced.ops[op].output_bytes, f"the result of {traced.ops[op].name}") for op in inside]
    weights = [
        (parameter.num_bytes, parameter.name)
        for parameter in traced.parameters
        if any(op in inside for op in parameter.ops)
    ]
    size, name = max(results + weights, default=(0, ""))
    return f"{name}, {size / 2**20:,.0f} MiB" if name else ""


def _is_same(first: Solution, second: Solution) -> bool:
    return first.settings == second.settings and first.layout == second.layout


def ranked(solutions: Sequence[Solution]) -> List[Solution]:
    """Sort solutions: those that fit first, each group by throughput."""
    return sorted(solutions, key=_rank)


def _rank(solution: Solution) -> Tuple[int, float]:
    return int(solution.estimate.verdict is not Verdict.FITS), -solution.estimate.time.samples_per_second


def _batches(goal: Goal, ipus: int) -> List[Tuple[int, int]]:
    """Return (micro-batch, accumulation) that give the global batch, small micro-batches first."""
    replicas = goal.devices // ipus
    if goal.global_batch is None:
        accumulation = _FREE_ACCUMULATION * ipus if ipus > 1 else 1
        sizes = [goal.micro_batch] if goal.micro_batch else powers_up_to(1 << (_MOST_MICRO_BATCHES - 1))
        return [(size, accumulation) for size in sizes]
    if goal.global_batch % replicas:
        return []
    own = goal.global_batch // replicas
    sizes = [size for size in range(1, own + 1) if own % size == 0 and own // size >= 2 * ipus - 1]
    return [(size, own // size) for size in sizes if goal.micro_batch in (None, size)]


def _about_doubling(batches: Sequence[Tuple[int, int]]) -> List[Tuple[int, int]]:
    """Return the largest micro-batches up to 1, 2, 4, ...; all of them if there are few."""
    if len(batches) <= _MOST_MICRO_BATCHES:
        return list(batches)
    steps = powers_up_to(1 << (_MOST_MICRO_BATCHES - 1))
    return sorted({max(batch for batch in batches if batch[0] <= step) for step in steps if batches[0][0] <= step})


def _spread(batches: Sequence[Tuple[int, int]], most: int) -> List[Tuple[int, int]]:
    """Return at most this many, evenly from the first to the last."""
    if len(batches) <= most:
        return list(batches)
    return [batches[round(number * (len(batches) - 1) / (most - 1))] for number in range(most)]


def split_overrides(split: Optional[Split], resets: Resets) -> List[str]:
    """Return the overrides that give a split; None: everything on one IPU."""
    if split is None:
        return ["pipeline.split=[]", *resets.placement, *resets.blocks]
    returning = ", ".join(f"{module}: {ipu}" for module, ipu in split.returning.items())
    # A mapping is merged with the one before it, so that this has to be reset first.
    blocks = (*resets.blocks, f"pipeline.blocks={{{returning}}}") if returning else resets.blocks
    return [f"pipeline.split=[{','.join(split.modules)}]", *resets.placement, *blocks]
