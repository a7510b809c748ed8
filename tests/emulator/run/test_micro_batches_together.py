"""Micro-batches of a weight update computed at once: the same numbers as one by one, whatever the model does."""

import contextlib
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from ipurun import emulator
from ipurun.emulator._run import chunks, forms

pytestmark = pytest.mark.usefixtures("at_once_where_possible")

ROWS = 4
ACCUMULATION, REPLICAS = 4, 2


class Model(nn.Module):
    """A function of (model, x, y) that returns the loss, with a few layers to use."""

    def __init__(self, function, layers=None):
        super().__init__()
        self.layers = nn.ModuleDict(layers or {})
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.function = function

    def forward(self, x, y):
        return self.function(self, x, y)


def scores(model, hidden):
    return model.last(hidden)


def loss(model, hidden, y):
    return functional.cross_entropy(scores(model, hidden), y)


def plain(model, x, y):
    return loss(model, torch.relu(model.first(x)), y)


def in_place(model, x, y):
    hidden = model.first(x)
    hidden.relu_().mul_(2.0)
    return loss(model, hidden, y)


def write_a_part(model, x, y):
    hidden = model.first(x) * 1.0
    hidden[:, 0] = 0.5
    hidden[:, 2:4] += hidden[:, 4:6]
    return loss(model, hidden, y)


def write_into_zeros(model, x, y):
    hidden = torch.zeros(ROWS, 8)
    hidden[:, 1:] = model.first(x)[:, :-1]
    hidden[:, 0].add_(x[:, 0])
    return loss(model, hidden, y)


def outputs_too(model, x, y):
    hidden = torch.tanh(model.first(x))
    return scores(model, hidden), loss(model, hidden, y), hidden.mean(), y + 1


def mix_rows_by_mean(model, x, y):
    hidden = model.first(x)
    return loss(model, hidden - hidden.mean(0), y)


def mix_rows_by_product(model, x, y):
    hidden = model.first(x)
    return loss(model, torch.softmax(hidden @ hidden.t(), dim=-1) @ hidden, y)


def mix_rows_by_view(model, x, y):
    hidden = model.first(x).view(ROWS // 2, 16).flip(0).view(ROWS, 8)
    return loss(model, hidden.t().reshape(ROWS, 8), y)


def mix_rows_by_order(model, x, y):
    hidden = model.first(x)
    return loss(model, torch.cat([hidden[1:], hidden[:1]]).cumsum(0).sort(0).values, y)


def softmax_over_rows(model, x, y):
    return loss(model, torch.log_softmax(model.first(x), dim=0), y)


def heads(model, x, y):
    hidden = model.first(x).view(ROWS, 2, 4)
    tokens = torch.cat([model.scale.view(1, 2, 4).expand(ROWS, -1, -1), hidden], dim=1)
    query = tokens.view(ROWS, 4, 2, 2).permute(0, 2, 1, 3)
    weights = torch.softmax(query @ query.transpose(-2, -1) / math.sqrt(2), dim=-1)
    return loss(model, (weights @ query).transpose(1, 2).reshape(ROWS, 16)[:, 8:], y)


def move_rows(model, x, y):
    hidden = model.first(x).t().unsqueeze(0).transpose(1, 2)
    parts = torch.stack(hidden.squeeze(0).split(2, dim=1), dim=1)
    return loss(model, parts.unbind(1)[0].repeat(1, 4) + parts.amax(dim=2).repeat_interleave(2, dim=1), y)


def look_up(model, x, y):
    table = model.layers["table"]
    return loss(model, model.first(x) + table(y) + table.weight[y] + table.weight[torch.arange(ROWS)], y)


def by_index(model, x, y):
    hidden = model.first(x)
    chosen = hidden.gather(1, y[:, None]) + hidden[:, torch.tensor([1, 3])].sum(1, keepdim=True)
    best = hidden.topk(2, dim=1).values.sum(1, keepdim=True)
    return loss(model, hidden * functional.one_hot(y, 8) + chosen + best, y)


def shared_over_rows(model, x, y):
    ramp = torch.arange(ROWS, dtype=torch.float32).view(ROWS, 1)
    return loss(model, model.first(x) * ramp + ramp @ model.scale.view(1, 8), y)


def padded(model, x, y):
    images = functional.pad(model.first(x).view(ROWS, 2, 2, 2), (1, 1, 1, 0), value=0.5)
    return loss(
        model,
        functional.interpolate(functional.avg_pool2d(images, 2, 1), scale_factor=2.0)[:, :, 0, :4].reshape(ROWS, 8),
        y,
    )


def convolved(model, x, y):
    images = model.first(x).view(ROWS, 2, 2, 2)
    return loss(model, functional.max_pool2d(model.layers["body"](images), 2).flatten(1), y)


def recurrent(model, x, y):
    hidden, _ = model.layers["body"](model.first(x).view(ROWS, 4, 2).transpose(0, 1))
    return loss(model, hidden[-1], y)


def recurrent_both_ways(model, x, y):
    steps = model.first(x).view(ROWS, 4, 2)
    forward, _ = model.layers["onward"](steps)
    backward, _ = model.layers["backward"](steps.flip(1))
    hidden, (last, _) = model.layers["above"](torch.cat([forward, backward.flip(1)], dim=2))
    return loss(model, hidden[:, 0] + last[0], y)


def views_in_place(model, x, y):
    hidden = model.first(x)
    turned = hidden.detach().t_().unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    return loss(model, hidden * turned.add_(1.0), y)


def in_blocks(model, x, y):
    with emulator.Block("0", ipu_id=0):
        hidden = torch.relu(model.first(x))
    with emulator.Block("1", ipu_id=1):
        return loss(model, emulator.recomputationCheckpoint(hidden), y)


def normalised(model, x, y):
    return loss(model, model.layers["body"](model.first(x)), y)


def scaled_loss(model, x, y):
    return emulator.identity_loss(loss(model, model.first(x), y) * 3 + model.scale.sum(), reduction="none")


def smoothed(given, y):
    exact, uniform = functional.cross_entropy(given, y), -functional.log_softmax(given, dim=1).mean()
    return emulator.identity_loss(0.9 * exact + 0.1 * uniform, reduction="none")


def with_loss(function):
    return lambda model, x, y: function(model.last(model.first(x)), y)


CONV = {"body": lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True))}
BATCH_NORM = {"body": lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())}
# Its channels have a mean of 0, of which rounding leaves next to nothing.
BATCH_NORM_TWICE = {
    "body": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    )
}
BARE_BATCH_NORM = {
    "body": lambda: nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False, track_running_stats=False)
    )
}
INSTANCE_NORM = {"body": lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True))}
TRANSPOSED = {"body": lambda: nn.Sequential(nn.ConvTranspose2d(2, 8, 2, bias=False), nn.GELU())}

CASES = {
    "plain": (plain, {}),
    "written in place": (in_place, {}),
    "a part written": (write_a_part, {}),
    "zeros written": (write_into_zeros, {}),
    "several outputs": (outputs_too, {}),
    "rows mixed by a mean": (mix_rows_by_mean, {}),
    "rows mixed by a product": (mix_rows_by_product, {}),
    "rows mixed by a view": (mix_rows_by_view, {}),
    "rows mixed by their order": (mix_rows_by_order, {}),
    "softmax over rows": (softmax_over_rows, {}),
    "attention with a class token": (heads, {}),
    "rows in other dimensions": (move_rows, {}),
    "tables": (look_up, {"table": lambda: nn.Embedding(8, 8)}),
    "indices": (by_index, {}),
    "a tensor with rows shared by all": (shared_over_rows, {}),
    "padding and resizing": (padded, {}),
    "convolution and group norm": (convolved, CONV),
    "batch norm": (convolved, BATCH_NORM),
    "batch norm after batch norm": (convolved, BATCH_NORM_TWICE),
    "batch norm without weights and statistics": (convolved, BARE_BATCH_NORM),
    "batch norm of sequences": (
        normalised,
        {"body": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2, momentum=0.3), nn.Flatten())},
    ),
    "instance norm": (convolved, INSTANCE_NORM),
    "transposed convolution": (convolved, TRANSPOSED),
    "batch norm of two dimensions": (normalised, {"body": lambda: nn.BatchNorm1d(8, momentum=0.3)}),
    "layer norm": (normalised, {"body": lambda: nn.LayerNorm(8)}),
    "dropout": (normalised, {"body": lambda: nn.Sequential(nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.2))}),
    "dropout of channels": (convolved, {"body": lambda: nn.Sequential(nn.Conv2d(2, 8, 1), nn.Dropout2d(0.4))}),
    "noise": (lambda m, x, y: loss(m, m.first(x) + torch.randn_like(m.scale) * torch.rand(ROWS, 1), y), {}),
    "recurrence": (recurrent, {"body": lambda: nn.LSTM(2, 8)}),
    "recurrence in both directions": (
        recurrent_both_ways,
        {
            "onward": lambda: nn.LSTM(2, 4, batch_first=True),
            "backward": lambda: nn.LSTM(2, 4, batch_first=True),
            "above": lambda: nn.LSTM(8, 8, batch_first=True),
        },
    ),
    "gated recurrence": (recurrent, {"body": lambda: nn.GRU(2, 8)}),
    "views in place": (views_in_place, {}),
    "blocks": (in_blocks, {}),
    "a scaled loss": (scaled_loss, {}),
    "sum": (with_loss(lambda s, y: functional.cross_entropy(s, y, reduction="sum")), {}),
    "mean of single losses": (
        with_loss(lambda s, y: emulator.identity_loss(functional.cross_entropy(s, y, reduction="none"), "mean")),
        {},
    ),
    "ignored targets": (with_loss(lambda s, y: functional.cross_entropy(s, y, ignore_index=1)), {}),
    "smoothed labels": (with_loss(smoothed), {}),
    "squares": (with_loss(lambda s, y: functional.mse_loss(s, functional.one_hot(y, 5).float())), {}),
    "logits": (
        with_loss(lambda s, y: functional.binary_cross_entropy_with_logits(s, functional.one_hot(y, 5).float())),
        {},
    ),
    "log probabilities of pixels": (
        with_loss(
            lambda s, y: functional.nll_loss(functional.log_softmax(s.view(ROWS, 5, 1, 1), 1), y.view(ROWS, 1, 1))
        ),
        {},
    ),
}


@contextlib.contextmanager
def one_by_one():
    original = chunks.ChunkRunner.size_for
    chunks.ChunkRunner.size_for = lambda self, block: 1
    try:
        yield
    finally:
        chunks.ChunkRunner.size_for = original


def train(
    function,
    layers,
    *,
    calls=2,
    accumulation=ACCUMULATION,
    replicas=REPLICAS,
    rows=ROWS,
    cache=None,
    dtype=torch.float32,
):
    """Train a fresh model; return its results, its state and how many micro-batches were computed at once."""
    torch.manual_seed(1)
    model = Model(function, {name: make() for name, make in layers.items()}).to(dtype)
    options = emulator.Options().randomSeed(7).replicationFactor(replicas).deviceIterations(2)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(emulator.OutputMode.All)
    if cache is not None:
        options.enableExecutableCaching(str(cache))
    training = emulator.trainingModel(model, options, emulator.optim.SGD(model.parameters(), lr=0.05))
    total = rows * accumulation * replicas * 2
    results = []
    for _ in range(calls):
        returned = training(torch.randn(total, 6).to(dtype), torch.randint(0, 5, (total,)))
        results += list(returned) if isinstance(returned, tuple) else [returned]
    training.copyWeightsToHost()
    return results, dict(model.state_dict()), training._executable.chunks.size


@pytest.mark.parametrize("name", CASES)
def test_together_as_one_by_one(name):
    function, layers = CASES[name]
    together, state, size = train(function, layers)
    with one_by_one():
        alone, expected, _ = train(function, layers)
    assert size == 8
    for got, wanted in zip(together, alone):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)
    for key, wanted in expected.items():
        torch.testing.assert_close(state[key], wanted, rtol=1e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize(
    "name", ["convolution and group norm", "batch norm", "dropout", "recurrence in both directions", "blocks"]
)
def test_together_as_one_by_one_in_half_precision(name):
    together, _, size = train(*CASES[name], calls=1, dtype=torch.float16)
    with one_by_one():
        alone, _, _ = train(*CASES[name], calls=1, dtype=torch.float16)
    assert size == 8
    for got, wanted in zip(together, alone):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-3)


def test_batch_norm_in_half_precision_rounds_as_one_by_one():
    """Deep networks multiply what another kernel would round differently, until gradients are taken for different."""

    def forward(model, x, y):
        hidden = model.first(x)
        images = model.layers["norm"](hidden[:, :, None, None] * hidden[:, None, :, None])
        return images, loss(model, images.mean((2, 3)), y)

    layers = {"norm": lambda: nn.BatchNorm2d(8)}
    together, _, size = train(forward, layers, calls=1, rows=16, dtype=torch.float16)
    with one_by_one():
        alone, _, _ = train(forward, layers, calls=1, rows=16, dtype=torch.float16)
    assert size == 8
    assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize("name", CASES)
def test_a_graph_from_the_cache_computes_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_EMULATOR_CACHE_SECONDS", "0")
    function, layers = CASES[name]
    results, state, _ = train(function, layers, cache=tmp_path)
    monkeypatch.setattr(forms, "_remembered", {})  # as in another process
    monkeypatch.setattr(chunks, "fold", lambda *args: pytest.fail("the graph was made again"))
    again, loaded, size = train(function, layers, cache=tmp_path)
    assert size == 8
    assert all(torch.equal(got, wanted) for got, wanted in zip(again, results))
    assert all(torch.equal(loaded[key], wanted) for key, wanted in state.items())


def test_random_numbers_of_a_micro_batch_do_not_depend_on_what_is_computed_with_it():
    mask = lambda model, x, y: (functional.dropout(torch.ones_like(x), 0.5), plain(model, x, y))  # noqa: E731
    together, _, size = train(mask, {})
    with one_by_one():
        alone, _, _ = train(mask, {})
    assert size == 8
    assert torch.equal(together[0], alone[0])
    assert not torch.equal(alone[0][:ROWS], alone[0][ROWS : 2 * ROWS])


@pytest.mark.parametrize("name", ["dropout", "batch norm", "attention with a class token"])
def test_the_same_run_twice_is_the_same_bit_for_bit(name):
    first, second = train(*CASES[name]), train(*CASES[name])
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit():
    layers = {"body": lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(8))}
    data = [(torch.randn(32, 6), torch.randint(0, 5, (32,))) for _ in range(4)]

    def start():
        torch.manual_seed(1)
        model = Model(normalised, {name: make() for name, make in layers.items()})
        options = emulator.Options().randomSeed(7)
        options.Training.gradientAccumulation(8)
        optimizer = emulator.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, emulator.trainingModel(model, options, optimizer)

    whole, _, training = start()
    for batch in data:
        training(*batch)
    training.copyWeightsToHost()
    model, optimizer, training = start()
    for batch in data[:2]:
        training(*batch)
    training.copyWeightsToHost()
    weights, state, random = dict(model.state_dict()), optimizer.state_dict(), training.rng_state
    resumed, optimizer, training = start()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    training.compile(*data[0])
    training.rng_state = random
    for batch in data[2:]:
        training(*batch)
    training.copyWeightsToHost()
    assert training._executable.chunks.size == 8
    assert all(torch.equal(value, resumed.state_dict()[key]) for key, value in whole.state_dict().items())


@pytest.mark.parametrize("training_mode", [False, True])
def test_inference_together_as_one_by_one(training_mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model.train(training_mode)
    images = torch.randn(16, 1, 8, 8)
    inference = emulator.inferenceModel(model, emulator.Options().deviceIterations(8))
    got = inference(images)
    assert inference._executable.chunks.size == 8
    with torch.no_grad():
        expected = torch.cat([model(part) for part in images.split(2)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "scale"), [((6,), 1.0), ((6, 5), 1.0), ((6, 5), 1e-3), ((6, 5), 1e3)])
def test_running_statistics_of_replicas_follow_the_order_of_their_micro_batches(shape, scale):
    norm = nn.BatchNorm1d(6, momentum=0.3)
    torch.manual_seed(0)
    layers = {"norm": norm, "flat": nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 6))}
    model = Model(lambda m, x, y: loss(m, m.first(m.layers["flat"](m.layers["norm"](x))), y), layers)
    options = emulator.Options().replicationFactor(2)
    options.Training.gradientAccumulation(4)
    training = emulator.trainingModel(model, options, emulator.optim.SGD(model.parameters(), lr=0.0))
    data = torch.randn(32, *shape) * scale + scale
    training(data, torch.randint(0, 5, (32,)))
    assert training._executable.chunks.size == 8
    reference = [nn.BatchNorm1d(6, momentum=0.3) for _ in range(2)]
    for index, part in enumerate(data.split(4)):
        reference[index % 2](part)
    for name in ("running_mean", "running_var"):
        copies = training._executable.weights.buffers[f"layers.norm.{name}"]
        for copy, expected in zip(copies, reference):
            torch.testing.assert_close(copy, getattr(expected, name))


@pytest.mark.parametrize(
    ("limit", "value"),
    [("_CACHE_BYTES", 512), ("_MEMORY_BUDGET_BYTES", 0), ("_LARGE_WORK_FLOPS", 1), ("_LARGE_RESULT_BYTES", 1)],
)
def test_large_micro_batches_are_run_one_by_one(limit, value, monkeypatch):
    assert train(plain, {}, calls=1, rows=16)[2] == 8
    monkeypatch.setattr(chunks, limit, value)
    assert train(plain, {}, calls=1, rows=16)[2] == 1


def differing(comparisons, monkeypatch):
    """Let this many comparisons fail, as where a value lies on a kink; return the gradients that were compared."""
    seen = []
    compare = chunks._compare

    def record(alone, summed, outputs, grads):
        seen.append({name: grad.clone() for name, grad in summed.items()})
        if len(seen) <= comparisons:
            raise chunks._Different("a kink")
        compare(alone, summed, outputs, grads)

    monkeypatch.setattr(chunks, "_compare", record)
    return seen


def test_results_that_differ_once_are_compared_again_with_other_weights(monkeypatch):
    expected, state, _ = train(plain, {})
    seen = differing(1, monkeypatch)
    monkeypatch.setattr(forms, "_remembered", {})
    results, compared, size = train(plain, {})
    assert size == 8
    assert len(seen) == 2
    assert not any(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
    assert all(torch.equal(got, wanted) for got, wanted in zip(results, expected))
    assert all(torch.equal(compared[key], wanted) for key, wanted in state.items())


def test_results_that_always_differ_keep_micro_batches_apart(monkeypatch):
    seen = differing(math.inf, monkeypatch)
    assert train(*CASES["batch norm"])[2] == 1
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x, y: loss(m, m.first(x) * torch.bernoulli(torch.sigmoid(x[:, :1])), y), "bernoulli draws random"),
        (lambda m, x, y: loss(m, m.first(Twice.apply(x * m.scale[:6])), y), "functions of the user"),
    ],
)
def test_the_log_names_what_keeps_micro_batches_apart(function, reason, caplog):
    emulator.setLogLevel("DEBUG")
    try:
        _, _, size = train(function, {}, calls=1)
    finally:
        emulator.setLogLevel("WARN")
    assert size == 1
    assert re.search(f"run one by one: .*{re.escape(reason)}", caplog.text)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3
