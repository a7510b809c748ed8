"""Integers on the device have 32 bits: values that do not fit wrap around."""

import pytest
import torch

from ipurun import emulator as poptorch

LARGE = torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int64)


def _as_int32(value):
    return torch.tensor((value + 2**31) % 2**32 - 2**31, dtype=torch.int32)


def _run(function, *inputs):
    model = torch.nn.Module()
    model.forward = function
    return poptorch.inferenceModel(model)(*inputs)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x: (x + 1).float(), lambda v: v + 1),
        (lambda x: (1 - x).float(), lambda v: 1 - v),
        (lambda x: (x * 3).float(), lambda v: v * 3),
        (lambda x: (-x).float(), lambda v: -v),
        (lambda x: (x**2).float(), lambda v: v * v),
        (lambda x: x.clone().add_(7).float(), lambda v: v + 7),
    ],
    ids=["add", "rsub", "mul", "neg", "pow", "add_"],
)
def test_arithmetic_wraps_around_before_it_is_used(function, exact):
    expected = torch.stack([_as_int32(exact(value)) for value in LARGE.tolist()]).float()
    assert torch.equal(_run(function, LARGE), expected)


def test_a_sum_wraps_around_before_it_is_divided():
    x = torch.tensor([2**30, 2**30, 2**30], dtype=torch.int64)
    found = _run(lambda x: torch.div(x.sum(), 2, rounding_mode="trunc"), x)
    assert found.dtype == torch.int32
    assert found.item() == -(2**29)  # 3 * 2**30 is -2**30 in 32 bits


def test_comparisons_see_the_wrapped_value():
    assert _run(lambda x: x + 1 > x, LARGE).tolist() == [False, True, True]


def test_values_in_range_are_unchanged():
    x = torch.tensor([1, -2, 3], dtype=torch.int64)
    found = _run(lambda x, w: (x * 1000 + 7, w.index_select(0, x.abs())), x, torch.arange(5.0))
    assert found[0].tolist() == [1007, -1993, 3007]
    assert found[1].tolist() == [1.0, 2.0, 3.0]


def test_an_integer_buffer_is_a_constant():
    """What forward writes to it wraps around, is seen for the rest of the run, and is gone at its end."""

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor([2**31 - 2], dtype=torch.int64))

        def forward(self, x):
            before = self.count.clone()
            self.count += 2
            return x * before, x * self.count

    model = Counter()
    executor = poptorch.inferenceModel(model, poptorch.Options().replicationFactor(2))
    x = torch.ones(2, dtype=torch.int32)
    for _ in range(2):
        before, after = executor(x)
        assert before.tolist() == [2**31 - 2] * 2 and after.tolist() == [-(2**31)] * 2
    executor.copyWeightsToHost()
    assert model.count.item() == 2**31 - 2
    with torch.no_grad():
        model.count.fill_(5)  # compiled in: a later value of the host stays on the host
    executor.copyWeightsToDevice()
    assert executor(x)[0].tolist() == [2**31 - 2] * 2
    executor.copyWeightsToHost()
    assert model.count.item() == 5


def test_a_buffer_is_narrowed_when_uploaded():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.tensor([2**32 + 3, 4], dtype=torch.int64))

        def forward(self, x):
            return x * self.wide.float()

    assert poptorch.inferenceModel(Model())(torch.ones(2)).tolist() == [3.0, 4.0]


def test_micro_batches_with_integers_equal_one_by_one():
    class Model(torch.nn.Module):
        def forward(self, x, w):
            return w * (x * 2**20 + 1).float()

    x = torch.tensor([[1], [2**12], [2**11], [3]], dtype=torch.int64)
    executor = poptorch.inferenceModel(Model(), poptorch.Options().deviceIterations(4))
    expected = torch.stack([_as_int32(value * 2**20 + 1) for value in x.flatten().tolist()]).float()
    for _ in range(2):
        found = executor(x, torch.ones(4, 1)).flatten()
        assert torch.equal(found, expected)
