"""PopTorch's ops inside an executor: run-time values, and checks at compile time."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import ipurun.emulator as poptorch


class Calls(torch.nn.Module):
    """A model whose forward is the given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Trained(Calls):
    """A model with one weight `w`, the first argument of the function that returns the loss."""

    def __init__(self, function, weight):
        super().__init__(function)
        self.w = torch.nn.Parameter(weight.clone())

    def forward(self, *args):
        return poptorch.identity_loss(self.function(self.w, *args), "sum")


def infer(function, options=None):
    return poptorch.inferenceModel(Calls(function), options)


def trained_weight(function, weight, *args, options=None):
    model = Trained(function, weight)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(*args)
    return model.w.detach().clone()


def test_for_loop_repeats_the_body_and_runs_its_python_once():
    traced = []

    def forward(x, y):
        def body(a, b):
            traced.append(1)
            b += 1
            return a * y, b

        return poptorch.for_loop(10, body, [x, x])

    executor = infer(forward)
    x, y = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0])
    result = executor(x, y)
    assert torch.equal(result[0], torch.tensor([1024.0, 3.0]))
    assert torch.equal(result[1], x + 10)
    assert torch.equal(executor(x, y * 0)[0], torch.zeros(2))
    assert torch.equal(x, torch.tensor([1.0, 3.0]))
    assert len(traced) == 1


def test_for_loop_uses_weights_of_the_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return poptorch.for_loop(3, lambda v: torch.relu(self.layer(v)), [x])[0]

    model = Model()
    x = torch.randn(2, 3)
    expected = x
    for _ in range(3):
        expected = torch.relu(model.layer(expected))
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), expected.detach())


def test_for_loop_that_swaps_and_for_loop_without_iterations():
    executor = infer(lambda a, b: poptorch.for_loop(3, lambda x, y: (y, x + 1), [a, b]))
    first, second = executor(torch.tensor([0.0]), torch.tensor([10.0]))
    assert (first.item(), second.item()) == (11.0, 2.0)
    none = infer(lambda a: poptorch.for_loop(0, lambda x: x + 1, [a]))
    assert none(torch.tensor([5.0]))[0].item() == 5.0


@pytest.mark.parametrize("op", ["for_loop", "cond", "CPU"])
def test_inference_only_ops_are_refused_in_training(op):
    bodies = {
        "for_loop": lambda w: poptorch.for_loop(2, lambda v: v * 2, [w])[0],
        "cond": lambda w: poptorch.cond(w.sum() > 0, lambda v: v, [w], lambda v: -v, [w])[0],
        "CPU": poptorch.CPU(lambda v: v * 2, "TwiceOnHost"),
    }
    with pytest.raises(poptorch.Error, match=rf"poptorch\.{op}\(\) is only supported in inference"):
        trained_weight(bodies[op], torch.ones(2))


def test_for_loop_body_must_return_tensors_like_its_arguments():
    with pytest.raises(poptorch.Error, match="for_loop"):
        infer(lambda x: poptorch.for_loop(2, lambda v: (v, v), [x]))(torch.ones(2))


def test_cond_chooses_at_run_time():
    def forward(flag, x):
        return poptorch.cond(flag, lambda a, b: a + b, [x, x], lambda a: a * a, [x])

    executor = infer(forward)
    x = torch.tensor([3.0, 5.0])
    assert torch.equal(executor(torch.tensor([True]), x)[0], x + x)
    assert torch.equal(executor(torch.tensor([False]), x)[0], x * x)


def test_cond_branches_must_agree():
    executor = infer(lambda f, x: poptorch.cond(f, lambda v: v, [x], lambda v: (v, v), [x]))
    with pytest.raises(poptorch.Error, match="cond"):
        executor(torch.tensor([True]), torch.ones(2))


def test_dynamic_slice_uses_the_run_time_start():
    executor = infer(lambda t, s: poptorch.dynamic_slice(t, 0, s, 4, 2))
    values = torch.arange(8.0)
    executor.compile(values, torch.tensor([21]))
    for start in (0, 1, 3):
        assert torch.equal(executor(values, torch.tensor([start])), values[start : start + 4 : 2])


def test_dynamic_update_uses_the_run_time_start():
    executor = infer(lambda t, u, s: poptorch.dynamic_update(t, u, 1, s, 2))
    values, update = torch.zeros(2, 5), torch.ones(2, 2)
    for start in (0, 2, 3):
        expected = values.clone()
        expected[:, start : start + 2] = update
        assert torch.equal(executor(values, update, torch.tensor([start])), expected)


@pytest.mark.parametrize(
    ("size", "step", "message"),
    [
        (0, 1, "start and end of a slice must be different"),
        (-2, 1, "end less than the start"),
        (4, 0, "step"),
        (7, 1, r"size of the slice \(7\) must be a factor of the slicing dimension \(8\)"),
    ],
)
def test_dynamic_slice_is_checked_at_compile_time(size, step, message):
    executor = infer(lambda t, s: poptorch.dynamic_slice(t, 0, s, size, step))
    with pytest.raises(poptorch.Error, match=message):
        executor(torch.arange(8.0), torch.tensor([1]))


def test_cpu_op_gets_run_time_values():
    seen = []

    def on_host(a, b):
        assert not poptorch.isRunningOnIpu() or not seen
        seen.append(a.tolist())
        return a * b, torch.tensor(sum(a.tolist()))

    host = poptorch.CPU(on_host, "OnHost")

    def forward(a, b):
        product, total = host(a + 1, b)
        return product * 3, total

    executor = infer(forward)
    executor(torch.tensor([1.0, 2.0]), torch.tensor([2.0]))
    product, total = executor(torch.tensor([5.0, 6.0]), torch.tensor([10.0]))
    assert seen[-1] == [6.0, 7.0]
    assert torch.equal(product, torch.tensor([180.0, 210.0]))
    assert total.item() == 13.0


def test_second_cpu_op_with_the_same_name_calls_the_first_function():
    first, second = poptorch.CPU(lambda v: v + 1, "Same"), poptorch.CPU(lambda v: v * 100, "Same")
    assert infer(lambda x: second(first(x)))(torch.tensor([1.0])).item() == 3.0
    assert infer(lambda x: second(x))(torch.tensor([1.0])).item() == 100.0


def test_custom_op_runs_the_registered_implementation_and_its_gradient():
    poptorch.ops.register_cpu_implementation("Scale", "test.ops", lambda x, factor: x**3 * factor)
    try:

        def cube(x):
            return poptorch.custom_op([x], "Scale", "test.ops", 1, [x], attributes={"factor": 2.0})[0]

        x = torch.tensor([1.0, 2.0])
        assert torch.equal(infer(cube)(x), 2 * x**3)
        torch.testing.assert_close(trained_weight(cube, x), x - 6 * x**2)
    finally:
        poptorch.ops.register_cpu_implementation("Scale", "test.ops", None)


def test_custom_op_uses_the_registered_backward():
    def backward(inputs, outputs, grads):
        return [grads[0] * 0 + 7.0]

    poptorch.ops.register_cpu_implementation("Odd", "test.ops", lambda x: x * 2, backward)
    try:

        def op(w):
            return poptorch.custom_op((w,), "Odd", "test.ops", 1, (w,))[0]

        assert torch.equal(trained_weight(op, torch.ones(2)), torch.full((2,), -6.0))
    finally:
        poptorch.ops.register_cpu_implementation("Odd", "test.ops", None)


def _fast_gather(data, index):
    example = torch.zeros(index.shape).type_as(data)
    return poptorch.custom_op([data, index], "FastGatherLastDim", "poptorch.custom_ops", 1, [example])[0]


def test_fast_gather_of_poptorch_works_and_has_a_gradient():
    data = torch.arange(12.0).reshape(2, 2, 3)
    index = torch.tensor([[[0, 2], [1, 1]], [[2, 2], [0, 1]]])
    expected = torch.tensor([[[0.0, 2.0], [4.0, 4.0]], [[8.0, 8.0], [9.0, 10.0]]])
    assert torch.equal(infer(_fast_gather)(data, index), expected)
    uses = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]], [[0.0, 0.0, 2.0], [1.0, 1.0, 0.0]]])

    def gather(weight):
        places = torch.tensor([[[0, 2], [1, 1]], [[2, 2], [0, 1]]])
        return _fast_gather(weight, places)

    torch.testing.assert_close(trained_weight(gather, data), data - uses)


@pytest.mark.parametrize(("axis", "accepted"), [(-1, True), (1, True), (0, False)])
def test_fast_gather_of_poptorch_takes_the_last_axis(axis, accepted):
    def gather(data, index):
        inputs, attributes = [data, index], {"axis": axis}
        return poptorch.custom_op(inputs, "FastGatherLastDim", "poptorch.custom_ops", 1, [data], attributes)[0]

    data, index = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]])
    if accepted:
        assert infer(gather)(data, index).tolist() == [[2.0, 1.0]]
    else:
        with pytest.raises(poptorch.Error, match="axis must be the last one, got 0"):
            infer(gather)(data, index)


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 3)])
def test_fast_gather_of_poptorch_needs_equal_dimensions_except_the_last(shape):
    with pytest.raises(poptorch.Error, match="FastGatherLastDim"):
        infer(_fast_gather)(torch.ones(2, 2, 3), torch.zeros(shape, dtype=torch.int64))


def test_custom_op_without_implementation_says_how_to_register_one():
    executor = infer(lambda x: poptorch.custom_op([x], "Nobody", "test.ops", 1, [x])[0])
    with pytest.raises(poptorch.Error, match="register_cpu_implementation"):
        executor(torch.ones(1))


@pytest.mark.parametrize(("value", "side"), [(1.0e300, "high"), (-1.0e300, "low")])
def test_custom_op_float_attributes_must_fit_float32(value, side):
    executor = infer(lambda x: poptorch.custom_op([x], "Any", "test.ops", 1, [x], attributes={"v": [value]})[0])
    with pytest.raises(poptorch.Error, match=f"too {side} for a Popart float attribute"):
        executor(torch.ones(1))


def best_label_sequences(log_probs, blank):
    """Return the log-probability of every label sequence, summed over all alignments."""
    steps, classes = log_probs.shape
    totals = {}
    for alignment in itertools.product(range(classes), repeat=steps):
        merged = [label for label, _ in itertools.groupby(alignment)]
        labels = tuple(label for label in merged if label != blank)
        probability = math.exp(sum(log_probs[t, label].item() for t, label in enumerate(alignment)))
        totals[labels] = totals.get(labels, 0.0) + probability
    return sorted(((math.log(p), labels) for labels, p in totals.items()), reverse=True)


@pytest.mark.parametrize("blank", [0, 2])
def test_beam_search_decoder_finds_the_most_likely_sequences(blank):
    torch.manual_seed(3)
    log_probs = torch.log_softmax(2 * torch.randn(5, 2, 3), -1)
    lengths = torch.tensor([5, 4], dtype=torch.int32)
    executor = infer(lambda p, n: poptorch.ctc_beam_search_decoder(p, n, blank, top_paths=3))
    # One micro-batch: the batch is dimension 1, so dimension 0 is not split.
    scores, path_lengths, paths = executor(log_probs, lengths)
    for sample in range(2):
        expected = best_label_sequences(log_probs[: lengths[sample], sample], blank)[:3]
        for rank, (score, labels) in enumerate(expected):
            assert scores[sample, rank].item() == pytest.approx(score, abs=1e-4)
            assert path_lengths[sample, rank].item() == len(labels)
            assert tuple(paths[sample, rank, : len(labels)].tolist()) == labels


def test_ctc_loss_with_padded_targets():
    torch.manual_seed(0)
    weight = torch.randn(6, 2, 4)
    targets = torch.tensor([[1, 2, 0], [3, 3, 1]])
    input_lengths, target_lengths = torch.tensor([6, 6]), torch.tensor([2, 3])
    loss = torch.nn.CTCLoss(reduction="mean")

    def forward(w, *args):
        return loss(torch.log_softmax(w, -1), *args)

    reference = weight.clone().requires_grad_()
    forward(reference, targets, input_lengths, target_lengths).backward()
    updated = trained_weight(forward, weight, targets, input_lengths, target_lengths)
    torch.testing.assert_close(updated, weight - reference.grad)


@pytest.mark.parametrize("make", [list, tuple])
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_loss_with_python_lengths(reduction, zero_infinity, make):
    torch.manual_seed(0)
    weight = torch.randn(6, 3, 4)
    targets = torch.tensor([[1, 2, 0], [3, 3, 1], [2, 2, 2]])
    # With zero_infinity, the last sample is too short for its target.
    lengths = make([6, 5, 2 if zero_infinity else 6]), make([2, 3, 3])
    loss = torch.nn.CTCLoss(reduction=reduction, zero_infinity=zero_infinity)

    def forward(w, targets):
        return loss(torch.log_softmax(w, -1), targets, *lengths)

    reference = weight.clone().requires_grad_()
    forward(reference, targets).backward()
    torch.testing.assert_close(trained_weight(forward, weight, targets), weight - reference.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_loss_of_half_log_probabilities(reduction):
    torch.manual_seed(0)
    log_probs = torch.randn(6, 2, 4).log_softmax(-1).half()
    targets = torch.tensor([[1, 2, 0], [3, 3, 1]])
    got = infer(lambda x, t: functional.ctc_loss(x, t, [6, 5], [2, 3], reduction=reduction))(log_probs, targets)
    expected = functional.ctc_loss(log_probs.float(), targets, [6, 5], [2, 3], reduction=reduction)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=0.0)


def test_ctc_loss_without_reduction_is_refused_however_it_is_given():
    log_probs, targets = torch.randn(4, 2, 3).log_softmax(-1), torch.ones(2, 2, dtype=torch.int64)
    for loss in (functional.ctc_loss, torch.ctc_loss):
        none = "none" if loss is functional.ctc_loss else 0
        with pytest.raises(poptorch.Error, match="Unsupported reduction type for ctc_loss"):
            infer(lambda x, t, loss=loss, none=none: loss(x, t, [4, 4], [2, 2], 0, none))(log_probs, targets)


@pytest.mark.parametrize(
    ("mode", "factor", "fits"),
    [
        ("InputChannels", 2, True),
        ("ReducingDim", 3, True),
        ("OutputChannels", 5, True),
        ("Disabled", 0, True),
        ("InputChannels", 3, False),
        ("ReducingDim", 2, False),
        ("OutputChannels", 2, False),
        ("OutputChannels", 0, False),
    ],
)
def test_serialized_matmul(mode, factor, fits):
    serialization = poptorch.MatMulSerializationMode[mode]
    executor = infer(lambda a, b: poptorch.serializedMatMul(a, b, serialization, factor))
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    if fits:
        torch.testing.assert_close(executor(a, b), a @ b)
    else:
        with pytest.raises(poptorch.Error, match="factor"):
            executor(a, b)


def test_multi_conv_computes_the_convolutions():
    first, second = torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(1, 2, 3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            with poptorch.MultiConv().availableMemoryProportions(0.1):
                a, b = self.first(x), self.second(x)
            return a + b

    image = torch.randn(1, 1, 5, 5)
    torch.testing.assert_close(poptorch.inferenceModel(Model())(image), (first(image) + second(image)).detach())


def test_multi_conv_refuses_nesting_and_scopes_without_convolution():
    def empty(x):
        with poptorch.MultiConv():
            return x + 1

    def nested(x):
        with poptorch.MultiConv(), poptorch.MultiConv():
            return torch.nn.functional.conv1d(x, torch.ones(1, 1, 1))

    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        infer(empty)(torch.ones(2))
    with pytest.raises(poptorch.Error, match="Nested"):
        infer(nested)(torch.ones(1, 1, 4))
    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        infer(empty)(torch.ones(2))


def test_identity_like_ops_pass_values_and_gradients():
    def forward(w):
        w = poptorch.nop(w)
        w = poptorch.recomputationCheckpoint(w * w)
        with poptorch.NameScope("scope"):
            return poptorch.set_available_memory(w * 3, 0.2)

    weight = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(trained_weight(forward, weight), weight - 6 * weight)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_identity_loss_gradient(reduction):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self):
            return poptorch.identity_loss(self.w * 4, reduction)

    model = Model()
    executor = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=1.0))
    loss = executor()
    assert loss.shape == ()
    assert loss.item() == {"sum": 12.0, "mean": 6.0}[reduction]
    step = {"sum": 4.0, "mean": 2.0}[reduction]
    torch.testing.assert_close(model.w.detach(), torch.tensor([1.0, 2.0]) - step)


def test_for_loop_calls_host_functions_in_every_iteration():
    seen = []
    host = poptorch.CPU(lambda v: (seen.append(v.item()), v * 2)[1], "Doubled")
    executor = infer(lambda x: poptorch.for_loop(3, lambda v: host(v) + 1, [x])[0])
    executor(torch.tensor([0.0]))
    seen.clear()
    assert executor(torch.tensor([5.0])).item() == 47.0
    assert seen == [5.0, 11.0, 23.0]
