"""Memory of each IPU, worked out on paper."""

from __future__ import annotations

import dataclasses

import pytest
from estimate_toys import chain

from ipurun.estimate.costs import OpCost, op_costs
from ipurun.estimate.estimate import verdict_of
from ipurun.estimate.machine import Machine
from ipurun.estimate.memory import estimate_memory, in_flight, op_bytes, parameter_shares, stage_memories
from ipurun.estimate.stages import layout_of_blocks, layout_of_cuts, single_ipu
from ipurun.estimate.types import IpuMemory, Settings, Verdict, worst
from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter

MACHINE = Machine()


def test_the_first_stage_keeps_most_micro_batches() -> None:
    layout = layout_of_cuts(chain(4), [1, 2, 3])
    settings = Settings(gradient_accumulation=16)
    assert [in_flight(stage, layout.num_stages, settings) for stage in range(4)] == [7, 5, 3, 1]
    memory = estimate_memory(chain(4), layout, settings, MACHINE)
    # Each stage keeps its result and, except for the first, its input.
    assert [ipu.activations for ipu in memory] == [7 * 1000, 5 * 2000, 3 * 2000, 2000]


def test_without_a_pipeline_one_micro_batch_is_kept() -> None:
    layout = layout_of_cuts(chain(4), [2])
    memory = estimate_memory(chain(4), layout, Settings(gradient_accumulation=8, strategy="sharded"), MACHINE)
    assert [ipu.activations for ipu in memory] == [2000, 3000]


def test_recomputation_keeps_inputs_of_stages_and_checkpoints() -> None:
    traced = chain(8)
    everything = estimate_memory(traced, layout_of_cuts(traced, [4]), Settings(gradient_accumulation=8), MACHINE)
    settings = Settings(gradient_accumulation=8, recompute="checkpoints")
    bare = estimate_memory(traced, layout_of_cuts(traced, [4]), settings, MACHINE)
    checked = estimate_memory(traced, layout_of_cuts(traced, [4], checkpoints=[1]), settings, MACHINE)
    assert everything[0].activations == 3 * 4000
    assert bare[0].activations == 0  # its input comes from the host
    assert bare[1].activations == 1000
    assert checked[0].activations == 3 * 1000
    # There are at most 2 of 4 operations between checkpoints.
    assert bare[0].temporary - checked[0].temporary == 4000 - 2000


def test_values_that_come_after_the_largest_operation_do_not_count_beside_it() -> None:
    """The first of four operations has a large result that nothing reads backward; the others keep 1,000 bytes each."""

    def temporary(largest: int) -> int:
        traced = chain(4)
        ops = list(traced.ops)
        ops[largest] = dataclasses.replace(ops[largest], output_bytes=10**6, saved_bytes=1000)
        traced = dataclasses.replace(traced, ops=tuple(ops))
        return estimate_memory(traced, single_ipu(traced), Settings(recompute="checkpoints"), MACHINE)[0].temporary

    # The second has an operand, and one more value beside it.
    assert temporary(1) - temporary(0) == 2000


def test_optimizer_state_on_chip_off_chip_and_sharded() -> None:
    traced = chain(2)
    layout = single_ipu(traced)
    here = Settings(gradient_accumulation=4, replicas=4, state_bytes=8.0, accumulator_bytes=2.0)
    (on_chip,) = parameter_shares(traced, layout, here)
    assert (on_chip.weights, on_chip.gradients, on_chip.state) == (2 * 400 * 2, 2 * 400 * 2, 2 * 400 * 8)
    (sharded,) = parameter_shares(traced, layout, dataclasses.replace(here, state_sharded=True))
    assert sharded.state == on_chip.state / 4
    (off_chip,) = parameter_shares(traced, layout, dataclasses.replace(here, state_on_chip=False))
    assert (off_chip.state, off_chip.streaming, off_chip.streamed) == (0, 2 * 400 * 8, 2 * 2 * 400 * 8)
    (stays,) = parameter_shares(
        traced, layout, dataclasses.replace(here, state_on_chip=False, min_elements_off_chip=401)
    )
    assert stays.state == on_chip.state


def test_a_tied_weight_counts_once_on_its_ipu() -> None:
    traced = chain(3)
    first = dataclasses.replace(traced.parameters[0], ops=(0, 2))
    tied = dataclasses.replace(traced, parameters=(first, traced.parameters[1]))
    layout = layout_of_blocks(tied, [("layer.0", 0), ("layer.1", 1), ("layer.2", 0)])
    assert layout.ipu_of_stage == (0, 1, 0)
    assert [share.weights for share in parameter_shares(tied, layout, Settings())] == [800, 800]


def test_equal_operations_share_code() -> None:
    different = chain(6)
    equal = dataclasses.replace(different, ops=tuple(dataclasses.replace(op, signature="mm") for op in different.ops))
    more, less = (estimate_memory(p, single_ipu(p), Settings(), MACHINE)[0].code for p in (different, equal))
    # Five forward programs and twice as many backward ones are saved, on every tile.
    assert more - less == 5 * 3 * MACHINE.code_bytes_per_op * MACHINE.tiles


@pytest.mark.parametrize(
    ("share", "allowed", "training", "verdict"),
    [
        (0.92, 0.0, True, Verdict.FITS),
        (0.77, 0.5, False, Verdict.FITS),
        (0.86, 0.1, False, Verdict.TIGHT),
        (0.86, 0.06, False, Verdict.FITS),
        (0.94, 0.0, False, Verdict.TIGHT),
        (0.94, 0.0, True, Verdict.TIGHT),
        (1.02, 0.0, True, Verdict.TIGHT),
        (1.02, 0.0, False, Verdict.TIGHT),
        (1.04, 0.0, True, Verdict.DOES_NOT_FIT),
        (1.04, 0.0, False, Verdict.DOES_NOT_FIT),
    ],
)
def test_the_verdict_is_tight_within_the_error_of_the_estimate(
    share: float, allowed: float, training: bool, verdict: Verdict
) -> None:
    """In inference, what the compiler may take for temporaries beyond the estimate counts as well."""
    used, more = (round(part * MACHINE.memory_bytes) for part in (share, allowed))
    memory = IpuMemory(0, used, 0, 0, 0, 0, 0, 0, limit=MACHINE.memory_bytes, allowed=more)
    assert verdict_of(memory, MACHINE, training=training) is verdict


def test_inference_with_a_small_share_of_tiles_for_temporaries_has_no_wider_band() -> None:
    traced = dataclasses.replace(chain(4, kept=1472 * 300_000), training=False)
    found = {}
    for share in (0.1, 0.6):
        settings = Settings(training=False, compute_bytes=2, partials_bytes=2, available_proportion=(share,))
        (memory,) = estimate_memory(traced, single_ipu(traced), settings, MACHINE)
        found[share] = memory.allowed / MACHINE.memory_bytes
    assert 0.05 < found[0.1] <= 0.1
    assert 0.5 < found[0.6] <= 0.6
    training = Settings(compute_bytes=2, partials_bytes=2)
    assert estimate_memory(chain(4), single_ipu(chain(4)), training, MACHINE)[0].allowed == 0


def test_the_worst_ipu_decides() -> None:
    assert worst([Verdict.FITS, Verdict.DOES_NOT_FIT, Verdict.TIGHT]) is Verdict.DOES_NOT_FIT
    assert worst([Verdict.FITS, Verdict.TIGHT]) is Verdict.TIGHT


def test_limit_is_897_mebibytes() -> None:
    assert MACHINE.memory_bytes == 940_572_672
    assert MACHINE.memory_bytes / 2**20 == pytest.approx(897)


def test_inference_keeps_only_values_that_are_still_needed() -> None:
    """Four results of 1,000 bytes, the first of which the last operation reads again."""
    traced = chain(4)
    again = dataclasses.replace(traced.ops[3], inputs=(0, 2))
    traced = dataclasses.replace(traced, ops=(*traced.ops[:3], again))
    inference = Settings(training=False)
    (whole,) = stage_memories(traced, single_ipu(traced), inference)
    # While the third runs on the second's result, the first one waits.
    assert (whole.kept, max(whole.beside)) == (0, 1000)
    first, second = stage_memories(traced, layout_of_cuts(traced, [2]), inference)
    assert (max(first.beside), max(second.beside)) == (0, 1000)


def test_the_largest_phase_of_phased_execution_is_on_chip() -> None:
    traced = chain(6, values=1000)
    blocks = [("layer.0", 0), ("layer.1", 0), ("layer.4", 0)]  # 1, 3 and 2 layers
    layout = layout_of_blocks(traced, blocks, phases={"layer.0": 0, "layer.1": 1, "layer.4": 2})
    assert layout.ipu_of_stage == (0, 0, 0)
    assert layout.phase_of_stage == (0, 1, 2)
    off_chip = Settings(
        strategy="serial_phased",
        gradient_accumulation=4,
        accumulator_bytes=4.0,
        weights_on_chip=False,
        accumulators_on_chip=False,
        activations_on_chip=False,
    )
    (ipu,) = estimate_memory(traced, layout, off_chip, MACHINE)
    assert ipu.weights == 3 * 1000 * 2
    assert ipu.gradients == 3 * 1000 * 4
    assert ipu.streaming >= 6 * 1000 * (2 + 4)
    on_chip = dataclasses.replace(off_chip, weights_on_chip=True, accumulators_on_chip=True)
    (ipu,) = estimate_memory(traced, layout, on_chip, MACHINE)
    assert (ipu.weights, ipu.gradients) == (6 * 1000 * 2, 6 * 1000 * 4)
    assert layout_of_blocks(traced, blocks).num_stages == 1  # without phases it is one stage


def test_the_state_of_a_serialised_layer_comes_in_parts() -> None:
    settings = Settings(state_bytes=8.0, state_tensors=2, state_on_chip=False, min_elements_off_chip=2)
    traced = chain(1, values=100_000)
    (whole,) = parameter_shares(traced, single_ipu(traced), settings)
    in_parts = dataclasses.replace(settings, serialized={"layer.0": 4})
    (parts,) = parameter_shares(traced, single_ipu(traced), in_parts)
    assert (whole.update, parts.update) == (800_000, 200_000)
    assert parts.streamed == whole.streamed
    assert parts.transfers == 4 * whole.transfers


def test_an_accumulated_embedding_has_no_gradient_of_the_size_of_its_table() -> None:
    lookup = TracedOp(0, "embedding", "table", "gather", output_bytes=64, parameters=("table.weight",), gradients=1)
    table = TracedParameter("table.weight", 1000, element_bytes=2, trainable=True, ops=(0,))
    traced = TracedModel((lookup,), (table,), 0, 4, 4, 1)
    once, accumulated = Settings(accumulator_bytes=2.0), Settings(accumulator_bytes=2.0, gradient_accumulation=4)
    free = [OpCost(0.0, 0.0, 0.0)]
    assert op_bytes(traced, lookup, once, free) == 64 + 2000
    assert op_bytes(traced, lookup, accumulated, free) == 64


def test_only_large_weights_are_off_chip_and_the_largest_is_loaded() -> None:
    traced = chain(2, values=1000)
    small = dataclasses.replace(traced.parameters[0], elements=10)
    traced = dataclasses.replace(traced, parameters=(small, traced.parameters[1]))
    on_chip = Settings(gradient_accumulation=4, accumulator_bytes=4.0)
    (before,) = estimate_memory(traced, single_ipu(traced), on_chip, MACHINE)
    off_chip = dataclasses.replace(on_chip, weights_on_chip=False, min_weights_off_chip=1000)
    (ipu,) = estimate_memory(traced, single_ipu(traced), off_chip, MACHINE)
    assert (before.weights, ipu.weights, ipu.streaming) == (20 + 2000, 20, 2000)
    assert ipu.temporary == before.temporary + 2000  # a weight is on chip while it is used
    assert ipu.gradients == before.gradients  # accumulators have a separate location


def test_a_result_that_few_tiles_compute_is_on_those() -> None:
    """Each of 1,000 products is on a tile of its own, and 472 tiles have none."""
    product = TracedOp(0, "bmm", "scores", "matmul", output_bytes=512_000, dims=(1000, 16, 16, 16, 1))
    traced = TracedModel((product,), (), 0, 4, 4, 1)
    plain, few = OpCost(0.0, 0.0, 0.0), op_costs(traced, MACHINE, Settings(), 0.6)[0]
    assert few.crowding == 1.472
    assert op_bytes(traced, product, Settings(), [plain]) == 512_000
    assert op_bytes(traced, product, Settings(), [few]) == 1.472 * 512_000 + few.temporary


def test_the_fullest_tile_has_more_code_than_the_average() -> None:
    traced = chain(4)
    measured = dataclasses.replace(MACHINE, code_imbalance=0.5, tile_imbalance_bytes=100.0)
    (ipu,) = estimate_memory(traced, single_ipu(traced), Settings(), measured)
    assert ipu.imbalance == ipu.code / 2 + 100 * MACHINE.tiles
    assert ipu.fullest == ipu.total + ipu.imbalance


def test_nothing_of_a_frozen_model_is_computed_again_unless_a_kept_value_needs_it() -> None:
    """The first two operations are frozen; the fourth keeps its result for the backward pass."""
    traced = chain(4)
    frozen = [dataclasses.replace(op, gradients=0, saved_bytes=0) for op in traced.ops[:2]]
    trained = [dataclasses.replace(traced.ops[2], inputs=()), traced.ops[3]]
    settings = Settings(recompute="checkpoints")
    apart = dataclasses.replace(traced, ops=(*frozen, *trained))
    layout = layout_of_cuts(apart, [3])
    assert stage_memories(apart, layout, settings)[0].recomputed == {2}
    read = dataclasses.replace(traced, ops=(*frozen, *traced.ops[2:]))
    assert stage_memories(read, layout, settings)[0].recomputed == {0, 1, 2}
