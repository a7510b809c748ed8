"""Config keys for where and how the model runs on IPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from ipurun.config.schema.option import node, option

__all__ = [
    "CacheConfig",
    "InferenceConfig",
    "MemoryConfig",
    "OutputConfig",
    "PipelineConfig",
    "PoplarConfig",
    "ProfileConfig",
    "RecomputeConfig",
    "ReplicationConfig",
    "TensorLocationConfig",
]


@dataclass
class PipelineConfig:
    """Split of the model over the IPUs of one replica."""

    split: Any = option(
        [],
        "Module names or patterns (docs/reference/patterns.md) at which the next IPU begins. Empty: the model is not "
        "split. auto: find a split that fits.",
    )
    layers: Optional[Any] = option(
        None,
        "Name of the repeated stack of layers that layers_per_ipu counts, or a list; null: found automatically.",
    )
    layers_per_ipu: List[int] = option(
        [],
        "Layers of the stack on IPU 0, 1, ...; -1: an equal share of the rest. [-1] with pipeline.ipus: on all IPUs.",
    )
    embedding: Optional[Any] = option(
        None, "Modules to place on embedding_ipu; null: everything that runs before the first layer."
    )
    embedding_ipu: Optional[int] = option(None, "IPU of the embedding; null: IPU 0.", minimum=0, maximum=65535)
    head: Optional[Any] = option(None, "Modules to place on head_ipu; null: everything after the last layer.")
    head_ipu: Optional[int] = option(
        None,
        "IPU of the head; null: that of the last layer, or of the embedding if they share weights.",
        minimum=0,
        maximum=65535,
    )
    blocks: Any = option(
        {},
        "Module name or pattern (docs/reference/patterns.md) -> IPU, or {ipu: 1, id: B}; a block begins at the module "
        "and ends where the next one begins.",
    )
    stages: List[Any] = option(
        [], "Pipelined and sharded: the blocks of each stage, as a name, a list of names, or {blocks: [A, B], ipu: 0}."
    )
    phases: List[Any] = option(
        [], "Phased: the blocks of each phase, written like a stage, or as a list of stages that run in parallel."
    )
    strategy: str = option(
        "pipelined",
        "How the IPUs of a replica work together.",
        choices=("pipelined", "sharded", "serial_phased", "parallel_phased"),
    )
    auto_stage: str = option(
        "auto",
        "How blocks become stages; auto: as the split needs.",
        choices=("auto", "same_as_ipu", "auto_increment"),
    )
    ipus: Optional[int] = option(
        None,
        "IPUs per replica, for layers_per_ipu=[-1] or a model that defines blocks itself; null: as placed.",
        minimum=1,
        maximum=65536,
    )
    auto_round: bool = option(False, "Round the number of IPUs up to a power of two (the extra IPUs stay idle).")
    liveness: Optional[str] = option(
        None,
        "Phased execution: how long tensors stay on chip.",
        choices=("AlwaysLive", "OffChipAfterFwd", "OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"),
    )
    separate_backward_phase: Optional[bool] = option(
        None, "Phased execution: run the backward pass in separate phases."
    )


@dataclass
class ReplicationConfig:
    """Data-parallel replicas."""

    factor: Optional[int] = option(None, "Number of replicas; null: devices / IPUs per replica.", minimum=1)
    reduction: str = option(
        "mean", "How gradients of micro-batches and replicas are combined.", choices=("mean", "sum")
    )
    mean_strategy: str = option("post", "When gradients are averaged.", choices=("post", "running"))
    tensor_sharding: bool = option(False, "Shard optimizer state over the replicas (replicated tensor sharding).")
    broadcast_buffers: Optional[bool] = option(
        None,
        "Broadcast buffers to all replicas; null: false if forward writes to buffers in place (batch norm does not).",
    )
    input_group_size: int = option(1, "Replicas that share the same input.", minimum=1)
    input_group_type: str = option(
        "Consecutive", "How replicas form input groups.", choices=("Consecutive", "Orthogonal")
    )


@dataclass
class RecomputeConfig:
    """Activations to recompute instead of keeping them."""

    checkpoints: List[str] = option(
        [],
        "Modules (names or patterns, docs/reference/patterns.md) whose outputs are kept; everything between them is "
        "recomputed.",
    )
    every: Optional[str] = option(
        None, "block: also keep the outputs of all layers in the model's repeated stacks.", choices=("block",)
    )
    mode: Optional[str] = option(
        None,
        "PopART's automatic recomputation; null: PopTorch's default (pipeline if the model is pipelined).",
        choices=("none", "standard", "norm_only", "pipeline", "recompute_all"),
    )


@dataclass
class TensorLocationConfig:
    """Memory for one kind of tensor (poptorch.TensorLocationSettings); null leaves PopTorch's default."""

    on_chip: Optional[bool] = option(None, "true: in the IPU's memory; false: in streaming memory.")
    sharded: Optional[bool] = option(None, "Replicated tensor sharding: each replica keeps a part.")
    io_tiles_to_load: Optional[bool] = option(None, "Load through the I/O tiles.")
    io_tiles_to_store: Optional[bool] = option(None, "Store through the I/O tiles.")
    min_elements_off_chip: Optional[int] = option(None, "Smaller tensors stay on chip.", minimum=0)
    min_elements_sharded: Optional[int] = option(None, "Smaller tensors are not sharded.", minimum=0)


@dataclass
class MemoryConfig:
    """Memory of the IPUs."""

    optimizer_state: TensorLocationConfig = node(TensorLocationConfig, "Optimizer state.")
    weights: TensorLocationConfig = node(TensorLocationConfig, "Weights.")
    activations: TensorLocationConfig = node(TensorLocationConfig, "Activations.")
    accumulators: TensorLocationConfig = node(TensorLocationConfig, "Gradient accumulators.")
    available_proportion: Optional[Any] = option(
        None, "Share of tile memory for matmuls and convolutions: one number, a list by IPU, or {IPU0: 0.2}."
    )
    module_proportion: Dict[str, Any] = option(
        {},
        "Module name or pattern (docs/reference/patterns.md) -> share of tile memory for its matmuls and convolutions "
        "(set_available_memory).",
    )
    serialize: Dict[str, Any] = option(
        {},
        "Linear layer or embedding, by name or pattern (docs/reference/patterns.md) -> number of parts to compute it "
        "in, the parts on each IPU as in [3, 1], or {factor: 4, mode: output_channels}; modes: input_channels, "
        "reducing_dim, output_channels. input_embeddings and output_embeddings are the tables of a model of "
        "transformers.",
    )
    overlap_io: str = option(
        "none",
        "Overlap host I/O with computation; not for pipelined models.",
        choices=("none", "accumulation_loop", "device_iteration_loop"),
    )
    io_tiles: Optional[int] = option(None, "Tiles reserved for I/O: an even number from 32 to 192.")
    prefetch_depth: Optional[int] = option(
        None, "Batches that the device prefetches (defaultPrefetchBufferingDepth).", minimum=1
    )


@dataclass
class OutputConfig:
    """Outputs that a training call returns."""

    mode: str = option(
        "auto",
        "Which outputs are returned; auto: all if training metrics need outputs, else sum (of the loss).",
        choices=("auto", "final", "all", "sum", "every_n"),
    )
    every: int = option(1, "Interval of every_n, in device iterations.", minimum=1)


@dataclass
class InferenceConfig:
    """Evaluation and prediction, where they differ from training."""

    device_iterations: Optional[int] = option(None, "Batches per host call; null: as in training.", minimum=1)
    micro_batch_size: Optional[int] = option(None, "Samples per forward pass; null: as in training.", minimum=1)
    replicas: Optional[int] = option(None, "Replicas; null: as in training.", minimum=1)
    split: Optional[List[str]] = option(None, "Split over IPUs; null: as in training.")
    layers_per_ipu: Optional[List[int]] = option(None, "Layers of the stack on each IPU; null: as in training.")
    options: Dict[str, Any] = option(
        {}, "poptorch.Options setters for inference only; they take priority over `options`."
    )


@dataclass
class CacheConfig:
    """Reuse of compiled executables."""

    enabled: bool = option(True, "Keep compiled executables (compilation takes minutes).")
    dir: Optional[str] = option(
        None, "Folder; null: executables/NAME below IPURUN_CACHE_DIR, else below ~/.cache/ipurun."
    )
    max_size: Optional[str] = option(
        "20GB", "Largest total size, such as 500MB; the least recently used executables are removed. null: no limit."
    )
    min_seconds: Optional[float] = option(
        None, "CPU engine: store what takes at least this long to compile; null: 2 seconds, about what loading takes."
    )


_LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF")


@dataclass
class PoplarConfig:
    """Settings that Graphcore's libraries read from environment variables (docs/how-to/environment.md)."""

    engine_options: Dict[str, str] = option(
        {}, "Poplar engine options; entries of POPLAR_ENGINE_OPTIONS win, as Poplar says."
    )
    target_options: Dict[str, str] = option(
        {}, "Poplar target options, set as POPLAR_TARGET_OPTIONS; entries that it has already win, as Poplar says."
    )
    log_level: Optional[str] = option(None, "Poplar's log level (POPLAR_LOG_LEVEL).", choices=_LEVELS)
    popart_log_level: Optional[str] = option(None, "PopART's log level (POPART_LOG_LEVEL).", choices=_LEVELS)
    log_dest: Optional[str] = option(
        None,
        "Where PopTorch, PopART and Poplar log: stdout, stderr or a file (POPTORCH_LOG_DEST, POPART_LOG_DEST, "
        "POPLAR_LOG_DEST).",
    )
    ipu_model_version: Optional[str] = option(
        None,
        "The IPU that engine=ipu_model simulates (POPTORCH_IPU_MODEL_VERSION).",
        choices=("ipu1", "ipu2", "ipu21"),
    )
    wait_for_ipu_minutes: Optional[float] = option(
        None, "How long to wait for IPUs that are in use, with a countdown; null: fail at once.", positive=True
    )
    monitor_seconds: Optional[float] = option(
        10.0,
        "On IPUs, the interval at which power, temperature and memory are logged, if gc-monitor is on PATH; null: off.",
        positive=True,
    )


@dataclass
class DistributedConfig:
    """Several processes (PopRun's instances) that train one model together."""

    kind: str = option(
        "none",
        "none: one process; poprun: several on IPUs; torchrun: several on CPUs.",
        choices=("none", "poprun", "torchrun"),
    )
    instances: Optional[int] = option(
        None, "Processes in total, each with an equal share of the replicas; null: as many as were started.", minimum=1
    )
    hosts: List[str] = option(
        [], "Machines, with equal shares of the instances; []: this one. For torchrun, start the command on each."
    )
    rendezvous: Optional[str] = option(
        None, "HOST:PORT where the instances find each other; null: a free port of the first host."
    )
    deterministic: bool = option(
        False,
        "On the CPU engine, add gradients in the order of micro-batches and replicas, one by one: the same weights bit "
        "for bit with any number of instances, also one.",
    )
    max_restarts: int = option(
        3, "Restarts from the last checkpoint when an instance dies, in the whole run; 0: stop.", minimum=0
    )
    partition: Optional[str] = option(None, "V-IPU partition of poprun; null: poprun's choice.")
    allocation: Optional[str] = option(None, "V-IPU allocation in which poprun makes the partition.")
    ilds: Optional[int] = option(
        None,
        "IPU-Link domains of poprun, each with an equal share of the instances; null: the V-IPU server's.",
        minimum=1,
    )
    server: Optional[str] = option(None, "V-IPU server of poprun: HOST or HOST:PORT; null: poprun's.")
    mpi_args: List[str] = option(
        [], "Further arguments of poprun's mpirun, such as [--mca, btl_tcp_if_include, eth0] (--mpi-global-args)."
    )
    environment: List[str] = option(
        [], "Names of environment variables that poprun passes to the instances, besides those it always does."
    )


@dataclass
class ProfileConfig:
    """Profiles to record (docs/how-to/profile.md)."""

    kind: str = option(
        "none",
        "graph: for PopVision's Graph Analyser; system: for its System Analyser (both IPUs only); trace: for Perfetto "
        "and chrome://tracing; torch: torch.profiler for TensorBoard.",
        choices=("none", "graph", "system", "trace", "torch"),
    )
    start_step: int = option(
        2, "trace, torch: the first weight update to record; the first one of a run also warms up.", minimum=1
    )
    steps: int = option(3, "trace, torch: weight updates to record, rounded up to whole host calls.", minimum=1)
    dir: Optional[str] = option(
        None,
        "Folder of the report; null: `profile` in the run folder (graph, system: a fixed folder in the cache, moved "
        "there at the end).",
    )
    engine_options: Dict[str, str] = option({}, "More Poplar engine options, merged with POPLAR_ENGINE_OPTIONS.")
