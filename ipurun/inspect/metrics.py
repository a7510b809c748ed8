"""Check and make the metrics of a config: built-in names or any target, for training or evaluation."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.errors import Problem, nearest
from ipurun.inspect.targets import check_arguments, check_named, check_node, locate, make
from ipurun.metrics import BUILT_IN, MeanOf, MetricSet

__all__ = ["check_metrics", "check_monitor", "make_metrics", "monitored"]

_PHASES = ("train", "eval")


def check_metrics(nodes: Mapping[str, Any], engine_module: Optional[ModuleType] = None) -> List[Problem]:
    """Return the problems of the metrics that can be found without data."""
    problems: List[Problem] = []
    for name, node in nodes.items():
        key = f"metrics.{name}"
        if node is not None and not isinstance(node, Mapping):
            continue  # composing has reported it
        arguments, phases, _ = _parts(node)
        wrong = [phase for phase in phases if phase not in _PHASES]
        if wrong:
            problems.append(
                Problem(
                    f"`{key}.on`: `{wrong[0]}` is not a phase of a run",
                    known="train, eval",
                    fix=f"{key}.on=[eval]",
                    key=f"{key}.on",
                )
            )
        if "_target_" not in arguments and name in BUILT_IN:
            problems += check_named(arguments, key) or check_arguments(BUILT_IN[name], arguments, key)
            continue
        arguments = _with_target(name, arguments)
        if "_target_" not in arguments:
            problems.append(
                Problem(
                    f"`{key}` has no `_target_`",
                    known=f"without it: {', '.join(BUILT_IN)}, and the metrics of torchmetrics, {_AVAILABILITY}",
                    fix=f"{key}._target_=module.Metric, or ~{key} removes it",
                    key=key,
                )
            )
            continue
        found = check_node({**arguments, "_partial_": True}, key, engine_module)
        problems += found
        if not found and inspect.isclass(locate(arguments["_target_"], key, engine_module)):
            problems += check_node(arguments, key, engine_module)
    return problems


def check_monitor(key: str, monitor: Optional[str], nodes: Mapping[str, Any], prefix: str = "") -> List[Problem]:
    """Check that evaluation computes the monitored metric, of the weights or of their average."""
    known = ["loss", *(name for name, node in nodes.items() if "eval" in _parts(node)[1])]
    if prefix:
        known += [prefix + name for name in known]
    if monitor is None or monitor.split("/")[0] in known:
        return []
    close = nearest(monitor, known, most=1)
    return [
        Problem(
            f"`{key}={monitor}` is not one of the evaluation metrics",
            known=", ".join(known),
            fix=f"{key}={close[0]}" if close else f"metrics.{monitor}={{...}} to declare it",
            key=key,
        )
    ]


def make_metrics(nodes: Mapping[str, Any], phase: str, engine_module: Optional[ModuleType] = None) -> MetricSet:
    """Make the metrics of one phase of a run.

    Args:
        nodes: Metric name -> target and arguments.
        phase: ``train`` or ``eval``.
        engine_module: See `ipurun.inspect.targets.locate`.
    """
    made: Dict[str, Any] = {}
    for name, node in nodes.items():
        arguments, phases, higher = _parts(node)
        if phase in phases:
            made[name] = _make(name, arguments, higher, engine_module)
    return MetricSet(made)


def monitored(monitor: Optional[str], nodes: Mapping[str, Any]) -> str:
    """Return the metric for the best checkpoint: `monitor`, else the first one of evaluation, else the loss."""
    evaluated = [name for name in nodes if "eval" in _parts(nodes[name])[1] and not _is_matrix(name, nodes[name])]
    return monitor or (evaluated[0] if evaluated else "loss")


def _make(name: str, arguments: Dict[str, Any], higher: Optional[bool], engine_module: Optional[ModuleType]) -> Any:
    key = f"metrics.{name}"
    if name not in BUILT_IN:
        arguments = _with_target(name, arguments)
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


_AVAILABILITY = "if it is installed: pip install 'ipurun[metrics]'"


def _with_target(name: str, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the arguments with a target: the class of torchmetrics that a metric is named after, if there is one."""
    if "_target_" in arguments:
        return arguments
    for package in ("torchmetrics", "torchmetrics.classification"):  # the second has those of one task, such as binary
        try:
            module: Any = importlib.import_module(package)
        except ImportError:
            break
        classes = {_plain(found): found for found in dir(module) if inspect.isclass(getattr(module, found))}
        if _plain(name) in classes:
            return {"_target_": f"{package}.{classes[_plain(name)]}", **arguments}
    return arguments


def _is_matrix(name: str, node: Any) -> bool:
    """Return whether a metric is a confusion matrix, which cannot select the best checkpoint."""
    target = node.get("_target_", name) if isinstance(node, Mapping) else name
    return _plain(str(target)).endswith("confusionmatrix")


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _parts(node: Any) -> Tuple[Dict[str, Any], Tuple[str, ...], Optional[bool]]:
    """Split a metric's node into its arguments, the phases it is computed in, and its direction if given."""
    arguments = dict(node) if isinstance(node, Mapping) else {}
    # YAML 1.1 reads a bare `on` as the boolean true.
    phases = arguments.pop("on", arguments.pop(True, ("eval",)))  # type: ignore[call-overload]  # see above
    higher = arguments.pop("higher_is_better", None)
    return arguments, tuple(phases) if isinstance(phases, (list, tuple)) else (phases,), higher
