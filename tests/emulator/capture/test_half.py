"""Half precision: types of results, kernels missing on the CPU, stochastic rounding, floating-point exceptions."""

import copy
import time

import pytest
import torch
from executor_models import Classifier, images
from torch import nn

import ipurun.emulator as poptorch
from ipurun.emulator.graph import capture, values_in


def _infer(function, options=None):
    class Model(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    return poptorch.inferenceModel(Model(), options)


def test_mixed_elementwise_operations_promote():
    result = _infer(lambda a, b: a + b)(torch.ones(2, dtype=torch.float16), torch.ones(2))
    assert result.dtype == torch.float32


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 3, bias=False),
        nn.Conv1d(4, 2, 3),
        nn.ConvTranspose1d(4, 2, 3),
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(6),
        nn.InstanceNorm1d(4, affine=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_compute_in_the_type_of_their_input(layer):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6)
    expected = copy.deepcopy(layer)(x).detach()
    wide = copy.deepcopy(layer)
    narrow = poptorch.inferenceModel(copy.deepcopy(layer))(x.half())
    assert narrow.dtype == torch.float16
    torch.testing.assert_close(narrow.float(), expected, rtol=2e-2, atol=2e-2)
    from_half_weights = poptorch.inferenceModel(wide.half())(x)
    assert from_half_weights.dtype == torch.float32
    torch.testing.assert_close(from_half_weights, expected, rtol=2e-2, atol=2e-2)


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("shape", "bias", "expected"),
    [
        ((6,), True, HALF),
        ((2, 6), True, FLOAT),
        ((2, 6), False, HALF),
        ((2, 4, 6), True, FLOAT),
        ((2, 4, 6), False, HALF),
        ((2, 2, 4, 6), True, HALF),
    ],
)
def test_linear_layers_have_the_type_that_torch_infers(shape, bias, expected):
    """With a bias, torch 2.0.1 calls addmm for two and three dimensions, which promotes, and a product otherwise."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 3, bias=bias), torch.randn(shape)
    wanted = layer(x).detach()
    found = poptorch.inferenceModel(layer)(x.half())
    assert found.dtype == expected
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("function", "left", "right", "expected"),
    [
        (torch.mm, (2, 3), (3, 4), (HALF, FLOAT)),
        (torch.matmul, (5, 2, 3), (3, 4), (HALF, FLOAT)),
        (torch.matmul, (5, 2, 3), (5, 3, 4), (FLOAT, HALF)),
        (torch.bmm, (5, 2, 3), (5, 3, 4), (FLOAT, HALF)),
        (lambda a, b: a @ b, (6, 5, 2, 3), (6, 5, 3, 4), (FLOAT, HALF)),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (5, 2, 3), (5, 3, 4), (FLOAT, HALF)),
        (torch.mv, (2, 3), (3,), (FLOAT, FLOAT)),
    ],
)
def test_products_of_two_types_have_the_type_that_torch_infers(function, left, right, expected):
    a, b = torch.rand(left), torch.rand(right)
    found = [_infer(function)(a.half(), b), _infer(function)(a, b.half())]
    assert tuple(result.dtype for result in found) == expected
    for result in found:
        torch.testing.assert_close(result.float(), function(a, b), rtol=1e-2, atol=1e-2)


def test_a_two_dimensional_convolution_refuses_a_bias_of_another_type():
    x = torch.randn(1, 4, 8, 8)
    for layer, given, words in (
        (nn.Conv2d(4, 2, 3), x.half(), r"Input type \(c10::Half\) and bias type \(float\)"),
        (nn.Conv2d(4, 2, 3).half(), x, r"Input type \(float\) and bias type \(c10::Half\)"),
    ):
        with pytest.raises(RuntimeError, match=f"{words} should be the same"):
            poptorch.inferenceModel(layer)(given)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 2, 3, bias=False), nn.Conv2d(4, 2, 3, padding="same"), nn.ConvTranspose2d(4, 2, 3)]
)
def test_other_convolutions_compute_in_the_type_of_their_input(layer):
    torch.manual_seed(0)
    x = torch.randn(1, 4, 8, 8)
    expected = layer(x).detach()
    found = poptorch.inferenceModel(layer)(x.half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


class _Attention(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.function(self.layer, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda _, x: nn.functional.scaled_dot_product_attention(x, x, x, torch.ones(4, 4, dtype=torch.bool)),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    ],
    ids=["causal", "mask", "layer"],
)
def test_attention_has_the_operations_of_torch_2_0_and_stays_in_half_precision(function):
    # What an IPU host runs. Later versions of torch cast to float32 and back.
    model = _Attention(function).half()
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    half, weights = x.half(), dict(model.named_parameters())
    captured = capture(
        lambda: model(half), parameters=weights, buffers={}, inputs=[half], training=False, options=poptorch.Options()
    )
    graph = captured.graph
    made = {graph.specs[value].dtype for node in graph.nodes for value in values_in(node.outputs)}
    assert made <= {torch.float16, torch.bool}
    names = [node.name for node in graph.nodes]
    assert names.count("_softmax") == 1
    assert names.count("bmm") == 2
    assert names.count("div") == 2
    with torch.no_grad():
        torch.testing.assert_close(captured.reference[0][0].float(), model.float()(x), rtol=2e-2, atol=2e-2)


def test_attention_refuses_a_mask_of_another_type():
    q, mask = torch.rand(1, 2, 3, 4).half(), torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or to match query dtype"):
        _infer(lambda q, m: nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=m))(q, mask)


@pytest.mark.parametrize("kwargs", [{}, {"add_bias_kv": True}, {"kdim": 8, "vdim": 6}])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_master_weights_promotes(kwargs, need_weights):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, **kwargs)
    tensors = [torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, kwargs.get("vdim", 8))]
    expected = attention(*tensors)[0].detach()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = copy.deepcopy(attention)

        def forward(self, query, key, value):
            out = self.attention(query, key, value, need_weights=need_weights)[0]
            return out, poptorch.identity_loss(out, "mean")

    model = Model()
    out, _ = poptorch.trainingModel(model)(*[tensor.half() for tensor in tensors])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(model.attention.out_proj.weight, attention.out_proj.weight)


class CastWeights(nn.Module):
    """Runs a model with half copies of its float32 weights."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        halves = {name: weight.half() for name, weight in self.model.named_parameters()}
        return torch.func.functional_call(self.model, halves, (x, labels))


def _train(model, x, labels, **kwargs):
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, use_combined_accum=False, **kwargs)
    executor = poptorch.trainingModel(model, optimizer=optimizer)
    losses = [float(executor(x, labels)[1]) for _ in range(5)]
    return losses


@pytest.mark.parametrize("norm", [None, nn.BatchNorm2d(4)])
def test_half_weights_and_master_weights_train_like_float(norm):
    torch.manual_seed(0)
    model = Classifier(norm)
    masters, halves = copy.deepcopy(model), copy.deepcopy(model).half()
    x, labels = images(8)
    expected = _train(model, x, labels)
    with_masters = _train(CastWeights(masters), x.half(), labels, loss_scaling=128.0)
    with_halves = _train(halves, x.half(), labels, loss_scaling=128.0)
    assert expected[-1] < expected[0]
    assert with_masters == pytest.approx(expected, rel=0.03)
    assert with_halves == pytest.approx(expected, rel=0.05)
    assert masters.conv.weight.dtype == torch.float32
    assert halves.conv.weight.dtype == torch.float16


def test_operations_without_a_half_kernel_are_rounded_once():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).half()
    result = _infer(lambda x: torch.cumsum(x @ x, 0).softmax(1))(x)
    assert result.dtype == torch.float16
    expected = torch.cumsum(x.float() @ x.float(), 0).softmax(1)
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, [(4, 3000), (3000, 5)]),
        (lambda a, b: torch.mm(a.t(), b), [(3000, 4), (3000, 5)]),
        (torch.addmm, [(5,), (4, 3000), (3000, 5)]),
        (torch.bmm, [(2, 4, 3000), (2, 3000, 5)]),
        (torch.baddbmm, [(2, 4, 5), (2, 4, 3000), (2, 3000, 5)]),
        (torch.mv, [(4, 3000), (3000,)]),
        (nn.functional.conv2d, [(2, 64, 9, 9), (8, 64, 7, 7), (8,)]),
    ],
    ids=["mm", "transposed", "addmm", "bmm", "baddbmm", "mv", "conv2d"],
)
def test_products_are_summed_in_float_and_rounded_once(function, shapes):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).half() for shape in shapes]
    expected = function(*[tensor.float() for tensor in tensors]).half()
    # Sums in float32 differ only in the order of terms, which changes at most the last bit of a half result.
    torch.testing.assert_close(_infer(function)(*tensors), expected, rtol=2.0**-10, atol=2.0**-12)


def test_half_products_take_about_as_long_as_float_ones():
    a, b = torch.randn(64, 1000), torch.randn(1000, 2048)
    model = _infer(torch.mm)
    model.compile(a.half(), b.half())
    times = []
    for run in (lambda: torch.mm(a, b), lambda: model(a.half(), b.half())):
        run()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    assert times[1] < 20 * times[0] + 0.02  # torch's half kernel is 200 times slower


def _rounding(seed=1):
    opts = poptorch.Options().randomSeed(seed)
    opts.Precision.enableStochasticRounding(True)
    return opts


def test_stochastic_rounding_keeps_the_expected_value():
    # Halfway between 1 and the next half number, 1 + 2^-10, and a quarter of the way.
    x = torch.tensor([1.0 + 2.0**-11, 1.0 + 2.0**-12]).repeat(4096, 1)
    result = _infer(lambda x: x.half(), _rounding())(x).float()
    assert set(result.flatten().tolist()) == {1.0, 1.0 + 2.0**-10}
    share = (result > 1.0).float().mean(0)
    assert share[0] == pytest.approx(0.5, abs=0.05)
    assert share[1] == pytest.approx(0.25, abs=0.05)


def test_stochastic_rounding_keeps_values_that_half_can_represent():
    inf = float("inf")
    held = [0.0, 2.0**-24, -3 * 2.0**-24, 2.0**-14, -(2.0**-14), 1.0, -1.5, 65504.0, inf, -inf]
    x = torch.tensor(held).repeat(10000, 1)  # more than one chunk of the rounding
    model = _infer(lambda x: (x.half(), x.half().isnan()), _rounding())
    result, no_number = model(x)
    assert torch.equal(result.float(), x)
    assert not no_number.any()
    assert bool(_infer(lambda x: x.half(), _rounding())(torch.tensor([float("nan")])).isnan())


@pytest.mark.parametrize("step", [2.0**-24, 2.0**-20, 2.0**3], ids=["subnormal", "small", "large"])
def test_stochastic_rounding_picks_a_neighbour(step):
    first = 1024 * step if step > 2.0**-24 else 5 * step
    x = torch.tensor([first + step / 4, -first - step / 4]).repeat(8192, 1)
    result = _infer(lambda x: x.half(), _rounding())(x).float()
    assert set(result[:, 0].tolist()) == {first, first + step}
    assert set(result[:, 1].tolist()) == {-first, -first - step}
    torch.testing.assert_close(result.mean(0), x[0], rtol=0, atol=0.05 * step)


def test_stochastic_rounding_depends_on_the_seed_and_does_not_change_float():
    x = torch.rand(64)
    first = _infer(lambda x: (x.half() * x.half(), x * 3), _rounding(1))(x)
    again = _infer(lambda x: (x.half() * x.half(), x * 3), _rounding(1))(x)
    other = _infer(lambda x: (x.half() * x.half(), x * 3), _rounding(2))(x)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[1], x * 3)


@pytest.mark.parametrize(
    ("function", "bad", "good"),
    [
        (lambda x: 1.0 / x, 0.0, 1.0),
        (lambda x: torch.sqrt(x), -1.0, 1.0),
        (lambda x: torch.log(x), -1.0, 1.0),
        (lambda x: torch.exp(x), 1000.0, 1.0),
        (lambda x: x - x, float("inf"), 1.0),
        (lambda x: x > 0, float("nan"), 1.0),
        (lambda x: (x.half() * 100).half(), 1000.0, 1.0),
    ],
    ids=["divide", "sqrt", "log", "overflow", "inf-inf", "compare", "half"],
)
def test_floating_point_exceptions(function, bad, good):
    opts = poptorch.Options()
    opts.Precision.enableFloatingPointExceptions(True)
    executor = _infer(function, opts)
    executor(torch.tensor([good]))
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        executor(torch.tensor([bad]))
    unchecked = _infer(function)
    unchecked(torch.tensor([bad]))


def test_dropout_in_half_precision_is_captured_with_its_random_numbers():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5)).train()
    executor = poptorch.inferenceModel(model, poptorch.Options().randomSeed(1))
    x = torch.ones(1000, dtype=torch.float16)
    first, second = executor(x), executor(x)
    assert set(first.tolist()) == {0.0, 4.0}
    assert not torch.equal(first, second)


def test_half_running_statistics_are_updated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.BatchNorm1d(3, momentum=0.5).half()

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x), "mean")

    model = Model()
    poptorch.trainingModel(model)(torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]).half())
    assert model.layer.running_mean.tolist() == [1.0, 1.5, 2.0]
    assert model.layer.running_mean.dtype == torch.float16
