"""The solver compared with all possible splits, and the configs it finds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import List, Optional, Sequence, Tuple

import pytest
from estimate_toys import chain

from ipurun.estimate.cuts import cut_points
from ipurun.estimate.estimate import estimate
from ipurun.estimate.machine import Machine
from ipurun.estimate.search import Goal, Search, Variant, variants_of
from ipurun.estimate.split import Splitter
from ipurun.estimate.stages import layout_of_blocks, layout_of_cuts
from ipurun.estimate.types import Settings, Verdict
from ipurun.inspect.traced_model import TracedModel

MACHINE = Machine()
SETTINGS = Settings(gradient_accumulation=64, compute_bytes=2, accumulator_bytes=2.0)


def _uneven(rows: Sequence[int], values: Sequence[int]) -> TracedModel:
    """A chain whose layers take different time and have weights of different size."""
    plain = chain(len(rows))
    ops = tuple(
        dataclasses.replace(op, dims=(1, count, 512, 512, 1), signature=f"mm {count}")
        for op, count in zip(plain.ops, rows)
    )
    parameters = tuple(
        dataclasses.replace(parameter, elements=size) for parameter, size in zip(plain.parameters, values)
    )
    return dataclasses.replace(plain, ops=ops, parameters=parameters)


def _best_by_hand(traced: TracedModel, ipus: int, settings: Settings) -> Optional[Tuple[float, Tuple[int, ...]]]:
    found: List[Tuple[float, Tuple[int, ...]]] = []
    for cuts in itertools.combinations(range(1, len(traced.ops)), ipus - 1):
        tried = estimate(traced, layout_of_cuts(traced, cuts), settings, MACHINE)
        if tried.verdict is Verdict.FITS:
            found.append((max(ipu.total for ipu in tried.time.ipus), cuts))
    return min(found, default=None)


@pytest.mark.parametrize("ipus", [2, 3, 4])
@pytest.mark.parametrize("recompute", ["none", "checkpoints"])
def test_the_split_is_the_best_of_all(ipus: int, recompute: str) -> None:
    rows = [40000, 900, 30000, 7000, 60000, 500, 20000, 12000]
    traced = _uneven(rows, [1000] * len(rows))
    settings = dataclasses.replace(SETTINGS, recompute=recompute)
    best = _best_by_hand(traced, ipus, settings)
    split = Splitter(traced, ipus, settings, MACHINE).within()
    assert best is not None and split is not None
    assert split.slowest == pytest.approx(best[0])
    tried = estimate(traced, split.layout, settings, MACHINE)
    assert max(ipu.total for ipu in tried.time.ipus) == pytest.approx(best[0])
    assert len(split.modules) == ipus - 1


def test_memory_moves_the_split_away_from_even_work() -> None:
    heavy = 80_000_000  # 160 MB, and as much for the accumulator
    traced = _uneven([10000] * 6, [heavy, heavy, 1000, 1000, 1000, 1000])
    assert Search(_uneven([10000] * 6, [1000] * 6), MACHINE).split(2, SETTINGS).modules == ("layer.3",)  # type: ignore[union-attr]
    best = _best_by_hand(traced, 2, SETTINGS)
    split = Splitter(traced, 2, SETTINGS, MACHINE).within()
    assert best is not None and split is not None
    assert split.modules == ("layer.1",) == tuple(f"layer.{cut}" for cut in best[1])


def test_a_model_that_does_not_fit_has_no_split() -> None:
    traced = _uneven([1000] * 4, [600_000_000, 10, 10, 10])
    assert Search(traced, MACHINE).split(2, SETTINGS) is None
    assert Search(traced, MACHINE).solutions(Goal(devices=4, global_batch=64), variants_of(SETTINGS, ())) == []


def test_tables_that_are_too_large_are_updated_in_parts() -> None:
    """As in the published config of mT5-small on four IPUs."""
    plain = _uneven([10000] * 6, [120_000_000, 1000, 1000, 1000, 1000, 120_000_000])
    table = dataclasses.replace(plain.ops[0], kind="gather", dims=())
    traced = dataclasses.replace(plain, ops=(table, *plain.ops[1:]))
    settings = dataclasses.replace(SETTINGS, state_bytes=8.0, state_tensors=2)
    search, goal = Search(traced, MACHINE), Goal(devices=4, global_batch=64)
    assert search.tables == {"layer.0": 4, "layer.5": 4}
    assert search.solutions(goal, variants_of(settings, ())) == []
    found = search.solutions(goal, variants_of(settings, (), (), search.tables))[0]
    assert found.overrides[-1] == "memory.serialize={layer.0: 4, layer.5: 4}"
    assert found.estimate.verdict is Verdict.FITS
    assert Search(_uneven([10000] * 6, [1000] * 6), MACHINE).tables == {}


def test_a_config_is_found_once() -> None:
    """A variant may ask for what the config does already: PopTorch recomputes in pipelines by default."""
    settings = dataclasses.replace(SETTINGS, recompute="checkpoints")
    variants = [Variant(settings), Variant(settings, ("recompute.mode=pipeline",))]
    tight = dataclasses.replace(MACHINE, tight_margin=1.0)  # what fits with one variant is not tried with the next
    found = Search(_uneven([10000] * 4, [1000] * 4), tight).solutions(Goal(devices=2, global_batch=64), variants)
    assert len(found) > 1
    assert not any(
        first.settings == second.settings and first.layout == second.layout
        for first, second in itertools.combinations(found, 2)
    )


def _with_tied_head(layers: int) -> TracedModel:
    plain = chain(layers)
    first, last = plain.parameters[0], plain.parameters[-1]
    ops = (*plain.ops[:-1], dataclasses.replace(plain.ops[-1], module="head", parameters=(first.name,)))
    tied = dataclasses.replace(first, ops=(0, layers - 1))
    return dataclasses.replace(plain, ops=ops, parameters=(tied, *(p for p in plain.parameters[1:] if p is not last)))


def test_a_head_that_shares_the_first_weight_returns_to_its_ipu() -> None:
    traced = _with_tied_head(9)
    split = Splitter(traced, 4, SETTINGS, MACHINE).within()
    assert split is not None
    assert split.returning == {"head": 0}
    assert split.layout.ipu_of_stage == (0, 1, 2, 3, 0)
    ipus = {split.layout.ipu_of_op(op) for op in traced.parameters[0].ops}
    assert ipus == {0}


def test_layers_that_share_a_weight_stay_together() -> None:
    plain = chain(8)
    shared = dataclasses.replace(plain.parameters[3], ops=(3, 4, 5))
    parameters = (*plain.parameters[:3], shared, *plain.parameters[4:])
    traced = dataclasses.replace(plain, parameters=parameters)
    split = Splitter(traced, 2, SETTINGS, MACHINE).within()
    assert split is not None
    assert len({split.layout.ipu_of_op(op) for op in shared.ops}) == 1


def test_blocks_begin_only_at_modules_that_are_called_once() -> None:
    plain = chain(6)
    modules = ["a", "stack.0", "stack.1", "a", "b", "c"]
    ops = tuple(dataclasses.replace(op, module=module) for op, module in zip(plain.ops, modules))
    points = cut_points(dataclasses.replace(plain, ops=ops), cut_modules={"a", "stack.0", "stack.1", "b", "c"})
    assert [(point.op, point.module) for point in points] == [(1, "stack.0"), (2, "stack.1"), (4, "b"), (5, "c")]


def test_a_possible_caller_of_a_shared_layer_begins_no_block_after_it() -> None:
    plain = chain(5)
    modules = ["shared", "encoder", "shared", "decoder", "decoder.block"]
    ops = tuple(dataclasses.replace(op, module=module) for op, module in zip(plain.ops, modules))
    points = cut_points(dataclasses.replace(plain, ops=ops))
    assert [(point.op, point.module) for point in points] == [(1, "encoder"), (4, "decoder.block")]


def _with_table(uses: Tuple[int, ...]) -> TracedModel:
    """A chain of 24 operations, some of which share the weight of the first or of another one."""
    plain = chain(24)
    table = plain.parameters[uses[0]]
    others = tuple(p for p in plain.parameters if not set(uses) & set(p.ops))
    ops = tuple(dataclasses.replace(op, parameters=(table.name,)) if op.index in uses else op for op in plain.ops)
    return dataclasses.replace(plain, ops=ops, parameters=(dataclasses.replace(table, ops=uses), *others))


@pytest.mark.parametrize("uses", [(0, 12, 23), (12, 23), (0, 8, 16)])
@pytest.mark.parametrize("ipus", [2, 4])
def test_all_uses_of_a_weight_are_on_one_ipu(uses: Tuple[int, ...], ipus: int) -> None:
    traced = _with_table(uses)
    split = Splitter(traced, ipus, SETTINGS, MACHINE).within()
    assert split is not None
    assert len({split.layout.ipu_of_op(op) for op in uses}) == 1
    assert {ipu for _, ipu in split.blocks} | {0} == set(range(ipus))
    # Nearly even, though IPU 0 has all uses besides its part: 24 equal operations.
    times = [time.total for time in estimate(traced, split.layout, SETTINGS, MACHINE).time.ipus]
    assert max(times) == pytest.approx(split.slowest, rel=0.02)
    assert max(times) < 1.35 * sum(times) / ipus
    again = layout_of_blocks(traced, split.blocks)
    assert (again.stage_of_op, again.ipu_of_stage) == (split.layout.stage_of_op, split.layout.ipu_of_stage)


def test_solutions_keep_the_global_batch_and_feed_the_pipeline() -> None:
    traced = _uneven([20000] * 8, [30_000_000] * 8)
    found = Search(traced, MACHINE).solutions(Goal(devices=8, global_batch=96), variants_of(SETTINGS, ()))
    assert found
    for solution in found:
        settings = solution.settings
        assert settings.micro_batch_size * settings.gradient_accumulation * settings.replicas == 96
        assert settings.replicas * solution.ipus == 8
        assert settings.gradient_accumulation >= 2 * solution.layout.num_stages - 1 or solution.ipus == 1
        assert solution.estimate.verdict is not Verdict.DOES_NOT_FIT
    fitting = [solution for solution in found if solution.estimate.verdict is Verdict.FITS]
    speeds = [solution.estimate.time.samples_per_second for solution in fitting]
    assert found[: len(fitting)] == fitting and speeds == sorted(speeds, reverse=True)


def test_an_impossible_global_batch_has_no_solution() -> None:
    # Three samples feed neither 2 nor 4 replicas, and a pipeline of 4 stages needs 7 micro-batches.
    assert Search(chain(4), MACHINE).solutions(Goal(devices=4, global_batch=3), variants_of(SETTINGS, ())) == []


def test_recomputation_pays_if_it_allows_larger_micro_batches() -> None:
    plain = _uneven([400] * 16, [1000] * 16)
    ops = tuple(dataclasses.replace(op, output_bytes=5_000_000, saved_bytes=5_000_000) for op in plain.ops)
    traced = dataclasses.replace(plain, ops=ops)
    variants = variants_of(dataclasses.replace(SETTINGS, strategy="pipelined"), (3, 7, 11, 15))
    found = Search(traced, MACHINE).solutions(Goal(devices=1, global_batch=64), variants)
    largest_without = max(s.settings.micro_batch_size for s in found if "recompute.mode=standard" not in s.overrides)
    assert max(s.settings.micro_batch_size for s in found) > largest_without
    sizes = [s.settings.micro_batch_size for s in found if s.estimate.verdict is Verdict.FITS]
    assert len(sizes) == len(set(sizes))  # each micro-batch is solved once


def test_checkpoints_of_the_config_are_kept() -> None:
    kept = variants_of(SETTINGS, (3, 7), kept=(1,))
    assert kept[0].checkpoints == (1,) and kept[1].checkpoints == (1, 3, 7)
    recomputing = dataclasses.replace(SETTINGS, recompute="checkpoints")
    assert "recompute.every=block" not in variants_of(recomputing, (3, 7), kept=(3, 7))[0].overrides
    assert all("recompute.every=block" not in v.overrides for v in variants_of(recomputing, (3, 7), kept=(3, 7)))


def test_each_ipu_has_its_own_share_of_memory_for_products() -> None:
    """Wide products are slow with little memory, so the IPU with less memory gets fewer of them."""
    traced = chain(8)
    ops = tuple(dataclasses.replace(op, dims=(1, 2048, 2048, 2048, 1), signature="wide") for op in traced.ops)
    traced = dataclasses.replace(traced, ops=ops)
    lean = dataclasses.replace(SETTINGS, available_proportion=(0.6, 0.02))
    even, uneven = (Splitter(traced, 2, settings, MACHINE).within() for settings in (SETTINGS, lean))
    assert even is not None and uneven is not None
    assert uneven.layout.stage_of_op.count(1) < even.layout.stage_of_op.count(1)
    time = estimate(traced, uneven.layout, lean, MACHINE).time
    assert uneven.slowest == pytest.approx(max(ipu.total for ipu in time.ipus), rel=0.01)


def test_the_update_decides_between_equally_slow_splits() -> None:
    """Seven layers on four IPUs: the layer with most state, first or last, is alone on its IPU."""
    for heavy in (0, 6):
        sizes = [4_000_000 if layer == heavy else 1_000_000 for layer in range(7)]
        traced = _uneven([512] * 7, sizes)
        settings = dataclasses.replace(SETTINGS, state_bytes=8.0, state_tensors=2, state_on_chip=False)
        found = Search(traced, MACHINE).split(4, settings)
        assert found is not None
        tried = (
            estimate(traced, layout_of_cuts(traced, cuts), settings, MACHINE).time.samples_per_second
            for cuts in itertools.combinations(range(1, 7), 3)
        )
        speed = estimate(traced, found.layout, settings, MACHINE).time.samples_per_second
        assert speed == pytest.approx(max(tried), rel=0.02)


def test_micro_batches_between_powers_of_two_are_tried() -> None:
    plain = _uneven([400] * 4, [1000] * 4)
    ops = tuple(dataclasses.replace(op, output_bytes=4_000_000, saved_bytes=4_000_000) for op in plain.ops)
    traced = dataclasses.replace(plain, ops=ops)
    settings = dataclasses.replace(SETTINGS, strategy="pipelined")
    batch = 17 * 2**6 * 3  # 28 divisors
    found = Search(traced, MACHINE).solutions(Goal(devices=1, global_batch=batch), variants_of(settings, ())[:1])

    def fits(size: int) -> bool:
        own = dataclasses.replace(settings, micro_batch_size=size, gradient_accumulation=batch // size)
        return estimate(traced, layout_of_cuts(traced, ()), own, MACHINE).verdict is Verdict.FITS

    largest = max(size for size in range(1, batch + 1) if batch % size == 0 and fits(size))
    assert largest & (largest - 1)  # not a power of two
    assert found[0].settings.micro_batch_size == largest
