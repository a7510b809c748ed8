"""What a user set: config keys with where they were set, and calls written under `options` or in poptorch.conf.

A key that was set, also to its default, wins over poptorch.conf. A key and the setter under `options` that says the
same thing may both be set as long as they agree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.api.calls import Call, call_text, last_call
from ipurun.config.schema import PipelineConfig, RunConfig
from ipurun.errors import Problem

__all__ = ["INFERENCE_TWINS", "TWINS", "UserSettings", "Twins", "unlike_defaults"]

Twins = Mapping[str, Tuple[str, ...]]
_OWN_STRATEGY = ("pipeline.auto_stage", "pipeline.stages", "pipeline.phases")
_STRATEGIES = {
    "pipelined": "poptorch.PipelinedExecution",
    "sharded": "poptorch.ShardedExecution",
    "serial_phased": "poptorch.SerialPhasedExecution",
    "parallel_phased": "poptorch.ParallelPhasedExecution",
}
# Setter -> the keys of ipurun that write the same option.
TWINS: Twins = {
    "deviceIterations": ("device_iterations",),
    "replicationFactor": ("replication.factor",),
    "Training.gradientAccumulation": ("gradient_accumulation", "global_batch_size"),
    "inputReplicaGrouping": ("replication.input_group_size", "replication.input_group_type"),
    "randomSeed": ("seed",),
    "outputMode": ("output.mode", "output.every"),
    "setExecutionStrategy": ("pipeline.strategy", *_OWN_STRATEGY),
    "autoRoundNumIPUs": ("pipeline.auto_round",),
    "broadcastBuffers": ("replication.broadcast_buffers",),
    "Training.accumulationAndReplicationReductionType": ("replication.reduction",),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": ("replication.mean_strategy",),
    "Training.setAutomaticLossScaling": ("loss_scaling",),
    "Precision.setPartialsType": ("partials",),
    "Precision.enableStochasticRounding": ("stochastic_rounding",),
    "Precision.enableFloatingPointExceptions": ("debug.fp_exceptions",),
    "TensorLocations.setOptimizerLocation": ("memory.optimizer_state", "replication.tensor_sharding"),
    "TensorLocations.setWeightLocation": ("memory.weights",),
    "TensorLocations.setActivationLocation": ("memory.activations",),
    "TensorLocations.setAccumulatorLocation": ("memory.accumulators",),
    "TensorLocations.numIOTiles": ("memory.io_tiles",),
    "setAvailableMemoryProportion": ("memory.available_proportion",),
    "_Popart.set.autoRecomputation": ("recompute.mode",),
    "_Popart.set.defaultPrefetchBufferingDepth": ("memory.prefetch_depth",),
    "_Popart.setEngineOptions": ("profile",),
    "enableExecutableCaching": ("cache",),
    "useIpuModel": ("engine",),
}
INFERENCE_TWINS: Twins = {
    "deviceIterations": ("inference.device_iterations",),
    "replicationFactor": ("inference.replicas",),
}


@dataclass(frozen=True)
class UserSettings:
    """Everything a user set.

    Args:
        file: Calls of the poptorch.conf file.
        options: Calls of `options`.
        inference: Calls of `inference.options`.
        keys: Keys that were typed or written in YAML -> where; empty text where that is not known.
    """

    file: List[Call] = field(default_factory=list)
    options: List[Call] = field(default_factory=list)
    inference: List[Call] = field(default_factory=list)
    keys: Mapping[str, str] = field(default_factory=dict)

    def has(self, *keys: str) -> bool:
        """Whether one of the keys, or a key inside one, was set."""
        return any(self._inside(key) for key in keys)

    def argument(self, path: str, index: int = 0) -> Optional[Any]:
        """An argument of a setter given for training and inference alike; None where nobody gave it."""
        call = last_call(path, self.options, self.file)
        return call.args[index] if call is not None and len(call.args) > index else None

    def inference_argument(self, path: str) -> Optional[Any]:
        """The first argument of a setter given for inference only."""
        call = last_call(path, self.inference)
        return call.args[0] if call is not None and call.args else None

    def strategy(self, pipeline: PipelineConfig) -> Optional[Call]:
        """The execution strategy of `options` or poptorch.conf; None where there is none or `pipeline` decides."""
        asked: Optional[Call] = self.argument("setExecutionStrategy")
        if asked is None or self.has(*_OWN_STRATEGY):
            return None
        if self.has("pipeline.strategy") and asked.path != _STRATEGIES.get(pipeline.strategy):
            return None
        return asked

    def origin(self, path: str, *keys: str, default: str) -> str:
        """What decides a setter's value: the first of its keys that was set, else the call that the user wrote."""
        call = last_call(path, self.options, self.file)
        written = default if call is None else call.origin
        return next((key for key in keys if self.has(key)), written)

    def disagreement(self, winner: Call, loser: Call, twins: Twins) -> Optional[Problem]:
        """The problem with a key and a setter that were both set to different values.

        Args:
            winner: The call that a key of ipurun makes.
            loser: The call that was written as such.
            twins: The keys that belong to each setter.

        Returns:
            None where the call is not one of a key that was set, or where it is not known who set the two.
        """
        path = f"{winner.path}.{winner.args[0]}" if winner.path == "_Popart.set" else winner.path
        keys = [key for twin in twins.get(path, ()) for key in self._inside(twin)]
        places = [*(self.keys[key] for key in keys), *self._places(loser.origin)]
        if not keys or not all(places):
            return None
        named = " and ".join(f"`{key}`" for key in (*keys, loser.origin))
        return Problem(
            f"{named} disagree",
            where="; ".join(dict.fromkeys(places)),
            seen=f"{call_text(winner)} and {call_text(loser)}",
            fix=f"leave one of them out; {loser.origin}=null takes back what a file says",
        )

    def _inside(self, key: str) -> List[str]:
        """The keys that were set at or below a key, without the nodes above them."""
        found = [name for name in self.keys if name == key or name.startswith(f"{key}.")]
        return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]

    def _places(self, key: str) -> List[str]:
        """Where a key was set, or the nearest node above it."""
        while key and not self._inside(key):
            key = key.rpartition(".")[0]
        return [self.keys[name] for name in self._inside(key)] if key else [""]


def unlike_defaults(config: RunConfig) -> Dict[str, str]:
    """The keys that differ from their defaults: the best guess at what was set where only the config is known."""
    return dict.fromkeys(_unlike(dataclasses.asdict(config), dataclasses.asdict(RunConfig())), "")


def _unlike(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> List[str]:
    keys: List[str] = []
    for name, default in defaults.items():
        value = values[name]
        if isinstance(default, dict) and default:
            keys += _unlike(value, default, f"{prefix}{name}.")
        elif value is not None and value != default:
            keys.append(f"{prefix}{name}")
    return keys
