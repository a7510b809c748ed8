"""Quicker kernels and reused memory: the same bits as torch's operations; freed memory stays with the process."""

import resource

import pytest
import torch
from torch import nn
from torch.nn import functional

from ipurun import emulator
from ipurun.emulator._capture.graph import Graph, GraphInput, Node, Placement, TensorSpec, Value
from ipurun.emulator._run import kernels
from ipurun.emulator._run.checked import ReplayMaker

ATEN = torch.ops.aten


def quick(op):
    """Return what a replay calls in place of an operation."""
    return kernels._QUICKER[op]


@pytest.mark.parametrize("shape", [(16, 5, 26, 26), (128, 16, 24, 24), (3, 7, 33, 20), (1, 2, 64, 64), (2, 3, 5, 5)])
@pytest.mark.parametrize(
    "arguments",
    [
        ([2, 2], [2, 2]),
        ([3, 3], [2, 2], [1, 1]),
        ([2, 3], [1, 2], [0, 1], [2, 1]),
        ([3, 3], [2, 2], [0, 0], [1, 1], True),
    ],
)
def test_max_pool_gives_the_same_values_and_indices(shape, arguments):
    image = torch.randn(shape).round(decimals=1)  # with equal numbers in a window
    image[0, 0, 2, 2] = float("nan")
    image[0, 1] = float("-inf")
    expected = ATEN.max_pool2d_with_indices(image, *arguments)
    got = quick(ATEN.max_pool2d_with_indices.default)(image, *arguments)
    assert torch.equal(got[0].nan_to_num(7.0), expected[0].nan_to_num(7.0))
    assert torch.equal(got[1], expected[1])
    assert [each.stride() for each in got] == [each.stride() for each in expected]


@pytest.mark.skipif(not hasattr(ATEN, "_safe_softmax"), reason="torch before 2.5 has no such operation")
@pytest.mark.parametrize("masked", ["nothing", "a row", "a part", "nan"])
def test_safe_softmax_gives_the_same_values(masked):
    scores = torch.randn(4, 3, 8, 8)
    if masked == "a row":
        scores[1, 2, 3] = float("-inf")
    elif masked != "nothing":
        scores[1, 2, 3, :5] = float("-inf") if masked == "a part" else float("nan")
    expected = ATEN._safe_softmax(scores, -1)
    assert torch.equal(quick(ATEN._safe_softmax.default)(scores, -1).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_for_several_micro_batches_agrees_with_torch(approximate):
    op, op_backward = (kernels._ROUNDED_DIFFERENTLY[getattr(ATEN, name).default] for name in ("gelu", "gelu_backward"))
    source = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-30, 80.0, -80.0, float("nan")])])
    exact = source.double()
    given = {"approximate": approximate}
    expected = ATEN.gelu(exact, **given)
    assert torch.allclose(op(source, **given).double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    grad = torch.randn_like(source)
    expected = ATEN.gelu_backward(grad.double(), exact, **given)
    got = op_backward(grad.clone(), source, **given).double()
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_its_share_and_draws_the_same_in_half(probability):
    torch.manual_seed(3)
    drawn = kernels.draw_bernoulli(torch.empty(200, 1000), probability)
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    # Five standard deviations of the mean of 200,000 draws.
    assert abs(drawn.mean().item() - probability) <= 5 * (probability * (1 - probability) / drawn.numel()) ** 0.5
    torch.manual_seed(3)
    half = kernels.draw_bernoulli(torch.empty(200, 1000, dtype=torch.float16), probability)
    assert half.dtype == torch.float16
    assert torch.equal(half.float(), drawn)


class Net(nn.Module):
    """Convolutions, norms, residuals, attention-like products and values that are used again later."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x, y):
        hidden = functional.relu(self.norm(self.conv(x)))
        hidden = functional.max_pool2d(hidden, 2) * 0.5 + 1
        rows = hidden.flatten(2).transpose(1, 2)
        later = rows + rows.detach()
        rows = rows + self.narrow(functional.gelu(self.wide(rows), approximate="tanh"))
        mixed = torch.softmax(rows @ rows.transpose(1, 2) * 0.3, -1) @ rows
        scores = self.out((mixed + later - rows).mean(1) / 2)
        return scores, functional.cross_entropy(scores, y), hidden


def test_reusing_memory_changes_no_bit():
    torch.manual_seed(0)
    model = Net()
    training = emulator.trainingModel(model, emulator.Options(), emulator.optim.SGD(model.parameters(), lr=0.0))
    x, y = torch.randn(4, 2, 16, 16), torch.randint(0, 4, (4,))
    training(x, y)
    executable = training._executable
    graph = executable.graph
    arguments = executable.arguments(0, [x, y], torch.ones(()))
    before = [argument.clone() for argument in arguments]
    replaced = kernels.with_quick_kernels(graph, [*graph.outputs, *graph.grads.values()])
    assert sum(old.op is not new.op for old, new in zip(graph.nodes, replaced.nodes)) > 8
    with torch.no_grad():
        expected = ReplayMaker(as_captured=True)(graph)(arguments)
        got = ReplayMaker()(graph)(arguments)
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(arguments, before))


def graph_of(*nodes, results, shared=()):
    """Return a graph on values of one shape: v0 is its input; `shared` values have the memory of another one."""
    specs = {Value(i): TensorSpec((2, 3), torch.float32, dict(shared).get(i, i)) for i in range(6)}
    made = [
        Node(op, tuple(Value(a) if isinstance(a, int) else a for a in args), {}, Value(out), Placement(), name=name)
        for name, op, args, out in nodes
    ]
    inputs = [GraphInput("input", "x", Value(0))]
    return Graph(nodes=made, inputs=inputs, outputs=[Value(r) for r in results], specs=specs)


@pytest.mark.parametrize(
    ("graph", "reused"),
    [
        (graph_of(("exp", ATEN.exp.default, (0,), 1), ("relu", ATEN.relu.default, (1,), 2), results=[2]), True),
        (graph_of(("relu", ATEN.relu.default, (0,), 2), results=[2]), False),  # the input is the caller's
        (graph_of(("exp", ATEN.exp.default, (0,), 1), ("relu", ATEN.relu.default, (1,), 2), results=[1, 2]), False),
        (
            graph_of(
                ("exp", ATEN.exp.default, (0,), 1),
                ("relu", ATEN.relu.default, (1,), 2),
                ("neg", ATEN.neg.default, (1,), 3),
                results=[2, 3],
            ),
            False,  # it is read later
        ),
        (
            graph_of(
                ("exp", ATEN.exp.default, (0,), 1),
                ("detach", ATEN.detach.default, (1,), 3),
                ("relu", ATEN.relu.default, (1,), 2),
                ("neg", ATEN.neg.default, (3,), 4),
                results=[2, 4],
                shared={3: 1}.items(),
            ),
            False,  # another name of it is read later
        ),
        (
            graph_of(
                ("exp", ATEN.exp.default, (0,), 1),
                ("keep", lambda tensor: tensor.neg(), (1,), 3),
                ("relu", ATEN.relu.default, (1,), 2),
                results=[2, 3],
            ),
            False,  # a function of the user may keep it
        ),
    ],
)
def test_only_memory_that_nothing_reads_is_reused(graph, reused):
    changed = kernels.with_quick_kernels(graph, graph.outputs)
    before, after = ([node.op for node in each.nodes if node.name == "relu"] for each in (graph, changed))
    assert (before != after) == reused


def test_an_operand_of_another_layout_is_not_written():
    left, right = torch.randn(3, 4), torch.randn(4, 3).t()
    copy = right.clone()
    got = kernels._into_second(ATEN.add.Tensor, ATEN.add_.Tensor, left, right)
    assert torch.equal(got, left + copy)
    assert got.stride() == left.stride()
    assert torch.equal(right, copy)


def test_what_the_user_set_for_the_allocator_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert kernels.keep_freed_memory.__wrapped__() is False


def test_a_step_gets_the_memory_of_the_step_before():
    if not kernels.keep_freed_memory():
        pytest.skip("not glibc, or its settings are the user's")

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            kept = [torch.ones(2**19) for _ in range(40)]
            del kept
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < 4000  # 80 MB four times are 82,000 pages
