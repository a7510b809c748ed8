"""Import arguments of Hugging Face's Trainer and of its example scripts."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Optional, Tuple

from ipurun.config.importers.applications import take_application
from ipurun.config.importers.recipe import Recipe

__all__ = ["import_training_arguments", "is_huggingface", "read_overrides", "take_arguments"]

# Arguments that a run of ipurun has in another form, or that say nothing about it.
_SILENT: Tuple[str, ...] = (
    *(
        "do_train",
        "do_eval",
        "do_predict",
        "overwrite_output_dir",
        "overwrite_cache",
        "logging_dir",
        "logging_strategy",
    ),
    *("hub_", "push_to_hub", "fsdp", "deepspeed", "_n_gpu", "disable_tqdm", "log_level", "ray_", "torchdynamo"),
    *("accelerator_config", "past_index", "use_auth_token", "cache_dir", "preprocessing_num_workers"),
)
_EMPTY: Tuple[Any, ...] = (None, False, "", [], {}, "none", "None", "no", "passive", "auto", "no_deprecated_warning")
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
    "logging_nan_inf_filter": True,
    "skip_memory_metrics": True,
    "average_tokens_across_devices": True,
    "ddp_timeout": 1800,
    "seed": 42,
    "max_steps": -1,
    "local_rank": -1,
    "save_steps": -1,
    "length_column_name": "length",
    "log_on_each_node": True,
    "project": "huggingface",
    "eval_do_concat_batches": True,
    "dataloader_in_order": True,
    "train_sampling_strategy": "random",
    "fp16_opt_level": "O1",
}
# What HF's Trainer takes where nothing is said, and ipurun's optimizers do not.
_TRAINERS: Mapping[str, Tuple[str, Any]] = {
    "learning_rate": ("optimizer.lr", 5e-05),
    "weight_decay": ("optimizer.weight_decay", 0.0),
    "per_device_train_batch_size": ("micro_batch_size", 8),
    "max_grad_norm": ("optimizer.max_grad_norm", 1.0),
}
_OF_OPTIMUM = ("ipu_config_name", "ipu_config_overrides", "pod_type", "n_ipu")  # whose trainer differs in two of them
_MARKS = frozenset(("per_device_train_batch_size", "num_train_epochs", "warmup_ratio", "lr_scheduler_type"))
# The example scripts, without run_, and the transformers.AutoModelFor... that they make.
_TASKS: Mapping[str, str] = {
    **dict.fromkeys(("glue", "xnli", "classification", "text_classification"), "SequenceClassification"),
    "ner": "TokenClassification",
    **dict.fromkeys(("qa", "vit_qa"), "QuestionAnswering"),
    "mlm": "MaskedLM",
    "clm": "CausalLM",
    **dict.fromkeys(("summarization", "translation", "seq2seq_qa"), "Seq2SeqLM"),
    "swag": "MultipleChoice",
    **dict.fromkeys(("pretraining", "mae"), "PreTraining"),
    "image_classification": "ImageClassification",
    "audio_classification": "AudioClassification",
    "speech_recognition_ctc": "CTC",
    "speech_recognition_seq2seq": "SpeechSeq2Seq",
}


def import_training_arguments(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of HF's TrainingArguments, as `to_json_string` writes them."""
    recipe = Recipe("model, data and the collate function")
    take_arguments(recipe, values)
    return recipe


def is_huggingface(names: Mapping[str, Any]) -> bool:
    """Return whether arguments are those of HF's Trainer."""
    return bool(_MARKS.intersection(names)) or "ipu_config_name" in names


def take_arguments(recipe: Recipe, values: Mapping[str, Any], prefix: str = "", program: str = "") -> None:
    """Take over arguments of HF's Trainer and of an example script.

    Args:
        recipe: The recipe to fill.
        values: The arguments.
        prefix: What the source writes before a name, for the notes.
        program: File name of the script, which says what the model is for.
    """
    is_theirs = is_huggingface(values)
    rest: Dict[str, Any] = {}
    idle = _idle_intervals(values) if is_theirs else ()
    for name, value in values.items():
        is_silent = is_theirs and (name.startswith(_SILENT) or name in idle or _DEFAULTS.get(name, _SILENT) == value)
        is_off = value == 0 and name != "seed" if _is_number(value) else value in _EMPTY
        if not is_silent and not (is_off and is_theirs):
            rest[name] = value
    if is_theirs and any(name in values for name in _OF_OPTIMUM):
        rest.pop("max_grad_norm", None)
    if is_theirs:
        _set_model(recipe, rest, prefix, program)
        _set_optimizer(recipe, rest)
        _note_ipu_config(recipe, rest, prefix)
        _add_defaults(recipe, values)
    take_application(recipe, rest, prefix)


def _idle_intervals(values: Mapping[str, Any]) -> Tuple[str, ...]:
    """Return the intervals in steps that do not count, because the strategy is another: a file has all of them."""
    strategies = {
        "save_steps": values.get("save_strategy", "steps"),
        "eval_steps": values.get("eval_strategy", values.get("evaluation_strategy", "steps")),
        "logging_steps": values.get("logging_strategy", "steps"),
    }
    return tuple(name for name, strategy in strategies.items() if str(strategy).lower().rpartition(".")[2] != "steps")


def read_overrides(text: Any) -> Dict[str, Any]:
    """Read ``a=1,b=[1 2],c=true``, as ``--ipu_config_overrides`` and ``--config_overrides`` take it."""
    pairs = re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", text if isinstance(text, str) else "")
    return {name: _value(value.strip()) for name, value in pairs}


def _value(text: str) -> Any:
    if text.startswith("["):
        return [_value(item) for item in re.split(r"[ ,]+", text.strip("[] ")) if item]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _set_model(recipe: Recipe, rest: Dict[str, Any], prefix: str, program: str) -> None:
    """Set the model that an example script makes from ``model_name_or_path`` or ``config_name``."""
    name, config = rest.pop("model_name_or_path", None), rest.pop("config_name", None)
    overrides = read_overrides(rest.pop("config_overrides", ""))
    if name is None and config is None:
        return
    task = _task(program)
    made = f"transformers.AutoModelFor{task or '...'}"
    if task is None:
        recipe.notes.append(
            f"{prefix}{'model_name_or_path' if name else 'config_name'}: {name or config}: model: {{_target_: "
            f"{made}.from_pretrained, pretrained_model_name_or_path: {name or config}}}, with the class for the task"
        )
        return
    if name is not None:
        keys = {"_target_": f"{made}.from_pretrained", "pretrained_model_name_or_path": name, **overrides}
    else:
        of_config = {"_target_": "transformers.AutoConfig.from_pretrained", "pretrained_model_name_or_path": config}
        keys = {"_target_": f"{made}.from_config", "config": {**of_config, **overrides}}
    recipe.keys["model"] = keys
    recipe.set("loader.collate", "transformers.default_data_collator")
    recipe.lacks = "data"


def _task(program: str) -> Optional[str]:
    found = re.fullmatch(r"(?:run_)?(\w+?)(?:_no_trainer)?\.py", program)
    return _TASKS.get(found.group(1)) if found else None


def _set_optimizer(recipe: Recipe, rest: Dict[str, Any]) -> None:
    """Choose optimizer and schedule, with what the trainer takes where none is named."""
    no_bias = rest.pop("lamb_no_bias_correction", False)
    if rest.pop("lamb", False) or no_bias:
        recipe.choose("optimizer", "lamb")
        recipe.set("optimizer.bias_correction", True)
    elif "optim" not in rest:
        recipe.choose("optimizer", "adamw")
    if no_bias:
        recipe.set("optimizer.bias_correction", False)
    if rest.get("weight_decay"):
        recipe.set("optimizer.no_decay", "norms_and_biases")
    if "lr_scheduler_type" not in rest and "lr_schedule" not in rest:
        recipe.choose("schedule", "linear")
    smoothing = rest.pop("smoothing", None) or rest.pop("label_smoothing_factor", None)
    if smoothing:
        recipe.notes.append(
            f"label smoothing: {smoothing}: the model returns its own loss: loss.name=CrossEntropyLoss "
            f"loss.args.label_smoothing={smoothing} computes another one"
        )
    epochs = rest.get("num_train_epochs")
    if rest.get("warmup_epochs") and epochs:
        recipe.set("schedule.warmup_share", round(rest.pop("warmup_epochs") / epochs, 6))


def _note_ipu_config(recipe: Recipe, rest: Dict[str, Any], prefix: str) -> None:
    name, overrides = rest.pop("ipu_config_name", None), rest.pop("ipu_config_overrides", None)
    if name or overrides:
        recipe.notes.append(
            f"{prefix}ipu_config_name: {name or overrides}: the placement is in its ipu_config.json: "
            "ipurun import ipu_config.json 'THE COMMAND' NAME takes both"
        )


def _add_defaults(recipe: Recipe, names: Mapping[str, Any]) -> None:
    defaults = dict(_TRAINERS)
    if any(name in names for name in _OF_OPTIMUM):
        defaults["per_device_train_batch_size"] = ("micro_batch_size", 1)
        del defaults["max_grad_norm"]  # Optimum's trainer does not clip
    for name, (key, value) in defaults.items():
        given = names.get(name, value)
        if name not in names or (given == 0 and name != "max_grad_norm"):
            recipe.set(key, given)
    if "num_train_epochs" not in names and names.get("max_steps", -1) in (None, -1):
        recipe.set("epochs", 3)
