"""Log a compiled program: its placement, and the lines of the backend's own log."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from typing import Any, Callable

from ipurun.emulator._capture.graph import Graph, Placement
from ipurun.emulator._capture.host_tensors import scalar_type_name
from ipurun.emulator._logging import native_logger, trace
from ipurun.emulator._logs.lowering import LoweredOp, lowered_ops, scattered_dimension
from ipurun.emulator._options.strategies import ShardedExecution, _IPhasedExecution
from ipurun.emulator.enums import Liveness

LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF")
# All other ops belong to ONNX.
_GRAPHCORE_OPS = frozenset(
    ["Checkpoint", "Gelu", "GroupNormalization", "IdentityLoss", "L1", "MultiConv", "Nll", "Nop", "Scale"]
    + ["ScatterReduce"]
)
_PHASE_STRIDES = {Liveness.OffChipAfterFwdNoOverlap: 2, Liveness.OffChipAfterEachPhase: 4}
_PHASES_BETWEEN_PASSES_OFF_CHIP = 3


class _Threshold:
    """The lowest level that is written."""

    number = LEVELS.index("WARN")


def set_level(level: str) -> None:
    """Set how much the backend logs.

    Args:
        level: One of `LEVELS`.

    Raises:
        ValueError: For anything else.
    """
    if not isinstance(level, str) or level not in LEVELS:
        raise ValueError(f"Level must be one of {', '.join(LEVELS)}, got {level!r}")
    _Threshold.number = LEVELS.index(level)


def log_program(graph: Graph, options: Any) -> None:
    """Log the compilation of a program at TRACE and INFO, and its ops at DEBUG.

    Args:
        graph: The captured graph.
        options: The executor's options.
    """
    if _Threshold.number > LEVELS.index("INFO"):
        return
    ops = lowered_ops(graph, options._module_namescope_enabled)
    _write("session", "TRACE", "Compiling a program for the emulated device")
    _write("popart", "TRACE", "Options and patterns set")
    _write("ir", "INFO", f"The program has {len(ops)} forward ops")
    for number, op in enumerate(ops):
        _write("ir", "DEBUG", _described(number, op))
    _write("devicex", "TRACE", "Program ready to run")


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


def log_placement(graph: Graph, options: Any) -> None:
    """Log the settings derived from the strategy, and every forward op with its placement.

    Args:
        graph: The captured graph.
        options: The executor's options.
    """
    if not native_logger.isEnabledFor(logging.DEBUG):
        return
    strategy = options._execution_strategy
    forward = [node.placement for node in graph.nodes if not node.is_backward]
    if isinstance(strategy, _IPhasedExecution):
        _log_set("enablePipelining", 0)
        _log_phases(strategy, max([placement.phase_id for placement in forward], default=0))
        _log_locations(options)
        describe = _in_phase(strategy)
    elif isinstance(strategy, ShardedExecution):
        _log_set("enablePipelining", 0)
        describe = _in_stage("Sharded")
    else:
        _log_set("enablePipelining", int(len({placement.ipu_id for placement in forward}) > 1))
        describe = _in_stage("Pipelined")
    _trace_inputs(graph)
    _trace_scatters(graph)
    ops = lowered_ops(graph, options._module_namescope_enabled)
    native_logger.debug("Graph lowered to PopART:")
    for op in ops:
        native_logger.debug("%s [%s, %s]", op.name, op.shape, describe(op.placement))
    for op in ops:
        native_logger.debug("%s (%s) was lowered to %s", op.name, op.source, op.type)


def _trace_inputs(graph: Graph) -> None:
    trace("Inputs of the graph:")
    for item in graph.inputs_of("input", "parameter", "buffer"):
        spec = graph.specs[item.value]
        kind = scalar_type_name(spec.dtype)
        sizes = "".join(f"{size}, " for size in spec.shape)
        strides = [math.prod(spec.shape[index + 1 :]) for index in range(len(spec.shape))]
        trace(
            "%%%d : %s(%sstrides=%s, requires_grad=0, device=ipu:0) -> %s", item.value, kind, sizes, strides, item.name
        )


def _trace_scatters(graph: Graph) -> None:
    for node in graph.nodes:
        dim = None if node.is_backward else scattered_dimension(graph, node)
        if dim is not None:
            trace("Using vectorized ScatterReduce with none reduction in dim %d", dim)


def _log_set(option: str, value: Any) -> None:
    native_logger.debug("PopTorch option %s set to value %s", option, value)


def _log_phases(strategy: _IPhasedExecution, last_phase: int) -> None:
    settings = strategy.backendOptions()
    serial = bool(settings["serial_phases_execution"])
    phases = last_phase * _stride(strategy) + 1 + int(strategy._separate_backward_phase)
    if strategy._tensors_liveness != Liveness.AlwaysLive:
        phases += _PHASES_BETWEEN_PASSES_OFF_CHIP
    native_logger.debug("PopTorch set serial_phases_execution to value %s", str(serial).lower())
    _log_set("executionPhaseSettings.stages", 1 if serial else 2)
    _log_set("executionPhaseSettings.phases", phases)


def _log_locations(options: Any) -> None:
    for kind in ("activation", "weight", "optimizer", "accumulator"):
        if not options.TensorLocations.exists(f"location_{kind}"):
            _log_set(f"location_{kind}", "useOnChipStorage(False)")


def _stride(strategy: _IPhasedExecution) -> int:
    return _PHASE_STRIDES.get(strategy._tensors_liveness, 1)


def _in_stage(mode: str) -> Callable[[Placement], str]:
    return lambda place: f"mode({mode}), ipu({place.ipu_id}), stage({place.stage_id})"


def _in_phase(strategy: _IPhasedExecution) -> Callable[[Placement], str]:
    stride = _stride(strategy)
    return lambda place: f"mode(Phased), ipu({place.ipu_id}), phase({place.phase_id * stride})"
