"""The backend's own log: its channels, and the compiled program as the backend tells it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ipurun.emulator._capture.graph import Graph
from ipurun.emulator._logs.lowering import LoweredOp, lowered_ops

__all__ = ["log_program", "set_level"]

LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF")
# Every other op is one of ONNX.
_GRAPHCORE_OPS = frozenset(
    ["Checkpoint", "Gelu", "GroupNormalization", "IdentityLoss", "L1", "MultiConv", "Nll", "Nop", "Scale"]
)


class _Threshold:
    """The level that lines must have to be written."""

    number = LEVELS.index("WARN")


def set_level(level: str) -> None:
    """Sets how much the backend logs.

    Args:
        level: One of `LEVELS`.

    Raises:
        ValueError: For anything else.
    """
    if not isinstance(level, str) or level not in LEVELS:
        raise ValueError(f"Level must be one of {', '.join(LEVELS)}, got {level!r}")
    _Threshold.number = LEVELS.index(level)


def log_program(graph: Graph, options: Any) -> None:
    """Logs a compiled program: that it was compiled at TRACE and INFO, and its ops at DEBUG.

    Args:
        graph: The captured graph.
        options: The executor's options.
    """
    if _Threshold.number > LEVELS.index("INFO"):
        return
    ops = lowered_ops(graph, options._module_namescope_enabled)
    _write("session", "TRACE", "The session compiles a program for the emulated device")
    _write("popart", "TRACE", "Options and patterns are set")
    _write("ir", "INFO", f"The program has {len(ops)} forward ops")
    for number, op in enumerate(ops):
        _write("ir", "DEBUG", _described(number, op))
    _write("devicex", "TRACE", "The program is ready to run")


def _described(number: int, op: LoweredOp) -> str:
    domain, version = ("ai.graphcore", 1) if op.type in _GRAPHCORE_OPS else ("ai.onnx", 10)
    lines = [
        f'Op "{op.name}", {number} of type {domain}.{op.type}:{version}',
        f"  output: {op.name} {op.shape}",
        f"  ipu: {op.placement.ipu_id}, stage: {op.placement.stage_id}, phase: {op.placement.phase_id}",
    ]
    for pairs in op.attributes.values():
        lines += [f"  {key}: {key}:{value}" for key, value in pairs.items()]
    return "\n".join(lines)


def _write(channel: str, level: str, message: str) -> None:
    if LEVELS.index(level) >= _Threshold.number:
        sys.stderr.write(f"popart:{channel} {time.perf_counter():.6f} {level[0]}: {message}\n")
        sys.stderr.flush()


_environment_level = os.environ.get("POPART_LOG_LEVEL", "WARN")
set_level(_environment_level if _environment_level in LEVELS else "WARN")
