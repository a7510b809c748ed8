"""PopTorch's ops outside an executor, and arguments that they always refuse."""

import pytest
import torch

import ipurun.emulator as poptorch

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    "op",
    [
        poptorch.nop,
        poptorch.ipu_print_tensor,
        poptorch.recomputationCheckpoint,
        lambda t: poptorch.set_available_memory(t, 0.3),
        lambda t: poptorch.set_overlap_for_input(t, poptorch.OverlapMode.OverlapAccumulationLoop),
        lambda t: poptorch.set_overlap_for_output(t, poptorch.OverlapMode.OverlapAccumulationLoop),
    ],
)
def test_identity_ops_return_their_tensor(op, capfd):
    assert torch.equal(op(X), X)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "op",
    [
        poptorch.nop,
        poptorch.ipu_print_tensor,
        lambda t: poptorch.set_available_memory(t, 0.3),
        lambda t: poptorch.dynamic_slice(t, 0, torch.tensor([0]), 1, 1),
        lambda t: poptorch.dynamic_slice(X, 0, t, 1, 1),
        lambda t: poptorch.dynamic_update(t, X, 0, torch.tensor([0]), 1),
        lambda t: poptorch.dynamic_update(X, t, 0, torch.tensor([0]), 1),
        lambda t: poptorch.ctc_beam_search_decoder(t, torch.tensor([1])),
        lambda t: poptorch.ctc_beam_search_decoder(torch.zeros(1, 1, 2), t),
        lambda t: poptorch.fps(t, [0, 1]),
        lambda t: poptorch.nearest(t, X),
        lambda t: poptorch.nearest(X, t),
        lambda t: poptorch.BeginBlock(t),
    ],
)
def test_non_tensors_are_refused_with_poptorch_error(op):
    with pytest.raises(poptorch.Error):
        op(17)


def test_unknown_float_format_is_a_key_error():
    with pytest.raises(KeyError):
        poptorch.ipu_print_tensor(X, float_format="octal")


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", torch.tensor(6.0)), ("mean", torch.tensor(1.5)), ("none", X)]
)
def test_identity_loss_reduces(reduction, expected):
    loss = poptorch.identity_loss(X, reduction)
    assert torch.equal(loss, expected)
    assert loss is not X


def test_identity_loss_refuses_other_reductions():
    with pytest.raises(AssertionError, match="Unsupported reduction"):
        poptorch.identity_loss(X, "max")


def test_checkpoint_keeps_the_container():
    y = X + 1
    several = poptorch.recomputationCheckpoint(X, y)
    assert isinstance(several, tuple)
    assert torch.equal(several[1], y)
    as_list = poptorch.recomputationCheckpoint([X, y])
    assert isinstance(as_list, list)
    assert len(as_list) == 2
    as_tuple = poptorch.recomputationCheckpoint((X,))
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], X)
    with pytest.raises(ValueError, match="tensors"):
        poptorch.recomputationCheckpoint(X, 3)


def test_serialized_matmul_is_a_matmul_and_checks_types():
    modes = poptorch.MatMulSerializationMode
    assert torch.equal(poptorch.serializedMatMul(X, X, modes.InputChannels, 2), X @ X)
    for arguments in [("input_channels", 2, False), (modes.Disabled, 2.0, False), (modes.Disabled, 2, 1)]:
        with pytest.raises(AssertionError):
            poptorch.serializedMatMul(X, X, *arguments)


def test_overlap_keeps_the_structure_and_values_that_are_not_tensors():
    structure = {"a": X, "b": [X, 3, ("text", None)]}
    result = poptorch.set_overlap_for_input(structure, poptorch.OverlapMode.NoOverlap)
    assert result["a"] is X
    assert result["b"][1:] == [3, ("text", None)]


def test_for_loop_body_runs_once_on_copies():
    def body(value):
        value += 1
        return value

    start = torch.zeros(2)
    result = poptorch.for_loop(10, body, [start])
    assert isinstance(result, list)
    assert torch.equal(result[0], torch.ones(2))
    assert torch.equal(start, torch.zeros(2))


@pytest.mark.parametrize(("inputs", "message"), [(X, "Object is not list"), ([X, 5], "index 1 is not torch.tensor")])
def test_control_flow_refuses_inputs_that_are_not_lists_of_tensors(inputs, message):
    with pytest.raises(ValueError, match=message):
        poptorch.for_loop(2, lambda *values: list(values), inputs)
    with pytest.raises(ValueError, match=message):
        poptorch.cond(torch.tensor(True), lambda *v: list(v), inputs, lambda *v: list(v), [X])
    with pytest.raises(ValueError, match=message):
        poptorch.cond(torch.tensor(True), lambda *v: list(v), [X], lambda *v: list(v), inputs)


@pytest.mark.parametrize("flag", [True, False])
def test_cond_takes_the_branch(flag):
    result = poptorch.cond(torch.tensor([flag]), lambda v: v + 1, [X], lambda v: v * 2, [X])
    assert isinstance(result, list)
    assert torch.equal(result[0], X + 1 if flag else X * 2)


@pytest.mark.parametrize("start_type", [torch.int16, torch.int32, torch.int64])
def test_dynamic_slice_and_update(start_type):
    values = torch.arange(16.0).reshape(2, 8)
    start = torch.tensor([3], dtype=start_type)
    assert torch.equal(poptorch.dynamic_slice(values, 1, start, 4, 2), values[:, 3:7:2])
    source = -torch.ones(2, 4)
    expected = values.clone()
    expected[:, 3:7] = source
    assert torch.equal(poptorch.dynamic_update(values, source, 1, start, 4), expected)
    assert values[0, 3] == 3.0


def test_dynamic_slice_refuses_wrong_types():
    start = torch.tensor([0])
    for dim, size, step in [(0.0, 1, 1), (0, 1.0, 1), (0, 1, 1.0)]:
        with pytest.raises(poptorch.Error, match="integer"):
            poptorch.dynamic_slice(X, dim, start, size, step)


def test_dynamic_update_refuses_a_different_rank_or_type():
    start = torch.tensor([0])
    with pytest.raises(poptorch.Error, match=r"same dimensionality. \(2\) vs \(1\)"):
        poptorch.dynamic_update(X, torch.ones(2), 0, start, 1)
    with pytest.raises(poptorch.Error, match=r"same dtype. \(torch.float32 vs torch.int32\)"):
        poptorch.dynamic_update(X, torch.ones(1, 2, dtype=torch.int32), 0, start, 1)


def test_beam_search_decoder_returns_zeros_of_the_right_shapes():
    scores, lengths, paths = poptorch.ctc_beam_search_decoder(
        torch.randn(5, 3, 4), torch.tensor([5, 4, 3]), top_paths=2
    )
    assert scores.shape == lengths.shape == (3, 2)
    assert paths.shape == (3, 2, 5)
    assert not scores.any()
    assert not paths.any()
    with pytest.raises(poptorch.Error):
        poptorch.ctc_beam_search_decoder(torch.randn(5, 4), torch.tensor([5]))


@pytest.mark.parametrize(
    "attributes",
    [
        {1: 2.0},
        {"key": None},
        {"key": {"a": 1}},
        {"key": [1, 2.0]},
        {"key": "a\u1f00b"},
        {"key": ["ok", "a\u1f00b"]},
        {"a\u1f00b": 1},
    ],
)
def test_custom_op_refuses_invalid_attributes(attributes):
    with pytest.raises(ValueError):
        poptorch.custom_op([X], "Cube", "com.acme", 1, example_outputs=[X], attributes=attributes)


def test_custom_op_returns_zeros_like_the_examples():
    first, second = poptorch.custom_op([X], "Cube", "com.acme", 1, example_outputs=[X, torch.ones(3)])
    assert torch.equal(first, torch.zeros(2, 2))
    assert torch.equal(second, torch.zeros(3))


def test_cpu_calls_the_function_and_freezes_a_module():
    assert torch.equal(poptorch.CPU(lambda a, b: a * b, "Times")(X, X), X * X)
    layer = torch.nn.Linear(2, 2)
    on_host = poptorch.CPU(layer, "Layer")
    assert not layer.weight.requires_grad
    assert torch.equal(on_host(X), layer(X))


def test_multi_conv_settings_can_be_chained_and_are_checked():
    multi_conv = poptorch.MultiConv()
    chained = (
        multi_conv.availableMemoryProportions(0.5)
        .availableMemoryProportions([0.1, 0.2])
        .partialsTypes(torch.float)
        .partialsTypes([torch.half, torch.float])
        .enableConvDithering([True, False])
        .planType(poptorch.MultiConvPlanType.Serial)
        .perConvReservedTiles(120)
        .cycleBackOff(0.3)
    )
    assert chained is multi_conv
    for method, value, error in [
        ("availableMemoryProportions", 1, AssertionError),
        ("availableMemoryProportions", [], AssertionError),
        ("partialsTypes", torch.int32, ValueError),
        ("enableConvDithering", 1, ValueError),
        ("enableConvDithering", [True, 1], ValueError),
        ("planType", "serial", AssertionError),
        ("perConvReservedTiles", 1.5, AssertionError),
        ("cycleBackOff", 1, AssertionError),
    ]:
        with pytest.raises(error):
            getattr(multi_conv, method)(value)


def test_multi_conv_and_name_scope_change_nothing():
    conv = torch.nn.Conv2d(1, 2, 3)
    image = torch.randn(1, 1, 5, 5)
    with poptorch.MultiConv(), poptorch.NameScope("scope"):
        result = conv(image)
    assert torch.equal(result, conv(image))
    with pytest.raises(AssertionError):
        poptorch.NameScope(3)


def test_farthest_points_of_each_cloud():
    points = torch.tensor([[0.0], [1.0], [10.0], [6.0], [100.0], [101.0]])
    assert poptorch.fps(points, [0, 4, 6], ratio=0.75).tolist() == [0, 2, 3, 4, 5]
    for arguments in [([0.0, 4.0], 0.5, False), ([0, 4], 1, False), ([0, 4], 0.5, 0)]:
        with pytest.raises(poptorch.Error):
            poptorch.fps(points, *arguments)


def test_nearest_point_within_the_cloud():
    x = torch.tensor([[0.0, 0.0], [5.0, 5.0], [5.0, 5.0]])
    y = torch.tensor([[1.0, 0.0], [4.0, 5.0], [90.0, 90.0]])
    assert poptorch.nearest(x, y).tolist() == [0, 1, 1]
    assert poptorch.nearest(x, y, [0, 0, 1], [0, 0, 1]).tolist() == [0, 1, 2]
    batch = torch.tensor([0, 0, 1])
    assert poptorch.nearest(x, y, batch, batch).tolist() == [0, 1, 2]
    with pytest.raises(poptorch.Error):
        poptorch.nearest(x, y, [0, 0, 1], batch)
