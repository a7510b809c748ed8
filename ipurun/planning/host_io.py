"""Host I/O: rules of the data loader, the output mode of training, and overlap with computation."""

from __future__ import annotations

from dataclasses import replace
from typing import List, Mapping, Sequence, Tuple

from ipurun.api.calls import Call, Symbol, last_call
from ipurun.config.schema import LoaderConfig, RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.plan import BatchSizes
from ipurun.planning.user_settings import TWINS, UserSettings

__all__ = ["check_loading", "check_overlap", "output_call", "output_mode", "strategy_for_overlap"]

_MODES = {"final": "Final", "all": "All", "sum": "Sum", "every_n": "EveryN"}


def check_loading(loader: LoaderConfig, batch: BatchSizes, found: Findings) -> None:
    """Check what PopTorch's loader would refuse only after the model has been made."""
    size = loader.rebatched_worker_size
    if loader.mode != "async_rebatched":
        if size is not None:
            found.problem(
                "`loader.rebatched_worker_size` needs `loader.mode=async_rebatched`",
                seen=f"loader.mode={loader.mode}, loader.rebatched_worker_size={size}",
                fix="loader.mode=async_rebatched",
                key="loader.rebatched_worker_size",
            )
        return
    if batch.samples_per_call == 1:
        found.problem(
            "`loader.mode=async_rebatched` needs more than one sample per host call",
            seen="1 sample per host call",
            fix="loader.mode=async",
            key="loader.mode",
        )
    elif size is not None and size > batch.samples_per_call:
        found.problem(
            f"`loader.rebatched_worker_size` is larger than the {batch.samples_per_call} samples of a host call",
            seen=f"loader.rebatched_worker_size={size}",
            fix=f"loader.rebatched_worker_size={batch.samples_per_call}",
            key="loader.rebatched_worker_size",
        )


def output_mode(
    config: RunConfig, facts: Facts, settings: UserSettings, device_iterations: int, found: Findings
) -> Tuple[str, int]:
    """Return the output mode of training (final, all, sum, every_n) and the period of every_n.

    Args:
        config: The config.
        facts: What the model logs.
        settings: What the user set: `output.mode`, else ``outputMode`` under `options` or in poptorch.conf, counts.
        device_iterations: Weight updates per host call.
        found: Takes the problems.
    """
    metrics = _training_metrics(config)
    metrics += [value.name for value in facts.logged.get("training", {}).values() if value.needs_all]
    mode, every = config.output.mode, config.output.every
    written = last_call("outputMode", settings.options, settings.file)
    if written is not None and not settings.has("output.mode"):
        mode = {name: key for key, name in _MODES.items()}[str(written.args[0]).rpartition(".")[2]]
        if not settings.has("output.every"):
            every = int(written.args[1]) if len(written.args) > 1 and written.args[1] else 1
    if mode == "auto":
        return ("all" if metrics else "sum"), 1
    if metrics and mode != "all":
        found.problem(
            f"metrics on training data need every output, but `output.mode` is {mode}",
            seen=f"metrics on train: {', '.join(metrics)}",
            fix="output.mode=all, or metrics on eval only",
            key="output.mode",
        )
    if mode == "every_n" and device_iterations % every:
        fitting = [period for period in range(1, device_iterations + 1) if device_iterations % period == 0]
        found.problem(
            "`output.every` must divide `device_iterations`",
            seen=f"output.every={every}, device_iterations={device_iterations}",
            fix=f"output.every={max(period for period in fitting if period <= every)}",
            key="output.every",
        )
    return mode, every


def output_call(mode: str, every: int, origin: str) -> Call:
    """Return the ``outputMode`` call."""
    symbol = Symbol(f"poptorch.OutputMode.{_MODES[mode]}")
    return Call("outputMode", (symbol, every) if mode == "every_n" else (symbol,), origin=origin)


def strategy_for_overlap(
    config: RunConfig, placed: bool, settings: UserSettings, found: Findings
) -> Tuple[RunConfig, UserSettings]:
    """Switch a model on one IPU to sharded execution where it overlaps I/O.

    PopTorch refuses overlap under pipelined execution, its default, even on one IPU, where both are the same.

    Args:
        config: The config.
        placed: Whether the model is split over IPUs.
        settings: What the user set.
        found: Takes a note on the choice.

    Returns:
        Both, with sharded execution set where it was chosen.
    """
    chosen = settings.has(*TWINS["setExecutionStrategy"]) or settings.argument("setExecutionStrategy") is not None
    if config.memory.overlap_io == "none" or placed or chosen:
        return config, settings
    found.note("PopTorch does not overlap I/O under pipelined execution: the model runs sharded on its one IPU")
    sharded = replace(config, pipeline=replace(config.pipeline, strategy="sharded"))
    return sharded, replace(settings, keys={**settings.keys, "pipeline.strategy": ""})


def check_overlap(config: RunConfig, mode: str, calls: Sequence[Call], found: Findings) -> None:
    """Check the rules of overlapped I/O.

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
            "`memory.overlap_io` does not work with pipelined execution",
            seen=f"memory.overlap_io={config.memory.overlap_io}, pipeline.strategy=pipelined",
            fix="pipeline.strategy=sharded, or memory.overlap_io=none",
            key="memory.overlap_io",
        )
    if last_call("TensorLocations.numIOTiles", calls) is None:
        found.problem(
            "`memory.overlap_io` needs I/O tiles",
            seen="memory.io_tiles=null",
            fix="memory.io_tiles=32",
            key="memory.overlap_io",
        )
    if mode not in ("all", "sum"):
        found.problem(
            "`memory.overlap_io` needs `output.mode` all or sum",
            seen=f"output mode {mode}",
            fix="output.mode=sum",
            key="memory.overlap_io",
        )


def _training_metrics(config: RunConfig) -> List[str]:
    """Return the metrics that are computed while training and so need the model's outputs."""
    named = []
    for name, node in config.metrics.items():
        on = node.get("on") if isinstance(node, Mapping) else None
        if on is not None and "train" in (on if isinstance(on, (list, tuple)) else [on]):
            named.append(str(name))
    return named
