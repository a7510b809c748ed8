"""Half precision in replayed graphs: every result is computed in float32 and rounded, to nearest or stochastically."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import ipurun.emulator as poptorch
from ipurun.emulator._run import chunks

pytestmark = pytest.mark.usefixtures("at_once_where_possible")

NORMS = (torch.ops.aten.native_group_norm, torch.ops.aten.native_layer_norm)
FLOAT_STATISTICS = torch.__version__.startswith("2.0.")  # newer kernels return statistics in the type of the input


class RoundEveryResult(TorchDispatchMode):
    """Compute each operation on half tensors in float32 and round its result; an independent oracle."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def widen(item):
            if isinstance(item, torch.Tensor) and item.dtype == torch.float16:
                return item.float()
            return torch.float32 if item is torch.float16 else item

        def narrow(item):
            return item.half() if isinstance(item, torch.Tensor) and item.dtype == torch.float32 else item

        if any(result.alias_info is not None for result in func._schema.returns):
            return func(*args, **(kwargs or {}))
        result = func(*tree_map(widen, args), **tree_map(widen, kwargs or {}))
        if FLOAT_STATISTICS and func.overloadpacket in NORMS:
            return (narrow(result[0]), *result[1:])
        return tree_map(narrow, result)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 5)
        )

    def forward(self, x):
        return self.layers(x.view(-1, 2, 8, 8))


class OverlappingWindows(nn.Module):
    """Gradients of windows that overlap are added up, and so rounded."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, stride=1), nn.Flatten(), nn.Linear(64, 5))

    def forward(self, x):
        return self.layers(x.view(-1, 2, 8, 8))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.gelu(self.embed(x.view(-1, 8, 16)))
        mixed = torch.softmax(x @ x.transpose(1, 2) / 3, -1) @ x
        return self.head(self.norm(x + mixed)).mean(1)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        scores = self.model(x)
        return scores, poptorch.identity_loss(nn.functional.cross_entropy(scores, labels), "none")


def half_model(kind):
    torch.manual_seed(0)
    return WithLoss(kind()).half(), torch.randn(6, 128).half(), torch.randint(0, 5, (6,))


def options_of(seed=1, rounds=True, checks=False):
    options = poptorch.Options().randomSeed(seed)
    options.Precision.enableStochasticRounding(rounds)
    options.Precision.enableFloatingPointExceptions(checks)
    return options


def infer(function, options=None):
    class Model(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    return poptorch.inferenceModel(Model(), options)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("kind", [Images, OverlappingWindows, Words])
def test_a_step_equals_operations_rounded_one_by_one(kind, checks):
    model, x, labels = half_model(kind)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with RoundEveryResult():
        scores = model.model(x)
        loss = nn.functional.cross_entropy(scores, labels)
        grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = {n: (w.float() - g.float()).half() for (n, w), g in zip(expected.items(), grads)}
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, options_of(rounds=False, checks=checks), optimizer)
    got, got_loss = training(x, labels)
    assert got.dtype == torch.float16
    assert torch.equal(got, scores)
    assert torch.equal(got_loss.view(()), loss)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("checks", [False, True])
def test_training_with_stochastic_rounding_is_reproducible(checks):
    def trained(seed):
        model, x, labels = half_model(Words)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, options_of(seed, checks=checks), optimizer)
        losses = [float(training(x, labels)[1]) for _ in range(3)]
        return losses, torch.cat([weight.flatten() for weight in model.state_dict().values()])

    losses, weights = trained(1)
    assert losses[-1] < losses[0]
    assert torch.equal(weights, trained(1)[1])
    assert not torch.equal(weights, trained(2)[1])


@pytest.mark.parametrize("factor", [1.0009765625, 2.0**-15 * 1.2001953125, -(2.0**-22) * 1.0009765625])
def test_products_are_rounded_up_or_down_without_bias(factor):
    """The last two factors give subnormal numbers."""
    x = torch.full((50000,), 1.3330078125).half()
    result = infer(lambda x, y: x * y, options_of())(x, torch.full_like(x, factor)).double()
    exact = float(x[0].double() * torch.tensor(factor).half().double())
    nearest = torch.tensor(exact).half()
    found = sorted(result.unique().tolist())
    assert len(found) == 2
    assert found[0] < exact < found[1]
    assert float(nearest) in found
    share = (exact - found[0]) / (found[1] - found[0])
    assert (result == found[1]).double().mean().item() == pytest.approx(share, abs=0.012)  # 5 standard deviations


def test_gradients_of_several_weights_are_rounded_up_or_down_without_bias():
    """No operation reads them, so they are rounded together."""

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.zeros(30000, dtype=torch.float16))
            self.second = nn.Parameter(torch.zeros(2, 10000, dtype=torch.float16))

        def forward(self, x, y):
            both = (self.first * x * y).sum() + (self.second.view(-1) * x[:20000] * y[:20000]).sum()
            return poptorch.identity_loss(both, "none")

    model = Products()
    training = poptorch.trainingModel(model, options_of(), poptorch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.full((30000,), 1.3330078125).half()
    training(x, torch.full_like(x, 1.0009765625))
    exact = -float(x[0].double() * 1.0009765625)
    for weight in (model.first, model.second):
        found = weight.detach().double()
        low, high = sorted(found.unique().tolist())
        assert low < exact < high
        assert abs(found.mean() - exact) < 0.02 * (high - low)


def test_numbers_of_half_precision_are_never_moved():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).repeat(20)
    result = infer(lambda x: x * 1.0, options_of())(every)
    assert torch.equal(result[~every.isnan()], every[~every.isnan()])  # zeros may change their sign
    assert torch.equal(result.isnan(), every.isnan())


def test_results_beyond_the_range_become_infinite():
    x = torch.tensor([65504.0, 65520.0, 65536.0, -1e6, 1e30]).repeat(2000, 1)
    result = infer(lambda x: x.half(), options_of())(x)
    assert torch.isfinite(result[:, 0]).all()
    assert torch.isinf(result[:, 1]).float().mean() == pytest.approx(0.5, abs=0.06)
    assert torch.isinf(result[:, 2:]).all()
    assert (result[:, 3] < 0).all()
    assert torch.isinf(infer(lambda x: x * x)(torch.tensor([300.0]).half())).all()


def test_operations_and_calls_are_rounded_independently():
    x = torch.full((4096,), 1.3330078125).half()
    model = infer(lambda x, y: (x * y, y * x), options_of())
    results = [*model(x, x), *model(x, x)]
    up = [(result.double() > float(x[0]) ** 2).float() for result in results]
    for index, first in enumerate(up):
        for second in up[:index]:
            assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.08


def test_large_tensors_have_independent_roundings():
    x = torch.full((2**16,), 1.3330078125).half()
    rows = (infer(lambda x: x * x, options_of())(x).double() > float(x[0]) ** 2).float().view(16, -1)
    correlations = torch.corrcoef(rows) - torch.eye(16)
    assert correlations.abs().max() < 0.08


def test_sums_of_rounding_errors_hardly_vary_more_than_of_independent_ones():
    x = (torch.rand(2**16, generator=torch.Generator().manual_seed(0)) + 1).float()
    model = infer(lambda x: x.half(), options_of())
    sums = torch.stack([(model(x).double() - x.double()).sum() for _ in range(60)]) * 2**10
    assert sums.var() < 2.5 * x.numel() / 6  # an error at a random place between two numbers varies by a sixth


def in_another_layout(x):
    return (x.t() * 1.1).t()


def into_a_part(x):
    y = x.clone()
    y[:, 1:].mul_(1.1)
    return y[:, 1:]


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("shape", [(1024, 601), (7, 99991), (1, 100003)])
@pytest.mark.parametrize("multiply", [lambda x: x * 1.1, in_another_layout, into_a_part])
def test_every_part_of_a_large_tensor_is_rounded(multiply, shape, rounds):
    """Large tensors are rounded part by part; the number of elements may have no divisor near the size of a part."""
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5).half()
    result = infer(multiply, options_of(rounds=rounds))(x)
    exact = x[:, x.shape[1] - result.shape[1] :].double() * torch.tensor(1.1).double()
    nearest = exact.half()
    if not rounds:
        assert torch.equal(result, nearest)
        return
    errors = (result.double() - exact).flatten()
    assert (errors.abs() < 2.0**-10).all()  # the next number of half precision, on one side or the other
    for part in errors.tensor_split(8):
        assert abs(part.mean()) < 5 * part.std() / part.numel() ** 0.5
    assert (result != nearest).double().mean() > 0.1


def test_writing_to_parts_of_half_tensors():
    def write(x):
        y = x.clone()
        y[:, 0] = 0.1
        y[1].mul_(1 / 3)
        row = y[2]
        row += 0.5
        return y, y.float() * 3, torch.full_like(y, 0.1), torch.full((2,), 0.3, dtype=torch.float16)

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).half()
    expected = write(x)
    for got, wanted in zip(infer(write)(x), expected):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_a_half_buffer_keeps_what_forward_writes():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(2, dtype=torch.float16))

        def forward(self, x):
            self.total += x / 3
            return self.total * 1.0

    model = Counter()
    executor = poptorch.inferenceModel(model)
    expected = torch.zeros(2, dtype=torch.float16)
    for value in (1.0, 5.0):
        x = torch.full((2,), value).half()
        expected = expected + x / 3
        assert torch.equal(executor(x), expected)
    executor.copyWeightsToHost()
    assert model.total.dtype == torch.float16


def test_a_branch_in_half_precision():
    def choose(condition, x):
        return poptorch.cond(condition, lambda x: x * x, [x], lambda x: x + x / 3, [x])[0]

    x = torch.tensor([1.3330078125, 2.0]).half()
    for options in (None, options_of()):
        model = infer(choose, options)
        assert model(torch.tensor([True]), x)[1] == 4.0
        assert model(torch.tensor([False]), x).dtype == torch.float16


def test_random_numbers_in_half_precision():
    model = infer(lambda x: (torch.randn_like(x), torch.rand_like(x), nn.functional.dropout(x, 0.25)), options_of())
    normal, uniform, dropped = model(torch.ones(20000, dtype=torch.float16))
    assert normal.dtype == uniform.dtype == torch.float16
    assert float(normal.float().std()) == pytest.approx(1.0, abs=0.03)
    assert float(uniform.float().mean()) == pytest.approx(0.5, abs=0.02)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.02)


def test_an_overflow_is_an_exception_with_stochastic_rounding():
    model = infer(lambda x: x * 100, options_of(checks=True))
    model(torch.ones(3).half())
    with pytest.raises(poptorch.Error, match=r"Floating point exception: an overflow .* in mul"):
        model(torch.full((3,), 1000.0).half())


class Scaled(nn.Module):
    """Has a gradient of `sum(x)` for each micro-batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float16))

    def forward(self, x):
        return poptorch.identity_loss((x * self.weight).sum(), "none")


def accumulating(model, options, steps=8, **kwargs):
    options.Training.gradientAccumulation(steps)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    optimizer = poptorch.optim.SGD(model.parameters(), use_combined_accum=False, accum_type=torch.float32, **kwargs)
    return poptorch.trainingModel(model, options, optimizer)


def sizes_of_chunks(training, monkeypatch):
    sizes = []
    run = chunks.Together.run
    monkeypatch.setattr(
        chunks.Together, "run", lambda self, *args, **kwargs: sizes.append(self.size) or run(self, *args, **kwargs)
    )
    return sizes


def test_sums_over_micro_batches_do_not_overflow(monkeypatch):
    model = Scaled()
    training = accumulating(model, options_of(rounds=False), lr=2.0**-16)
    sizes = sizes_of_chunks(training, monkeypatch)
    training(torch.full((8, 4), 32768.0).half())
    assert sizes
    assert model.weight.tolist() == [0.5] * 4


@pytest.mark.parametrize("rounds", [False, True])
def test_micro_batches_computed_together_train_like_one_by_one(rounds, monkeypatch):
    def trained(seed, together):
        model, x, labels = half_model(Words)
        training = accumulating(model, options_of(seed, rounds=rounds), 3, lr=0.1)
        sizes = sizes_of_chunks(training, monkeypatch)
        training.compile(x, labels)
        if not together:
            training._executable.chunks.disable()
        for _ in range(3):
            training(x, labels)
        assert bool(sizes) == together
        return torch.cat([weight.flatten() for weight in model.state_dict().values()])

    expected, got = trained(1, False), trained(1, True)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
    assert torch.equal(got, trained(1, True))
    assert torch.equal(got, trained(2, True)) == (not rounds)


def test_automatic_loss_scaling_inspects_every_micro_batch(monkeypatch):
    options = options_of(rounds=False)
    options.Training.setAutomaticLossScaling(True)
    training = accumulating(Scaled(), options, lr=0.0)
    sizes = sizes_of_chunks(training, monkeypatch)
    training(torch.full((8, 4), 4096.0).half())
    assert not sizes


class Mixed(nn.Module):
    """Masters in float32, operations in half; `first` is used twice, `last` computes in float32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.eye(4))
        self.last = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = (x @ self.first.half()) @ self.first.half()
        return poptorch.identity_loss((y.float() * self.last).sum(), reduction="none")


@pytest.mark.parametrize(("size", "factor"), [(1.0, 2.0), (4096.0, 0.5)])
def test_automatic_loss_scaling_counts_half_gradients_of_float32_weights(size, factor):
    options = options_of(rounds=False)
    options.Training.setAutomaticLossScaling(True)
    model = Mixed()
    training = accumulating(model, options, steps=1, lr=0.0)
    training(torch.full((2, 4), size).half())
    assert training._executable.optimizer.loss_scaling == factor


def test_resuming_is_exact_with_stochastic_rounding_of_micro_batches_together():
    def made():
        model, x, labels = half_model(Words)
        return model, accumulating(model, options_of(), 3, lr=0.1), (x, labels)

    straight, training, batch = made()
    for _ in range(4):
        training(*batch)
    first, training, _ = made()
    for _ in range(2):
        training(*batch)
    second, resumed, _ = made()
    second.load_state_dict(first.state_dict())
    resumed.compile(*batch)
    resumed.rng_state = training.rng_state
    for _ in range(2):
        resumed(*batch)
    for got, expected in zip(second.state_dict().values(), straight.state_dict().values()):
        assert torch.equal(got, expected)
