"""Results of a call: output modes, shapes, structures and types."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from executor_models import Classifier, Double, images, options
from torch import nn

import ipurun.emulator as poptorch

ITERATIONS, ACCUMULATION, REPLICAS, ROWS = 2, 3, 2, 4
RUNS = ITERATIONS * ACCUMULATION * REPLICAS


class _RowsAndSum(nn.Module):
    """Returns rows and a number that identify the micro-batch; the weight does not change."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * 10, poptorch.identity_loss((x * (1 + self.weight)).sum(), reduction="none")


def _train(mode, period=None):
    opts = options(ITERATIONS, ACCUMULATION, REPLICAS)
    if mode is not None:
        opts.outputMode(mode, period)
    model = _RowsAndSum()
    executor = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.arange(RUNS * ROWS, dtype=torch.float32).reshape(-1, 1)
    rows, total = executor(x)
    return x.reshape(ITERATIONS, ACCUMULATION, REPLICAS, ROWS, 1), rows, total


@pytest.mark.parametrize("mode", [None, poptorch.OutputMode.Final])
def test_final_returns_the_last_step_of_each_replica(mode):
    x, rows, total = _train(mode)
    last = x[-1, -1]
    assert torch.equal(rows, last.reshape(-1, 1) * 10)
    assert torch.equal(total, last.sum(dim=(1, 2)))


def test_all_returns_every_run_in_order():
    x, rows, total = _train(poptorch.OutputMode.All)
    assert torch.equal(rows, x.reshape(-1, 1) * 10)
    assert torch.equal(total, x.sum(dim=(3, 4)).flatten())


def test_sum_adds_the_runs_of_each_replica():
    x, rows, total = _train(poptorch.OutputMode.Sum)
    assert torch.equal(rows, x.sum(dim=(0, 1)).reshape(-1, 1) * 10)
    assert torch.equal(total, x.sum(dim=(0, 1, 3, 4)))


def test_every_n_returns_all_steps_of_every_nth_iteration():
    x, rows, total = _train(poptorch.OutputMode.EveryN, 2)
    assert torch.equal(rows, x[1].reshape(-1, 1) * 10)
    assert torch.equal(total, x[1].sum(dim=(2, 3)).flatten())


@pytest.mark.parametrize("period", [3, 4])
def test_every_n_needs_a_period_that_divides_the_iterations(period):
    with pytest.raises(poptorch.Error, match="EveryN"):
        _train(poptorch.OutputMode.EveryN, period)


def test_shapes_of_the_worked_example():
    x, labels = images(48)
    expected = {
        poptorch.OutputMode.Final: ((8, 3), (2,)),
        poptorch.OutputMode.All: ((48, 3), (12,)),
        poptorch.OutputMode.Sum: ((8, 3), (2,)),
    }
    for mode, shapes in expected.items():
        executor = poptorch.trainingModel(Classifier(), options(2, 3, 2, outputMode=mode))
        logits, loss = executor(x, labels)
        assert (tuple(logits.shape), tuple(loss.shape)) == shapes, mode


def test_one_run_returns_a_scalar_loss():
    _, loss = poptorch.trainingModel(Classifier())(*images(4))
    assert loss.shape == ()


def test_inference_returns_all_rows_by_default_and_the_users_options_stay_default():
    opts = options(device_iterations=3)
    executor = poptorch.inferenceModel(Double(), opts)
    x = torch.arange(6.0)
    assert torch.equal(executor(x), x * 2)
    assert opts.defaultOutputMode()
    assert executor.options.output_mode == poptorch.OutputMode.All


Pair = namedtuple("Pair", ["first", "second"])


class _Nested(nn.Module):
    def forward(self, x):
        return OrderedDict(pair=Pair(x + 1, [x + 2, (x + 3,)]), text="kept", none=None), {"same": x}, x, x


def test_structures_keep_their_types_and_non_tensor_values():
    x = torch.tensor([1.0, 2.0])
    ordered, plain, first, second = poptorch.inferenceModel(_Nested())(x)
    assert isinstance(ordered, OrderedDict)
    assert isinstance(ordered["pair"], Pair)
    assert isinstance(ordered["pair"].second, list)
    assert isinstance(ordered["pair"].second[1], tuple)
    assert torch.equal(ordered["pair"].second[1][0], x + 3)
    assert ordered["text"] == "kept"
    assert ordered["none"] is None
    assert torch.equal(plain["same"], x)
    assert torch.equal(first, x)
    assert first is not second


def test_a_forward_that_returns_nothing_returns_none():
    class Nothing(nn.Module):
        def forward(self, x):
            x + 1

    assert poptorch.inferenceModel(Nothing())(torch.ones(1)) is None


def test_64_bit_types_are_returned_as_32_bit():
    class Wide(nn.Module):
        def forward(self, integers, doubles):
            return integers + 1, doubles * 2, integers > 1

    integers, doubles, flags = poptorch.inferenceModel(Wide())(
        torch.tensor([1, 2]), torch.tensor([0.5, 1.5], dtype=torch.float64)
    )
    assert integers.dtype == torch.int32
    assert integers.tolist() == [2, 3]
    assert doubles.dtype == torch.float32
    assert doubles.tolist() == [1.0, 3.0]
    assert flags.dtype == torch.bool


def test_constant_outputs_are_returned_once():
    class Constant(nn.Module):
        def forward(self, x):
            return x, torch.ones(2)

    _, constant = poptorch.inferenceModel(Constant(), options(device_iterations=4))(torch.ones(4))
    assert constant.shape == (2,)


def test_backward_on_a_result_is_refused():
    logits, loss = poptorch.trainingModel(Classifier())(*images(4))
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        loss.backward()
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        logits.backward()


def test_results_are_not_overwritten_by_the_next_call():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self):
            self.count += 1
            return self.count

    executor = poptorch.inferenceModel(Counter())
    assert [executor() for _ in range(3)] == [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
