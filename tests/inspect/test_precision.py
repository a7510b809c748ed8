"""Half precision: what is cast, where, and what is not."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from run_harness import built
from torch import nn
from torch.utils.data import default_collate

from ipurun.inspect.precision import CastingCollate, cast_hooks, cast_weights


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
