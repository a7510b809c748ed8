"""Half precision: what is cast, where, and what is not."""

from __future__ import annotations

import copy
from typing import Any, Dict, List

import pytest
import torch
from run_harness import built, inspected
from torch import nn
from torch.utils.data import default_collate

import ipurun.emulator as poptorch
from ipurun.inspect.precision import CastingCollate, HalfWeights, cast_hooks, cast_weights


class Seen(nn.Module):
    """Records the types of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.types: List[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        self.types.append(x.dtype)
        if scale is not None:
            self.types.append(scale.dtype)
        return x * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Seen()
        self.block = nn.Sequential(Seen(), Seen())
        self.last = Seen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)))

    def seen(self) -> Dict[str, torch.dtype]:
        return {name: m.types[-1] for name, m in self.named_modules() if isinstance(m, Seen)}


HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("precision", "rules", "given", "types", "result"),
    [
        ("32.32", {"block": "16"}, FULL, (FULL, HALF, HALF, FULL), FULL),
        ("16.16", {"block": "32"}, HALF, (HALF, FULL, FULL, HALF), HALF),
        ("16.32", {"last": "32"}, HALF, (HALF, HALF, HALF, FULL), HALF),
        ("32.32", {"block": "16", "block.1": "32"}, FULL, (FULL, HALF, FULL, FULL), FULL),
    ],
)
def test_rules_cast_around_modules(precision: str, rules: Any, given: Any, types: Any, result: Any) -> None:
    net = Net()
    handles = cast_hooks(net, precision, rules)
    assert net(torch.ones(1, dtype=given)).dtype == result
    assert net.seen() == dict(zip(("first", "block.0", "block.1", "last"), types))
    for handle in handles:
        handle.remove()
    net(torch.ones(1, dtype=given))
    assert set(net.seen().values()) == {given}


def test_named_arguments_are_cast_and_integers_are_not() -> None:
    net = Seen()
    holder = nn.ModuleDict({"m": net})
    cast_hooks(holder, "32.32", {"m": "16"})
    net(torch.ones(1), scale=torch.ones(1))
    assert net.types == [HALF, HALF]
    net(torch.ones(1, dtype=torch.int32))
    assert net.types[-1] == torch.int32


@pytest.mark.parametrize(
    ("precision", "rules", "halved"),
    [
        ("32.32", {}, set()),
        ("16.32", {}, set()),
        ("16.16", {}, {"first", "block.0", "block.1", "last"}),
        ("16.16", {"block": "32"}, {"first", "last"}),
        ("16.16", {"block": "32", "block.0": "16"}, {"first", "block.0", "last"}),
        ("32.32", {"block": "16"}, {"block.0", "block.1"}),
        ("16.32", {"last": "16"}, set()),
    ],
)
def test_types_of_weights(precision: str, rules: Any, halved: Any) -> None:
    net = Net()
    cast_weights(net, precision, rules)
    found = {name.rpartition(".")[0] for name, weight in net.named_parameters() if weight.dtype == HALF}
    assert found == halved


def test_the_host_casts_inputs_but_not_targets() -> None:
    samples = [(torch.ones(2), torch.tensor(3), torch.ones(1)) for _ in range(4)]
    inputs, numbers, target = CastingCollate(default_collate, True, None)(samples)
    assert (inputs.dtype, numbers.dtype, target.dtype) == (HALF, torch.int64, FULL)
    inputs, _, target = CastingCollate(default_collate, False, None)(samples)
    assert (inputs.dtype, target.dtype) == (HALF, HALF)
    named = CastingCollate(default_collate, True, None)([{"x": torch.ones(2), "labels": torch.ones(1)}])
    assert (named["x"].dtype, named["labels"].dtype) == (HALF, FULL)


def test_a_run_with_rules_trains_with_mixed_weights() -> None:
    run = built(precision="16.16", precision_rules={"sec*": 32})
    types = {name: value.dtype for name, value in run.user_model.state_dict().items()}
    assert types["first.weight"] == HALF and types["second.weight"] == FULL


class Tied(nn.Module):
    """Reads a weight of another module, a list of parameters, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.register_buffer("positions", torch.ones(3, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.positions
        for scale in self.scales:
            hidden = hidden * scale
        assert self.embed.weight.dtype == HALF and self.embed.weight.shape == (9, 4)
        return nn.functional.linear(hidden, self.embed.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Conv2d(4, 2, 3), (1, 4, 8, 8)),
        (nn.Linear(4, 2), (3, 4)),
        (nn.Linear(4, 2), (2, 3, 4)),
        (nn.Bilinear(4, 4, 2), None),
        (nn.LayerNorm(4), (3, 4)),
        (nn.BatchNorm1d(4), (3, 4)),
        (nn.PReLU(4), (3, 4)),
        (Attention(), (2, 3, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8), (2, 3, 4)),
        (Recurrent(), (2, 3, 4)),
        (Tied(), None),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else "",
)
def test_mixed_precision_computes_in_half_from_float_weights(model: nn.Module, shape: Any) -> None:
    model.to("meta")
    inputs: List[torch.Tensor] = [torch.empty(shape or (3, 4), dtype=HALF, device="meta")]
    if isinstance(model, nn.Bilinear):
        inputs *= 2
    elif isinstance(model, Tied):
        inputs = [torch.empty(2, 3, dtype=torch.int64, device="meta")]
    with HalfWeights(model):
        assert model(*inputs).dtype == HALF
    assert {weight.dtype for weight in model.parameters()} == {FULL}


def test_mixed_precision_writes_buffers_in_their_own_type() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += 1.0
            self.total.add_(1.0)
            self.total[0] = 5.0
            return self.total.float()

    counter = Counter()
    with HalfWeights(counter):
        assert counter(torch.ones(1)).tolist() == [5.0, 2.0]
    assert counter.total.dtype == FULL and counter.total.tolist() == [5.0, 2.0]


def test_mixed_precision_leaves_modules_with_a_rule_in_float() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.inner = nn.Identity()
            self.seen: List[torch.dtype] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(self.weight.dtype)
            return self.inner(x)

    net = nn.Sequential(Reader(), Reader(), Reader())
    net[1].inner = Reader()
    cast_hooks(net, "16.32", {"1": "32", "1.inner": "16"})
    with HalfWeights(net):
        net(torch.ones(1, dtype=HALF))
    assert [net[0].seen, net[1].seen, net[1].inner.seen, net[2].seen] == [[HALF], [FULL], [HALF], [HALF]]


def test_mixed_precision_trains_as_a_model_that_casts_its_weights_itself() -> None:
    """The runner adds casts around nothing but the weights: a hand-written program gets the same bits."""
    run = built(precision="16.32", gradient_accumulation=2, loss_scaling=64.0)
    run.train_loader.start()
    batches = list(run.train_loader.epoch())
    assert len(batches) > 2
    written = CastsItself(copy.deepcopy(run.user_model))
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.randomSeed(run.config.seed)
    optimizer = poptorch.optim.SGD(written.parameters(), lr=0.1, momentum=0.9, loss_scaling=64.0)
    by_hand = poptorch.trainingModel(written, options, optimizer)
    run.enter_training()
    for x, y in batches:
        assert x.dtype == HALF
        run.training_model(x, y)
        by_hand(x, y)
    run.training_model.copyWeightsToHost()
    by_hand.copyWeightsToHost()
    assert {weight.dtype for weight in run.user_model.parameters()} == {FULL}
    expected = written.net.state_dict()
    start = CastsItself(copy.deepcopy(inspected(run.config).model)).net.state_dict()
    for name, weight in run.user_model.state_dict().items():
        assert torch.equal(weight, expected[name]) and not torch.equal(weight, start[name]), name


class CastsItself(nn.Module):
    """The toy network, with the casts of mixed precision written out."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = self.net.first, self.net.second
        hidden = torch.relu(nn.functional.linear(x, first.weight.half(), first.bias.half()))
        return nn.functional.cross_entropy(nn.functional.linear(hidden, second.weight.half(), second.bias.half()), y)
