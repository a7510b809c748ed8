"""Items of batches and of outputs: the target, the loss, and containers that keep their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ipurun.errors import ConfigError
from ipurun.inspect.batch_items import leading_rows, map_tensors, pick, split_target, target_of, with_loss


def test_a_missing_item_is_reported_with_the_existing_ones() -> None:
    with pytest.raises(ConfigError, match="the keys a, b"):
        split_target((), {"a": 1, "b": 2}, None)
    with pytest.raises(ConfigError, match="2 items by position"):
        split_target((1, 2), {}, "5")
    assert target_of({"a": 1}, None) is None


@pytest.mark.parametrize(("output", "shown"), [(None, "NoneType"), (3.5, "float"), ((), "an empty tuple")])
def test_a_model_that_returns_no_tensor_is_reported(output: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"the model returns {shown}"):
        pick(output, None)


def test_picking_from_outputs() -> None:
    t = torch.zeros(1)
    assert pick(t, None) is t and pick((1, t), None, loss=True) is t and pick({"loss": t, "x": 1}, None, loss=True) is t
    assert pick({"loss": 1, "logits": t}, None) is t and pick((t, 1), None) is t
    assert pick({"loss": 1, "other": t}, None) is t
    for output, which in ((t, "3"), ((1, 2), "5"), ({"a": 1}, "b")):
        with pytest.raises(ConfigError, match=r"loss\.output"):
            pick(output, which)


def test_mapping_keeps_containers() -> None:
    nested = {"a": [torch.ones(2), 3], "b": (torch.ones(1),)}
    doubled = map_tensors(lambda t: t * 2, nested)
    assert isinstance(doubled["b"], tuple) and doubled["a"][1] == 3 and doubled["a"][0].tolist() == [2, 2]
    assert leading_rows({"n": torch.tensor(3), "x": torch.zeros(6, 2)}) == 6


@pytest.mark.parametrize("output", [(1.0, 2.0), [1.0, 2.0], {"loss": 2.0, "other": 1.0}])
def test_replacing_the_loss_keeps_the_structure(output: Any) -> None:
    new = torch.tensor(7.0)
    changed = with_loss(output, None, new)
    assert type(changed) is type(output) and len(changed) == 2
    assert pick(changed, None, loss=True) is new and pick(output, None, loss=True) == 2.0
