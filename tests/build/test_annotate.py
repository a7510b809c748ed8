"""Blocks and recomputation marks on models written without PopTorch."""

from __future__ import annotations

from typing import List

import torch
from run_harness import built
from run_toys import Net
from torch import nn

from ipurun import emulator
from ipurun.build.annotate import Annotations
from ipurun.planning.plan import Placement


def _blocks(model: nn.Module) -> List[str]:
    """Return the modules that begin a block, in PopTorch's own terms."""
    text = emulator.module_repr(model)
    return [line.strip() for line in text.splitlines() if "BeginBlock" in line]


def test_blocks_are_installed_and_removed() -> None:
    net = Net()
    annotations = Annotations(net, emulator, "32.32", {}, ())
    annotations.install([Placement("first", 0, "A"), Placement("second", 1, "B")])
    assert len(_blocks(net)) == 2
    annotations.install([Placement("drop", 0, "C")])
    assert len(_blocks(net)) == 1
    annotations.remove()
    assert _blocks(net) == []


def test_the_model_itself_can_begin_a_block() -> None:
    net = Net()
    annotations = Annotations(net, emulator, "32.32", {}, ())
    annotations.install([Placement("", 0, "all"), Placement("second", 1, "B")])
    assert len(net._forward_pre_hooks) == 1
    annotations.remove()
    assert len(net._forward_pre_hooks) == 0


def test_blocks_of_the_models_author_stay() -> None:
    net = nn.Sequential(Net(), nn.Linear(3, 3))
    emulator.BeginBlock(net[0].second, user_id="own", ipu_id=0)
    annotations = Annotations(net, emulator, "32.32", {}, ())
    annotations.install([Placement("0", 0, "A"), Placement("1", 1, "B")])
    annotations.remove()
    assert len(_blocks(net)) == 1


def test_parameter_names_and_results_do_not_change() -> None:
    net = Net()
    names, x = list(net.state_dict()), torch.ones(2, 4)
    before = net(x)
    Annotations(net, emulator, "32.32", {}, ("first",)).install([Placement("second", 1, "B")])
    assert list(net.state_dict()) == names and torch.equal(net(x), before)


def test_checkpoints_mark_the_outputs_of_their_modules(monkeypatch) -> None:
    marked = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        marked.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(emulator, "recomputationCheckpoint", record)
    net = Net(width=7)
    annotations = Annotations(net, emulator, "32.32", {}, ("first", "second"))
    annotations.install(())
    net(torch.ones(2, 4))
    assert marked == [(2, 7), (2, 3)]
    annotations.remove()
    net(torch.ones(2, 4))
    assert len(marked) == 2


def test_training_and_inference_may_be_placed_differently() -> None:
    run = built(devices=2, pipeline__split=["second"], gradient_accumulation=4, inference__split=[], micro_batch_size=2)
    assert run.plan.placements != run.plan.inference_placements
    run.enter_training()
    in_training = len(_blocks(run.user_model))
    run.enter_inference()
    assert in_training > len(_blocks(run.user_model))
