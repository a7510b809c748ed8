"""The config of a run and the groups of keys that do not concern the device.

Nothing here imports torch, PopTorch or Hydra, so that listing and completing keys stays fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

from ipurun.config.schema.device import (
    CacheConfig,
    DistributedConfig,
    InferenceConfig,
    MemoryConfig,
    OutputConfig,
    PipelineConfig,
    PoplarConfig,
    ProfileConfig,
    RecomputeConfig,
    ReplicationConfig,
)
from ipurun.config.schema.machine import MachineConfig
from ipurun.config.schema.option import node, option

__all__ = [
    "AveragingConfig",
    "CheckpointConfig",
    "CustomOpsConfig",
    "DebugConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "InitConfig",
    "LimitConfig",
    "LoaderConfig",
    "LossConfig",
    "RecoveryConfig",
    "RollbackConfig",
    "RunConfig",
    "SecurityConfig",
    "SweepConfig",
    "canonical_precision",
]


# Other words for a precision: Lightning's, and short ones.
_PRECISIONS = {
    "16-mixed": "16.32",
    "16-true": "16.16",
    "32-true": "32.32",
    "half": "16.16",
    "16": "16.32",
    "32": "32.32",
}


def canonical_precision(word: str) -> str:
    """Return a precision as <operations>.<weights>."""
    return _PRECISIONS.get(word, word)


@dataclass
class LossConfig:
    """The loss, for a model that does not compute it."""

    name: Optional[str] = option(
        None,
        "A PyTorch loss (CrossEntropyLoss, cross_entropy) or a dotted path; null: the model returns the loss.",
    )
    args: Dict[str, Any] = option({}, "Arguments of the loss, such as ignore_index.")
    reduction: str = option(
        "mean", "Reduction passed to identity_loss around a custom loss.", choices=("mean", "sum", "none")
    )
    target: Optional[str] = option(
        None,
        "Index or key of the target in a batch; null: the last item, or `labels`/`target`.",
    )
    output: Optional[str] = option(
        None,
        "Index or key of the model output for the loss (of the loss itself if the model returns it).",
    )


@dataclass
class InitConfig:
    """Selection of the weights that `init_from` loads."""

    strict: bool = option(
        True, "Refuse weights that are missing, left over or of another shape; false: load what fits and list the rest."
    )
    include: List[str] = option(
        [], "Names and patterns (docs/reference/patterns.md) of the weights of the model to load; []: all."
    )
    exclude: List[str] = option([], "Names and patterns of weights not to load, such as a new head.")
    rename: Dict[str, Any] = option(
        {}, "Name or pattern of a module or weight in the file -> its name in the model; '' removes it."
    )
    best: bool = option(False, "Take the best checkpoint of a run instead of the newest.")


@dataclass
class LoaderConfig:
    """Settings of the data loader (poptorch.DataLoader)."""

    shuffle: bool = option(True, "Shuffle the training set each epoch; iterable data sets: whether epochs differ.")
    workers: int = option(0, "Worker processes that load samples.", minimum=0)
    mode: str = option(
        "sync",
        "sync: load in the main process; async: in another process; async_rebatched: there, and rebatch.",
        choices=("sync", "async", "async_rebatched"),
    )
    buffer_size: int = option(3, "Batches kept ready in the asynchronous modes.", minimum=1)
    timeout_seconds: Optional[float] = option(
        None,
        "Longest wait for a batch from worker processes or an asynchronous mode; null: no limit.",
        positive=True,
    )
    drop_last: bool = option(True, "Drop the last samples of an epoch that do not fill a host call.")
    sampler: Dict[str, Any] = option({}, "A sampler: `_target_` and arguments; the first argument is the data set.")
    batch_sampler: Dict[str, Any] = option({}, "A batch sampler: `_target_` and arguments; it yields micro-batches.")
    collate: Optional[str] = option(
        None, "Dotted path of a collate function, or of a class of such; null: torch's default."
    )
    collate_args: Dict[str, Any] = option({}, "Arguments of the collate function, such as length for padding.")
    on_error: str = option(
        "raise",
        "When a sample cannot be read: raise: stop; skip: train on the next one, evaluate without it (not generators).",
        choices=("raise", "skip"),
    )
    max_errors: int = option(
        100, "Stop when more samples than this cannot be read, of all splits, with on_error=skip.", minimum=1
    )
    rebatched_worker_size: Optional[int] = option(
        None, "Samples that a worker loads at a time in async_rebatched mode.", minimum=1
    )


@dataclass
class EvalConfig:
    """Schedule and split of evaluations."""

    every_epochs: Optional[int] = option(1, "Evaluate every N epochs; null: only at the end.", minimum=1)
    every_steps: Optional[int] = option(None, "Also evaluate every N weight updates.", minimum=1)
    every_minutes: Optional[float] = option(None, "Also evaluate when N minutes have passed.", positive=True)
    at_end: bool = option(True, "Evaluate when training ends.")
    split: Optional[str] = option(None, "Split to evaluate on (eval, test, train); null: eval, else test.")
    max_samples: Optional[int] = option(None, "Maximum number of samples to evaluate on.", minimum=1)


@dataclass
class CheckpointConfig:
    """Schedule of checkpoints, and how many are kept."""

    every_epochs: Optional[int] = option(1, "Save every N epochs; null: not by epoch.", minimum=1)
    every_steps: Optional[int] = option(None, "Also save every N weight updates.", minimum=1)
    every_minutes: Optional[float] = option(None, "Also save when N minutes have passed.", positive=True)
    at_end: bool = option(True, "Save when training ends.")
    keep: int = option(2, "Number of newest checkpoints to keep; 0: all, or all that keep_hours allows.", minimum=0)
    keep_hours: Optional[float] = option(
        None, "Also keep checkpoints that are not older than N hours; null: by number only.", positive=True
    )
    best: Optional[str] = option(None, "Metric whose best checkpoint is kept as well; null: the run's `monitor`.")


@dataclass
class EarlyStoppingConfig:
    """Conditions that end a run early; off unless patience or threshold is set."""

    metric: Optional[str] = option(None, "Metric of the evaluation; null: the run's `monitor`.")
    mode: Optional[str] = option(
        None, "Whether lower or higher values are better; null: as for `monitor`.", choices=("min", "max")
    )
    patience: Optional[int] = option(None, "Stop after N evaluations in a row without an improvement.", minimum=1)
    min_change: float = option(0.0, "A smaller change, or one of exactly this size, is not an improvement.", minimum=0)
    threshold: Optional[float] = option(None, "Stop when the metric reaches this value.")


@dataclass
class AveragingConfig:
    """An average of the weights over training, on the host, evaluated and saved beside the weights themselves."""

    kind: str = option(
        "none", "ema: exponential moving average; tail: mean over the last part.", choices=("none", "ema", "tail")
    )
    decay: float = option(
        0.999,
        "Decay of ema for one weight update; a host call of D updates decays by decay ** D.",
        positive=True,
        maximum=1,
    )
    start_step: Optional[int] = option(
        None, "Average after this weight update; null: ema from the first, tail after three quarters.", minimum=0
    )
    every_calls: int = option(
        1, "Read the weights every N host calls, each time with a copy from the device.", minimum=1
    )
    evaluate: str = option(
        "both",
        "What is evaluated: the weights, the average, or both (ema_accuracy); `eval` and `predict` take the weights "
        "unless it is average.",
        choices=("raw", "average", "both"),
    )

    @property
    def prefix(self) -> str:
        """Begins the names of the average's metrics; empty without its own average."""
        return f"{self.kind}_" if self.kind != "none" and self.evaluate == "both" else ""


@dataclass
class LimitConfig:
    """Limits for a quick look; debug=fast and debug=overfit set them."""

    calls: Optional[int] = option(
        None, "Host calls of the whole training; epochs and max_steps then do not count.", minimum=1
    )
    train_calls: Optional[int] = option(None, "Host calls of a training epoch, at most.", minimum=1)
    eval_calls: Optional[int] = option(None, "Host calls of an evaluation or prediction, at most.", minimum=1)


@dataclass
class RecoveryConfig:
    """Response to recoverable failures of the IPU system (poptorch.RecoverableError)."""

    max_attempts: int = option(
        3,
        "Attempts to attach again and return to the last checkpoint, reset by each new checkpoint; 0: stop.",
        minimum=0,
    )
    backoff_seconds: float = option(
        10.0, "Wait before the first attempt; each further one waits twice as long.", minimum=0
    )
    reset_command: Optional[str] = option(
        None, "Command for LINK_RESET, PARTITION_RESET and FULL_RESET, given in IPURUN_RECOVERY_ACTION; null: stop."
    )


@dataclass
class RollbackConfig:
    """Changes that `on_nonfinite=rollback` makes after returning to the last checkpoint."""

    lower: str = option("lr", "What to lower: the learning rate, or the loss scale.", choices=("lr", "loss_scaling"))
    factor: float = option(0.5, "Factor on it, each time.", positive=True, maximum=1)
    max_times: int = option(3, "Stop when the loss becomes NaN or infinite more often than this.", minimum=1)


@dataclass
class CustomOpsConfig:
    """Custom operations, which the model calls with `poptorch.custom_op`."""

    libraries: List[str] = option([], "Shared libraries (.so) with the ops; loaded on IPUs and their simulator.")
    cpu: Dict[str, Any] = option(
        {},
        "DOMAIN/NAME -> Python function for the op on the CPU engine, or {forward: ..., backward: ...}.",
    )


@dataclass
class DebugConfig:
    """Checks that cost time or stop a run early."""

    stop_on_nonfinite: Optional[bool] = option(
        None, "Old name of on_nonfinite, for one release: true is stop, false is continue."
    )
    fp_exceptions: bool = option(False, "Stop on the device at the first floating-point exception.")
    log_level: Optional[str] = option(
        None,
        "PopTorch's log level (POPTORCH_LOG_LEVEL).",
        choices=("TRACE", "TRACE_ALL", "DEBUG", "DEBUG_IR", "INFO", "WARN", "ERR", "OFF"),
    )
    print_options: bool = option(False, "Write poptorch.Options, as the engine sees them, into the run's log.")


@dataclass
class SecurityConfig:
    """Limits on what a config may import (docs/explanation/security.md)."""

    allow_targets: Optional[List[str]] = option(
        None,
        "Prefixes of the dotted names that `_target_`, loss.name, loader.collate and custom_ops may import, such as "
        "[ipurun, torch.nn, mymodel]; null: anything.",
    )


@dataclass
class SweepConfig:
    """Settings of sweeps (`-m`)."""

    jobs: Union[int, str] = option(
        1,
        "Points that run at the same time; auto: as many as there are IPUs for, on the CPU engine one for each core. "
        "Side by side they disturb each other's speed.",
    )
    on_error: str = option(
        "continue", "Whether the sweep continues after a failed point.", choices=("continue", "stop")
    )
    rank_by: Optional[str] = option(None, "Column to rank the table by; null: `monitor`, else samples_per_second.")
    timeout_seconds: Optional[float] = option(None, "Time limit of a point; null: none.", positive=True)


@dataclass
class RunConfig:
    """The complete config of a run."""

    name: Optional[str] = option(None, "Name of the run and of its folder; null: the recipe's name.")
    devices: Union[int, str] = option(
        "auto", "Total number of IPUs, a power of two; auto: all available ones, 1 on the CPU."
    )
    device_iterations: int = option(1, "Weight updates (training) or batches (inference) per host call.", minimum=1)
    micro_batch_size: int = option(1, "Samples per replica and forward pass.", minimum=1)
    gradient_accumulation: Optional[int] = option(
        None,
        "Micro-batches per weight update; null: 1, or computed from global_batch_size.",
        minimum=1,
    )
    global_batch_size: Optional[int] = option(
        None,
        "Samples per weight update over all replicas; if set, gradient_accumulation is computed from it.",
        minimum=1,
    )
    precision: str = option(
        "32.32",
        "<operations>.<weights>; Lightning's names work as well: 16-mixed and 16 mean 16.32, 16-true and half 16.16, "
        "32-true and 32 mean 32.32.",
        choices=("32.32", "16.32", "16.16", *_PRECISIONS),
    )
    precision_rules: Dict[str, str] = option(
        {},
        "Module name or pattern (docs/reference/patterns.md) -> 16 or 32: precision of the module, with casts at its "
        "inputs and outputs.",
    )
    partials: Optional[str] = option(
        None,
        "Type of partial sums in matmuls and convolutions; null: PopTorch's default.",
        choices=("float", "half"),
    )
    loss_scaling: Optional[Union[int, float, str]] = option(
        None, "Loss scale against float16 underflow: a number, or auto; null: 1."
    )
    stochastic_rounding: Optional[bool] = option(
        None, "Round float16 results stochastically; null: PopTorch's default."
    )
    engine: str = option(
        "auto",
        "ipu: hardware; ipu_model: PopTorch's simulator; cpu: the emulator; auto: ipu if available, else cpu.",
        choices=("auto", "ipu", "ipu_model", "cpu"),
    )
    threads: Optional[int] = option(
        None, "CPU threads of the CPU engine; null: torch's choice. One is fastest for small models.", minimum=1
    )
    seed: int = option(0, "Seed of weights, shuffling and on-device random numbers.", minimum=0, maximum=2**63 - 1)
    epochs: Optional[int] = option(None, "Passes over the training set; null: 1 unless max_steps is set.", minimum=1)
    max_steps: Optional[int] = option(
        None, "Stop after this many weight updates, rounded up to whole host calls.", minimum=1
    )
    max_minutes: Optional[float] = option(
        None, "Save and stop after this many minutes since the command started, between host calls.", positive=True
    )
    interrupt_exit_code: int = option(
        130, "Exit code after an interrupt (Ctrl-C, SIGTERM, SIGHUP) or `max_minutes`.", minimum=0, maximum=255
    )
    monitor: Optional[str] = option(
        None, "Metric that selects the best checkpoint and ranks a sweep; null: the first metric."
    )
    log_every_steps: Optional[int] = option(
        None,
        "Log training metrics every N weight updates; null: every host call, unless another log_every is set.",
        minimum=1,
    )
    log_every_epochs: Optional[int] = option(None, "Log training metrics every N epochs.", minimum=1)
    log_every_minutes: Optional[float] = option(None, "Log training metrics when N minutes have passed.", positive=True)
    precompiled: Optional[str] = option(
        None, "File of `ipurun compile --export`, used instead of compiling. Such a file is code: trust its source."
    )
    resume: Optional[str] = option(None, "Run folder to resume; auto: the newest unfinished run of this name.")
    init_from: Optional[str] = option(
        None,
        "Weights to start from: a run folder, a checkpoint, a .safetensors or a torch file; not used by a resumed run.",
    )
    runs_dir: str = option("runs", "Folder of all runs.")
    sample: List[Any] = option([], "Shape, dtype and range of each item of a sample, for data=synthetic and planning.")

    model: Dict[str, Any] = option({}, "The model: `_target_` (any importable nn.Module) and arguments.")
    init: InitConfig = node(InitConfig, "What of `init_from` is loaded.")
    freeze: List[str] = option(
        [], "Modules and parameters that are not trained, by name or pattern (docs/reference/patterns.md)."
    )
    unfreeze: Dict[str, Any] = option(
        {}, "Name or pattern of what `freeze` freezes -> the step after which it is trained, too; recompiles."
    )
    loss: LossConfig = node(LossConfig, "The loss.")
    data: Dict[str, Any] = option(
        {},
        "The data: `_target_` (data set, or function that returns splits), arguments; `_eval_`: changes for eval.",
    )
    loader: LoaderConfig = node(LoaderConfig, "The data loader.")
    optimizer: Dict[str, Any] = option(
        {},
        "The optimizer: `_target_` (poptorch.optim, torch.optim), arguments; `variable`, `constant`, "
        "`groups` by parameter names and patterns (docs/reference/patterns.md).",
    )
    schedule: Dict[str, Any] = option({}, "The learning-rate schedule: `_target_` and arguments; empty: constant.")
    metrics: Dict[str, Any] = option({}, "Metric name -> `_target_` and arguments, with `on: [eval]` or [train, eval].")
    eval: EvalConfig = node(EvalConfig, "Evaluation.")
    checkpoint: CheckpointConfig = node(CheckpointConfig, "Checkpoints.")
    early_stopping: EarlyStoppingConfig = node(EarlyStoppingConfig, "An end before the planned one.")
    averaging: AveragingConfig = node(AveragingConfig, "An average of the weights.")
    limit: LimitConfig = node(LimitConfig, "Limits for a quick look.")
    on_nonfinite: str = option(
        "stop",
        "When the loss becomes NaN or infinite: stop, continue, or return to the last checkpoint (see rollback).",
        choices=("stop", "rollback", "continue"),
    )
    rollback: RollbackConfig = node(RollbackConfig, "Changes after a rollback.")
    recovery: RecoveryConfig = node(RecoveryConfig, "Recovery from failures of the IPU system.")

    pipeline: PipelineConfig = node(PipelineConfig, "Placement of the model on the IPUs of a replica.")
    replication: ReplicationConfig = node(ReplicationConfig, "Replicas and how their gradients are combined.")
    recompute: RecomputeConfig = node(RecomputeConfig, "Recomputation of activations.")
    memory: MemoryConfig = node(MemoryConfig, "Where tensors are kept.")
    output: OutputConfig = node(OutputConfig, "Outputs that a training call returns to the host.")
    inference: InferenceConfig = node(InferenceConfig, "Differences for evaluation and prediction.")
    cache: CacheConfig = node(CacheConfig, "Executable cache.")
    profile: ProfileConfig = node(ProfileConfig, "Profiling.")
    distributed: DistributedConfig = node(DistributedConfig, "Several processes for one run.")
    poplar: PoplarConfig = node(PoplarConfig, "Variables of Graphcore's libraries, and the IPUs as a machine.")
    machine: MachineConfig = node(MachineConfig, "The kind of IPU that `plan` estimates for: machine=gc200 or bow.")
    options: Dict[str, Any] = option(
        {}, "Any other poptorch.Options setter by its PopTorch name, such as Training.gradientAccumulation."
    )
    poptorch_conf: Optional[str] = option(
        None, "A poptorch.conf file (Options.loadFromFile) to include; keys of the config take priority over it."
    )

    custom_ops: CustomOpsConfig = node(CustomOpsConfig, "Custom operations.")

    logger: Dict[str, Any] = option({}, "Logger name -> `_target_` and arguments; metrics.jsonl is always written.")
    callbacks: Dict[str, Any] = option(
        {}, "Name -> `_target_` and arguments of an ipurun.Callback, which receives every event of the run."
    )
    on_callback_error: str = option(
        "stop", "When a callback raises an error: stop the run, or continue without it.", choices=("stop", "continue")
    )
    debug: DebugConfig = node(DebugConfig, "Debugging aids.")
    security: SecurityConfig = node(SecurityConfig, "What the config may import.")
    sweep: SweepConfig = node(SweepConfig, "Sweeps.")

    @property
    def nonfinite_action(self) -> str:
        """`on_nonfinite`, or what its old name asks for."""
        if self.debug.stop_on_nonfinite is False and self.on_nonfinite == "stop":
            return "continue"
        return self.on_nonfinite
