"""Import what Graphcore's applications are configured with: a section of ``configs.yml``, or flags of a program."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Mapping, Optional, Tuple

from ipurun.config.foreign import translate
from ipurun.config.importers.recipe import Recipe
from ipurun.errors import ConfigError, listing, nearest

__all__ = ["add_program", "find_section", "from_environment", "take_application"]

_Rule = Callable[[Recipe, Any], None]
_OFF: Tuple[Any, ...] = (None, False, "", [], {}, 0, "none", "None")
_OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "lamb": "lamb", "sgd": "sgd", "sgd_combined": "sgd"}
_OPTIMIZERS.update({"lambnobias": "lamb", "lambnobiascorrection": "lamb", "adamwnobias": "adamw", "adamnobias": "adam"})
_OPTIMIZERS.update({"rmsprop": "rmsprop", "rmsprop_tf": "rmsprop"})
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "poly": "polynomial"}
_LOSSES = {"celoss": "CrossEntropyLoss", "crossentropy": "CrossEntropyLoss", "cross_entropy": "CrossEntropyLoss"}
_TYPES = {"fp16": "float16", "float16": "float16", "fp32": "float32", "float32": "float32"}


def find_section(values: Mapping[str, Any], section: Optional[str]) -> Mapping[str, Any]:
    """Return one section of a file, or the file itself if it has none.

    Raises:
        ConfigError: There is no such section, or no section was named and there are several.
    """
    sections = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    if section is None and len(sections) != len(values):
        return values
    if section not in sections:
        close = nearest(section or "", sections, most=1) or list(sections)[:1]
        raise ConfigError(
            f"the file has no section `{section}`" if section else "the file has several sections: which one?",
            known=listing(sections, most=30),
            fix=f"--section {close[0] if close else 'NAME'}",
        )
    return sections[section]


def take_application(recipe: Recipe, values: Mapping[str, Any], prefix: str = "") -> None:
    """Take over keys of an application.

    Args:
        recipe: The recipe to fill.
        values: The keys, with dashes or underscores.
        prefix: What the source writes before a key, for the notes.
    """
    given = {str(name).replace("-", "_"): _number(value) for name, value in values.items()}
    shown = {str(name).replace("-", "_"): f"{prefix}{name}" for name in values}
    for name, value in _joined(recipe, given):
        if name in _RULES:
            _RULES[name](recipe, value)
        elif name in _OF_MODEL and value is not None:
            recipe.notes.append(f"{shown[name]}: {value}: an argument of the model: write it below model")
        elif value in _OFF:
            continue
        elif name in _OF_DATA or (name.startswith(_BEGINS_OF_DATA) and translate(name) is None):
            recipe.notes.append(f"{shown[name]}: {value}: about the data: write it below data")
        else:
            recipe.take(name, value, shown[name])


def add_program(recipe: Recipe, values: Mapping[str, Any]) -> None:
    """Add what the program of an application does whatever its file says, as far as it is known."""
    given = recipe.keys.setdefault("optimizer", {})
    if given.get("weight_decay"):
        given["no_decay"] = "norms_and_biases"
    if "mask_tokens" in values:  # of BERT
        recipe.keys.update({"precision": "16.16", "stochastic_rounding": True, **recipe.keys})
        given.update({"accum_type": "float16", "eps": 1e-06, **given})
        if str(values.get("optimizer")).lower() == "adamw":
            given["bias_correction"] = False
    if not given:
        del recipe.keys["optimizer"]


def _number(value: Any) -> Any:
    """Return a number that YAML reads as text: 6e-5."""
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_number else value


def _joined(recipe: Recipe, given: Mapping[str, Any]) -> Iterator[Tuple[str, Any]]:
    """Yield the keys that mean something by themselves, and take over those that depend on others."""
    rest: Dict[str, Any] = dict(given)
    optimizer = str(given.get("optimizer", "")).lower()
    is_sgd = optimizer.startswith("sgd")
    if rest.get("auto_loss_scaling"):
        rest.pop("loss_scaling", None)
        rest.pop("initial_loss_scaling", None)
        rest["accum_type"] = "fp16"  # PopART scales automatically only with gradients in half precision
    if "loss_scaling" in rest and "initial_loss_scaling" in rest:
        rest["loss_scaling"] = rest.pop("initial_loss_scaling")
    if "momentum" in rest and not is_sgd and not optimizer.startswith("rmsprop"):
        recipe.notes.append(f"momentum: {rest.pop('momentum')}: {optimizer or 'the optimizer'} has none")
    if "nobias" in optimizer:
        rest["bias_correction"] = False
    if rest.get("label_smoothing"):
        recipe.set("loss.name", "CrossEntropyLoss")
    if optimizer == "rmsprop_tf":
        recipe.set("optimizer.use_tf_variant", True)
    if not rest.get("wandb"):
        rest.pop("wandb_project_name", None)
    if optimizer == "sgd_combined":
        recipe.set("optimizer.use_combined_accum", True)
    first = "velocity_accum_type" if is_sgd else "first_order_momentum_accum_type"
    keys = {"accum_type": "accum_type", "first_order_type": first}
    for name, key in {**keys, "second_order_type": "second_order_momentum_accum_type"}.items():
        if _TYPES.get(str(rest.pop(name, None)).lower()) == "float16":  # float32 is PopTorch's default
            recipe.set(f"optimizer.{key}", "float16")
    _warm_up(recipe, rest)
    yield from rest.items()


def _warm_up(recipe: Recipe, rest: Dict[str, Any]) -> None:
    schedule = str(rest.get("lr_schedule", "")).lower()
    epochs = next((rest[name] for name in ("epoch", "epochs", "num_epochs") if rest.get(name)), None)
    warm_epochs, warm = rest.pop("warmup_epoch", None), rest.pop("lr_warmup", None)
    if warm_epochs and epochs:
        warm = round(warm_epochs / epochs, 6)
    elif warm_epochs is not None and warm_epochs != 0:
        recipe.notes.append(f"warmup_epoch: {warm_epochs}: schedule.warmup_share={warm_epochs}/EPOCHS")
    if schedule == "exponential":
        every, factor = rest.pop("lr_scheduler_freq", 1), rest.pop("lr_decay", "lr_decay")
        recipe.notes.append(
            f"lr_schedule: exponential: the rate times {factor} every {every} epochs: schedule=exponential, and "
            "schedule.gamma, its factor for one weight update, by hand"
        )
        rest.pop("lr_schedule")
    if schedule == "step":
        decay, at = rest.pop("lr_decay", 0.1), rest.pop("lr_epoch_decay", "?")
        recipe.notes.append(
            f"lr_schedule: step: the rate times {decay} after epochs {at}: schedule=step with schedule.step_size and "
            "schedule.gamma in weight updates, by hand"
        )
        rest.pop("lr_schedule")
    if warm and schedule == "constant":
        rest["lr_schedule"] = "warmup"
    if warm and schedule in ("exponential", "step"):
        recipe.notes.append(f"warm-up: {warm} of the run, which schedule={schedule} does not have")
    elif warm:
        recipe.set("schedule.warmup_share" if warm < 1 else "schedule.warmup_steps", warm)
        if not schedule:
            rest["lr_schedule"] = "warmup"
    rest.pop("lr_scheduler_freq", None)  # how often per epoch the rate is set; ipurun sets it at every host call


def _sets(key: str, convert: Callable[[Any], Any] = lambda value: value) -> _Rule:
    def apply(recipe: Recipe, value: Any) -> None:
        made = None if value is None else convert(value)
        if made is not None:
            recipe.set(key, made)

    return apply


def _on(key: str, value: Any) -> _Rule:
    return lambda recipe, given: recipe.set(key, value) if given not in (False, None, 0) else None


def _chosen(group: str, names: Mapping[str, str]) -> _Rule:
    def apply(recipe: Recipe, value: Any) -> None:
        name = names.get(str(value).lower())
        if name is None:
            recipe.notes.append(f"{group}: {value} has no counterpart in ipurun")
        else:
            recipe.choose(group, name)

    return apply


def _by_hand(key: str) -> _Rule:
    return lambda recipe, value: recipe.notes.append(f"{key}: {value}: write {key}._target_ and its arguments")


def _by_ipu(value: Any) -> Any:
    return {f"IPU{ipu}": share for ipu, share in enumerate(value)} if isinstance(value, list) else value


def _precision(recipe: Recipe, value: Any) -> None:
    text = str(value).replace("fp", "")
    made = text if text in ("16.16", "16.32", "32.32") else {"16": "16.16", "32": "32.32"}.get(text)
    if made:
        recipe.set("precision", made)
    else:
        recipe.notes.append(f"precision: {value} has no counterpart in ipurun")


def _loss(recipe: Recipe, value: Any) -> None:
    name = _LOSSES.get(str(value).lower())
    if name:
        recipe.set("loss.name", name)
    else:
        recipe.notes.append(f"loss: {value}: write loss.name, a loss of torch.nn, or loss._target_")


def _checkpoints(recipe: Recipe, value: Any) -> None:
    """Take over modules whose outputs are kept; sums are no modules."""
    names = [re.sub(r"_(\d+)$", r".\1", str(name).replace("/", ".")) for name in value or []]
    sums = [str(name) for name in value or [] if re.fullmatch(r"(.*/)?(add|mul|cat)(_\d+)?", str(name))]
    modules = [name for name, theirs in zip(names, value or []) if str(theirs) not in sums]
    if modules:
        recipe.set("recompute.checkpoints", modules)
    if sums:
        recipe.notes.append(
            f"recompute_checkpoints: {', '.join(sums)}: results of operations, not of modules: name the modules that "
            "return them in recompute.checkpoints"
        )


def _recompute_mode(recipe: Recipe, value: Any) -> None:
    if str(value).lower() == "auto":
        recipe.set("recompute.mode", "standard")  # manual: recompute_checkpoints has the modules


def _serialize(recipe: Recipe, value: Any) -> None:
    if value not in (None, 0, 1):
        recipe.set("memory.serialize.output_embeddings", value)


def _rebatch(recipe: Recipe, value: Any) -> None:
    if value:
        recipe.set("loader.mode", "async_rebatched")
        recipe.set("loader.rebatched_worker_size", value)


def from_environment(value: Any) -> Any:
    """Return a path in which ``$NAME`` is a variable of the environment, as Hydra writes it."""
    return re.sub(r"\$(\w+)", r"${oc.env:\1}", value) if isinstance(value, str) else value


def _average(recipe: Recipe, value: Any) -> None:
    if value not in _OFF:
        kind = "ema" if str(value) == "exponential" else "tail"
        recipe.notes.append(
            f"weight_avg_strategy: {value}: an average of checkpoints: averaging.kind={kind}, whose averaging.decay "
            "counts for one weight update"
        )


def _prefetch(recipe: Recipe, value: Any) -> None:
    if value:
        recipe.set("options._Popart.set", {"defaultPrefetchBufferingDepth": value})


def _custom_ops(recipe: Recipe, value: Any) -> None:
    if value:
        recipe.notes.append("custom_ops: operations that the application compiles: list their libraries in custom_ops")


def _wandb(recipe: Recipe, value: Any) -> None:
    if value:
        recipe.choose("logger", "wandb")


def _names(text: str) -> FrozenSet[str]:
    return frozenset(text.split())


_OF_MODEL = _names(
    """
    attention_probs_dropout_prob drop_path_rate efficientnet_expand_ratio efficientnet_group_dim enable_fast_groupnorm
    attention_mask hidden_dropout_prob hidden_size layer_norm_eps layer_scale_init_value layerdrop
    mlp_dim norm_eps norm_num_groups norm_type num_attention_heads
    num_hidden_layers num_labels patches_size representation_size vocab_size
    """
)
_OF_DATA = _names(
    """
    alpha audio_column_name byteio cutmix
    cutmix_disable_prob cutmix_lambda_high cutmix_lambda_low dataset_path eight_bit_io extra_aug
    feature_extractor_name image_processor_name
    imagenet_data_path input_file input_files mask_tokens max_sequences_per_pack mixup mixup_alpha
    is_already_preprocessed label_column_name language normalization_location packed_data packing_factor
    pad_to_max_length sequence_length source_lang source_prefix summary_column synthetic_data target_lang task_name
    text_column tokenizer_name use_bbox_info
    """
)
_BEGINS_OF_DATA: Tuple[str, ...] = (
    "dataset_",
    "train_",
    "validation_",
    "test_",
    "max_seq_",
    "max_source_",
    "max_target_",
    "max_train_",
)
_BEGINS_OF_DATA += ("max_eval_", "max_predict_", "max_length", "max_duration_", "min_duration_", "doc_stride")
_SHARDED = _on("replication.tensor_sharding", True)
_OFF_CHIP = _on("memory.optimizer_state.on_chip", False)
_MEMORY = _sets("memory.available_proportion", _by_ipu)
_NAMES: List[Tuple[str, _Rule]] = [
    ("model", _by_hand("model")),
    ("data dataset", _by_hand("data")),
    ("replicas replication_factor", _sets("replication.factor")),
    ("global_batch_size", _sets("global_batch_size")),
    ("gradient_accumulation", _sets("gradient_accumulation")),
    ("epoch epochs num_epochs", _sets("epochs")),
    ("training_steps", _sets("max_steps")),
    ("lr learning_rate", _sets("optimizer.lr")),
    ("precision", _precision),
    ("seed random_seed", _sets("seed")),
    ("fp32", _on("precision", "32.32")),
    ("dataloader_mode", _sets("loader.mode", lambda value: value if value != "sync" else None)),
    ("optimizer", _chosen("optimizer", _OPTIMIZERS)),
    ("optimizer_eps adam_eps", _sets("optimizer.eps")),
    ("adam_betas", _sets("optimizer.betas")),
    ("bias_correction", lambda recipe, value: recipe.set("optimizer.bias_correction", False) if not value else None),
    ("rmsprop_decay", _sets("optimizer.alpha")),
    ("weight_decay", _sets("optimizer.weight_decay")),
    ("momentum", _sets("optimizer.momentum")),
    ("lr_schedule", _chosen("schedule", {**_SCHEDULES, "warmup": "warmup"})),
    ("loss", _loss),
    ("loss_scaling initial_loss_scaling", _sets("loss_scaling")),
    ("auto_loss_scaling", _on("loss_scaling", "auto")),
    ("label_smoothing smoothing", _sets("loss.args.label_smoothing", lambda value: value or None)),
    ("pipeline_splits", _sets("pipeline.split", lambda value: [str(name).replace("/", ".") for name in value] or None)),
    ("layers_per_ipu", _sets("pipeline.layers_per_ipu")),
    ("ipus_per_replica", _sets("pipeline.ipus", lambda value: value if value > 1 else None)),
    ("available_memory_proportion matmul_proportion", _MEMORY),
    ("enable_stochastic_rounding stochastic_rounding", _on("stochastic_rounding", True)),
    ("half_partial enable_half_partials", _on("partials", "half")),
    ("enable_rts enable_optimizer_rts replicated_tensor_sharding", _SHARDED),
    ("optimizer_state_offchip offload_optimizer", _OFF_CHIP),
    ("recompute_checkpoint_every_layer", _on("recompute.every", "block")),
    ("recompute_checkpoints", _checkpoints),
    ("recompute_mode", _recompute_mode),
    ("embedding_serialization_factor", _serialize),
    ("executable_cache_dir exec_cache_dir", _sets("cache.dir", from_environment)),
    ("dataloader_worker dataloader_workers", _sets("loader.workers")),
    ("rebatched_worker_size dataloader_rebatch_size", _rebatch),
    ("async_dataloader", _on("loader.mode", "async")),
    ("prefetch_depth", _prefetch),
    ("num_io_tiles", _sets("memory.io_tiles", lambda value: value or None)),
    ("reduction_type", _sets("replication.reduction", lambda value: value if value in ("mean", "sum") else None)),
    ("checkpoint_save_steps", _sets("checkpoint.every_steps")),
    ("checkpoint_output_dir", _sets("runs_dir", lambda value: value or None)),
    ("weight_avg_strategy", _average),
    ("weight_avg_exp_decay", lambda recipe, value: None),  # in the note on the strategy
    ("custom_ops", _custom_ops),
    ("wandb", _wandb),
    ("wandb_project_name", _sets("logger.wandb.project")),
]
_RULES: Mapping[str, _Rule] = {name: rule for names, rule in _NAMES for name in names.split()}
