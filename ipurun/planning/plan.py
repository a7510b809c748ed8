"""The plan of a run: every number and every PopTorch call that follows from a config.

Plain frozen data. Nothing here needs torch or an engine, so a plan can be made, shown and stored anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Mapping, Optional, Tuple

from ipurun.api.calls import Call
from ipurun.inspect.facts import EndedBlock, InitialWeights, LoggedValue, UserBlock

__all__ = [
    "BatchSizes",
    "Devices",
    "EvalPass",
    "FrozenPart",
    "Instances",
    "ParameterGroup",
    "Placement",
    "Plan",
    "Serialized",
    "Steps",
]


@dataclass(frozen=True)
class Devices:
    """IPUs, and how replicas share them."""

    total: int
    per_replica: int
    replicas: int
    idle: int


@dataclass(frozen=True)
class Instances:
    """The processes of a run.

    Args:
        kind: What starts them: none, poprun, torchrun or mpirun.
        count: How many there are.
        index: Number of this one, from 0.
        uses_popdist: Whether `popdist.poptorch.Options` gives each its share of the replicas.
        hosts: The machines; empty: this one.
        command: What starts all of them; empty where they run already, or there is one.
    """

    kind: str = "none"
    count: int = 1
    index: int = 0
    uses_popdist: bool = False
    hosts: Tuple[str, ...] = ()
    command: Tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of one mode (training or inference), of all processes."""

    micro_batch_size: int
    device_iterations: int
    gradient_accumulation: int
    replicas: int
    input_group_size: int = 1

    def share_of(self, instances: Instances) -> BatchSizes:
        """Return the batch sizes of one process."""
        return self if instances.count == 1 else replace(self, replicas=max(self.replicas // instances.count, 1))

    @property
    def distinct_replicas(self) -> int:
        """Replicas that read different data."""
        return self.replicas // self.input_group_size

    @property
    def samples_per_update(self) -> int:
        """Samples of one weight update (the global batch)."""
        return self.micro_batch_size * self.gradient_accumulation * self.distinct_replicas

    @property
    def samples_per_call(self) -> int:
        """Samples of one host call (PopTorch's combined batch)."""
        return self.samples_per_update * self.device_iterations


@dataclass(frozen=True)
class Steps:
    """Length of training in weight updates and host calls; None where the data has no length."""

    total_updates: Optional[int]
    total_calls: Optional[int]
    calls_per_epoch: Optional[int]
    updates_per_epoch: Optional[int]
    epochs: Optional[float]
    dropped_samples: Optional[int]  # per epoch
    save_every_calls: Optional[int]  # from checkpoint.every_steps; the loop saves by epoch
    eval_every_calls: Optional[int]  # from eval.every_steps, likewise
    log_every_calls: Optional[int]  # from log_every_steps, likewise


@dataclass(frozen=True)
class Saving:
    """The checkpoints of a run.

    Args:
        checkpoint_bytes: Size of one, about.
        saves: How many are written, those of best values not counted; None where the data has no length.
        most_bytes: What they take at most at a time; None if all are kept and their number is unknown.
        free_bytes: What the disk of the run folder has free; None if unknown.
        copy_seconds: Estimated time for which training stops at each, to copy it from the device; None on the CPU.
    """

    checkpoint_bytes: int
    saves: Optional[int]
    most_bytes: Optional[int]
    free_bytes: Optional[int]
    copy_seconds: Optional[float]


@dataclass(frozen=True)
class EvalPass:
    """One evaluation of a split; None where the split has no length."""

    split: str
    samples: Optional[int]
    host_calls: Optional[int]
    padded_samples: Optional[int]  # copies that fill the last host call, not counted in results
    dropped_samples: Optional[int]  # left out by eval.max_samples


@dataclass(frozen=True)
class Placement:
    """A block that begins at a module; an empty module name is the model itself."""

    module: str
    ipu: int
    block_id: str
    origin: str = field(default="", compare=False)


@dataclass(frozen=True)
class Serialized:
    """A matmul or an embedding that is computed in parts, one after another.

    Args:
        module: Name of a linear layer or an embedding.
        factor: Number of parts.
        mode: Dimension of the matmul that is split: ``input_channels``, ``reducing_dim`` or ``output_channels``;
            ``rows`` for an embedding, whose table is split.
        keep_precision: Whether partial sums keep the precision of the inputs (poptorch.serializedMatMul).
    """

    module: str
    factor: int
    mode: str
    keep_precision: bool = False


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with separate optimizer values: those whose name matches one of the patterns."""

    match: Tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class FrozenPart:
    """Parameters that are not trained, or not at first.

    Args:
        names: Their names.
        elements: Number of values in them.
        until_step: Weight updates after which they are trained, a multiple of the host call's; None: never.
    """

    names: Tuple[str, ...]
    elements: int
    until_step: Optional[int]


@dataclass(frozen=True)
class Plan:
    """Everything that a run will do."""

    name: str
    engine: str
    engine_version: str
    devices: Devices
    training: BatchSizes
    inference: BatchSizes
    steps: Steps
    precision: str  # normalised: 32.32, 16.32 or 16.16
    output_mode: str  # final, all, sum or every_n
    training_options: Tuple[Call, ...]
    inference_options: Tuple[Call, ...]
    placements: Tuple[Placement, ...]
    inference_placements: Tuple[Placement, ...]
    optimizer: Call
    environment: Mapping[str, str]  # variables to set before the engine is imported
    cache_dir: Optional[str]
    profile_dir: Optional[str]
    parameters: int
    notes: Tuple[str, ...]  # decisions that the user should know: rounding, dropped samples, ...
    evaluation: Optional[EvalPass] = None  # None where the data has no split for it
    saving: Optional[Saving] = None  # None if nothing is saved
    parameter_groups: Tuple[ParameterGroup, ...] = ()
    no_decay: Tuple[str, ...] = ()  # parameters without weight decay, in whichever group
    frozen: Tuple[FrozenPart, ...] = ()
    initial_weights: Optional[InitialWeights] = None
    recompute: Tuple[str, ...] = ()  # modules whose outputs are recomputation checkpoints
    module_precision: Mapping[str, str] = field(default_factory=dict)  # module -> 16 or 32, patterns resolved
    stages: int = 1  # forward stages of training: 1 + switches between IPUs
    inference_stages: int = 1
    user_blocks: Tuple[UserBlock, ...] = ()  # begun by the model's code
    ended_blocks: Tuple[EndedBlock, ...] = ()  # ended by it, and re-opened for what ipurun adds after modules
    serialized: Tuple[Serialized, ...] = ()
    module_proportions: Mapping[str, float] = field(
        default_factory=dict
    )  # linear layer or convolution -> share of tile memory
    overlap_io: str = "none"  # or accumulation_loop, device_iteration_loop
    is_left_whole: bool = False  # no split fits: the plan shows the model on one IPU
    instances: Instances = Instances()
    environment_origins: Mapping[str, str] = field(default_factory=dict)  # variable -> its key, and where that was set
    own_optimizer: bool = False  # the optimizer and its schedule are those that a LightningModule configures
    logged: Mapping[str, Mapping[str, LoggedValue]] = field(default_factory=dict)  # kind of step -> name -> value

    @property
    def local_training(self) -> BatchSizes:
        """The batch sizes of training in one process."""
        return self.training.share_of(self.instances)

    @property
    def local_inference(self) -> BatchSizes:
        """The batch sizes of inference in one process."""
        return self.inference.share_of(self.instances)
