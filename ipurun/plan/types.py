"""The plan of a run: every number and every PopTorch call that follows from a config.

Plain frozen data. Nothing here needs torch or an engine, so a plan can be made, shown and stored anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Tuple

__all__ = [
    "Batch",
    "Call",
    "Devices",
    "EndedBlock",
    "EvalPass",
    "Facts",
    "ModuleCall",
    "OwnBlock",
    "ParameterGroup",
    "Placement",
    "Plan",
    "Serialized",
    "Steps",
    "Symbol",
]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in a forward pass; `operations` is how many were done before it."""

    module: str
    operations: int


@dataclass(frozen=True)
class OwnBlock:
    """A block that the model's own code begins.

    Args:
        module: The module that begins it by ``poptorch.BeginBlock``; None where it is ``poptorch.Block`` in `forward`.
        ipu: Its IPU; None where the code leaves it to the strategy.
        block_id: Its name; None where PopTorch gives one.
        operations: How many operations were done before it; None where the model was not traced.
    """

    module: Optional[str]
    ipu: Optional[int] = None
    block_id: Optional[str] = None
    operations: Optional[int] = None


@dataclass(frozen=True)
class EndedBlock:
    """A block of the model's own code that ends with a module, so that none is active behind it.

    Args:
        module: The module; "" is the model itself.
        block_id: Name of the block.
        ipu: The IPU that the code asks for; None where it leaves it to the strategy.
    """

    module: str
    block_id: str
    ipu: Optional[int] = None


@dataclass(frozen=True)
class Facts:
    """What a plan needs to know beyond the config: read off the engine, the data and the model.

    Args:
        engine: ``ipu``, ``ipu_model`` or ``cpu``.
        engine_version: For display: ``PopTorch 3.4.0`` or ``emulator of PopTorch 3.4.0``.
        available_ipus: IPUs that can be attached; None where any number is emulated.
        train_samples: Length of the training set; None for a stream without a length.
        split_samples: Split name -> length; None for a stream without a length.
        eval_split: Name of the split to evaluate on; None where there is none.
        module_names: Dotted names of all modules of the model, in order of definition.
        parameters: Number of trainable elements.
        changing_buffers: Names of buffers that training changes (BatchNorm statistics and the like).
        returns_loss: Whether the model computes its own loss.
        notes: Remarks of the data set or the model for the user ("using the 5,000-digit subset").
        module_kinds: Module name -> name of its class; "" is the model itself.
        parameter_shapes: Parameter name -> shape; a tied parameter under each of its names.
        shared_parameters: Names of parameters that are one tensor, a group for each such tensor.
        calls: Calls of modules in one forward pass, in order; empty: the model was not traced.
        operations: Operations of the forward pass, the loss included.
        own_blocks: Blocks that the model's own code begins.
        ended_blocks: Those of them that end where a module does.
        solved_split: What `pipeline.split=auto` stands for, as the planner solved it; None: not solved.
        unsolved: Why it is not.
        is_left_whole: Whether no split fits, and the plan shows the model as a whole instead.
        on_paper: Whether nothing will run, so that a machine larger than one process can attach is fine.
    """

    engine: str
    engine_version: str
    available_ipus: Optional[int] = None
    train_samples: Optional[int] = None
    split_samples: Mapping[str, Optional[int]] = field(default_factory=dict)
    eval_split: Optional[str] = None
    module_names: Tuple[str, ...] = ()
    parameters: int = 0
    changing_buffers: Tuple[str, ...] = ()
    returns_loss: bool = False
    notes: Tuple[str, ...] = ()
    module_kinds: Mapping[str, str] = field(default_factory=dict)
    parameter_shapes: Mapping[str, Tuple[int, ...]] = field(default_factory=dict)
    shared_parameters: Tuple[Tuple[str, ...], ...] = ()
    calls: Tuple[ModuleCall, ...] = ()
    operations: int = 0
    own_blocks: Tuple[OwnBlock, ...] = ()
    ended_blocks: Tuple[EndedBlock, ...] = ()
    solved_split: Optional[Tuple[str, ...]] = None
    unsolved: str = ""
    is_left_whole: bool = False
    on_paper: bool = False


@dataclass(frozen=True)
class Devices:
    """IPUs, and how they are shared out."""

    total: int
    per_replica: int
    replicas: int
    idle: int


@dataclass(frozen=True)
class Batch:
    """The batch arithmetic of one mode (training or inference)."""

    micro_batch_size: int
    device_iterations: int
    gradient_accumulation: int
    replicas: int
    input_group_size: int = 1

    @property
    def distinct_replicas(self) -> int:
        """Replicas that read data of their own."""
        return self.replicas // self.input_group_size

    @property
    def samples_per_update(self) -> int:
        """Samples that feed one weight update (the global batch)."""
        return self.micro_batch_size * self.gradient_accumulation * self.distinct_replicas

    @property
    def samples_per_call(self) -> int:
        """Samples that one host call consumes (PopTorch's combined batch)."""
        return self.samples_per_update * self.device_iterations


@dataclass(frozen=True)
class Steps:
    """How long training lasts, in weight updates and in host calls; None where the data has no length."""

    total_updates: Optional[int]
    total_calls: Optional[int]
    calls_per_epoch: Optional[int]
    updates_per_epoch: Optional[int]
    epochs: Optional[float]
    dropped_samples: Optional[int]  # per epoch
    save_every_calls: Optional[int]  # from checkpoint.every_steps; saving by epoch is the loop's
    eval_every_calls: Optional[int]  # from eval.every_steps, likewise
    log_every_calls: int


@dataclass(frozen=True)
class EvalPass:
    """One evaluation of a split; None where the split has no length."""

    split: str
    samples: Optional[int]
    host_calls: Optional[int]
    padded_samples: Optional[int]  # copies that fill the last host call and are left out of every number
    dropped_samples: Optional[int]  # left out by eval.max_samples


@dataclass(frozen=True)
class Symbol:
    """A name that only the engine or torch can turn into a value, such as ``poptorch.OutputMode.Sum``."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """One call on PopTorch's API, as data: `plan` prints it, the builder performs it.

    Args:
        path: Dotted path of what is called: ``Training.gradientAccumulation``.
        args: Positional arguments: Python values, `Symbol`s, or nested `Call`s (settings objects).
        kwargs: Named arguments.
        origin: The config key, file or rule that asked for it.
        chain: Further setters on what the call returns (settings objects).
    """

    path: str
    args: Tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    chain: Tuple[Call, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Where a module begins a block; an empty module name is the model itself."""

    module: str
    ipu: int
    block_id: str
    origin: str = field(default="", compare=False)


@dataclass(frozen=True)
class Serialized:
    """A matmul or an embedding that is done in parts, one after another.

    Args:
        module: Name of a linear layer or an embedding.
        factor: Number of parts.
        mode: Dimension of a matmul that is cut: ``input_channels``, ``reducing_dim`` or ``output_channels``; ``rows``
            for an embedding, whose table is cut.
        keep_precision: Whether partial sums keep the precision of the inputs (poptorch.serializedMatMul).
    """

    module: str
    factor: int
    mode: str
    keep_precision: bool = False


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with optimizer values of their own: those whose name fits one of the patterns."""

    match: Tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """All that will happen, and nothing that has happened yet."""

    name: str
    engine: str
    engine_version: str
    devices: Devices
    training: Batch
    inference: Batch
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
    notes: Tuple[str, ...]  # decisions to know of: rounding, dropped samples, broadcastBuffers(False)
    evaluation: Optional[EvalPass] = None  # None where the data has no split for it
    parameter_groups: Tuple[ParameterGroup, ...] = ()
    recompute: Tuple[str, ...] = ()  # modules whose outputs are recomputation checkpoints
    module_precision: Mapping[str, str] = field(default_factory=dict)  # module -> 16 or 32, patterns resolved
    stages: int = 1  # forward stages of training: 1 + switches between IPUs
    inference_stages: int = 1
    own_blocks: Tuple[OwnBlock, ...] = ()  # begun by the model's code, and kept
    ended_blocks: Tuple[EndedBlock, ...] = ()  # ended by it, and begun again for what ipurun puts behind modules
    serialized: Tuple[Serialized, ...] = ()
    module_proportions: Mapping[str, float] = field(default_factory=dict)  # linear layer, convolution -> tile memory
    overlap_io: str = "none"  # or accumulation_loop, device_iteration_loop
    is_left_whole: bool = False  # where no split fits, a plan shows the model on one IPU
