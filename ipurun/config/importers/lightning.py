"""Import a config of Lightning's CLI: ``trainer``, ``model``, ``data`` and others."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipurun.config.importers.applications import from_environment
from ipurun.config.importers.recipe import Recipe

__all__ = ["import_lightning", "is_lightning_cli"]

_EMPTY: Tuple[Any, ...] = (None, False, "", [], {}, 0, "none", "None", "no", "auto")
_LOGGERS = {"TensorBoardLogger": "tensorboard", "WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CSVLogger": ""}
# Values that a run of ipurun has anyway, or that are for the processes that one program makes superfluous.
_USUAL: Mapping[str, Tuple[Any, ...]] = {
    **dict.fromkeys(("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "inference_mode"), (True,)),
    **dict.fromkeys(("use_distributed_sampler", "replace_sampler_ddp"), (True,)),
    **dict.fromkeys(("max_steps", "max_epochs", "track_grad_norm"), (-1,)),
    "num_sanity_val_steps": (-1, 0, 2),
    **dict.fromkeys(("num_nodes", "accumulate_grad_batches"), (1,)),
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval"), (1.0,)),
    "limit_predict_batches": (1.0,),
    "deterministic": (True, "warn"),
    "benchmark": (True,),
}
_OF_STRATEGY = ("training_opts", "inference_opts", "autoreport", "autoreport_dir", "device_iterations")
_OF_CALLBACKS = ("patience", "min_delta", "stopping_threshold", "every_n_train_steps", "every_n_epochs")
_SHOWN: Tuple[str, ...] = (
    "LearningRateMonitor",
    "RichProgressBar",
    "TQDMProgressBar",
    "ModelSummary",
    "RichModelSummary",
    "Timer",
)
_SHOWN += ("DeviceStatsMonitor", "GPUStatsMonitor", "ProgressBar", "LearningRateLogger")


def is_lightning_cli(values: Any) -> bool:
    """Return whether a YAML file is one of Lightning's CLI."""
    return isinstance(values, Mapping) and ("trainer" in values or "trainer" in (values.get("fit") or ()))


def import_lightning(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a Lightning CLI config."""
    if "trainer" not in values:
        values = values["fit"]  # as `program fit --print_config` has it below the subcommand
    values = _plain(values)
    nodes = {name: _class(values.get(name)) for name in ("model", "data")}
    recipe = Recipe(" and ".join(name for name, node in nodes.items() if node is None))
    for name, value in values.items():
        if name == "seed_everything":
            if value is not True and value is not None:
                recipe.set("seed", value)
        elif name == "trainer":
            for key, inner in (value or {}).items():
                _trainer(recipe, key, inner)
        elif name in ("model", "data", "optimizer", "lr_scheduler"):
            _set_class(recipe, name, value)
        elif name == "ckpt_path":
            if value:
                recipe.set("init_from", value)
        elif value not in _EMPTY:
            recipe.take(name, value)
    return recipe


def _plain(value: Any) -> Any:
    """Return a file with its numbers and variables as Lightning reads them: 2e-4 is text in YAML 1.1."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return from_environment(value)


def _set_class(recipe: Recipe, name: str, value: Any) -> None:
    ours = "schedule" if name == "lr_scheduler" else name
    node = _class(value)
    if node is None and isinstance(value, Mapping):
        recipe.keys[ours] = {key: _nested(inner) for key, inner in value.items()}
        recipe.notes.append(f"{name}: the class is in the program that calls LightningCLI: write {ours}._target_")
    elif node is None:
        recipe.notes.append(f"{name}: {json.dumps(value)} names no class_path: write {ours}._target_ by hand")
    else:
        recipe.keys[ours] = node


def _class(value: Any) -> Optional[Dict[str, Any]]:
    """Return a class of Lightning's CLI as a node with `_target_`."""
    if isinstance(value, str):
        return {"_target_": value}
    if not isinstance(value, Mapping) or "class_path" not in value:
        return None
    arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    return {"_target_": value["class_path"], **{name: _nested(inner) for name, inner in arguments.items()}}


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_nested(inner) for inner in value]
    if isinstance(value, Mapping):
        return _class(value) or {name: _nested(inner) for name, inner in value.items()}
    return value


def _name_of(node: Mapping[str, Any]) -> str:
    return str(node.get("_target_", "")).rpartition(".")[2]


def _trainer(recipe: Recipe, key: str, value: Any) -> None:
    if value in _USUAL.get(key, ()) and value is not False:
        return
    if key == "callbacks":
        for callback in _listed(value):
            _callback(recipe, _class(callback) or {})
    elif key == "logger":
        for logger in _listed(value):
            _logger(recipe, _class(logger) if not isinstance(logger, bool) else None)
    elif key == "devices" and value not in _EMPTY:
        _devices(recipe, value)
    elif key == "precision" and value is not None:
        _precision(recipe, str(value))
    elif key in ("strategy", "plugins"):
        for node in filter(None, map(_class, _listed(value))):
            _strategy(recipe, key, node)
    elif key == "accelerator" and str(value).lower() in ("ipu", "auto"):
        return  # engine=auto takes IPUs where there are any
    elif value not in _EMPTY:
        recipe.take(key, value, f"trainer.{key}")


def _listed(value: Any) -> List[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _devices(recipe: Recipe, value: Any) -> None:
    """Take over a number of devices, or count their ids: [0, 1], or text with a comma."""
    if isinstance(value, str) and "," in value:
        value = [number for number in value.split(",") if number.strip()]
    if isinstance(value, list):
        value = len(value)
    recipe.set("devices", "auto" if value in (-1, "-1") else value)


def _precision(recipe: Recipe, value: str) -> None:
    if value.startswith("bf16"):
        value = value.replace("bf16", "16") if "-" in value else "16-mixed"
        recipe.notes.append(f"trainer.precision: IPUs have no bfloat16: precision={value} was taken")
    elif value.startswith("64") or value == "transformer-engine":
        recipe.notes.append(f"trainer.precision: {value}: IPUs have float32 and float16: precision=32-true was taken")
        value = "32-true"
    recipe.set("precision", value)


def _strategy(recipe: Recipe, key: str, node: Mapping[str, Any]) -> None:
    name = _name_of(node) or str(node["_target_"])
    if name.lower() not in ("ipu", "auto", "ipustrategy", "ipu_strategy", "ipuplugin"):
        recipe.take(key, name, f"trainer.{key}")
        return
    for argument, inner in node.items():
        if argument in _OF_STRATEGY and inner not in _EMPTY:
            recipe.take(argument, inner, f"trainer.{key}.{argument}")
        elif argument != "_target_" and inner not in _EMPTY:
            recipe.notes.append(f"trainer.{key}.{argument}: {json.dumps(inner)}: has no counterpart in ipurun")


def _logger(recipe: Recipe, node: Optional[Mapping[str, Any]]) -> None:
    if node is None:  # true or false: every run of ipurun writes its own files
        return
    name = _name_of(node)
    if name not in _LOGGERS:
        recipe.notes.append(f"trainer.logger: {name}: ipurun ls logger lists those that ipurun has")
    elif _LOGGERS[name] and any("/logger:" in choice for choice in recipe.keys.get("defaults", [])):
        recipe.notes.append(f"trainer.logger: {name}: a second logger: add logger={_LOGGERS[name]} by hand")
    elif _LOGGERS[name]:
        recipe.choose("logger", _LOGGERS[name])
        if node.get("project") and name == "WandbLogger":
            recipe.set("logger.wandb.project", node["project"])


def _callback(recipe: Recipe, node: Mapping[str, Any]) -> None:
    name = _name_of(node)
    monitor = node.get("monitor")
    if name in ("EarlyStopping", "ModelCheckpoint"):
        if monitor:
            recipe.set("early_stopping.metric" if name == "EarlyStopping" else "monitor", monitor)
        for key in _OF_CALLBACKS:
            if node.get(key) is not None:
                recipe.take(key, node[key], f"trainer.callbacks.{name}.{key}")
        if node.get("save_top_k", -1) > 0:
            recipe.take("save_top_k", node["save_top_k"])
        if node.get("mode") and name == "EarlyStopping":
            recipe.set("early_stopping.mode", node["mode"])
    elif name == "StochasticWeightAveraging":
        recipe.set("averaging.kind", "tail")
        recipe.notes.append("trainer.callbacks: StochasticWeightAveraging: averaging.kind=tail; swa_lrs is not taken")
    elif name not in _SHOWN:
        recipe.notes.append(f"trainer.callbacks: {name}: write it as an ipurun callback (docs/how-to/callbacks.md)")
