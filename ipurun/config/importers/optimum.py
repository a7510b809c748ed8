"""Import an `ipu_config.json` of optimum as a recipe.

Every key of the file becomes a key of ipurun, or a note on what to do by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ipurun.config.foreign import translate
from ipurun.config.importers.applications import take_application
from ipurun.config.importers.huggingface import read_overrides
from ipurun.config.importers.recipe import Recipe
from ipurun.errors import ConfigError

__all__ = ["Imported", "import_config", "split_arguments"]

# optimum's defaults, where they differ from ipurun's.
_DEFAULTS = {"enable_half_partials": True, "matmul_proportion": 0.2, "inference_device_iterations": 1}
# What its trainer does whatever the file says; `fp32` in the arguments keeps float32.
_TRAINER = {"optimizer.bias_correction": False, "stochastic_rounding": True}
_TRAINER_IN_HALF = {
    "precision": "16.16",
    "optimizer.accum_type": "float16",
    "optimizer.first_order_momentum_accum_type": "float16",
}
_VERSIONS = ("optimum_version", "transformers_version")
_OUTPUT_MODES = ("final", "all", "sum")
_SAME_NAME = ("device_iterations", "seed")
_PLACEMENT = (
    "layers_per_ipu",
    "training_layers_per_ipu",
    "inference_layers_per_ipu",
    "ipus_per_replica",
    "training_ipus_per_replica",
    "inference_ipus_per_replica",
)
_FIX = "give the ipu_config.json of an Optimum model, a JSON object of names and values"
_REST = -1  # a count of layers: an equal share of the rest


class Imported(Recipe):
    """A recipe under construction.

    Args:
        source: The values of the file.
        layers: Dotted name of the model's list of layers, for placement; None: found when the model is built.
        arguments: The training arguments that the file is used with.
    """

    def __init__(
        self, source: Mapping[str, Any], layers: Optional[str] = None, arguments: Optional[Mapping[str, Any]] = None
    ) -> None:
        super().__init__("model, data and loss")
        arguments = arguments or {}
        self.source = {**_DEFAULTS, **source, **read_overrides(arguments.get("ipu_config_overrides"))}
        self._layers = layers
        self._pod = str(arguments.get("pod_type") or "").lower()
        self.choose("optimizer", "adamw")
        for key, value in {**_TRAINER, **({} if arguments.get("fp32") else _TRAINER_IN_HALF)}.items():
            self.set(key, value)
        self._convert()

    def _convert(self) -> None:
        unknown: Dict[str, Any] = {}
        for key, value in self.source.items():
            value = self._of_pod(key, value)
            if key in _VERSIONS:
                self.versions.append(f"{key} {value}")
            elif key in _PLACEMENT:
                continue
            elif key not in _CONVERTERS and key not in _SAME_NAME and (translate(key) is None or key in _NOT_OPTIMUMS):
                unknown[key] = value
            elif key in _CONVERTERS and value is not None:
                _CONVERTERS[key](self, value)
            elif value is not None:
                ours, translated = (key, value) if key in _SAME_NAME else translate(key, value) or (key, value)
                if translated is not None:
                    self.set(ours, translated)
        take_application(self, unknown)
        self._place()

    def _of_pod(self, key: str, value: Any) -> Any:
        """Return the value for the pod of the arguments, where one file has values for several."""
        if not isinstance(value, Mapping) or "default" not in value:
            return value
        chosen = value.get(self._pod, value["default"])
        if self._pod not in value:
            self.notes.append(f"{key}: {json.dumps(value)} depends on the pod; {chosen} was taken")
        return chosen

    def _place(self) -> None:
        training = _read_layers(self.source, "")
        self._set_layers(training, "pipeline.layers_per_ipu")
        inference = _read_layers(self.source, "inference_")
        if inference.given and inference != training:
            self._set_layers(inference, "inference.layers_per_ipu")
            if not inference.counts and not inference.note:
                self.set("inference.split", [])
        if self._layers and (training.counts or inference.counts):
            self.set("pipeline.layers", self._layers)
        if (inference if inference.given else training).counts:
            # optimum always shards inference
            self.set("inference.options.setExecutionStrategy", "ShardedExecution")

    def _set_layers(self, layers: _Layers, key: str) -> None:
        if layers.counts:
            self.set(key, list(layers.counts))
        if layers.note:
            self.notes.append(f"{layers.note}: write {key} by hand")


def import_config(text: str, layers: Optional[str] = None, arguments: Optional[Mapping[str, Any]] = None) -> Imported:
    """Read an ipu_config.json.

    Args:
        text: The file's text.
        layers: Dotted name of the model's list of layers (``bert.encoder.layer``), if it has several.
        arguments: The training arguments that the file is used with.

    Raises:
        ConfigError: If the text is not a JSON object.
    """
    try:
        source = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError("ipu_config.json is not JSON", where, seen=error.msg, fix=_FIX) from error
    if not isinstance(source, dict):
        what = "ipu_config.json is not a JSON object"
        raise ConfigError(what, "line 1", seen=type(source).__name__, fix=_FIX)
    return Imported(source, layers, arguments)


def split_arguments(values: Mapping[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Split a file that is both, as some of Optimum's examples are: the IPU config, and the training arguments."""
    known = {*_CONVERTERS, *_SAME_NAME, *_PLACEMENT, *_VERSIONS, *_ONLY_OPTIMUMS}
    ours = {key: value for key, value in values.items() if key in known}
    return ours, {key: value for key, value in values.items() if key not in ours}


def _matmul(imported: Imported, value: Any) -> None:
    shares = _for_all_ipus(imported, value, "")
    is_list = isinstance(shares, list)
    made = {f"IPU{index}": share for index, share in enumerate(shares)} if is_list else shares
    imported.set("memory.available_proportion", made)


def _for_all_ipus(imported: Imported, value: Any, mode: str) -> Any:
    """Return the only share of a list, which Optimum takes for every IPU."""
    ipus = imported.source.get(f"{mode}ipus_per_replica") or len(_read_layers(imported.source, mode).counts)
    return value[0] if isinstance(value, list) and len(value) == 1 and ipus > 1 else value


def _inference_matmul(imported: Imported, value: Any) -> None:
    layers = _read_layers(imported.source, "inference_")
    layers = layers if layers.given else _read_layers(imported.source, "")
    shares: List[Any] = value if isinstance(value, list) else [value] * max(1, len(layers.counts))
    imported.set(
        "inference.options.setAvailableMemoryProportion", {f"IPU{index}": share for index, share in enumerate(shares)}
    )


def _decompose_grad_sum(imported: Imported, value: Any) -> None:
    if value:
        imported.set("options._Popart.set", {"decomposeGradSum": True})


def _loss_scaling(imported: Imported, value: Any) -> None:
    if value:
        imported.set("loss_scaling", "auto")
        imported.set("optimizer.accum_type", "float16")


def _cache(imported: Imported, value: Any) -> None:
    if value and value != "disabled":
        imported.set("cache.dir", value)
    else:
        imported.set("cache.enabled", False)


def _output(imported: Imported, value: Any) -> None:
    if value in _OUTPUT_MODES:
        imported.set("output.mode", value)
    elif value != "default":  # of PopTorch: the final one in training
        imported.notes.append(f"output_mode: {json.dumps(value)} is not one of {', '.join(_OUTPUT_MODES)}")


def _profile(imported: Imported, value: Any) -> None:
    if value:
        imported.set("profile.kind", "graph")
        imported.set("profile.dir", value)


def _table(key: str) -> Callable[[Imported, Any], None]:
    def convert(imported: Imported, value: Any) -> None:
        if value in (0, 1, None) or (isinstance(value, list) and not any(value)):
            return
        word = "input_embeddings" if "embedding" in key else "output_embeddings"
        serialized = imported.keys.get("memory", {}).get("serialize", {})
        if not key.startswith("inference_"):
            imported.set(f"memory.serialize.{word}", value)
        elif serialized.get(word) != value:
            imported.notes.append(f"{key}: {json.dumps(value)}: memory.serialize is for training and inference")

    return convert


def _off_only(key: str) -> Callable[[Imported, Any], None]:
    def convert(imported: Imported, value: Any) -> None:
        if value:
            imported.notes.append(f"{key}: {json.dumps(value)} has no counterpart in ipurun")

    return convert


# Keys that mean several keys of ipurun, or whose values need a check; all others are in `ipurun.config.foreign`.
_CONVERTERS: Dict[str, Callable[[Imported, Any], None]] = {
    "matmul_proportion": _matmul,
    "training_matmul_proportion": _matmul,
    "inference_matmul_proportion": _inference_matmul,
    "auto_loss_scaling": _loss_scaling,
    "executable_cache_dir": _cache,
    "output_mode": _output,
    "profile_dir": _profile,
    "decompose_grad_sum": _decompose_grad_sum,
    "explicit_ir_inference": _off_only("explicit_ir_inference"),
    "use_popdist": _off_only("use_popdist"),
    "execute_encoder_on_cpu_for_generation": _off_only("execute_encoder_on_cpu_for_generation"),
    "sharded_execution_for_inference": lambda imported, value: None,  # always true in optimum; `_place` sets it
    **{
        key: _table(key)
        for mode in ("", "training_", "inference_")
        for part in ("embedding", "projection")
        for key in (f"{mode}{part}_serialization_factor", f"{mode}serialized_{part}_splits_per_ipu")
    },
}
# Keys of `ipurun.config.foreign` that are Optimum's, and those that older files have, but that applications explain.
_ONLY_OPTIMUMS = frozenset(
    ("replication_factor", "training_replication_factor", "inference_replication_factor", "gradient_accumulation_steps")
    + ("inference_device_iterations", "optimizer_state_offchip", "replicated_tensor_sharding", "enable_half_partials")
    + ("recompute_checkpoint_every_layer", "enable_half_first_order_momentum")
)
_NOT_OPTIMUMS = frozenset(("learning_rate", "weight_decay", "optimizer", "loss_scaling", "lr_warmup"))


@dataclass(frozen=True)
class _Layers:
    """The placement of layers in training or inference.

    Args:
        given: Whether the file has keys for it.
        counts: Layers on each IPU, `_REST` for a share of the rest; empty for a single IPU.
        note: A contradiction between the keys.
    """

    given: bool
    counts: Tuple[int, ...] = ()
    note: str = ""


def _read_layers(source: Mapping[str, Any], mode: str) -> _Layers:
    """Read the placement of training (mode ``""``) or inference (``inference_``)."""
    prefixes = [mode] if mode else ["training_", ""]
    counts = next((source[key] for key in (f"{prefix}layers_per_ipu" for prefix in prefixes) if key in source), None)
    ipus = next(filter(None, (source.get(f"{prefix}ipus_per_replica") for prefix in prefixes)), None)
    if counts is None and ipus is None:
        return _Layers(given=False)
    counts = [_REST] if counts is None else counts
    spread = ipus or len(counts)
    if spread == 1:
        return _Layers(given=True)
    if list(counts) == [_REST]:
        return _Layers(True, (_REST,) * spread)
    if len(counts) != spread:
        return _Layers(True, note=f"{mode}layers_per_ipu: {json.dumps(counts)} does not fit {spread} IPUs per replica")
    return _Layers(True, tuple(counts))
