"""The torch ops that PopTorch supports, each in a separate model, compared with plain torch."""

import pytest
import torch
from op_cases import ACTIVATIONS, CUBE, LAYERS, LOSSES, MATRIX, POINTWISE, PRODUCTS, REDUCTIONS, SHAPES, SIGNAL
from torch import nn
from torch.nn import functional

import ipurun.emulator as poptorch

FUNCTIONS = [
    pytest.param(function, shape, id=f"{group}-{name}")
    for group, shape, functions in [
        ("pointwise", MATRIX, POINTWISE),
        ("activation", MATRIX, ACTIVATIONS),
        ("reduction", CUBE, REDUCTIONS),
        ("shape", CUBE, SHAPES),
        ("product", MATRIX, PRODUCTS),
        ("loss", MATRIX, LOSSES),
    ]
    for name, function in functions.items()
]


class _Weighted(nn.Module):
    """Multiplies the input by a trained weight, to test the gradient through the op."""

    def __init__(self, function, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, torch.Size(shape).numel()).reshape(shape))
        self.function = function

    def forward(self, x):
        outputs = _flat(self.function(x * self.weight))
        squares = [(out * out).sum() for out in outputs if out.is_floating_point()]
        total = torch.stack(squares).sum() if squares else x.sum()
        return tuple(outputs), poptorch.identity_loss(total, "sum")


def _flat(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for item in result for tensor in _flat(item)]


def _sample(shape):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator)


def _assert_equal_values(actual, expected):
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected):
        if wanted.dtype in (torch.int64, torch.float64):
            wanted = wanted.to({torch.int64: torch.int32, torch.float64: torch.float32}[wanted.dtype])
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("function", "shape"), FUNCTIONS)
def test_function_matches_results_and_gradients_of_torch(function, shape):
    x = _sample(shape)
    model = _Weighted(function, shape)
    expected, loss = model(x)
    if not loss.requires_grad:
        executor = poptorch.inferenceModel(model)
        for _ in range(2):
            _assert_equal_values(executor(x)[0], expected)
        return
    (gradient,) = torch.autograd.grad(loss, [model.weight])
    before = model.weight.detach().clone()
    executor = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=0.01))
    outputs, _ = executor(x)
    _assert_equal_values(outputs, expected)
    torch.testing.assert_close(model.weight.detach(), before - 0.01 * gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_results_and_gradients_of_torch(name):
    shape, build = LAYERS[name]
    _assert_like_torch(build, shape)


RECURRENT_LAYERS = [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}, "Only LSTM with 1 layer supported"),
    (nn.LSTM, {"bidirectional": True}, "bidirectional LSTM not supported"),
    (nn.LSTM, {"bias": False}, "LSTM without biases not supported"),
    (nn.LSTM, {"proj_size": 2}, "LSTM with projections not supported"),
    (nn.LSTM, {"dropout": 0.5}, "LSTM only supports dropout = 0.0"),
    (nn.GRU, {"num_layers": 2}, "Only GRU with 1 layer supported"),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}, "bidirectional RNN not supported"),
    (nn.RNN, {"bias": False}, "RNN without biases not supported"),
]


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
@pytest.mark.parametrize(("layer", "arguments", "message"), RECURRENT_LAYERS)
def test_recurrent_layers_that_poptorch_cannot_lower_are_refused_or_run_on_request(
    layer, arguments, message, monkeypatch
):
    with pytest.raises(poptorch.Error, match=rf"{message}, called at .*test_ops_breadth.py:\d+"):
        poptorch.inferenceModel(_Weighted(layer(9, 5, **arguments), SIGNAL))(_sample(SIGNAL))
    monkeypatch.setenv("POPTORCH_EMULATOR_STRICT", "0")
    _assert_like_torch(lambda: layer(9, 5, **arguments), SIGNAL)


def _assert_like_torch(build, shape):
    torch.manual_seed(5)
    x = _sample(shape)
    reference = _Weighted(build(), shape)
    model = _Weighted(build(), shape)
    model.load_state_dict(reference.state_dict())

    inference = poptorch.inferenceModel(reference.eval())
    _assert_equal_values(inference(x)[0], reference(x)[0])

    reference.train()
    expected, loss = reference(x)
    loss.backward()
    executor = poptorch.trainingModel(model, None, poptorch.optim.SGD(model.parameters(), lr=0.01))
    outputs, _ = executor(x)
    _assert_equal_values(outputs, expected)
    after = dict(model.named_parameters())
    for parameter_name, parameter in reference.named_parameters():
        wanted = parameter.detach() - 0.01 * parameter.grad
        torch.testing.assert_close(after[parameter_name].detach(), wanted, rtol=1e-3, atol=1e-5)
    buffers = dict(model.named_buffers())
    for buffer_name, buffer in reference.named_buffers():
        if not buffer.is_floating_point():
            continue  # constant on the device
        torch.testing.assert_close(buffers[buffer_name].to(buffer.dtype), buffer)


@pytest.mark.parametrize(
    ("draw", "low", "high"),
    [
        (lambda x: torch.rand(x.shape), 0.0, 1.0),
        (lambda x: torch.empty(x.shape).uniform_(2.0, 3.0), 2.0, 3.0),
        (lambda x: torch.randint(0, 5, x.shape), 0, 4),
        (lambda x: torch.bernoulli(torch.full(x.shape, 0.5)), 0.0, 1.0),
        (lambda x: torch.randn(x.shape), -9.0, 9.0),
        (lambda x: torch.normal(torch.full(x.shape, 50.0), 1.0), 40.0, 60.0),
        (lambda x: torch.empty(x.shape).exponential_(), 0.0, 100.0),
        (lambda x: torch.randperm(x.numel()), 0, 199),
        (lambda x: functional.dropout(torch.ones_like(x), 0.5), 0.0, 2.0),
        (lambda x: functional.dropout2d(torch.ones(10, 20, 1, 1), 0.5).flatten(), 0.0, 2.0),
        (lambda x: torch.empty(x.shape, dtype=torch.int32).random_(0, 7), 0, 6),
        (lambda x: functional.rrelu(-torch.ones_like(x), 0.1, 0.9, training=True), -0.9, -0.1),
        (lambda x: torch.distributions.Uniform(2.0, 3.0).sample(x.shape), 2.0, 3.0),
        (lambda x: torch.distributions.Normal(x * 0, 1.0).rsample(), -9.0, 9.0),
    ],
)
def test_random_ops_draw_new_numbers_in_each_run(draw, low, high):
    model = nn.Module()
    model.forward = lambda x: draw(x) + 0 * x.flatten()[0].to(torch.int32)
    executor = poptorch.inferenceModel(model)
    first, second = executor(torch.zeros(200)), executor(torch.zeros(200))
    for values in (first, second):
        assert values.min() >= low
        assert values.max() <= high
    assert len(first.unique()) > 1
    assert not torch.equal(first, second)
