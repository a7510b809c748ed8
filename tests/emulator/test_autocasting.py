"""Automatic casting of PopTorch up to 3.0: it works, and warns once."""

import copy

import pytest
import torch

from ipurun import emulator as poptorch
from ipurun.emulator import autocasting


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch):
    monkeypatch.setattr(autocasting, "_warned", set())


class Product(torch.nn.Module):
    def forward(self, x, y):
        return self.product(x, y), x + y

    def product(self, x, y):
        return torch.matmul(x, y)


class ByContext(Product):
    def product(self, x, y):
        with poptorch.autocast():
            return torch.matmul(x, y)


class ByDecorator(Product):
    @poptorch.autocast()
    def product(self, x, y):
        return torch.matmul(x, y)


class SwitchedOff(Product):
    def product(self, x, y):
        with poptorch.autocast(), poptorch.autocast(enabled=False):
            return torch.matmul(x, y)


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def dtypes(model, options=None):
    product, total = poptorch.inferenceModel(model, options)(X, X)
    assert torch.equal(product.float(), X @ X)
    return product.dtype, total.dtype


@pytest.mark.parametrize("kind", [ByContext, ByDecorator])
def test_region_casts_to_half(kind):
    assert dtypes(kind()) == (torch.float16, torch.float32)


def test_inner_region_can_switch_it_off():
    assert dtypes(SwitchedOff()) == (torch.float32, torch.float32)


def test_native_calls_are_not_cast():
    assert ByContext()(X, X)[0].dtype == torch.float32


def test_options_can_switch_it_off():
    options = poptorch.Options()
    assert options.Precision.autocastEnabled(False) is options.Precision
    assert dtypes(ByContext(), options) == (torch.float32, torch.float32)


def test_module_flag():
    model = autocasting.autocast_module(Product())
    assert dtypes(model) == (torch.float16, torch.float32)
    assert dtypes(copy.deepcopy(model)) == (torch.float16, torch.float32)


class Mixed(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        with poptorch.autocast():
            return self.function(x, y)


@pytest.mark.parametrize(
    ("policy", "function", "expected"),
    [
        (autocasting.Policy(fp32=[torch.matmul], fp16=[]), lambda x, y: torch.matmul(x, y.float()), torch.float32),
        (autocasting.Policy(promote=[torch.add]), lambda x, y: torch.add(x, y), torch.float32),
        (autocasting.Policy(demote=[torch.add]), lambda x, y: torch.add(x, y), torch.float16),
        (autocasting.Policy(), lambda x, y: torch.cat([x, y]), torch.float32),
    ],
)
def test_policies(policy, function, expected):
    options = poptorch.Options()
    options.Precision.autocastPolicy(policy)
    assert poptorch.inferenceModel(Mixed(function), options)(X, X.half()).dtype == expected


def test_policy_accepts_layers():
    options = poptorch.Options()
    options.Precision.autocastPolicy(autocasting.Policy(fp16=[torch.nn.Linear]))
    model = Mixed(lambda x, y: model.layer(x))
    model.layer = torch.nn.Linear(2, 2)
    assert poptorch.inferenceModel(model, options)(X, X).dtype == torch.float16


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_wrong_values(value):
    precision = poptorch.Options().Precision
    with pytest.raises(ValueError):
        precision.autocastEnabled(value)
    with pytest.raises(ValueError):
        precision.autocastPolicy(value)


def test_each_name_warns_once(capsys):
    for _ in range(2):
        poptorch.autocast()
        poptorch.Options().Precision.autocastEnabled(True).autocastPolicy(autocasting.Policy())
        autocasting.autocast_module(Product())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for name in (
        "poptorch.autocast",
        "Precision.autocastEnabled",
        "Precision.autocastPolicy",
        "torch.nn.Module.autocast",
    ):
        assert sum(f"] {name} was removed" in line for line in lines) == 1
