"""The order in which a forward pass calls modules and begins blocks, found by tracing the model once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ipurun.config.schema import RunConfig
from ipurun.emulator.graph import BlockRecorder, active_recorder
from ipurun.errors import ConfigError
from ipurun.inspect.facts import EndedBlock, ModuleCall, UserBlock
from ipurun.inspect.loss import ModelWithLoss
from ipurun.inspect.model import user_blocks
from ipurun.inspect.sampling import seeded
from ipurun.inspect.trace import ended_block, trace_model

__all__ = ["ForwardOrder", "trace_forward_order"]

_PREFIX = "model."  # of the names of the user's modules in `ModelWithLoss`


@dataclass
class ForwardOrder:
    """The module calls of a forward pass and the blocks of its code.

    Args:
        calls: Calls in order, under the names of the user's model, without those of the loss.
        operations: Operations of the whole pass.
        blocks: Blocks that `forward` itself begins.
        ended: Blocks that end where a module does.
    """

    calls: List[ModuleCall] = field(default_factory=list)
    operations: int = 0
    blocks: List[UserBlock] = field(default_factory=list)
    ended: List[EndedBlock] = field(default_factory=list)


def trace_forward_order(config: RunConfig, sample: Any = None) -> Tuple[Optional[ForwardOrder], str]:
    """Trace the model of a config with its loss; return its forward order, or None and the reason.

    Args:
        config: The run. Its `sample` gives the shapes when no item of the data is passed.
        sample: One item of the data set.
    """
    if sample is None and not config.sample:
        return None, "the model cannot be traced without an item of the data"
    blocks = BlockRecorder()
    try:
        with seeded(config.seed), _recording(blocks.requested_ipus) as order:
            trace_model(config, sample=sample, training=False, strategy=blocks)
    except ConfigError as error:
        problem = error.problems[0]
        return None, f"{problem.what} ({problem.where}: {problem.seen})"
    return order, ""


@contextlib.contextmanager
def _recording(requested_ipus: Mapping[str, Optional[int]]) -> Iterator[ForwardOrder]:
    """Record the last forward pass of a `ModelWithLoss` that is captured inside.

    The model runs in training mode, in which it may call more modules (auxiliary heads), but without the cost of a
    backward pass.

    Args:
        requested_ipus: Block id -> the IPU that the block requests, filled while the model runs.
    """
    order = ForwardOrder()
    names: Dict[int, str] = {}

    def enter(module: nn.Module, inputs: Any) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if isinstance(module, ModelWithLoss):
            module.train()
            order.ended.clear()
            names.clear()
            names.update({id(part): name for name, part in module.model.named_modules()})

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if not isinstance(module, ModelWithLoss):
            place = ended_block(recorder) if id(module) in names else None
            if place is not None:
                order.ended.append(EndedBlock(names[id(module)], place.block_id, requested_ipus[place.block_id]))
            return
        order.operations = len(recorder.graph.nodes)
        order.calls = [
            ModuleCall(path[len(_PREFIX) :], position)
            for path, position in recorder.calls
            if path.startswith(_PREFIX) or path == _PREFIX[:-1]
        ]
        at_modules = {block.block_id for block in user_blocks(module.model)}
        begun = [(e.info["placement"], e.position) for e in recorder.graph.events if e.kind == "begin_block"]
        order.blocks = [
            UserBlock(None, requested_ipus[place.block_id], place.block_id, position)
            for (place, position), (before, _) in zip(begun, [(None, 0), *begun])
            if place != before and place.block_id not in at_modules  # re-opening a block begins it a second time
        ]

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()
