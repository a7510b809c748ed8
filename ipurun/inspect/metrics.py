"""Metrics of a config: built-in names, any target, with where they are computed."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.errors import Problem, nearest
from ipurun.inspect.targets import check_arguments, check_node, locate, make
from ipurun.metrics import BUILT_IN, MeanOf, MetricSet

__all__ = ["check_metrics", "check_monitor", "make_metrics", "monitored"]

_PLACES = ("train", "eval")


def check_metrics(nodes: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """All problems of the metrics that show without data."""
    problems: List[Problem] = []
    for name, node in nodes.items():
        key = f"metrics.{name}"
        arguments, places, _ = _parts(node)
        wrong = [place for place in places if place not in _PLACES]
        if wrong:
            problems.append(Problem(f"`{key}.on` knows no `{wrong[0]}`", known="train, eval", key=f"{key}.on"))
        if "_target_" not in arguments:
            if name not in BUILT_IN:
                problems.append(
                    Problem(f"`{key}` has no `_target_`", known=f"by name alone: {', '.join(BUILT_IN)}", key=key)
                )
            else:
                problems += check_arguments(BUILT_IN[name], arguments, key)
            continue
        found = check_node({**arguments, "_partial_": True}, key, engine_module)
        problems += found
        if not found and inspect.isclass(locate(arguments["_target_"], key, engine_module)):
            problems += check_node(arguments, key, engine_module)
    return problems


def check_monitor(key: str, monitor: Optional[str], nodes: Mapping[str, Any]) -> List[Problem]:
    """The monitored metric must be one that evaluation computes."""
    known = ["loss", *(name for name, node in nodes.items() if "eval" in _parts(node)[1])]
    if monitor is None or monitor.split("/")[0] in known:
        return []
    close = nearest(monitor, known, most=1)
    return [
        Problem(
            f"`{key}={monitor}`: evaluation computes no such value",
            known=", ".join(known),
            fix=f"{key}={close[0]}" if close else f"metrics.{monitor}={{...}} to declare it",
            key=key,
        )
    ]


def make_metrics(nodes: Mapping[str, Any], place: str, engine_module: Optional[ModuleType] = None) -> MetricSet:
    """The metrics that are computed in a place.

    Args:
        nodes: Metric name -> target and arguments.
        place: ``train`` or ``eval``.
        engine_module: See `ipurun.inspect.targets.locate`.
    """
    made: Dict[str, Any] = {}
    for name, node in nodes.items():
        arguments, places, higher = _parts(node)
        if place in places:
            made[name] = _make(name, arguments, higher, engine_module)
    return MetricSet(made)


def monitored(monitor: Optional[str], nodes: Mapping[str, Any]) -> str:
    """Name of the metric that tells the best checkpoint: as asked, else the first one, else the loss."""
    evaluated = [name for name in nodes if "eval" in _parts(nodes[name])[1]]
    return monitor or (evaluated[0] if evaluated else "loss")


def _make(name: str, arguments: Dict[str, Any], higher: Optional[bool], engine_module: Optional[ModuleType]) -> Any:
    key = f"metrics.{name}"
    if "_target_" not in arguments:
        metric = BUILT_IN[name](**arguments)
    elif inspect.isclass(locate(arguments["_target_"], key, engine_module)):
        metric = make(arguments, key, engine_module=engine_module)
        if not hasattr(metric, "update"):
            metric = MeanOf(metric)
    else:
        metric = MeanOf(make({**arguments, "_partial_": True}, key, engine_module=engine_module))
    if higher is not None:
        metric.higher_is_better = higher
    return metric


def _parts(node: Any) -> Tuple[Dict[str, Any], Tuple[str, ...], Optional[bool]]:
    """A metric's arguments, where it is computed, and its direction where the config tells."""
    arguments = dict(node or {})
    # YAML 1.1 reads a bare `on` as the boolean true.
    places = arguments.pop("on", arguments.pop(True, ("eval",)))  # type: ignore[call-overload]  # see above
    higher = arguments.pop("higher_is_better", None)
    return arguments, (places,) if isinstance(places, str) else tuple(places), higher
