"""PopTorch's operations and annotations, under the names of `poptorch.ops`."""

from __future__ import annotations

from ipurun.emulator._ops.added_ops import ctc_beam_search_decoder, dynamic_slice, dynamic_update, fps, nearest
from ipurun.emulator._ops.annotations import (
    MultiConv,
    NameScope,
    identity_loss,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipurun.emulator._ops.blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    BlockHook,
    LegacyBeginBlockFn,
    removeBlocks,
)
from ipurun.emulator._ops.control_flow import cond, for_loop
from ipurun.emulator._ops.custom_ops import CPU, custom_op, register_cpu_implementation
from ipurun.emulator._ops.print_tensor import ipu_print_tensor

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "LegacyBeginBlockFn",
    "MultiConv",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "register_cpu_implementation",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]

_BlockHook = BlockHook
