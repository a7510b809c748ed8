"""Rules of single setters that PopTorch checks only when the call runs, or when the model compiles."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, Mapping, Optional

from ipurun.api.setter_values import BadValueError

__all__ = ["broken_rule"]


def broken_rule(path: str, values: Mapping[str, Any]) -> Optional[BadValueError]:
    """What is wrong with the converted arguments of a setter, if anything is."""
    rule = _RULES.get(path)
    return rule(values) if rule else None


def _at_least_one(name: str) -> Callable[[Mapping[str, Any]], Optional[BadValueError]]:
    def rule(values: Mapping[str, Any]) -> Optional[BadValueError]:
        return BadValueError("a whole number from 1 on", fix="1") if values[name] < 1 else None

    return rule


def _output_mode(values: Mapping[str, Any]) -> Optional[BadValueError]:
    mode = str(values["output_mode"])
    if mode.endswith(".EveryN") and not (values.get("output_return_period") or 0) > 0:
        return BadValueError("a period with EveryN", fix="[EveryN, 2]")
    if mode.endswith(".Default"):
        return BadValueError("a mode other than Default, which is what no setting means", fix="Final")
    return None


def _io_tiles(values: Mapping[str, Any]) -> Optional[BadValueError]:
    tiles = values["num_tiles"]
    if 32 <= tiles <= 192 and tiles % 2 == 0:
        return None
    return BadValueError("an even number of tiles from 32 to 192", fix="32")


def _grouping(values: Mapping[str, Any]) -> Optional[BadValueError]:
    if str(values["input_group_type"]).endswith(".All"):
        return BadValueError("Consecutive or Orthogonal groups", fix="[2, Consecutive]")
    return BadValueError("a group size from 1 on", fix="[1, Consecutive]") if values["input_group_size"] < 1 else None


def _proportions(values: Mapping[str, Any]) -> Optional[BadValueError]:
    named = values["available_memory_proportion"]
    if all(re.fullmatch(r"IPU\d+", key) and 0 <= share <= 1 for key, share in named.items()):
        return None
    return BadValueError("shares from 0 to 1 by IPU", fix="{IPU0: 0.2}")


def _reduction(values: Mapping[str, Any]) -> Optional[BadValueError]:
    refused = str(values["reduction_type"]).endswith(".NoReduction")
    return BadValueError("Mean or Sum", fix="Mean") if refused else None


def _mean_strategy(values: Mapping[str, Any]) -> Optional[BadValueError]:
    refused = str(values["mean_reduction_strategy"]).endswith(".PostAndLoss")
    return BadValueError("Post or Running (PopTorch 3.4 cannot compile PostAndLoss)", fix="Post") if refused else None


def _trace(values: Mapping[str, Any]) -> Optional[BadValueError]:
    return (
        BadValueError("false: PopTorch 3.4 has no tracing by torch.jit", fix="false") if values["trace_model"] else None
    )


_RULES: Dict[str, Callable[[Mapping[str, Any]], Optional[BadValueError]]] = {
    "deviceIterations": _at_least_one("device_iterations"),
    "replicationFactor": _at_least_one("replication_factor"),
    "Training.gradientAccumulation": _at_least_one("gradient_accumulation"),
    "Training.accumulationAndReplicationReductionType": _reduction,
    "Training.setMeanAccumulationAndReplicationReductionStrategy": _mean_strategy,
    "outputMode": _output_mode,
    "inputReplicaGrouping": _grouping,
    "setAvailableMemoryProportion": _proportions,
    "TensorLocations.numIOTiles": _io_tiles,
    "Jit.traceModel": _trace,
}
