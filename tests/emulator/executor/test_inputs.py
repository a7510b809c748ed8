"""Arguments of a wrapped model: binding, splitting, and comparing calls with the first one."""

from collections import namedtuple

import pytest
import torch
from executor_models import options
from torch import nn

import ipurun.emulator as poptorch


class _Sum(nn.Module):
    def forward(self, a, b, c=2.0, *, scale=1):
        return (a + b) * c * scale


def _infer(forward, **kwargs):
    class Model(nn.Module):
        pass

    Model.forward = forward
    return poptorch.inferenceModel(Model(), options(**kwargs))


def test_positional_and_named_arguments_are_the_same_call():
    executor = poptorch.inferenceModel(_Sum())
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert float(executor(a, b)) == 6.0
    assert float(executor(b=b, a=a)) == 6.0
    assert float(executor(a, b, c=2.0)) == 6.0


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((1, 2, 3, 4), {}, AssertionError),
        ((1, 2), {"other": 1}, AssertionError),
        ((1, 2), {"a": 1}, AssertionError),
        ((1,), {}, poptorch.Error),
    ],
    ids=["too many", "unknown", "twice", "missing"],
)
def test_arguments_must_match_the_signature(args, kwargs, error):
    def tensors(items):
        return [torch.ones(1) for _ in items]

    with pytest.raises(error):
        poptorch.inferenceModel(_Sum())(*tensors(args), **{key: torch.ones(1) for key in kwargs})


def test_variadic_arguments_keep_their_names():
    executor = _infer(lambda self, *tensors, **named: sum(tensors) * named["factor"])
    assert float(executor(torch.ones(1), torch.ones(1), factor=torch.full((1,), 3.0))) == 6.0


Pair = namedtuple("Pair", ["x", "y"])


def test_nested_arguments():
    def forward(self, pair, table, items):
        assert isinstance(pair, Pair)
        assert isinstance(table, dict)
        assert isinstance(items, list)
        return pair.x + pair.y * table["scale"] + items[0][0]

    executor = _infer(forward)
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert float(executor(Pair(one, two), {"scale": two, "unused": one}, [(one,)])) == 6.0
    # The order of keys in the first call is used, not that of this one.
    assert float(executor(Pair(one, two), {"unused": one, "scale": two}, [(one,)])) == 6.0


class _Wrapped:
    def __init__(self, tensor):
        self.tensor = tensor


class _WrappedParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.tensor

    def reconstruct(self, original_structure, tensor_iterator):
        return _Wrapped(next(tensor_iterator))


def test_classes_with_a_parser_can_be_passed_and_returned():
    poptorch.registerCustomArgParser(_Wrapped, _WrappedParser())
    try:
        executor = _infer(lambda self, w: _Wrapped(w.tensor * 2), device_iterations=2)
        result = executor(_Wrapped(torch.tensor([1.0, 2.0])))
        assert isinstance(result, _Wrapped)
        assert result.tensor.tolist() == [2.0, 4.0]
        with pytest.raises(poptorch.Error):
            executor(_Wrapped(torch.ones(4)))
        with pytest.raises(poptorch.Error):
            poptorch.registerCustomArgParser(_Wrapped, object())
    finally:
        poptorch.registerCustomArgParser(_Wrapped, None)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ((torch.ones(4), (torch.ones(2), 1)), "shape"),
        ((torch.ones(2, dtype=torch.int32), (torch.ones(2), 1)), "dtype"),
        ((torch.ones(2), [torch.ones(2), 1]), "Type mismatch"),
        ((torch.ones(2), (torch.ones(2), 2)), "Value mismatch"),
        ((torch.ones(2), (torch.ones(2), True)), "Type mismatch"),
        ((torch.ones(2), (torch.ones(2), 1, 1)), "Length mismatch"),
    ],
)
def test_later_calls_must_match_the_first(second, text):
    executor = _infer(lambda self, a, b: a + b[0] * b[1])
    executor(torch.ones(2), (torch.ones(2), 1))
    with pytest.raises(poptorch.Error, match=text) as error:
        executor(*second)
    assert "destroy()" in str(error.value)
    executor(torch.ones(2), (torch.ones(2), 1))


def test_keys_must_match_the_first_call():
    executor = _infer(lambda self, table: table["x"] * 2)
    executor({"x": torch.ones(1)})
    with pytest.raises(poptorch.Error, match=r"Missing arguments: x\. Unexpected arguments: z\."):
        executor({"z": torch.ones(1)})


def test_another_shape_needs_destroy():
    executor = _infer(lambda self, x: x * 2)
    executor(torch.ones(2))
    executor.destroy()
    assert executor(torch.ones(4)).shape == (4,)


def test_rows_that_cannot_be_split_raise_an_assertion():
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        _infer(lambda self, x: x, device_iterations=3)(torch.ones(4))
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        _infer(lambda self, x: x, device_iterations=2)(torch.tensor(1.0))
    assert _infer(lambda self, x: x * 2)(torch.tensor(1.0)).shape == ()


def test_non_contiguous_inputs_and_inputs_that_require_grad_are_accepted():
    x = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    result = _infer(lambda self, x: x * 2)(x)
    assert torch.equal(result, (x * 2).detach())
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (poptorch.CommGroupType.Consecutive, [0, 0, 1, 1]),
        (poptorch.CommGroupType.Orthogonal, [0, 1, 0, 1]),
    ],
)
def test_groups_of_replicas_read_the_same_rows(kind, expected):
    opts = poptorch.Options().replicationFactor(4)
    opts.inputReplicaGrouping(2, kind)

    class Same(nn.Module):
        def forward(self, x):
            return x * 1

    assert poptorch.inferenceModel(Same(), opts)(torch.tensor([0.0, 1.0])).tolist() == expected


def test_bfloat16_and_wide_integers_are_converted():
    executor = _infer(lambda self, a, b: (a * 2, b + 1))
    a, b = executor(torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64))
    assert (a.dtype, b.dtype) == (torch.float32, torch.int32)


def test_defaults_of_keyword_only_parameters_are_part_of_the_call():
    executor = poptorch.inferenceModel(_Sum())
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert float(executor(a, b, scale=3)) == 18.0
    with pytest.raises(poptorch.Error, match="Value mismatch for scale: expected 3 but got 1"):
        executor(a, b)


def test_a_missing_parameter_before_variadic_ones_is_named():
    executor = _infer(lambda self, a, b, *more, **named: a + b)
    with pytest.raises(poptorch.Error, match="Mandatory parameter b missing"):
        executor(torch.ones(1))


def test_mismatches_name_the_parameter():
    executor = _infer(lambda self, a, *more: a * len(more))
    executor(torch.ones(1), torch.ones(1))
    with pytest.raises(poptorch.Error, match=r"mismatch for a: expected torch\.float32 but got torch\.int32"):
        executor(torch.ones(1, dtype=torch.int32), torch.ones(1))
    with pytest.raises(poptorch.Error, match="Number of positional arguments mismatch: expected 2 arguments but got 1"):
        executor(torch.ones(1))
