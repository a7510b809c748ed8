"""Time: products, the pipeline, updates, the host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import List, Tuple

import pytest
from estimate_toys import chain

from ipurun.estimate.calibration import Measurement, calibrate_to_run, measured_throughput, ratio
from ipurun.estimate.costs import Shape, backward_shapes, forward_shape, op_costs, plan_product
from ipurun.estimate.estimate import assumptions_of, estimate
from ipurun.estimate.machine import Machine, machine_from
from ipurun.estimate.stages import layout_of_blocks, layout_of_cuts, single_ipu
from ipurun.estimate.timing import compile_class, compile_seconds, estimate_time
from ipurun.estimate.types import EstimatedModel, Settings, StageLayout
from ipurun.inspect.traced_model import TracedModel, TracedOp

MACHINE = Machine()


def cycles(
    rows: int, columns: int, depth: int, *, groups: int = 1, element_bytes: int = 2, share: float = 0.6
) -> float:
    return plan_product(MACHINE, Shape(groups, rows, columns, depth), element_bytes, element_bytes, share).cycles


def efficiency(rows: int, columns: int, depth: int) -> float:
    return rows * columns * depth / (64 * 1472) / cycles(rows, columns, depth)


def test_products_never_beat_the_matrix_units() -> None:
    for size in (16, 100, 768, 4096):
        assert 0 < efficiency(size, size, size) < 1


def test_larger_micro_batches_use_the_device_better() -> None:
    shares = [efficiency(tokens, 3072, 768) for tokens in (16, 128, 1024, 4096)]
    assert shares == sorted(shares)
    assert shares[-1] > 3 * shares[0]


def test_single_precision_is_slower() -> None:
    assert 2 < cycles(1024, 1024, 1024, element_bytes=4) / cycles(1024, 1024, 1024) < 4


def test_single_partial_sums_halve_the_rate_of_the_matrix_unit() -> None:
    assert MACHINE.macs_per_cycle(2, 4) == MACHINE.macs_per_cycle(2, 2) / 2
    shape = Shape(1, 4096, 4096, 4096)
    half, single = (plan_product(MACHINE, shape, 2, partials, 0.6).cycles for partials in (2, 4))
    assert 1.3 < single / half < 2.2


def test_tiles_that_need_the_same_operand_share_their_buses() -> None:
    alone = dataclasses.replace(MACHINE, exchange_pair=1)
    shape = Shape(1, 1024, 1024, 1024)
    assert plan_product(MACHINE, shape, 2, 2, 0.6).cycles < plan_product(alone, shape, 2, 2, 0.6).cycles
    # One tile's worth of columns and of rows: there is no other tile to share with.
    thin = Shape(1472, 1, 16, 16)
    assert plan_product(MACHINE, thin, 2, 2, 0.6) == plan_product(alone, thin, 2, 2, 0.6)


def test_a_weight_that_one_tile_needs_is_on_that_tile() -> None:
    dims = (1, 64, 16 * 1472, 16, 1)  # each tile multiplies all rows with 16 different columns
    weight, data = forward_shape(dims, has_weight=True), forward_shape(dims)
    assert plan_product(MACHINE, weight, 2, 2, 0.6).cycles < plan_product(MACHINE, data, 2, 2, 0.6).cycles


def test_less_memory_takes_more_time() -> None:
    roomy = plan_product(MACHINE, Shape(1, 8192, 4096, 4096), 2, 2, 0.6)
    cramped = plan_product(MACHINE, Shape(1, 8192, 4096, 4096), 2, 2, 0.1)
    assert cramped.cycles > roomy.cycles
    assert cramped.tile_bytes <= 0.1 * MACHINE.tile_bytes < roomy.tile_bytes <= 0.6 * MACHINE.tile_bytes


def test_a_depthwise_convolution_takes_longer_than_one_with_groups_that_fill_a_block() -> None:
    """64 channels, 3 x 3, on 16 pictures of 28 x 28: a sixteenth of the work, but by vector instructions."""
    rows = 16 * 28 * 28
    grouped = plan_product(MACHINE, forward_shape((4, rows, 16, 16, 9)), 2, 2, 0.6)
    depthwise = plan_product(MACHINE, forward_shape((64, rows, 1, 1, 9)), 2, 2, 0.6)
    four_at_a_time = -(-16 * rows * 9 // 1472) * (7 + 4 * (6 + 1))
    assert depthwise.cycles > 2 * grouped.cycles
    assert depthwise.cycles == pytest.approx(four_at_a_time, rel=0.05)


def test_groups_of_a_vector_are_merged_for_the_matrix_unit() -> None:
    rows = 16 * 28 * 28
    narrow, full = (
        plan_product(MACHINE, forward_shape((*dims, 9)), 2, 2, 0.6) for dims in ((16, rows, 4, 4), (4, rows, 16, 16))
    )
    assert narrow == full


def test_backward_of_a_product_is_two_products_of_the_same_size() -> None:
    data, weight = backward_shapes((1, 100, 30, 20, 1))
    assert (data.rows, data.columns, data.depth) == (100, 20, 30)
    assert (weight.rows, weight.columns, weight.depth) == (30, 20, 100)


def time_of(layers: int, cuts: list, **changes: object):
    traced = chain(layers)
    return estimate_time(traced, layout_of_cuts(traced, cuts), Settings(**changes), MACHINE)  # type: ignore[arg-type]


def test_a_pipeline_fills_and_drains() -> None:
    time = time_of(4, [1, 2, 3], gradient_accumulation=16)
    assert time.cycles == 16 + 2 * 3
    assert time.bubble == pytest.approx(6 / 22)
    # Three cycles of forward work alone and three of both fill it; three of both and three of backward work drain it.
    waiting = MACHINE.transfer_seconds + chain(4).input_bytes / MACHINE.streaming_bytes_per_second
    forward, backward = time.ipus[0].forward, time.ipus[0].backward
    links = time.ipus[1].links / 2  # the first stage receives nothing
    assert time.compute < 22 * time.cycle
    assert time.compute == pytest.approx(
        10 * time.cycle + 12 * waiting + 3 * (forward + backward) + 6 * (forward + backward) + 15 * links, rel=0.02
    )


def test_a_short_pipeline_drains_before_it_was_full() -> None:
    seconds = [time_of(4, [1, 2, 3], gradient_accumulation=number).compute for number in (1, 5, 6, 7)]
    assert seconds == sorted(seconds)


def test_the_busiest_ipu_limits_the_pipeline() -> None:
    even, uneven = time_of(4, [2], gradient_accumulation=8), time_of(4, [1], gradient_accumulation=8)
    assert uneven.cycle > even.cycle
    busiest = max(ipu.total for ipu in uneven.ipus)
    reading = chain(4).input_bytes / MACHINE.streaming_bytes_per_second
    assert uneven.cycle == pytest.approx(busiest + MACHINE.transfer_seconds + reading)


def test_an_ipu_with_two_stages_does_both() -> None:
    traced = chain(3)
    layout = layout_of_blocks(traced, [("layer.0", 0), ("layer.1", 1), ("layer.2", 0)])
    time = estimate_time(traced, layout, Settings(gradient_accumulation=8), MACHINE)
    assert time.cycles == 8 + 2 * 2
    assert time.ipus[0].forward == pytest.approx(2 * time.ipus[1].forward)


def test_sharded_ipus_work_in_turn() -> None:
    together = time_of(4, [2], gradient_accumulation=8)
    in_turn = time_of(4, [2], gradient_accumulation=8, strategy="sharded")
    assert in_turn.bubble == 0
    assert in_turn.cycle > 1.5 * (together.cycle - MACHINE.transfer_seconds)


def test_recomputation_costs_the_forward_pass_again_except_in_the_last_stage() -> None:
    time = time_of(4, [2], gradient_accumulation=8, recompute="checkpoints")
    assert time.ipus[0].recompute == pytest.approx(time.ipus[0].forward)
    assert time.ipus[1].recompute == 0


def test_state_off_chip_goes_through_the_memory_that_four_ipus_share() -> None:
    settings = {"gradient_accumulation": 8, "state_bytes": 8.0, "state_tensors": 2}
    on_chip = time_of(2, [], **settings)
    off_chip = time_of(2, [], state_on_chip=False, **settings)
    moved = 2 * 2 * 400 * 8 / MACHINE.streaming_bytes_per_second
    begun = 2 * 2 * 2 * MACHINE.transfer_seconds  # parameters, state tensors, directions
    assert off_chip.update - on_chip.update == pytest.approx(moved + begun)
    # The two IPUs of a replica share it and wait for each other; so do the two replicas on a machine share it.
    split = time_of(2, [1], state_on_chip=False, replicas=2, **settings).update
    split -= time_of(2, [1], replicas=2, **settings).update
    assert split == pytest.approx(2 * moved + begun)


def test_weights_off_chip_are_read_for_every_micro_batch() -> None:
    """400 values of 2 bytes: for the forward and for the backward phase, once for both without phases."""
    rate = MACHINE.streaming_bytes_per_second / 4
    once = 400 * 2 / rate + MACHINE.transfer_seconds

    def streaming(**changes: object) -> list:
        settings = {"gradient_accumulation": 8, "weights_on_chip": False, "strategy": "sharded", **changes}
        return [ipu.streaming for ipu in time_of(2, [1], **settings).ipus]

    assert streaming() == pytest.approx([once, once])
    assert streaming(weights_on_chip=True) == [0, 0]
    assert streaming(strategy="parallel_phased") == pytest.approx([2 * once, 2 * once])
    assert streaming(strategy="parallel_phased", training=False) == pytest.approx([once, once])
    # The second keeps its result and its input, which are written and read.
    kept = [2 * 1000 / rate, 2 * 2000 / rate]
    found = streaming(weights_on_chip=True, activations_on_chip=False)
    assert found == pytest.approx(kept)
    in_turn = time_of(2, [1], weights_on_chip=False, strategy="sharded")
    assert in_turn.cycle > sum(ipu.streaming for ipu in in_turn.ipus) > 0


def test_a_module_can_have_its_own_share() -> None:
    traced = chain(2)
    wide = dataclasses.replace(traced.ops[0], dims=(1, 4096, 4096, 4096, 1))
    traced = dataclasses.replace(traced, ops=(wide, dataclasses.replace(wide, index=1, module="layer.1", inputs=(0,))))
    usual = op_costs(traced, MACHINE, Settings(), 0.6)
    lean = op_costs(traced, MACHINE, Settings(), 0.1)
    mixed = op_costs(traced, MACHINE, Settings(module_proportions={"layer.1": 0.1}), 0.6)
    assert lean[0].temporary < usual[0].temporary and lean[0].forward > usual[0].forward
    assert mixed == [usual[0], lean[1]]


def test_a_micro_batch_is_read_while_tiles_wait_unless_some_are_set_aside() -> None:
    traced = dataclasses.replace(chain(2), input_bytes=10**6)
    layout = single_ipu(traced)

    def cycle(replicas: int = 1, **changes: int) -> float:
        found = estimate_time(traced, layout, Settings(replicas=replicas, **changes), MACHINE)
        return found.cycle - max(ipu.total for ipu in found.ipus)

    reading = 10**6 / MACHINE.streaming_bytes_per_second
    assert cycle() == pytest.approx(MACHINE.transfer_seconds + reading)
    assert cycle(replicas=4) == pytest.approx(MACHINE.transfer_seconds + 4 * reading)  # all on one machine
    assert cycle(io_tiles=32) == pytest.approx(MACHINE.transfer_seconds)


def test_each_further_machine_makes_a_cycle_longer_by_a_measured_share() -> None:
    traced, slow = chain(2), dataclasses.replace(MACHINE, machine_loss=0.01)
    one, four, sixteen = (
        estimate_time(traced, single_ipu(traced), Settings(replicas=replicas), slow).cycle for replicas in (4, 16, 64)
    )
    assert four / one == pytest.approx(1 + 3 * 0.01)
    assert sixteen / one == pytest.approx(1 + 15 * 0.01)


def test_a_dropout_is_one_operation_and_a_permutation_none() -> None:
    plain = dataclasses.replace(chain(1).ops[0], kind="elementwise", name="mul", dims=(), traffic_bytes=10**6)
    ops = [
        dataclasses.replace(plain, name="bernoulli_", signature="a"),
        dataclasses.replace(plain, index=1, name="div_", signature="b"),
        dataclasses.replace(plain, index=2, inputs=(1,), signature="c"),
        dataclasses.replace(plain, index=3, inputs=(2,), signature="c"),
        dataclasses.replace(plain, index=4, inputs=(3,), name="clone", kind="copy", signature="d"),
        dataclasses.replace(plain, index=5, inputs=(4,), name="div_", signature="b"),
    ]
    traced = dataclasses.replace(chain(1), ops=tuple(ops))
    seconds = [cost.forward for cost in op_costs(traced, MACHINE, Settings(), 0.6)]
    assert seconds[0] == seconds[1] == seconds[4] == 0
    assert seconds[2] > seconds[3] > 0  # random numbers take time
    assert seconds[5] > 0


def test_the_gradient_of_a_cast_weight_is_cast_while_it_is_accumulated() -> None:
    data = dataclasses.replace(chain(1).ops[0], kind="copy", name="_to_copy", dims=(), traffic_bytes=10**6, gradients=1)
    weight = dataclasses.replace(data, index=1, is_batched=False)
    traced = dataclasses.replace(chain(1), ops=(data, weight))
    costs = op_costs(traced, MACHINE, Settings(), 0.6)
    assert costs[0].forward == costs[1].forward > 0
    assert costs[0].backward > costs[1].backward == 0


def test_replicas_sum_their_gradients() -> None:
    assert time_of(2, [], gradient_accumulation=8).all_reduce == 0
    assert time_of(2, [], gradient_accumulation=8, replicas=4).all_reduce > 0


def test_device_iterations_share_the_cost_of_a_host_call() -> None:
    once, shared = time_of(2, [], device_iterations=1), time_of(2, [], device_iterations=10)
    assert once.total - shared.total == pytest.approx(0.9 * MACHINE.host_call_seconds)


def test_loading_takes_its_time_between_host_calls_unless_there_are_workers() -> None:
    device = time_of(2, [], gradient_accumulation=1000)
    alone = time_of(2, [], gradient_accumulation=1000, host_samples_per_second=1e6)
    beside = time_of(2, [], gradient_accumulation=1000, host_samples_per_second=1e6, loads_beside=True)
    assert alone.total == pytest.approx(device.total + 1000 / 1e6)
    assert beside.total == pytest.approx(device.total)


def test_gradients_of_several_domains_also_pass_the_gateways() -> None:
    one_domain = time_of(2, [], gradient_accumulation=8, replicas=64).all_reduce
    four = time_of(2, [], gradient_accumulation=8, replicas=256).all_reduce
    gateways = 2 * (3 / 4) * (800 * 4 / 64) / (MACHINE.gateway_bytes_per_second / 4)  # 800 values in 64 parts
    steps = MACHINE.all_reduce_step_seconds
    links = (one_domain - 2 * 63 * steps) * (2 * 255 / 256) / (2 * 63 / 64)
    assert four == pytest.approx(links + 2 * 255 * steps + gateways)


@pytest.mark.parametrize(
    ("layers", "cuts", "kept", "expected"),
    [
        (5, [], 10**6, "under a minute"),
        (5, [1, 2, 3], 10**6, "1 to 5 minutes"),
        (200, [], 10**6, "5 to 15 minutes"),
        (200, [], 1000, "1 to 5 minutes"),  # tensors of 1,000 bytes are on 8 of the tiles
    ],
)
def test_compile_times_are_classes(layers: int, cuts: List[int], kept: int, expected: str) -> None:
    traced = chain(layers, kept=kept)
    assert compile_class(traced, layout_of_cuts(traced, cuts), Settings(), MACHINE) == expected


def test_equal_layers_are_compiled_once_for_each_ipu() -> None:
    def seconds(layers: int, cuts: List[int], *, equal: bool) -> float:
        traced = chain(layers, kept=10**6)
        if equal:
            traced = dataclasses.replace(
                traced, ops=tuple(dataclasses.replace(op, signature="mm") for op in traced.ops)
            )
        return compile_seconds(traced, layout_of_cuts(traced, cuts), Settings(), MACHINE)

    one, more = seconds(10, [], equal=True), seconds(20, [], equal=True)
    assert seconds(20, [], equal=False) - seconds(10, [], equal=False) > 2 * (more - one)
    assert seconds(20, [10], equal=True) - more > 17  # an IPU more, with a copy of the layer's code of its own


def test_steps_in_a_loop_take_their_time_and_share_their_code() -> None:
    once = chain(2)
    looped = dataclasses.replace(once, ops=(dataclasses.replace(once.ops[0], repeats=10), once.ops[1]))
    first, second = op_costs(looped, MACHINE, Settings(), 0.6)
    assert first.forward == pytest.approx(10 * second.forward)
    assert first.backward == pytest.approx(10 * second.backward)
    assert first.temporary == second.temporary
    plain, loops = (estimate(each, single_ipu(each), Settings(), MACHINE) for each in (once, looped))
    assert loops.ipus[0].code == plain.ipus[0].code
    assert (plain.time.error, loops.time.error) == (1.5, 2.0)


def test_thin_groups_widen_the_range_of_the_throughput() -> None:
    traced = chain(2)
    depthwise = dataclasses.replace(traced.ops[1], kind="conv", dims=(512, 3136, 1, 1, 9), signature="depthwise")
    mobile = dataclasses.replace(traced, ops=(traced.ops[0], depthwise))
    plain, thin = (estimate_time(each, single_ipu(each), Settings(), MACHINE) for each in (traced, mobile))
    assert (plain.error, thin.error) == (1.5, 2.0)
    assert thin.range == (thin.samples_per_second / 2, thin.samples_per_second * 2)


def test_a_slow_host_limits_throughput() -> None:
    fast = time_of(2, [], micro_batch_size=1, gradient_accumulation=1000)
    slow = time_of(2, [], gradient_accumulation=1000, host_samples_per_second=100.0)
    assert not fast.host_bound
    assert slow.host_bound
    assert slow.samples_per_second == pytest.approx(100, rel=0.02)


def test_all_machines_of_a_host_share_its_connection() -> None:
    traced = dataclasses.replace(chain(2), input_bytes=10**9)
    sent = [
        estimate_time(traced, single_ipu(traced), Settings(replicas=64, hosts=hosts), MACHINE) for hosts in (1, 4, 16)
    ]
    assert sent[0].sending == pytest.approx(64e9 / MACHINE.host_link_bytes_per_second)
    assert sent[1].sending == pytest.approx(sent[0].sending / 4)
    assert sent[2].sending == pytest.approx(64e9 / (16 * MACHINE.host_bytes_per_second))  # 16 machines of 4 IPUs


def test_inference_has_no_backward_pass_and_no_update() -> None:
    time = time_of(4, [2], training=False, device_iterations=8)
    assert all(ipu.backward == 0 for ipu in time.ipus)
    assert time.update == time.all_reduce == 0
    assert time.bubble == pytest.approx(1 / 9)


def test_an_estimate_scales_the_traced_model_to_its_micro_batch() -> None:
    traced = chain(2)
    layout = single_ipu(traced)
    one = estimate(traced, layout, Settings(micro_batch_size=1), MACHINE)
    four = estimate(traced, layout, Settings(micro_batch_size=4), MACHINE)
    assert four.ipus[0].activations == 4 * one.ipus[0].activations
    assert four.ipus[0].weights == one.ipus[0].weights


def _assumptions(traced: TracedModel, layout: StageLayout, settings: Settings) -> List[Tuple[str, str]]:
    found = estimate(traced, layout, settings, MACHINE)
    return assumptions_of(EstimatedModel(traced, layout, settings, MACHINE, found))


def test_assumptions_follow_the_settings() -> None:
    traced = chain(2)
    found = _assumptions(traced, layout_of_cuts(traced, [1]), Settings(gradient_accumulation=4, replicas=2))
    text = " ".join(text for _, text in found)
    assert "estimate" in text
    assert "2 forward stages on 2 IPUs" in text
    assert "in 2 steps of 16 µs" in text
    assert "All tiles wait while a micro-batch is read" in text
    assert "of the matrix unit's 16 multiply-adds" in text  # in single precision
    alone = _assumptions(traced, single_ipu(traced), Settings())
    assert not any(topic in ("pipeline", "replicas") for topic, _ in alone)


def test_unknown_constants_are_refused() -> None:
    with pytest.raises(KeyError, match="clok_hz"):
        machine_from({"clok_hz": 1e9})
    assert machine_from({"clock_hz": {"value": 1e9, "unit": "Hz"}}).clock_hz == 1e9


def test_calibrating_to_a_measured_run(tmp_path: Path) -> None:
    steps = [{"samples_per_second": speed} for speed in (10.0, 400.0, 410.0, 405.0)] + [{"loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(step) for step in steps))
    measured = measured_throughput(tmp_path)
    assert measured == pytest.approx(402.5)
    traced = chain(2)
    row = Measurement("run", "run", traced, single_ipu(traced), Settings(), MACHINE.clock_hz, measured)
    before = abs(ratio(row, MACHINE) - 1)
    after = abs(ratio(row, calibrate_to_run(row, MACHINE)) - 1)
    assert after < before / 2


def test_a_run_without_throughput_cannot_calibrate(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"loss": 1.0}) + "\n")
    with pytest.raises(ValueError, match="samples_per_second"):
        measured_throughput(tmp_path)


def test_another_micro_batch_scales_a_traced_model_in_proportion() -> None:
    op = chain(1).ops[0]
    still = dataclasses.replace(op, index=1, is_batched=False)
    attention = dataclasses.replace(op, index=2, dims=(12, 64, 64, 32, 1))
    traced = dataclasses.replace(chain(1), ops=(op, still, attention)).with_micro_batch(8)
    assert [scaled.flops_forward / op.flops_forward for scaled in traced.ops] == [8, 1, 8]
    assert [scaled.dims for scaled in traced.ops] == [
        (1, 512, 32, 32, 1),
        (1, 64, 32, 32, 1),
        (96, 64, 64, 32, 1),
    ]


@pytest.mark.parametrize(("length", "single"), [(197, False), (198, False), (196, False), (197, True)])
def test_values_of_matrices_that_are_not_aligned_are_moved_one_by_one(length: int, single: bool) -> None:
    """Scores of 12 heads for 17 pictures: PopLibs transposes halves in blocks of four, where both sides allow it."""
    size = 4 if single else 2
    settings = Settings(training=False, compute_bytes=size, partials_bytes=size)
    scores = TracedOp(0, "bmm", "", "matmul", dims=(204, length, length, 64, 1), element_bytes=size)
    traced = TracedModel((scores,), (), 0, 4, 4, 1)
    spread = plan_product(MACHINE, forward_shape(scores.dims), size, size, 0.6).cycles
    moved = 204 * (2 * length * 64 + length * length) if length % 4 and not single else 0
    cycles = spread + 2.5 * 6 * moved / MACHINE.tiles + MACHINE.op_cycles
    assert op_costs(traced, MACHINE, settings, 0.6)[0].forward * MACHINE.clock_hz == pytest.approx(cycles)
