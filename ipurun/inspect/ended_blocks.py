"""Blocks that a model's own code ends, while it is traced.

After ``with poptorch.Block(...)`` no block is active, and PopTorch refuses operations outside of all blocks. Where the
model's author wrote one around a whole `forward`, the loss, casts and marks that ipurun puts behind it go on in it.
"""

from __future__ import annotations

from typing import Any, List, Optional

from torch import nn

from ipurun.emulator.graph import Placement, Recorder, active_recorder

__all__ = ["ended_block", "go_on_in_ended_blocks"]


def ended_block(recorder: Recorder) -> Optional[Placement]:
    """The last block of a trace, if its end has come and no other one has begun."""
    ended = False
    for event in reversed(recorder.graph.events):
        if event.kind == "begin_block":
            return event.info["placement"] if ended else None
        ended = ended or event.kind == "end_block"
    return None


def go_on_in_ended_blocks(model: nn.Module) -> List[Any]:
    """Hooks behind all modules, since nobody knows before a trace which of them end blocks; what `Annotations` does in
    a run.
    """
    return [module.register_forward_hook(_begin_again) for module in model.modules()]


def _begin_again(module: nn.Module, args: Any, output: Any) -> None:
    recorder = active_recorder()
    ended = None if recorder is None else ended_block(recorder)
    if recorder is not None and ended is not None:
        recorder.begin_block(*ended)
