"""The whole config as typed, closed dataclasses: what a key is called, what it takes, what it means.

Groups that describe where and how the model runs on IPUs (pipeline, replication, memory, ...) are in
`ipurun.config.schema.device`. Nothing here imports torch, PopTorch or Hydra, so that listing keys and
completing them on the command line stay quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

from ipurun.config.schema.device import (
    CacheConfig,
    InferenceConfig,
    MemoryConfig,
    OutputConfig,
    PipelineConfig,
    ProfileConfig,
    RecomputeConfig,
    ReplicationConfig,
)
from ipurun.config.schema.machine import MachineConfig
from ipurun.config.schema.option import node, option

__all__ = [
    "CheckpointConfig",
    "CustomOpsConfig",
    "DebugConfig",
    "EvalConfig",
    "LoaderConfig",
    "LossConfig",
    "RunConfig",
    "SweepConfig",
]


@dataclass
class LossConfig:
    """The loss that is put behind a model which does not compute its own."""

    name: Optional[str] = option(
        None,
        "A PyTorch loss (CrossEntropyLoss, cross_entropy) or a dotted path; null: the model returns its own.",
    )
    args: Dict[str, Any] = option({}, "Arguments of the loss, such as ignore_index.")
    reduction: str = option(
        "mean", "Reduction handed to identity_loss around a custom loss.", choices=("mean", "sum", "none")
    )
    target: Optional[str] = option(
        None,
        "Item of a batch that is the target: an index or a key; null: the last item, or `labels`/`target`.",
    )
    output: Optional[str] = option(
        None,
        "Model output the loss reads (or, for a model with its own loss, where it is): an index or a key.",
    )


@dataclass
class LoaderConfig:
    """How batches are drawn from the data set (poptorch.DataLoader)."""

    shuffle: bool = option(True, "Shuffle the training set anew each epoch (ignored for iterable data sets).")
    workers: int = option(0, "Worker processes that load samples.", minimum=0)
    mode: str = option(
        "sync",
        "Load in the main process, in another one, or in another one that re-cuts batches.",
        choices=("sync", "async", "async_rebatched"),
    )
    buffer_size: int = option(3, "Batches kept ready in the asynchronous modes.", minimum=1)
    drop_last: bool = option(True, "Drop the samples that do not fill a last whole host call.")
    sampler: Dict[str, Any] = option({}, "A sampler: `_target_` and its arguments; the data set comes first.")
    batch_sampler: Dict[str, Any] = option({}, "A batch sampler: `_target_` and arguments; it yields micro-batches.")
    collate: Optional[str] = option(None, "Dotted path of a collate function; null: torch's own.")
    rebatched_worker_size: Optional[int] = option(
        None, "Samples a worker loads at a time in async_rebatched mode.", minimum=1
    )


@dataclass
class EvalConfig:
    """When and on what the model is evaluated."""

    every_epochs: Optional[int] = option(1, "Evaluate after every so many epochs; null: only at the end.", minimum=1)
    every_steps: Optional[int] = option(None, "Evaluate after every so many weight updates, too.", minimum=1)
    at_end: bool = option(True, "Evaluate when training ends.")
    split: Optional[str] = option(None, "Split to evaluate on (eval, test, train); null: eval, else test.")
    max_samples: Optional[int] = option(None, "Use at most so many samples of the split.", minimum=1)


@dataclass
class CheckpointConfig:
    """When weights and everything needed to go on are saved."""

    every_epochs: Optional[int] = option(1, "Save after every so many epochs; null: not by epoch.", minimum=1)
    every_steps: Optional[int] = option(None, "Save after every so many weight updates, too.", minimum=1)
    at_end: bool = option(True, "Save when training ends.")
    keep: int = option(2, "How many of the newest checkpoints stay; 0 keeps all.", minimum=0)
    best: Optional[str] = option(None, "Metric whose best checkpoint is kept as well; null: the run's `monitor`.")


@dataclass
class CustomOpsConfig:
    """Operations of your own, which the model calls with `poptorch.custom_op`."""

    libraries: List[str] = option([], "Shared libraries (.so) with the ops; loaded where an IPU or its simulator runs.")
    cpu: Dict[str, Any] = option(
        {},
        "DOMAIN/NAME -> Python function that computes the op on the CPU engine, or {forward: ..., backward: ...}.",
    )


@dataclass
class DebugConfig:
    """Checks that cost time or stop a run early."""

    stop_on_nonfinite: bool = option(True, "Stop with an error when the loss becomes NaN or infinite.")
    fp_exceptions: bool = option(False, "Stop on the device at the first floating-point exception.")
    log_level: Optional[str] = option(
        None, "PopTorch's log level.", choices=("TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF")
    )
    print_options: bool = option(False, "Write poptorch.Options, as the engine sees them, into the run's log.")


@dataclass
class SweepConfig:
    """How the points of `-m` are run."""

    on_error: str = option("continue", "What follows a failed point.", choices=("continue", "stop"))
    rank_by: Optional[str] = option(None, "Column that ranks the table; null: `monitor`, else samples_per_second.")
    timeout_seconds: Optional[float] = option(None, "End a point that takes longer; null: wait.", positive=True)


@dataclass
class RunConfig:
    """Everything that describes one run."""

    name: Optional[str] = option(None, "Name of the run and of its folder; null: the recipe's name.")
    devices: Union[int, str] = option(
        "auto", "Total number of IPUs, a power of two; auto: all there are, 1 on the CPU."
    )
    device_iterations: int = option(1, "Weight updates (training) or batches (inference) per host call.", minimum=1)
    micro_batch_size: int = option(1, "Samples that one replica sees in one forward pass.", minimum=1)
    gradient_accumulation: Optional[int] = option(
        None,
        "Micro-batches summed into one weight update; null: 1, or solved for from global_batch_size.",
        minimum=1,
    )
    global_batch_size: Optional[int] = option(
        None,
        "Samples per weight update over all replicas; given, gradient_accumulation is solved for.",
        minimum=1,
    )
    precision: str = option(
        "32.32",
        "<operations>.<weights>; 16 and 32 are short for 16.16 and 32.32.",
        choices=("32.32", "16.32", "16.16", "16", "32"),
    )
    precision_rules: Dict[str, str] = option(
        {},
        "Module name or pattern (docs/reference/patterns.md) -> 16 or 32: that module computes in it, with casts "
        "at its edges.",
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
        "auto", "ipu: hardware; ipu_model: PopTorch's simulator.", choices=("auto", "ipu", "ipu_model", "cpu")
    )
    threads: Optional[int] = option(
        None, "CPU threads of the CPU engine; null: torch's choice. One is quickest for small models.", minimum=1
    )
    seed: int = option(0, "Seed of weights, shuffling and on-device random numbers.", minimum=0, maximum=2**63 - 1)
    epochs: Optional[int] = option(None, "Passes over the training set; null: 1 unless max_steps is set.", minimum=1)
    max_steps: Optional[int] = option(
        None, "Stop after so many weight updates, rounded up to whole host calls.", minimum=1
    )
    monitor: Optional[str] = option(
        None, "Metric that tells the best checkpoint and ranks a sweep; null: the first metric."
    )
    log_every_steps: int = option(1, "Write training metrics every so many weight updates.", minimum=1)
    resume: Optional[str] = option(None, "auto (newest unfinished run of this name), or a run folder to go on with.")
    runs_dir: str = option("runs", "Folder of all runs.")
    sample: List[Any] = option([], "Shape, dtype and range of each item of a sample, for data=synthetic and planning.")

    model: Dict[str, Any] = option({}, "The model: `_target_` (any importable nn.Module) and its arguments.")
    loss: LossConfig = node(LossConfig, "The loss.")
    data: Dict[str, Any] = option(
        {},
        "The data: `_target_` (data set, or function giving splits), arguments; `_eval_`: changes for eval.",
    )
    loader: LoaderConfig = node(LoaderConfig, "The data loader.")
    optimizer: Dict[str, Any] = option(
        {},
        "The optimizer: `_target_` (poptorch.optim, torch.optim), arguments; `variable`, `constant`, "
        "`groups` by parameter names and patterns (docs/reference/patterns.md).",
    )
    schedule: Dict[str, Any] = option({}, "The learning-rate schedule: `_target_` and its arguments; empty: constant.")
    metrics: Dict[str, Any] = option({}, "Metric name -> `_target_` and arguments, with `on: [eval]` or [train, eval].")
    eval: EvalConfig = node(EvalConfig, "Evaluation.")
    checkpoint: CheckpointConfig = node(CheckpointConfig, "Checkpoints.")

    pipeline: PipelineConfig = node(PipelineConfig, "Placement of the model on the IPUs of a replica.")
    replication: ReplicationConfig = node(ReplicationConfig, "Replicas and how their gradients meet.")
    recompute: RecomputeConfig = node(RecomputeConfig, "Recomputation of activations.")
    memory: MemoryConfig = node(MemoryConfig, "Where tensors live.")
    output: OutputConfig = node(OutputConfig, "What a training call returns to the host.")
    inference: InferenceConfig = node(InferenceConfig, "What differs for evaluation and prediction.")
    cache: CacheConfig = node(CacheConfig, "Executable cache.")
    profile: ProfileConfig = node(ProfileConfig, "Profiling for PopVision.")
    machine: MachineConfig = node(MachineConfig, "The kind of IPU that `plan` estimates for: machine=gc200 or bow.")
    options: Dict[str, Any] = option(
        {}, "Any other poptorch.Options setter by its own name, such as Training.gradientAccumulation."
    )
    poptorch_conf: Optional[str] = option(
        None, "A poptorch.conf file (Options.loadFromFile) to include; own keys win over it."
    )

    custom_ops: CustomOpsConfig = node(CustomOpsConfig, "Operations of your own.")

    logger: Dict[str, Any] = option({}, "Logger name -> `_target_` and arguments; metrics.jsonl is always written.")
    debug: DebugConfig = node(DebugConfig, "Debugging aids.")
    sweep: SweepConfig = node(SweepConfig, "Sweeps.")
