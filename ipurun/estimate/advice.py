"""Estimate of a plan, with changes that would make it fit or run faster: each is planned as typed, then ranked."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from ipurun.estimate.costs import equal_parts, op_costs, parts_of_readers, proportion_of
from ipurun.estimate.estimate import estimate
from ipurun.estimate.search import Goal, Requirements, Search, serialize_override, split_overrides, variants_of
from ipurun.estimate.stages import single_ipu
from ipurun.estimate.types import Estimate, EstimatedModel, Settings, StageLayout, Trial, Verdict, worst
from ipurun.planning.devices import MAX_IPUS

__all__ = ["PlanEstimate", "Remedy", "remedies_for"]

_MOST_REMEDIES = 6
_WORTH_SPEED = 1.02
_WORTH_SHARE = 0.005  # of an IPU's memory
_PROPORTIONS = (0.3, 0.15)


@dataclass(frozen=True)
class Remedy:
    """A change that helps. All figures are those of the plan with it.

    Args:
        title: Short description.
        overrides: Overrides that make the change.
        verdict: Verdict with the change.
        saved_bytes: Bytes saved on the fullest IPU; negative: bytes added.
        speed: Throughput relative to that without the change.
        samples_per_second: Throughput with the change.
        fullest_share: Used part of the fullest IPU's memory with the change.
        devices: IPUs of all replicas with the change.
    """

    title: str
    overrides: Tuple[str, ...]
    verdict: Verdict
    saved_bytes: int
    speed: float
    samples_per_second: float
    fullest_share: float
    devices: int = 1


@dataclass(frozen=True)
class PlanEstimate(Trial):
    """The estimate of a plan.

    Args:
        training: Its training.
        inference: Its evaluation and prediction; None if the model cannot be traced in eval mode.
        search: The search for other configs of its model.
        remedies: Changes that help, best first.
        requirements: Memory and IPUs it would need, if no change makes it fit.
    """

    search: Search
    remedies: Tuple[Remedy, ...] = ()
    requirements: Optional[Requirements] = None

    @property
    def estimate(self) -> Estimate:
        """The estimate of training."""
        return self.training.estimate


@dataclass(frozen=True)
class _Change:
    """A change to try: its title, its overrides, and the settings and layout with it."""

    title: str
    overrides: Tuple[str, ...]
    settings: Settings
    layout: StageLayout


def remedies_for(
    now: Trial,
    search: Search,
    planned: Callable[[Sequence[str]], Optional[Trial]],
    *,
    is_batch_free: bool = False,
    is_placed_in_code: bool = False,
    known: Optional[Sequence[Tuple[str, Tuple[str, ...]]]] = None,
) -> List[Remedy]:
    """Return changes that help, best first; those that need more IPUs come last.

    For a model that does not fit, changes that make it fit come first, by throughput, then those that save most memory.
    For a model that fits, only changes that make it faster and still fit are returned. A change that the plan refuses,
    or with which inference fits less well, is left out.

    Args:
        now: The model as its config runs it.
        search: The search for other configs of it.
        planned: Plans the config with some overrides as if they had been typed; None: it is refused.
        is_batch_free: Whether the config leaves the global batch open.
        is_placed_in_code: Whether the model's code begins blocks, so that no override can change the split.
        known: Titles and overrides of the changes that an earlier search found; None: search.
    """
    model = now.training
    before = model.estimate

    def sorted_by_rank(remedies: Iterable[Remedy]) -> List[Remedy]:
        helpful = (remedy for remedy in remedies if _helps(remedy, before))
        return sorted(helpful, key=lambda remedy: (remedy.devices > model.num_ipus, *_rank(remedy, before)))

    def kept(remedies: Iterable[Remedy]) -> Iterator[Remedy]:
        """Yield the remedies that hold, with the figures of their plans; of equal titles only the first."""
        titles = set()
        for remedy in sorted_by_rank(remedies):
            trial = planned(remedy.overrides) if remedy.title not in titles else None
            if trial is None or _infers_worse(now, trial):
                continue
            found = _remedy(remedy.title, remedy.overrides, before, trial.training)
            if _helps(found, before):
                titles.add(found.title)
                yield found

    if known is not None:
        trials = [(title, overrides, planned(overrides)) for title, overrides in known]
        again = (_remedy(title, words, before, trial.training) for title, words, trial in trials if trial is not None)
        return sorted_by_rank(again)
    found = list(itertools.islice(kept(_estimated(model, _changes(model, search, is_placed_in_code))), _MOST_REMEDIES))
    can_fit = before.verdict is Verdict.FITS or any(remedy.verdict is Verdict.FITS for remedy in found)
    if not can_fit and not is_placed_in_code:
        for change in _all_together(model, search, is_batch_free):
            together = list(kept(_estimated(model, [change])))
            found += together
            if together:
                break
    return sorted_by_rank(found)[:_MOST_REMEDIES]


def _infers_worse(before: Trial, after: Trial) -> bool:
    if before.inference is None or after.inference is None:
        return False
    verdicts = before.inference.estimate.verdict, after.inference.estimate.verdict
    return verdicts[0] is not worst(verdicts)


def _all_together(model: EstimatedModel, search: Search, is_batch_free: bool) -> Iterator[_Change]:
    """Save memory in all ways at once, with as many IPUs per replica as that takes."""
    settings = model.settings
    global_batch = None if is_batch_free else settings.global_batch_size
    leanest = variants_of(settings, search.block_checkpoints, model.layout.checkpoints, search.tables)[-1:]
    title = "all ways to save memory, together with another split"
    for size in dict.fromkeys((settings.micro_batch_size, 1)):
        for best in search.solutions(Goal(model.num_ipus, global_batch, size), leanest)[:1]:
            yield _Change(title, best.overrides, best.settings, best.layout)


def _estimated(model: EstimatedModel, changes: Iterable[_Change]) -> Iterator[Remedy]:
    """Estimate changes without planning them, to find those that are worth planning."""
    for change in changes:
        after = estimate(model.traced, change.layout, change.settings, model.machine)
        changed = EstimatedModel(model.traced, change.layout, change.settings, model.machine, after)
        yield _remedy(change.title, change.overrides, model.estimate, changed)


def _remedy(title: str, overrides: Tuple[str, ...], before: Estimate, changed: EstimatedModel) -> Remedy:
    after = changed.estimate
    return Remedy(
        title,
        overrides,
        after.verdict,
        before.fullest.fullest - after.fullest.fullest,
        after.time.samples_per_second / before.time.samples_per_second,
        after.time.samples_per_second,
        after.fullest.share,
        changed.num_ipus,
    )


def _helps(remedy: Remedy, before: Estimate) -> bool:
    if before.verdict is Verdict.FITS:
        return remedy.verdict is Verdict.FITS and remedy.speed >= _WORTH_SPEED
    return remedy.saved_bytes >= _WORTH_SHARE * before.ipus[0].limit


def _rank(remedy: Remedy, before: Estimate) -> Tuple[int, float]:
    if before.verdict is Verdict.FITS:
        return 0, -remedy.speed
    if remedy.verdict is Verdict.DOES_NOT_FIT:
        return 2, -remedy.saved_bytes
    return int(remedy.verdict is Verdict.TIGHT), -remedy.speed


def _changes(model: EstimatedModel, search: Search, is_placed_in_code: bool) -> Iterator[_Change]:
    if model.settings.training:
        yield from _recomputation(model, search.block_checkpoints)
        yield from _locations(model)
        yield from _updates_in_parts(model)
    if model.estimate.verdict is not Verdict.FITS:
        yield from _proportions(model)
        yield from _serialisation(model)
    yield from _batches(model, search.resets.batch)
    yield from _workers(model)
    if model.settings.strategy == "pipelined" and not is_placed_in_code:
        yield from _splits(model, search)


def _workers(model: EstimatedModel) -> Iterator[_Change]:
    """Load with as many processes as the device needs, or as the host has CPUs."""
    settings, time = model.settings, model.estimate.time
    if not settings.host_samples_per_second or not (time.host_bound or time.loading):
        return
    each = settings.host_samples_per_second / settings.loading_processes
    wanted = math.ceil(time.total * time.samples_per_second / time.device / each)
    workers = min(wanted, settings.host_cpus or wanted)
    if workers > settings.workers:
        title = f"{workers} worker{'s' if workers > 1 else ''} to load data beside the device"
        rate = each * workers
        changed = {"workers": workers, "loads_beside": True, "host_samples_per_second": rate}
        yield _change(model, title, [f"loader.workers={workers}"], **changed)


def _change(model: EstimatedModel, title: str, overrides: Sequence[str], **settings: object) -> _Change:
    changed = dataclasses.replace(model.settings, **settings)  # type: ignore[arg-type]  # names are Settings' own
    return _Change(title, tuple(overrides), changed, model.layout)


def _recomputation(model: EstimatedModel, blocks: Tuple[int, ...]) -> Iterator[_Change]:
    settings, layout = model.settings, model.layout
    mode = f"recompute.mode={'pipeline' if layout.num_stages > 1 else 'standard'}"
    if settings.recompute == "none":
        yield _change(model, "recompute activations", [mode], recompute="checkpoints")
    else:
        yield _change(model, "keep all activations", ["recompute.mode=none"], recompute="none")
    if blocks and not set(blocks) <= set(layout.checkpoints):
        first = () if settings.recompute == "checkpoints" else (mode,)
        kept = dataclasses.replace(layout, checkpoints=tuple(sorted({*layout.checkpoints, *blocks})))
        changed = dataclasses.replace(settings, recompute="checkpoints")
        yield _Change("recompute layer by layer", (*first, "recompute.every=block"), changed, kept)


def _locations(model: EstimatedModel) -> Iterator[_Change]:
    settings = model.settings
    off_chip, sharded = "memory.optimizer_state.on_chip=false", "replication.tensor_sharding=true"
    can_shard = settings.sharding_replicas > 1 and not settings.state_sharded
    if settings.state_bytes:
        if settings.state_on_chip:
            yield _change(model, "optimizer state off chip", [off_chip], state_on_chip=False)
        else:
            on_chip = "memory.optimizer_state.on_chip=true"
            yield _change(model, "optimizer state on chip", [on_chip], state_on_chip=True)
        if can_shard:
            title = "optimizer state sharded over replicas (RTS)"
            yield _change(model, title, [sharded], state_sharded=True)
        if can_shard and settings.state_on_chip:
            title = "optimizer state off chip and sharded (RTS)"
            yield _change(model, title, [off_chip, sharded], state_on_chip=False, state_sharded=True)
    if settings.accumulator_bytes > 2 and settings.compute_bytes == 2:
        title = "gradients accumulated in half precision"
        yield _change(model, title, ["optimizer.accum_type=float16"], accumulator_bytes=2.0)


def _proportions(model: EstimatedModel) -> Iterator[_Change]:
    given = model.settings.available_proportion or (model.machine.default_proportion,)
    title = "less memory for temporaries of matmuls and convolutions"
    for share in _PROPORTIONS:
        if share < min(given):
            override = f"memory.available_proportion={share:g}"
            yield _change(model, title, [override], available_proportion=(share,))


def _serialisation(model: EstimatedModel) -> Iterator[_Change]:
    """Split the matmul with the largest temporaries on the fullest IPU into parts."""
    traced, settings, machine = model.traced, model.settings, model.machine
    fullest = model.estimate.fullest.ipu
    products = [
        op
        for op in traced.ops
        if op.kind == "matmul" and op.parameters and op.module and model.layout.ipu_of_op(op.index) == fullest
    ]
    if not products:
        return
    scaled = traced.with_micro_batch(settings.micro_batch_size)
    costs = op_costs(scaled, machine, settings, proportion_of(settings, machine, fullest))
    largest = max(products, key=lambda op: costs[op.index].temporary)
    factor = equal_parts(largest)
    if factor is not None and largest.module not in settings.serialized:
        parts = {**settings.serialized, largest.module: factor}
        title = f"{largest.module} split into {factor} parts"
        yield _change(model, title, [serialize_override(parts)], serialized=parts)


def _updates_in_parts(model: EstimatedModel) -> Iterator[_Change]:
    """Move the optimizer state off chip, and update the largest table of every IPU that is too full in parts."""
    traced, settings, layout = model.traced, model.settings, model.layout
    added: Dict[str, int] = {}
    for memory, verdict in zip(model.estimate.ipus, model.estimate.verdicts):
        owned = [item for item in traced.parameters if memory.ipu in {layout.ipu_of_op(op) for op in item.ops}]
        largest = max((item for item in owned if item.trainable), key=lambda item: item.elements, default=None)
        if verdict is not Verdict.FITS and largest is not None and settings.state_bytes:
            added.update(parts_of_readers(traced, largest))
    added = {name: factor for name, factor in added.items() if name not in settings.serialized}
    if added:
        first = "optimizer state off chip, that" if settings.state_on_chip else "optimizer state"
        title = f"{first} of {', '.join(added)} in parts"
        overrides = ["memory.optimizer_state.on_chip=false"] if settings.state_on_chip else []
        serialized = {**settings.serialized, **added}
        yield _change(model, title, [*overrides, serialize_override(added)], state_on_chip=False, serialized=serialized)


def _batches(model: EstimatedModel, resets: Sequence[str]) -> Iterator[_Change]:
    settings = model.settings
    size, accumulation = settings.micro_batch_size, settings.gradient_accumulation
    least = model.layout.least_accumulation if settings.strategy == "pipelined" and settings.training else 1
    sizes = []
    if size % 2 == 0:
        sizes.append(("smaller micro-batch, the same global batch", size // 2, accumulation * 2))
    if size % 4 == 0:
        sizes.append(("much smaller micro-batch, the same global batch", size // 4, accumulation * 4))
    if accumulation % 2 == 0 and accumulation // 2 >= least:
        sizes.append(("larger micro-batch, the same global batch", size * 2, accumulation // 2))
    if settings.training:
        sizes.append(("more accumulation (a global batch twice as large)", size, accumulation * 2))
    for title, micro_batch, accumulated in sizes:
        overrides = [f"micro_batch_size={micro_batch}"] if micro_batch != size else []
        yield _change(
            model,
            title,
            [*overrides, f"gradient_accumulation={accumulated}", *resets],
            micro_batch_size=micro_batch,
            gradient_accumulation=accumulated,
        )
    time = model.estimate.time
    if time.host > 0.02 * time.total:
        for factor in (16, 8, 4, 2):  # the data may be too short for more
            more = settings.device_iterations * factor
            yield _change(model, "more updates per host call", [f"device_iterations={more}"], device_iterations=more)


def _splits(model: EstimatedModel, search: Search) -> Iterator[_Change]:
    """Try the best split over the same number of IPUs per replica, over more and over fewer, with as many in total.

    A single replica that does not fit is also tried on twice as many IPUs.
    """
    settings, ipus = model.settings, model.layout.num_ipus
    total = model.num_ipus
    sizes: List[int] = [ipus] if ipus > 1 else []
    if model.estimate.verdict is not Verdict.FITS:
        sizes += [size for size in (2 * ipus, 4 * ipus) if total % size == 0]
        sizes += [2 * ipus] if settings.replicas == 1 and ipus < MAX_IPUS else []
    sizes += [ipus // 2] if ipus % 2 == 0 else []
    for size in sizes:
        replicas = max(1, total // size)
        accumulation, rest = divmod(settings.gradient_accumulation * settings.replicas, replicas)
        if rest:
            continue
        changed = dataclasses.replace(
            settings,
            replicas=replicas,
            gradient_accumulation=accumulation,
            recompute="checkpoints" if size > 1 and settings.recompute == "none" else settings.recompute,
        )
        found = _split_change(model, search, size, changed)
        if found is not None:
            yield found


def _split_change(model: EstimatedModel, search: Search, size: int, settings: Settings) -> Optional[_Change]:
    ipus, kept = model.layout.num_ipus, model.layout.checkpoints
    overrides: List[str] = []
    if size != ipus:
        resets, proportions = search.resets.for_ipus(size, settings.available_proportion)
        settings = dataclasses.replace(settings, available_proportion=proportions)
        overrides = [
            f"devices={size * settings.replicas}",
            *resets,
            f"gradient_accumulation={settings.gradient_accumulation}",
            *search.resets.batch,
        ]
    if size == 1:
        layout = dataclasses.replace(single_ipu(model.traced), checkpoints=kept)
        overrides = split_overrides(None, search.resets) + overrides
        return _Change("one IPU per replica, more replicas", tuple(overrides), settings, layout)
    split = search.split(size, settings, kept)
    if split is None or split.layout.stage_of_op == model.layout.stage_of_op:
        return None
    if settings.training and settings.gradient_accumulation < split.layout.least_accumulation:
        return None
    title = "another split"
    if size != ipus:
        replicas = "more" if size < ipus else "fewer" if settings.replicas < model.settings.replicas else "as many"
        title = f"{size} IPUs per replica, {replicas} replicas"
    return _Change(title, (*split_overrides(split, search.resets), *overrides), settings, split.layout)
