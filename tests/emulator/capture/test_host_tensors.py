"""Host tensors in forward: which ones PopTorch accepts and which it refuses."""

import warnings

import numpy
import pytest
import torch
from torch import nn

from ipurun import emulator as poptorch

OUTSIDE = torch.tensor([1.0, 2.0, 3.0])
OUTSIDE_SCALAR = torch.tensor(2.0)
INDEX = torch.tensor([2, 0])


def inference(function):
    model = nn.Module()
    model.forward = function
    return poptorch.inferenceModel(model)


REFUSED = {
    "a global": (lambda x: x + OUTSIDE, "shape=[3], dtype=Float"),
    "a global scalar tensor": (lambda x: x * OUTSIDE_SCALAR, "shape=[], dtype=Float"),
    "a global index": (lambda x: torch.index_select(x, 0, INDEX), "shape=[2], dtype=Long"),
    "a view of it": (lambda x: x[:2] + OUTSIDE[1:], "shape=[2], dtype=Float"),
    "what the host computed": (lambda x: x + OUTSIDE.half() * OUTSIDE.half(), "shape=[3], dtype=Half"),
    "a legacy constructor": (lambda x: x + torch.Tensor([1.0, 2.0, 3.0]), "shape=[3], dtype=Float"),
    "a legacy index": (lambda x: torch.index_select(x, 0, torch.LongTensor([1, 0])), "shape=[2], dtype=Long"),
    "numpy": (lambda x: x + torch.from_numpy(numpy.ones(3, dtype=numpy.float32)), "shape=[3], dtype=Float"),
    "as_tensor": (lambda x: x + torch.as_tensor([True, False, True]), "shape=[3], dtype=Bool"),
    "an update of it": (lambda x: OUTSIDE.add_(x), "shape=[3], dtype=Float"),
    "one of a list": (lambda x: torch.cat([x, OUTSIDE]), "shape=[3], dtype=Float"),
}


@pytest.mark.parametrize(("function", "described"), REFUSED.values(), ids=REFUSED)
def test_mixing_with_the_device_is_refused_with_line_and_advice(function, described):
    with pytest.raises(poptorch.Error) as error:
        inference(function).compile(torch.ones(3))
    message = str(error.value)
    assert f"Expected an IPU tensor but got tensor(device=cpu, {described})" in message
    assert "register_buffer()" in message
    assert "test_host_tensors.py:" in message
    assert error.value.type == "poptorch_cpp_error"


ACCEPTED = {
    "torch.tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), [2.0, 3.0, 4.0]),
    "torch.tensor of numpy": (lambda x: x + torch.tensor(numpy.ones(3, dtype=numpy.float32)), [2.0] * 3),
    "a scalar tensor": (lambda x: x * torch.tensor(2.0), [2.0] * 3),
    "new_tensor": (lambda x: x + x.new_tensor([1.0, 2.0, 3.0]), [2.0, 3.0, 4.0]),
    "zeros_like of the host": (lambda x: x + torch.zeros_like(OUTSIDE), [1.0] * 3),
    "a number": (lambda x: 2 ** (x + 1), [4.0] * 3),
    "a number of numpy": (lambda x: x * numpy.float32(3), [3.0] * 3),
    "to ipu": (lambda x: x + OUTSIDE.to("ipu"), [2.0, 3.0, 4.0]),
    "to the device of another": (lambda x: x + OUTSIDE.to(x.device), [2.0, 3.0, 4.0]),
    "to another": (lambda x: x + INDEX.to(x)[0], [3.0] * 3),
    "type_as": (lambda x: x + INDEX.type_as(x)[0], [3.0] * 3),
    "python indexing": (lambda x: x[INDEX] + x[[0, 1]], [2.0] * 2),
    "copy_": (lambda x: (x * 1).copy_(OUTSIDE), [1.0, 2.0, 3.0]),
    "data of a device's tensor": (lambda x: x + (x * 2).data, [3.0] * 3),
}


@pytest.mark.parametrize(("function", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_tensors_on_the_device_or_moved_there_are_accepted(function, expected):
    assert inference(function)(torch.ones(3)).tolist() == expected


def test_assigned_numbers_are_on_the_device():
    def assign(x):
        y = x * 1
        y[0] = 5.0
        y[y > 4] = 6.0
        return y

    assert inference(assign)(torch.ones(3)).tolist() == [6.0, 1.0, 1.0]


def test_the_host_computes_with_host_tensors_and_warns_about_outputs():
    with pytest.warns(UserWarning, match="Output expected to be on the IPU but is on cpu"):
        sums, doubled = inference(lambda x: (OUTSIDE + OUTSIDE, x * 2))(torch.ones(3))
    assert sums.tolist() == [2.0, 4.0, 6.0]
    assert doubled.tolist() == [2.0] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inference(lambda x: (x, torch.ones(2)))(torch.ones(3))


class _Holder(nn.Module):
    def __init__(self, as_buffer):
        super().__init__()
        if as_buffer:
            self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        else:
            self.scale = torch.tensor([2.0, 3.0])
            self.shifts = {"first": [torch.tensor([1.0, 1.0])]}

    def forward(self, x):
        y = x * self.scale
        return y + self.shifts["first"][0] if hasattr(self, "shifts") else y


def test_plain_attributes_are_constants_and_named_in_a_warning(caplog):
    assert poptorch.inferenceModel(_Holder(as_buffer=False))(torch.ones(2)).tolist() == [3.0, 4.0]
    warned = [
        record.getMessage() for record in caplog.records if "neither a parameter nor a buffer" in record.getMessage()
    ]
    assert [message.split()[2] for message in warned] == ["scale", "shifts['first'][0]"]
    caplog.clear()
    assert poptorch.inferenceModel(_Holder(as_buffer=True))(torch.ones(2)).tolist() == [2.0, 3.0]
    assert "neither a parameter" not in caplog.text


def test_a_refused_tensor_of_training_names_the_operation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.mse_loss(self.layer(x), OUTSIDE)

    with pytest.raises(poptorch.Error, match=r"In mse_loss at .*test_host_tensors\.py:"):
        poptorch.trainingModel(Model()).compile(torch.ones(1, 3))
