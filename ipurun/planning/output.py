"""`output`: what a training call gives back to the host."""

from __future__ import annotations

from typing import List, Mapping, Tuple

from ipurun.api.calls import Call, Symbol, last_call
from ipurun.config.schema import RunConfig
from ipurun.errors import Findings
from ipurun.planning.user_settings import Given

__all__ = ["output_call", "output_mode", "training_metrics"]

_MODES = {"final": "Final", "all": "All", "sum": "Sum", "every_n": "EveryN"}


def training_metrics(config: RunConfig) -> List[str]:
    """Metrics that are computed while training, and so need the model's outputs."""
    named = []
    for name, node in config.metrics.items():
        on = node.get("on") if isinstance(node, Mapping) else None
        if on is not None and "train" in ([on] if isinstance(on, str) else list(on)):
            named.append(str(name))
    return named


def output_mode(config: RunConfig, given: Given, device_iterations: int, found: Findings) -> Tuple[str, int]:
    """The mode (final, all, sum, every_n) and the period of every_n.

    Args:
        config: The config.
        given: What the user set; an ``outputMode`` of `options` or poptorch.conf counts unless `output.mode` was set.
        device_iterations: Weight updates per host call.
        found: Takes the problems.
    """
    metrics = training_metrics(config)
    mode, every = config.output.mode, config.output.every
    lifted = last_call("outputMode", given.options, given.file)
    if lifted is not None and not given.has("output.mode"):
        words = {name: word for word, name in _MODES.items()}
        mode = words[str(lifted.args[0]).rpartition(".")[2]]
        if not given.has("output.every"):
            every = int(lifted.args[1]) if len(lifted.args) > 1 and lifted.args[1] else 1
    if mode == "auto":
        return ("all" if metrics else "sum"), 1
    if metrics and mode != "all":
        found.problem(
            f"metrics on training data need every output, and `output.mode` is {mode}",
            seen=f"on train: {', '.join(metrics)}",
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
    """The ``outputMode`` call."""
    symbol = Symbol(f"poptorch.OutputMode.{_MODES[mode]}")
    return Call("outputMode", (symbol, every) if mode == "every_n" else (symbol,), origin=origin)
