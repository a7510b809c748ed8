"""Keys of other tools and the keys of ipurun that mean the same: for suggestions, and to import their files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from ipurun.api.setters import option_setters

__all__ = ["explain", "translate"]


@dataclass(frozen=True)
class _Meaning:
    key: str
    convert: Callable[[Any], Any] = lambda value: value  # None: ipurun does not have such a value
    choose: Optional[Callable[[Any], Optional[Tuple[str, Any]]]] = None  # where the value decides about the key


def _if_true(key: str, value: Any) -> _Meaning:
    return _Meaning(key, lambda given: value if given is True or given == 1 else None)


def _words(key: str, words: Mapping[str, str]) -> _Meaning:
    return _Meaning(key, lambda given: words.get(str(given).lower()))


def _whole(key: str) -> _Meaning:
    """A whole number, where the other tool also takes 3.0, or a share of the total."""

    def convert(given: Any) -> Any:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        is_share = isinstance(given, float) and given <= 1
        return int(given) if is_number and not is_share and given == int(given) else None

    return _Meaning(key, convert)


def _batches(key: str) -> _Meaning:
    """A number of batches, where the other tool also takes true for a single one."""

    def choose(given: Any) -> Optional[Tuple[str, Any]]:
        if given is True:
            return "debug", "fast"
        is_number = isinstance(given, int) and not isinstance(given, bool) and given > 0
        return (key, given) if is_number else None

    return _Meaning("debug", lambda given: None, choose)


def _average(kind: str) -> _Meaning:
    """An average of the weights: true, or its decay."""

    def choose(given: Any) -> Optional[Tuple[str, Any]]:
        if given is True:
            return "averaging.kind", kind
        return ("averaging.decay", given) if kind == "ema" and isinstance(given, float) else None

    return _Meaning("averaging.kind", lambda given: None, choose)


def _when(node: str) -> _Meaning:
    """A strategy of transformers: no, epoch or steps."""

    def choose(given: Any) -> Optional[Tuple[str, Any]]:
        word = str(given).lower()
        if word in ("no", "false"):  # YAML reads a bare `no` as false
            return f"{node}.every_epochs", "null"
        return {"epoch": (f"{node}.every_epochs", 1), "steps": (f"{node}.every_steps", 500)}.get(word)

    return _Meaning(f"{node}.every_epochs", lambda given: None, choose)


def _adam(given: Any) -> Optional[str]:
    word = str(given).lower().rpartition(".")[2]
    known = {"adamw": "adamw", "adamw_torch": "adamw", "adamw_hf": "adamw", "adam": "adam", "sgd": "sgd"}
    return {**known, "lamb": "lamb", "rmsprop": "rmsprop", "adamw_torch_fused": "adamw"}.get(word)


def _ipus_of_pod(given: Any) -> Optional[int]:
    pod = re.fullmatch(r"(?:bow-)?pod-?(\d+)", str(given).lower())
    return int(pod.group(1)) if pod else None


def _share_of_warmup(given: Any) -> Optional[Tuple[str, Any]]:
    """Take a number below 1 for a share of the run, as transformers 5 does."""
    return ("schedule.warmup_share", given) if isinstance(given, float) and 0 < given < 1 else None


def _shares(given: Any) -> Any:
    # By IPU, so that the value is valid before the split is written.
    return {f"IPU{index}": share for index, share in enumerate(given)} if isinstance(given, list) else given


def _as_list(given: Any) -> Optional[list]:
    return given if isinstance(given, list) else [given] if isinstance(given, str) else None


def _minutes(given: Any) -> Optional[float]:
    """Read a time as days:hours:minutes:seconds."""
    parts = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(given))
    if parts is None:
        return None
    days, hours, minutes, seconds = map(int, parts.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60


def _is_false(given: Any) -> Optional[bool]:
    return not given if isinstance(given, bool) else None


_LIGHTNING: Dict[str, _Meaning] = {
    "accelerator": _words(  # IPUs where there are any, else the CPU
        "engine", {"ipu": "ipu", "cpu": "cpu", **dict.fromkeys(("auto", "gpu", "cuda", "tpu", "mps", "hpu"), "auto")}
    ),
    "ipus": _Meaning("devices"),
    "strategy": _words("engine", {"ipu": "ipu", "ipu_strategy": "ipu", "ipustrategy": "ipu"}),
    "accumulate_grad_batches": _Meaning("gradient_accumulation"),
    "gradient_clip_val": _Meaning("optimizer.max_grad_norm"),
    "max_epochs": _Meaning("epochs"),
    "limit_train_batches": _whole("limit.train_calls"),
    "limit_val_batches": _whole("limit.eval_calls"),
    "overfit_batches": _if_true("debug", "overfit"),
    "detect_anomaly": _if_true("debug", "nonfinite"),
    "patience": _Meaning("early_stopping.patience"),
    "min_delta": _Meaning("early_stopping.min_change"),
    "stopping_threshold": _Meaning("early_stopping.threshold"),
    "ema_decay": _Meaning("averaging.decay"),
    "fast_dev_run": _batches("limit.train_calls"),
    "limit_test_batches": _whole("limit.eval_calls"),
    "limit_predict_batches": _whole("limit.eval_calls"),
    "enable_checkpointing": _Meaning("checkpoint.at_end", lambda given: False if given is False else None),
    "profiler": _words("profile.kind", {"simple": "trace", "advanced": "trace", "pytorch": "torch"}),
    "max_time": _Meaning("max_minutes", _minutes),
    "save_top_k": _whole("checkpoint.keep"),
    "every_n_train_steps": _Meaning("checkpoint.every_steps"),
    "every_n_epochs": _Meaning("checkpoint.every_epochs"),
    "ckpt_dir": _Meaning("runs_dir"),
    "autoreport": _if_true("profile.kind", "graph"),
    "autoreport_dir": _Meaning("profile.dir"),
    "convert_model_to_half": _if_true("precision", "16-true"),
    "training_opts": _Meaning("options"),
    "inference_opts": _Meaning("inference.options"),
    "check_val_every_n_epoch": _Meaning("eval.every_epochs"),
    "val_check_interval": _whole("eval.every_steps"),
    "log_every_n_steps": _Meaning("log_every_steps"),
    "default_root_dir": _Meaning("runs_dir"),
    "ckpt_path": _Meaning("resume"),
    "num_workers": _Meaning("loader.workers"),
    "batch_size": _Meaning("micro_batch_size"),
}
_TRANSFORMERS: Dict[str, _Meaning] = {
    "per_device_train_batch_size": _Meaning("micro_batch_size"),
    "per_device_eval_batch_size": _Meaning("inference.micro_batch_size"),
    "learning_rate": _Meaning("optimizer.lr"),
    "lr": _Meaning("optimizer.lr"),
    "weight_decay": _Meaning("optimizer.weight_decay"),
    "max_grad_norm": _Meaning("optimizer.max_grad_norm"),
    "num_train_epochs": _whole("epochs"),
    "warmup_ratio": _Meaning("schedule.warmup_share"),
    "num_warmup_steps": _Meaning("schedule.warmup_steps"),
    "adam_beta1": _Meaning("optimizer.betas", lambda given: [given, 0.999]),
    "adam_beta2": _Meaning("optimizer.betas", lambda given: [0.9, given]),
    "adam_epsilon": _Meaning("optimizer.eps"),
    "optim": _Meaning("optimizer", _adam),
    "fp16": _if_true("precision", "16-mixed"),
    "evaluation_strategy": _when("eval"),
    "eval_strategy": _when("eval"),
    "save_strategy": _when("checkpoint"),
    "gradient_checkpointing": _if_true("recompute.every", "block"),
    "report_to": _words("logger", {word: word for word in ("wandb", "tensorboard", "mlflow")}),
    "wandb_project": _Meaning("logger.wandb.project"),
    "train_batch_size": _Meaning("micro_batch_size"),
    "eval_batch_size": _Meaning("inference.micro_batch_size"),
    "max_train_steps": _Meaning("max_steps"),
    "num_steps": _Meaning("max_steps"),
    "steps": _Meaning("max_steps"),
    "data_seed": _Meaning("seed"),
    "loss_scaling_value": _Meaning("loss_scaling"),
    "warmup_steps": _Meaning("schedule.warmup_steps", choose=_share_of_warmup),
    "lr_scheduler_type": _words(
        "schedule",
        {
            **{word: word for word in ("linear", "cosine", "constant", "polynomial")},
            "cosine_with_restarts": "warm_restarts",
            "constant_with_warmup": "warmup",
        },
    ),
    "gradient_accumulation_steps": _Meaning("gradient_accumulation"),
    "dataloader_num_workers": _Meaning("loader.workers"),
    "dataloader_drop_last": _Meaning("loader.drop_last"),
    "logging_steps": _whole("log_every_steps"),
    "eval_steps": _whole("eval.every_steps"),
    "save_steps": _whole("checkpoint.every_steps"),
    "save_total_limit": _Meaning("checkpoint.keep"),
    "metric_for_best_model": _Meaning("monitor"),
    "early_stopping_patience": _Meaning("early_stopping.patience"),
    "early_stopping_threshold": _Meaning("early_stopping.min_change"),
    "resume_from_checkpoint": _Meaning("resume"),
    "output_dir": _Meaning("runs_dir"),
    "run_name": _Meaning("name"),
    "pod_type": _Meaning("devices", _ipus_of_pod),
    "n_ipu": _Meaning("devices"),
}
_OPTIMUM: Dict[str, _Meaning] = {
    "replication_factor": _Meaning("replication.factor"),
    "training_replication_factor": _Meaning("replication.factor"),
    "inference_replication_factor": _Meaning("inference.replicas"),
    "inference_device_iterations": _Meaning("inference.device_iterations"),
    "optimizer_state_offchip": _Meaning("memory.optimizer_state.on_chip", _is_false),
    "replicated_tensor_sharding": _Meaning("replication.tensor_sharding"),
    "matmul_proportion": _Meaning("memory.available_proportion", _shares),
    "training_matmul_proportion": _Meaning("memory.available_proportion", _shares),
    "enable_half_partials": _if_true("partials", "half"),
    "auto_loss_scaling": _if_true("loss_scaling", "auto"),
    "executable_cache_dir": _Meaning("cache.dir"),
    "output_mode": _Meaning("output.mode"),
    "profile_dir": _Meaning("profile.dir"),
    "recompute_checkpoint_every_layer": _if_true("recompute.every", "block"),
    "enable_half_first_order_momentum": _if_true("optimizer.first_order_momentum_accum_type", "float16"),
    "ipus_per_replica": _Meaning("pipeline.ipus"),
}
_OPTIMIZING: Dict[str, _Meaning] = {  # names that training scripts use, whichever tool they come from
    **dict.fromkeys(
        ("clip", "grad_clip", "gradient_clip", "clip_grad", "clip_grad_norm", "clip_norm", "clip_gradients")
        + ("grad_clip_norm", "gradient_clipping", "max_norm", "max_gradient_norm", "clipnorm", "global_clipnorm"),
        _Meaning("optimizer.max_grad_norm"),
    ),
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor"), _Meaning("loss.args.label_smoothing")),
    **dict.fromkeys(
        ("pretrained", "pretrained_checkpoint", "pretrained_weights", "init_checkpoint", "load_from_checkpoint")
        + ("model_name_or_path", "warm_start", "finetune_from", "restore_from"),
        _Meaning("init_from", lambda given: given if isinstance(given, str) else None),
    ),
    **dict.fromkeys(("ema", "use_ema"), _average("ema")),
    **dict.fromkeys(("swa", "use_swa"), _average("tail")),
    "early_stop": _whole("early_stopping.patience"),
    **dict.fromkeys(("warmup", "warmup_iters"), _whole("schedule.warmup_steps")),
    **dict.fromkeys(("frozen", "freeze_layers", "frozen_layers", "freeze_modules"), _Meaning("freeze", _as_list)),
    "freeze_backbone": _Meaning("freeze", lambda given: None),
    "unfreeze_at_epoch": _Meaning("unfreeze", lambda given: None),
    "unfreeze_backbone_at_epoch": _Meaning("unfreeze", lambda given: None),
    **dict.fromkeys(("no_weight_decay", "no_decay", "exclude_from_weight_decay"), _Meaning("optimizer.no_decay")),
}
_POPTORCH: Dict[str, _Meaning] = {
    "autoRoundNumIPUs": _Meaning("pipeline.auto_round"),
    "deviceIterations": _Meaning("device_iterations"),
    "replicationFactor": _Meaning("replication.factor"),
    "gradientAccumulation": _Meaning("gradient_accumulation"),
    "broadcastBuffers": _Meaning("replication.broadcast_buffers"),
    "enableExecutableCaching": _Meaning("cache.dir"),
    "useIpuModel": _if_true("engine", "ipu_model"),
    "randomSeed": _Meaning("seed"),
    **dict.fromkeys(
        ("outputMode", "anchorMode"), _words("output.mode", {"final": "final", "all": "all", "sum": "sum"})
    ),
    "setAvailableMemoryProportion": _Meaning("memory.available_proportion"),
    "setAutomaticLossScaling": _if_true("loss_scaling", "auto"),
    "enableFloatingPointExceptions": _Meaning("debug.fp_exceptions"),
    "enableStochasticRounding": _Meaning("stochastic_rounding"),
    "numIOTiles": _Meaning("memory.io_tiles"),
}
_LAUNCHERS: Dict[str, _Meaning] = {  # torchrun and poprun
    "nproc_per_node": _Meaning("devices"),
    "num_processes": _Meaning("devices"),  # of accelerate
    "mixed_precision": _words("precision", {"fp16": "16-mixed", "no": "32-true", "false": "32-true"}),
    "num_replicas": _Meaning("replication.factor"),
}
_PROCESSES = (
    "devices=N makes N replicas in one process; several processes take distributed=poprun on IPUs, "
    "distributed=torchrun on CPUs, and distributed.instances=N"
)
_SHARES = {
    "limit_train_batches": "limit.train_calls",
    **dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), "limit.eval_calls"),
    "val_check_interval": "eval.every_steps",
    **dict.fromkeys(("eval_steps", "save_steps", "logging_steps"), "the interval"),
}
# Words that no key of ipurun means, and why.
_WITHOUT: Dict[str, str] = {
    **dict.fromkeys(
        ("num_nodes", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint", "sync_batchnorm")
        + ("local_rank", "ddp_backend", "ddp_find_unused_parameters", "use_distributed_sampler")
        + ("standalone", "rdzv_backend", "rdzv_id", "rdzv_conf"),
        "one process drives all IPUs: devices=N; several hosts are started with poprun",
    ),
    "num_instances": "one process drives all IPUs; several are started with poprun",
    **dict.fromkeys(("bf16", "bf16_full_eval"), "IPUs have no bfloat16: precision=16-mixed"),
    **dict.fromkeys(("tf32", "benchmark", "deterministic"), "a compiled program is the same at every step"),
    **dict.fromkeys(("torch_compile", "compile", "jit_mode_eval"), "PopTorch compiles every model"),
    **dict.fromkeys(("gpus", "tpu_cores", "no_cuda", "use_cpu"), "engine=cpu or engine=ipu, and devices=N"),
    **dict.fromkeys(
        ("autocast", "autocast_enabled", "autocast_policy", "autocastEnabled", "autocastPolicy", "enable_autocast"),
        "PopTorch has no autocast since 3.1: precision=16-mixed, and modules apart in precision_rules: {'*.norm': 32}",
    ),
    "load_best_model_at_end": "a run keeps its best checkpoint: ipurun eval RUN --best, ipurun export RUN --best",
    "num_sanity_val_steps": "a run is checked before it begins, and debug=fast tries all of it",
    **dict.fromkeys(
        ("gradient_clip_algorithm", "clip_value", "clipvalue", "clip_grad_value"),
        "PopTorch clips by norm: optimizer.max_grad_norm",
    ),
    "enable_progress_bar": "--quiet hides it",
    "enable_model_summary": "ipurun plan shows the model",
    "inference_mode": "evaluation never computes gradients",
    "remove_unused_columns": "batches have what loader.collate returns",
    "group_by_length": "all batches have one shape on an IPU: pad to a fixed length",
    "pin_memory": "PopTorch copies batches to the IPU itself",
    "dataloader_pin_memory": "PopTorch copies batches to the IPU itself",
    "reload_dataloaders_every_n_epochs": "the data set may have set_epoch, which is called for each epoch",
}
_MEANINGS = {**_LIGHTNING, **_TRANSFORMERS, **_OPTIMUM, **_OPTIMIZING, **_POPTORCH, **_LAUNCHERS}


def translate(key: str, value: Any = None) -> Optional[Tuple[str, Any]]:
    """Translate a key of another tool.

    Args:
        key: As typed: ``max_epochs``, ``trainer.max_epochs``, ``nproc-per-node``, ``Training.gradientAccumulation``.
        value: The value it was set to.

    Returns:
        ipurun's key (or group, such as ``debug``) and value, None if no value means the same. None for an unknown key.
    """
    name = key.replace("-", "_").rpartition(".")[2]
    if key.startswith(("inference_opts.", "inference_options.")):
        return _for_inference(translate(name, value))
    if name in _MEANINGS:
        meaning = _MEANINGS[name]
        chosen = None if meaning.choose is None or value is None else meaning.choose(value)
        return chosen or (meaning.key, meaning.convert(value))
    setter = next((path for path in option_setters() if path.rpartition(".")[2] == name), None)
    return None if setter is None else (f"options.{setter}", value)


def explain(key: str, value: Any = None) -> str:
    """Return why a key of another tool, or this value of it, has no counterpart; empty if it has one or is unknown."""
    name = key.replace("-", "_").rpartition(".")[2]
    if name == "strategy" and re.match(r"(ddp|fsdp|deepspeed|dp|horovod|fullysharded)", str(value).lower()):
        return _PROCESSES
    is_share = isinstance(value, float) and 0 < value <= 1
    if name in _SHARES and is_share:
        return (
            f"{_SHARES[name]} is a number, not a share: {value} x the host calls of an epoch, which `ipurun plan` shows"
        )
    if name == "num_train_epochs" and isinstance(value, float) and value != int(value):
        return f"epochs are whole: max_steps=N, {value} x the weight updates of an epoch, which `ipurun plan` shows"
    return _WITHOUT.get(name, "")


def _for_inference(translated: Optional[Tuple[str, Any]]) -> Optional[Tuple[str, Any]]:
    """Return an option of training as the one of inference."""
    if translated is None:
        return None
    key, value = translated
    own = {"device_iterations": "inference.device_iterations", "replication.factor": "inference.replicas"}
    return own.get(key, f"inference.{key}" if key.startswith("options.") else key), value
