"""`memory.overlap_io`: host I/O at the same time as computation, and what PopTorch wants for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence, Tuple

from ipurun.api.calls import Call, last_call
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings
from ipurun.planning.user_settings import TWINS, Given

__all__ = ["check_overlap", "strategy_for_overlap"]


def strategy_for_overlap(config: RunConfig, placed: bool, given: Given, found: Findings) -> Tuple[RunConfig, Given]:
    """The config with sharded execution, where overlap asks for it and the model is on one IPU.

    PopTorch refuses to overlap under pipelined execution, its default, on a single IPU, too; there sharded execution
    is the same.

    Args:
        config: The config.
        placed: Whether the model is split over IPUs.
        given: What the user set; sharded execution counts as set, too.
        found: Takes a note on the choice.
    """
    chosen = given.has(*TWINS["setExecutionStrategy"]) or given.argument("setExecutionStrategy") is not None
    if config.memory.overlap_io == "none" or placed or chosen:
        return config, given
    found.note("overlapped I/O is refused under pipelined execution, so that the one IPU runs sharded")
    sharded = replace(config, pipeline=replace(config.pipeline, strategy="sharded"))
    return sharded, replace(given, keys={**given.keys, "pipeline.strategy": ""})


def check_overlap(config: RunConfig, mode: str, calls: Sequence[Call], found: Findings) -> None:
    """The rules of overlapped I/O.

    Args:
        config: The config.
        mode: Output mode of training.
        calls: Calls on the options of training.
        found: Takes the problems.
    """
    if config.memory.overlap_io == "none":
        return
    strategy = last_call("setExecutionStrategy", calls)
    if strategy is None or strategy.args[0].path.endswith("PipelinedExecution"):
        found.problem(
            "`memory.overlap_io` does not go with pipelined execution",
            seen=f"memory.overlap_io={config.memory.overlap_io}, pipeline.strategy=pipelined",
            fix="pipeline.strategy=sharded, or memory.overlap_io=none",
            key="memory.overlap_io",
        )
    if last_call("TensorLocations.numIOTiles", calls) is None:
        found.problem(
            "`memory.overlap_io` needs tiles set aside for I/O",
            seen="memory.io_tiles=null",
            fix="memory.io_tiles=32",
            key="memory.overlap_io",
        )
    if mode not in ("all", "sum"):
        found.problem(
            "`memory.overlap_io` needs the output mode all or sum",
            seen=f"output mode {mode}",
            fix="output.mode=sum",
            key="memory.overlap_io",
        )
