"""Import what other programs are started with: arguments of transformers, poprun, Lightning's CLI, Graphcore's apps."""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import yaml

from ipurun.config.importers.applications import find_section, from_environment, take_application
from ipurun.config.importers.recipe import Recipe
from ipurun.errors import ConfigError

__all__ = ["import_application", "import_command", "import_lightning", "import_training_arguments", "is_lightning_cli"]

# Arguments of transformers that a run of ipurun has in another form, or that say nothing about it.
_SILENT: Tuple[str, ...] = (
    "do_train",
    "do_eval",
    "do_predict",
    "overwrite_output_dir",
    "logging_dir",
    "hub_",
    "push_to_hub",
    "fsdp",
)
_SILENT += (
    "deepspeed",
    "_n_gpu",
    "disable_tqdm",
    "log_level",
    "ray_",
    "torchdynamo",
    "accelerator_config",
    "past_index",
)
_EMPTY: Tuple[Any, ...] = (None, False, "", [], {}, 0, "none", "None", "no", "passive", "auto", "no_deprecated_warning")
_DEFAULTS: Mapping[str, Any] = {  # of TrainingArguments: a file has all of them
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "ignore_data_skip": False,
    "prediction_loss_only": False,
    "save_safetensors": True,
    "dataloader_pin_memory": True,
    "remove_unused_columns": True,
    "logging_first_step": False,
    "average_tokens_across_devices": True,
    "ddp_timeout": 1800,
    "seed": 42,
    "max_steps": -1,
    "local_rank": -1,
}
# What HF's Trainer takes where nothing is said, and ipurun's optimizers do not.
_TRANSFORMERS_DEFAULTS: Mapping[str, Tuple[str, Any]] = {
    "learning_rate": ("optimizer.lr", 5e-05),
    "weight_decay": ("optimizer.weight_decay", 0.0),
    "per_device_train_batch_size": ("micro_batch_size", 8),
}


def import_training_arguments(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of HF's TrainingArguments, as `to_json_string` writes them."""
    recipe = Recipe("model, data and the collate function")
    for name, value in values.items():
        is_silent = name.startswith(_SILENT) or _DEFAULTS.get(name, _SILENT) == value
        if not is_silent and value not in _EMPTY:
            recipe.take(name, value)
    _add_defaults_of_transformers(recipe, values)
    return recipe


def import_command(command: str) -> Recipe:
    """Return the recipe of a command line: of a training script, of torchrun, or of poprun with one.

    Raises:
        ConfigError: It has no flags.
    """
    words = shlex.split(command.replace("\\\n", " "))
    flags, rest = _flags(words)
    if not flags:
        raise ConfigError(
            "the command line has no flags to import",
            seen=command.strip()[:100],
            fix="ipurun import 'poprun --num-replicas 4 python train.py --learning_rate 3e-5' my_recipe",
        )
    recipe = Recipe("model and data")
    own: Dict[str, Any] = {}
    for name, value in flags:
        if name in _POPRUN:
            _POPRUN[name](recipe, value)
        elif name == "config" and isinstance(value, str):
            recipe.notes.append(
                f"--config {value}: if it is a section of the application's configs.yml, import both: "
                f"ipurun import configs.yml 'THE COMMAND' NAME --section {value}"
            )
        elif not name.startswith(_SILENT):
            own[name] = value
    take_application(recipe, own, "--")
    _add_defaults_of_transformers(recipe, dict(flags))
    program = [os.path.basename(word) for word in rest if word.endswith(".py")]
    if program:
        recipe.versions.append(f"the command of {program[0]}")
    return recipe


def _add_defaults_of_transformers(recipe: Recipe, names: Mapping[str, Any]) -> None:
    """Choose what HF's Trainer takes where nothing is said: AdamW and a linear schedule."""
    if not {"per_device_train_batch_size", "num_train_epochs", "warmup_ratio", "lr_scheduler_type"}.intersection(names):
        return
    for name, (key, value) in _TRANSFORMERS_DEFAULTS.items():
        given = names.get(name, value)
        if name not in names or given == 0:
            recipe.set(key, given)
    if "num_train_epochs" not in names and names.get("max_steps", -1) in (None, -1):
        recipe.set("epochs", 3)
    if "optim" not in names:
        recipe.choose("optimizer", "adamw")
    if "lr_scheduler_type" not in names:
        recipe.choose("schedule", "linear")


def import_lightning(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a Lightning CLI config: ``trainer``, ``model``, ``data`` and others."""
    missing = [name for name in ("model", "data") if name not in values]
    recipe = Recipe(" and ".join(missing))
    for name, value in values.items():
        if name == "seed_everything":
            if value is not True and value is not None:
                recipe.set("seed", value)
        elif name == "trainer":
            for key, inner in (value or {}).items():
                _trainer(recipe, key, inner)
        elif name in ("model", "data", "optimizer", "lr_scheduler"):
            node = _class(value)
            ours = "schedule" if name == "lr_scheduler" else name
            if node is None:
                recipe.notes.append(f"{name}: {json.dumps(value)} names no class_path: write {ours}._target_ by hand")
            else:
                recipe.keys[ours] = node
        elif name == "ckpt_path":
            if value:
                recipe.set("init_from", value)
        elif value not in _EMPTY:
            recipe.take(name, value)
    return recipe


def is_lightning_cli(values: Any) -> bool:
    """Return whether a YAML file is one of Lightning's CLI."""
    return isinstance(values, Mapping) and "trainer" in values


def import_application(values: Mapping[str, Any], section: Optional[str], command: str = "") -> Recipe:
    """Return the recipe of one section of a ``configs.yml`` or ``benchmarks.yml`` of Graphcore's applications.

    Args:
        values: The file.
        section: Name of the section; None for the file's only level.
        command: A command line of the application, which wins over the file, as it does there.

    Raises:
        ConfigError: There is no such section.
    """
    chosen = find_section(values, section)
    if isinstance(chosen.get("cmd"), str):  # of a benchmarks.yml
        recipe = import_command(chosen["cmd"])
        recipe.notes += [
            f"env: {name}={value}: set it in the shell" for name, value in (chosen.get("env") or {}).items()
        ]
        return recipe
    flags = _flags(shlex.split(command.replace("\\\n", " ")))[0] if command else []
    recipe = Recipe("model and data")
    own = {name: value for name, value in flags if name not in _POPRUN and name != "config"}
    kept = {name: value for name, value in chosen.items() if str(name).replace("-", "_") not in own}
    take_application(recipe, {**kept, **own})
    for name, value in flags:
        if name in _POPRUN:
            _POPRUN[name](recipe, value)
    return recipe


def _flags(words: Sequence[str]) -> Tuple[List[Tuple[str, Any]], List[str]]:
    """Return the flags of a command line with their values, and its other words."""
    flags: List[Tuple[str, Any]] = []
    rest: List[str] = []
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        if not word.startswith("--"):
            rest.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if not equals and number < len(words) and not words[number].startswith("--") and not _is_program(words[number]):
            text = words[number]
            number += 1
        flags.append((name.replace("-", "_"), _value(text) if text else True))
    return flags, rest


def _is_program(word: str) -> bool:
    return word.endswith(".py") or os.path.basename(word).startswith("python")


def _value(text: str) -> Any:
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)  # YAML reads 3e-5 as text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _class(value: Any) -> Optional[Dict[str, Any]]:
    """Return a class of Lightning's CLI as a node with `_target_`."""
    if isinstance(value, str):
        return {"_target_": value}
    if not isinstance(value, Mapping) or "class_path" not in value:
        return None
    arguments = {name: _nested(inner) for name, inner in (value.get("init_args") or {}).items()}
    return {"_target_": value["class_path"], **arguments, **(value.get("dict_kwargs") or {})}


def _nested(value: Any) -> Any:
    return _class(value) or value if isinstance(value, Mapping) else value


def _trainer(recipe: Recipe, key: str, value: Any) -> None:
    if key == "callbacks":
        for callback in value if isinstance(value, list) else [value]:
            _callback(recipe, _class(callback) or {})
    elif key == "devices" and value not in _EMPTY:
        recipe.set("devices", len(value) if isinstance(value, list) else value)
    elif key in ("accelerator", "strategy") and str(value).lower() in ("ipu", "auto", "ipustrategy", "ipu_strategy"):
        return  # engine=auto takes IPUs where there are any
    elif key == "precision" and value is not None:
        recipe.set("precision", str(value))
    elif key == "plugins" or (key == "strategy" and isinstance(value, Mapping)):
        node = _class(value) or {}
        for name, inner in node.items():
            if name in ("training_opts", "inference_opts", "autoreport", "autoreport_dir"):
                recipe.take(name, inner, f"trainer.{key}.{name}")
    elif value not in _EMPTY:
        recipe.take(key, value, f"trainer.{key}")


def _callback(recipe: Recipe, node: Mapping[str, Any]) -> None:
    name = str(node.get("_target_", "")).rpartition(".")[2]
    monitor = node.get("monitor")
    if name in ("EarlyStopping", "ModelCheckpoint"):
        if monitor:
            recipe.set("early_stopping.metric" if name == "EarlyStopping" else "monitor", monitor)
        for key in (
            "patience",
            "min_delta",
            "stopping_threshold",
            "save_top_k",
            "every_n_train_steps",
            "every_n_epochs",
        ):
            if node.get(key) is not None:
                recipe.take(key, node[key], f"trainer.callbacks.{name}.{key}")
        if node.get("mode") and name == "EarlyStopping":
            recipe.set("early_stopping.mode", node["mode"])
    elif name not in ("LearningRateMonitor", "RichProgressBar", "TQDMProgressBar", "ModelSummary", "RichModelSummary"):
        recipe.notes.append(f"trainer.callbacks: {name}: write it as an ipurun callback (docs/how-to/callbacks.md)")


def _sets(key: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Recipe, Any], None]:
    def apply(recipe: Recipe, value: Any) -> None:
        made = None if value is None else convert(value)
        if made is not None:
            recipe.set(key, made)

    return apply


def _ignored(recipe: Recipe, value: Any) -> None:
    """Nothing of a recipe: the host, the partition or the launcher."""


_POPRUN: Mapping[str, Callable[[Recipe, Any], None]] = {
    "num_replicas": _sets("replication.factor"),
    "ipus_per_replica": _sets("pipeline.ipus"),
    "executable_cache_path": _sets("cache.dir", from_environment),
    **dict.fromkeys(
        (
            "num_instances",
            "vipu_partition",
            "vipu_server_host",
            "vipu_server_port",
            "vipu_server_timeout",
            "vipu_cluster",
            "vipu_allocation",
            "sync_type",
            "print_topology",
            "offline_mode",
            "v",
            "host",
            "host_rank",
            "host_subnet",
        )
        + ("mpi_global_args", "mpi_local_args", "numa_aware", "update_partition", "remove_partition", "reset_partition")
        + ("synchronous_execution", "instances_per_host", "only_output_from_instance", "vv", "tag_output", "ipus"),
        _ignored,
    ),
}
