"""record_operations: what is measured, and what is not run to measure it."""

import torch

import ipurun.emulator as poptorch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x, y):
        hidden = poptorch.ipu_print_tensor(torch.relu(self.first(x)), "seen")
        with poptorch.Block("B", ipu_id=1):
            return torch.nn.functional.cross_entropy(self.second(hidden), y)


def recorded(calls=1):
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(3)
    options.outputMode(poptorch.OutputMode.Sum)
    torch.manual_seed(0)
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    inputs = torch.randn(12, 4), torch.zeros(12, dtype=torch.int64)
    training.compile(*inputs)
    with poptorch.profiling.record_operations(training) as measured:
        for _ in range(calls):
            training(*inputs)
    training(*inputs)
    return measured


def test_every_operation_has_its_place_module_and_kind(capfd):
    (call,) = recorded()
    assert (call.strategy, call.updates, call.micro_batches, call.replicas) == ("pipelined", 2, 3, 1)
    products = [(op.module, op.kind, op.stage, op.ipu) for op in call.operations if op.name in ("addmm", "mm")]
    assert ("first", "forward", 0, 0) in products and ("second", "forward", 1, 1) in products
    # The gradient of the second layer's weights is computed where those weights are.
    assert products.count(("second", "backward", 1, 1)) == 2 and ("first", "backward", 0, 0) in products
    assert all(op.seconds > 0 for op in call.operations if op.name == "addmm")
    assert {update.parameter: update.ipu for update in call.parameters} == {
        "first.weight": 0,
        "first.bias": 0,
        "second.weight": 1,
        "second.bias": 1,
    }


def test_measuring_prints_nothing_more_than_the_calls(capfd):
    capfd.readouterr()
    recorded(calls=1)
    with_one = sum(stream.count("seen") for stream in capfd.readouterr())
    recorded(calls=0)
    with_none = sum(stream.count("seen") for stream in capfd.readouterr())
    # A call has six micro-batches, and one more call than that is made outside.
    assert with_none > 0 and with_one == 2 * with_none


def test_calls_outside_are_not_measured():
    assert len(recorded(calls=2)) == 2
