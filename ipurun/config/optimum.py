"""`ipu_config.json` of optimum, turned into a recipe.

Every key of the file ends up in the recipe: as a key of ipurun, or as a note that says what to do by hand.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipurun.config.optimum_layers import Layers, read_layers
from ipurun.errors import ConfigError

__all__ = ["Imported", "import_config"]

# What optimum assumes when a key is not in the file (field by field, where it is not ipurun's default as well).
_ASSUMED = {"enable_half_partials": True, "matmul_proportion": 0.2, "inference_device_iterations": 1}
_VERSIONS = ("optimum_version", "transformers_version")
_OUTPUT_MODES = ("final", "all", "sum")


class Imported:
    """A recipe under construction.

    Args:
        source: The values of the file.
        layers: Dotted name of the model's list of layers, for placement; None: found when the model is made.
    """

    def __init__(self, source: Mapping[str, Any], layers: Optional[str] = None) -> None:
        self.keys: Dict[str, Any] = {}
        self.notes: List[str] = []
        self.versions: List[str] = []
        self._source = {**_ASSUMED, **source}
        self._layers = layers
        self._convert()

    def set(self, key: str, value: Any) -> None:
        """Give a dotted key of ipurun a value."""
        node = self.keys
        *groups, last = key.split(".")
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value

    def text(self, name: str, file_name: str) -> str:
        """The recipe as YAML."""
        lines = [
            "# @package _global_",
            f"# {name}: imported from {file_name}{' (' + ', '.join(self.versions) + ')' if self.versions else ''}.",
            "# To add: model, data, loss and optimizer, which the file does not describe.",
        ]
        if self.notes:
            lines += ["#", "# Not taken over:"]
            lines += [f"# - {note}" for note in self.notes]
        return "\n".join([*lines, "", *_yaml(self.keys)]) + "\n"

    def _convert(self) -> None:
        for key, value in self._source.items():
            if key in _VERSIONS:
                self.versions.append(f"{key} {value}")
            elif key in _PLACEMENT:
                continue
            elif key not in _CONVERTERS:
                self.notes.append(f"{key}: {json.dumps(value)} has no counterpart in ipurun")
            elif isinstance(value, Mapping):
                self.notes.append(f"{key}: {json.dumps(value)} depends on the pod; pick one value")
            elif value is not None:
                _CONVERTERS[key](self, value)
        self._place()

    def _place(self) -> None:
        training = read_layers(self._source, "")
        self._set_layers(training, "pipeline.layers_per_ipu")
        inference = read_layers(self._source, "inference_")
        if inference.given and inference != training:
            self._set_layers(inference, "inference.layers_per_ipu")
            if not inference.counts and not inference.note:
                self.set("inference.split", [])
        if self._layers and (training.counts or inference.counts):
            self.set("pipeline.layers", self._layers)
        if (inference if inference.given else training).counts:
            # optimum shards inference, whatever training does
            self.set("inference.options.setExecutionStrategy", "ShardedExecution")

    def _set_layers(self, layers: Layers, key: str) -> None:
        if layers.counts:
            self.set(key, list(layers.counts))
        if layers.note:
            self.notes.append(f"{layers.note}: write {key} by hand")


def import_config(text: str, layers: Optional[str] = None) -> Imported:
    """Read an ipu_config.json.

    Args:
        text: The file's text.
        layers: Dotted name of the model's list of layers (``bert.encoder.layer``), where it has several.

    Raises:
        ConfigError: The text is no JSON object.
    """
    try:
        source = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError("ipu_config.json is not JSON", where, seen=error.msg) from error
    if not isinstance(source, dict):
        raise ConfigError("ipu_config.json is not a JSON object", seen=type(source).__name__)
    return Imported(source, layers)


def _to(key: str) -> Callable[[Imported, Any], None]:
    return lambda imported, value: imported.set(key, value)


def _switch(key: str, when_true: Any) -> Callable[[Imported, Any], None]:
    def convert(imported: Imported, value: Any) -> None:
        if value:
            imported.set(key, when_true)

    return convert


def _state_offchip(imported: Imported, value: Any) -> None:
    imported.set("memory.optimizer_state.on_chip", not value)


def _proportions(value: Any) -> Any:
    # By IPU, so that the recipe stays valid while its split is still to be written.
    return {f"IPU{index}": share for index, share in enumerate(value)} if isinstance(value, list) else value


def _matmul(imported: Imported, value: Any) -> None:
    imported.set("memory.available_proportion", _proportions(value))


def _inference_matmul(imported: Imported, value: Any) -> None:
    shares = _proportions(value if isinstance(value, list) else [value])
    imported.set("inference.options.setAvailableMemoryProportion", shares)


def _loss_scaling(imported: Imported, value: Any) -> None:
    if value:
        imported.set("loss_scaling", "auto")
        imported.set("optimizer.accum_type", "float16")


def _cache(imported: Imported, value: Any) -> None:
    if value:
        imported.set("cache.dir", value)
    else:
        imported.set("cache.enabled", False)


def _output(imported: Imported, value: Any) -> None:
    if value in _OUTPUT_MODES:
        imported.set("output.mode", value)
    else:
        imported.notes.append(f"output_mode: {json.dumps(value)} is none of {', '.join(_OUTPUT_MODES)}")


def _profile(imported: Imported, value: Any) -> None:
    if value:
        imported.set("profile.kind", "graph")
        imported.set("profile.dir", value)


def _by_module(key: str) -> Callable[[Imported, Any], None]:
    def convert(imported: Imported, value: Any) -> None:
        if value not in (1, [], None):
            imported.notes.append(
                f"{key}: {json.dumps(value)} needs a module's name: memory.serialize={{MODULE: {value}}}"
            )

    return convert


def _off_only(key: str) -> Callable[[Imported, Any], None]:
    def convert(imported: Imported, value: Any) -> None:
        if value:
            imported.notes.append(f"{key}: {json.dumps(value)} has no counterpart in ipurun")

    return convert


_PLACEMENT = (
    "layers_per_ipu",
    "training_layers_per_ipu",
    "inference_layers_per_ipu",
    "ipus_per_replica",
    "training_ipus_per_replica",
    "inference_ipus_per_replica",
)

_SERIALIZED: Sequence[Tuple[str, Callable[[Imported, Any], None]]] = [
    (key, _by_module(key))
    for mode in ("", "training_", "inference_")
    for part in ("embedding", "projection")
    for key in (f"{mode}{part}_serialization_factor", f"{mode}serialized_{part}_splits_per_ipu")
]

_CONVERTERS: Dict[str, Callable[[Imported, Any], None]] = {
    "replication_factor": _to("replication.factor"),
    "training_replication_factor": _to("replication.factor"),
    "inference_replication_factor": _to("inference.replicas"),
    "gradient_accumulation_steps": _to("gradient_accumulation"),
    "device_iterations": _to("device_iterations"),
    "inference_device_iterations": _to("inference.device_iterations"),
    "optimizer_state_offchip": _state_offchip,
    "replicated_tensor_sharding": _to("replication.tensor_sharding"),
    "matmul_proportion": _matmul,
    "training_matmul_proportion": _matmul,
    "inference_matmul_proportion": _inference_matmul,
    "enable_half_partials": _switch("partials", "half"),
    "auto_loss_scaling": _loss_scaling,
    "executable_cache_dir": _cache,
    "output_mode": _output,
    "seed": _to("seed"),
    "profile_dir": _profile,
    "decompose_grad_sum": _switch("options._Popart.set", {"decomposeGradSum": True}),
    "recompute_checkpoint_every_layer": _switch("recompute.every", "block"),
    "explicit_ir_inference": _off_only("explicit_ir_inference"),
    "use_popdist": _off_only("use_popdist"),
    "execute_encoder_on_cpu_for_generation": _off_only("execute_encoder_on_cpu_for_generation"),
    "sharded_execution_for_inference": lambda imported, value: None,  # always so in optimum, and here by `_place`
    "enable_half_first_order_momentum": _switch("optimizer.first_order_momentum_accum_type", "float16"),
    **dict(_SERIALIZED),
}


def _yaml(node: Mapping[str, Any], indent: str = "") -> List[str]:
    """Nested keys in block style; the leaves are JSON, which is YAML."""
    lines = []
    for key, value in node.items():
        if isinstance(value, Mapping) and value and not str(key).startswith("set"):
            lines += [f"{indent}{key}:", *_yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines
