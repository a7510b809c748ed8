"""The order of modules and blocks in a forward pass, from a trace."""

from __future__ import annotations

from typing import List, Optional

import pytest
import torch
from run_harness import config

from ipurun.inspect.trace import ForwardOrder, trace_forward_order

SAMPLE = (torch.zeros(4), torch.tensor(0))


def _order(model: str, sample: object = SAMPLE) -> ForwardOrder:
    order, reason = trace_forward_order(config(model={"_target_": model}), sample)
    assert order is not None, reason
    return order


def test_modules_are_listed_as_they_run_in_training() -> None:
    order = _order("lookalikes.AuxiliaryNet", (torch.zeros(6, dtype=torch.int64), torch.tensor(0)))
    assert [call.module for call in order.calls] == ["", "embed", "body", "head", "aux"]
    positions = [call.operations for call in order.calls]
    assert positions == sorted(positions) and positions[-1] < order.operations


@pytest.mark.parametrize(("model", "ipus"), [("Returning", [0, 1, 0]), ("Unplaced", [None, None, None])])
def test_blocks_are_recorded_with_the_ipu_they_request(model: str, ipus: List[Optional[int]]) -> None:
    blocks = _order(f"user_blocks.{model}").blocks
    assert [(block.block_id, block.ipu) for block in blocks] == list(zip("abc", ipus))


def test_blocks_that_end_with_a_module_are_recorded() -> None:
    ended = {(block.module, block.ipu) for block in _order("user_blocks.EnclosedLayers").ended}
    assert {("first", 0), ("second", 1)} <= ended


def test_a_model_that_cannot_be_traced_gives_the_reason() -> None:
    assert trace_forward_order(config()) == (None, "the model cannot be traced without an item of the data")
    order, reason = trace_forward_order(config(), (torch.zeros(5), torch.tensor(0)))
    assert order is None and "the model cannot be traced" in reason and "addmm" in reason
