"""Settings made by the user: config keys with their origins, and calls written under `options` or in poptorch.conf.

A key that was set, even to its default, wins over poptorch.conf. A key and the setter under `options` that means the
same may both be set as long as they agree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.api.calls import Call, call_text, last_call
from ipurun.config.schema import PipelineConfig, RunConfig
from ipurun.errors import Problem

__all__ = [
    "INFERENCE_TWINS",
    "LOCATIONS",
    "LOCATION_FIELDS",
    "STRATEGIES",
    "TWINS",
    "Twins",
    "UserSettings",
    "unlike_defaults",
]

Twins = Mapping[str, Tuple[str, ...]]
# Keys of `memory`, and the setters that they mean on Options and on poptorch.TensorLocationSettings.
LOCATIONS = {
    "optimizer_state": "TensorLocations.setOptimizerLocation",
    "weights": "TensorLocations.setWeightLocation",
    "activations": "TensorLocations.setActivationLocation",
    "accumulators": "TensorLocations.setAccumulatorLocation",
}
LOCATION_FIELDS = {
    "on_chip": "useOnChipStorage",
    "sharded": "useReplicatedTensorSharding",
    "io_tiles_to_load": "useIOTilesToLoad",
    "io_tiles_to_store": "useIOTilesToStore",
    "min_elements_off_chip": "minElementsForOffChip",
    "min_elements_sharded": "minElementsForReplicatedTensorSharding",
}
STRATEGIES = {
    "pipelined": "poptorch.PipelinedExecution",
    "sharded": "poptorch.ShardedExecution",
    "serial_phased": "poptorch.SerialPhasedExecution",
    "parallel_phased": "poptorch.ParallelPhasedExecution",
}
_STRATEGY_KEYS = ("pipeline.auto_stage", "pipeline.stages", "pipeline.phases")
# Setter -> the keys that write the same option.
TWINS: Twins = {
    "deviceIterations": ("device_iterations",),
    "replicationFactor": ("replication.factor",),
    "Training.gradientAccumulation": ("gradient_accumulation", "global_batch_size"),
    "inputReplicaGrouping": ("replication.input_group_size", "replication.input_group_type"),
    "randomSeed": ("seed",),
    "outputMode": ("output.mode", "output.every"),
    "setExecutionStrategy": ("pipeline.strategy", *_STRATEGY_KEYS),
    "autoRoundNumIPUs": ("pipeline.auto_round",),
    "broadcastBuffers": ("replication.broadcast_buffers",),
    "Training.accumulationAndReplicationReductionType": ("replication.reduction",),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": ("replication.mean_strategy",),
    "Training.setAutomaticLossScaling": ("loss_scaling",),
    "Precision.setPartialsType": ("partials",),
    "Precision.enableStochasticRounding": ("stochastic_rounding",),
    "Precision.enableFloatingPointExceptions": ("debug.fp_exceptions",),
    **{
        f"{setter}.{field_setter}": (f"memory.{kind}.{name}",)
        for kind, setter in LOCATIONS.items()
        for name, field_setter in LOCATION_FIELDS.items()
    },
    "TensorLocations.setOptimizerLocation.useReplicatedTensorSharding": (
        "memory.optimizer_state.sharded",
        "replication.tensor_sharding",
    ),
    "TensorLocations.numIOTiles": ("memory.io_tiles",),
    "setAvailableMemoryProportion": ("memory.available_proportion",),
    "_Popart.set.autoRecomputation": ("recompute.mode",),
    "_Popart.set.defaultPrefetchBufferingDepth": ("memory.prefetch_depth",),
    "_Popart.setEngineOptions": ("profile", "poplar.engine_options"),
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
        """Return an argument of a setter under `options` or in poptorch.conf; None where it was not set."""
        call = last_call(path, self.options, self.file)
        return call.args[index] if call is not None and len(call.args) > index else None

    def inference_argument(self, path: str) -> Optional[Any]:
        """Return the first argument of a setter under `inference.options`; None where it was not set."""
        call = last_call(path, self.inference)
        return call.args[0] if call is not None and call.args else None

    def strategy(self, pipeline: PipelineConfig) -> Optional[Call]:
        """Return the strategy of `options` or poptorch.conf; None where there is none or `pipeline` decides."""
        written: Optional[Call] = self.argument("setExecutionStrategy")
        if written is None or self.has(*_STRATEGY_KEYS):
            return None
        if self.has("pipeline.strategy") and written.path != STRATEGIES.get(pipeline.strategy):
            return None
        return written

    def origin(self, path: str, *keys: str, default: str) -> str:
        """Return what decides a setter's value: the first of its keys that was set, else the call the user wrote."""
        call = last_call(path, self.options, self.file)
        written = default if call is None else call.origin
        return next((key for key in keys if self.has(key)), written)

    def disagreement(self, winner: Call, loser: Call, twins: Twins, dictionary_key: str = "") -> Optional[Problem]:
        """Return the problem with a key and a setter that were set to different values.

        Args:
            winner: The call that follows from a key.
            loser: The call that was written under `options` or in a file.
            twins: The keys that belong to each setter.
            dictionary_key: The entry that differs, where the setter writes a dictionary or a settings object.

        Returns:
            None where no key of the setter was set, or where it is not known who set the two.
        """
        path = f"{winner.path}.{winner.args[0]}" if winner.path == "_Popart.set" else winner.path
        twin_keys = twins.get(path, twins.get(f"{path}.{dictionary_key}", ()))
        keys = [key for twin in twin_keys for key in self._inside(twin)]
        places = [*(self.keys[key] for key in keys), *self._places(loser.origin)]
        if not keys or not all(places):
            return None
        named = " and ".join(f"`{key}`" for key in (*keys, loser.origin))
        return Problem(
            f"{named} disagree",
            where="; ".join(dict.fromkeys(places)),
            seen=f"{call_text(winner)} and {call_text(loser)}",
            fix=f"remove one of them; {loser.origin}=null overrides a file",
            key=keys[0],
        )

    def _inside(self, key: str) -> List[str]:
        """Return the keys that were set at or below a key, without the nodes above them."""
        below = [name for name in self.keys if name == key or name.startswith(f"{key}.")]
        return [name for name in below if not any(other.startswith(f"{name}.") for other in below)]

    def _places(self, key: str) -> List[str]:
        """Return where a key, or the nearest node above it, was set."""
        while key and not self._inside(key):
            key = key.rpartition(".")[0]
        return [self.keys[name] for name in self._inside(key)] if key else [""]


def unlike_defaults(config: RunConfig) -> Dict[str, str]:
    """Return the keys that differ from their defaults: a guess at what was set where only the config is known."""
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
