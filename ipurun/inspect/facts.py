"""Facts about the engine, the data and the model that a plan is made from, as plain data without torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Optional, Tuple

__all__ = ["EndedBlock", "Facts", "InitialWeights", "LoadingRate", "LoggedValue", "ModuleCall", "Purpose", "UserBlock"]


class Purpose(enum.Enum):
    """Purpose for which a config is prepared."""

    RUN = "run"
    COMPILE = "compile"  # as for a run, but no device is attached
    CHECK = "check"  # as for a run, but large models get no memory for their weights
    PLAN = "plan"  # as CHECK, and a machine larger than one process can attach, or than exists, is fine


@dataclass(frozen=True)
class LoadingRate:
    """How fast a host loads a data set, as `ipurun bench` measured it.

    Args:
        samples_per_second: Samples that one process loads.
        cpus: CPUs of the host.
        day: Day of the measurement, as YYYY-MM-DD.
        core_seconds: Seconds that one of its CPUs takes for the fixed work that tells how fast it is.
        has_ipus: Whether IPUs were attached to it.
    """

    samples_per_second: float
    cpus: int
    day: str
    core_seconds: float
    has_ipus: bool


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in a forward pass, after `operations` operations."""

    module: str
    operations: int


@dataclass(frozen=True)
class UserBlock:
    """A block that the model's own code begins.

    Args:
        module: The module that begins it with ``poptorch.BeginBlock``; None for ``poptorch.Block`` in `forward`.
        ipu: Its IPU; None if the strategy decides.
        block_id: Its name; None if PopTorch numbers it.
        operations: Number of operations before it; None if the model was not traced.
    """

    module: Optional[str]
    ipu: Optional[int] = None
    block_id: Optional[str] = None
    operations: Optional[int] = None


@dataclass(frozen=True)
class EndedBlock:
    """A block of the model's own code that ends with a module, so that no block is active after it.

    Args:
        module: The module; "" is the model itself.
        block_id: Name of the block.
        ipu: The IPU that the code requests; None if the strategy decides.
    """

    module: str
    block_id: str
    ipu: Optional[int] = None


@dataclass(frozen=True)
class InitialWeights:
    """Source of the initial weights of a run.

    Args:
        path: The file.
        kind: What it is, for the user.
        loaded: Name in the model -> name in the file.
        not_loaded: Name in the model -> why it keeps the value that the model's code gave it.
        left_over: Name in the file -> why it was not used.
    """

    path: str
    kind: str
    loaded: Mapping[str, str]
    not_loaded: Mapping[str, str]
    left_over: Mapping[str, str]


@dataclass(frozen=True)
class LoggedValue:
    """A value that a step of a LightningModule logs with ``self.log``.

    Args:
        name: Its name.
        on_step: Whether it is reported while training.
        on_epoch: Whether it is reported for a whole epoch.
        reduction: mean, sum, min or max.
        metric: Name of the metric object in the model that computes it on the host; None: the step computes it.
        metric_key: Its name in a collection of metrics.
        by_batch: Whether the object computes a value for each micro-batch, which are then reduced.
        then: What the step does with the object's value before it is logged, for the host to do.
    """

    name: str
    on_step: bool
    on_epoch: bool
    reduction: str
    metric: Optional[str] = None
    metric_key: Optional[str] = None
    by_batch: bool = False
    then: Optional[Callable[[Any], Any]] = field(default=None, compare=False)

    @property
    def needs_all(self) -> bool:
        """Whether it needs the outputs of every micro-batch, rather than their sum."""
        return self.metric is not None or self.reduction in ("min", "max")


@dataclass(frozen=True)
class Facts:
    """Facts about engine, data and model that a plan needs in addition to the config.

    Args:
        engine: ``ipu``, ``ipu_model`` or ``cpu``.
        engine_version: For display: ``PopTorch 3.4.0`` or ``emulator of PopTorch 3.4.0``.
        available_ipus: IPUs that can be attached; None for the emulator, which has any number.
        train_samples: Length of the training set; None for a stream without a length.
        split_samples: Split name -> length; None for a stream without a length.
        eval_split: Name of the split to evaluate on; None if the data has none.
        module_names: Dotted names of all modules of the model, in order of definition.
        parameters: Number of trainable elements.
        written_buffers: Names of floating-point buffers that forward writes to in place (batch norm does not).
        batch_norms: Number of batch norm layers with running statistics.
        returns_loss: Whether the model computes its own loss.
        notes: Remarks for the user from the data set or the model ("using the 5,000-digit subset").
        module_kinds: Module name -> name of its class; "" is the model itself.
        buffer_bytes: Size of the buffers that a checkpoint has.
        parameter_shapes: Parameter name -> shape; a tied parameter under each of its names.
        shared_parameters: Groups of parameter names that share one tensor.
        table_parts: Embedding or head that is split into parts -> IPU of each part.
        tables: Word of `memory.serialize` for a table -> name of the module.
        calls: Calls of modules in one forward pass, in order; empty if the model was not traced.
        operations: Operations of the forward pass, the loss included.
        user_blocks: Blocks that the model's own code begins.
        ended_blocks: Those of them that end where a module does.
        solved_split: The split found for `pipeline.split=auto`; None if there is none.
        unsolved: Why none was found.
        is_left_whole: Whether no split fits and the plan shows the unsplit model instead.
        purpose: What the plan is made for.
        initial_weights: What `init_from` loads; None if the model's code gives all values, or a checkpoint.
        own_optimizer: The optimizer that a LightningModule configures, as a node; empty if the config has one.
        has_own_schedule: Whether the model configures a learning-rate schedule.
        logged: Kind of step -> name -> what a LightningModule logs there.
        is_synthetic: Whether the training data is made up, so that there could be any number of samples.
    """

    engine: str
    engine_version: str
    available_ipus: Optional[int] = None
    train_samples: Optional[int] = None
    split_samples: Mapping[str, Optional[int]] = field(default_factory=dict)
    eval_split: Optional[str] = None
    module_names: Tuple[str, ...] = ()
    parameters: int = 0
    written_buffers: Tuple[str, ...] = ()
    batch_norms: int = 0
    returns_loss: bool = False
    notes: Tuple[str, ...] = ()
    module_kinds: Mapping[str, str] = field(default_factory=dict)
    buffer_bytes: int = 0
    parameter_shapes: Mapping[str, Tuple[int, ...]] = field(default_factory=dict)
    shared_parameters: Tuple[Tuple[str, ...], ...] = ()
    table_parts: Mapping[str, Tuple[int, ...]] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    calls: Tuple[ModuleCall, ...] = ()
    operations: int = 0
    user_blocks: Tuple[UserBlock, ...] = ()
    ended_blocks: Tuple[EndedBlock, ...] = ()
    solved_split: Optional[Tuple[str, ...]] = None
    unsolved: str = ""
    is_left_whole: bool = False
    purpose: Purpose = Purpose.RUN
    initial_weights: Optional[InitialWeights] = None
    own_optimizer: Mapping[str, Any] = field(default_factory=dict)
    has_own_schedule: bool = False
    logged: Mapping[str, Mapping[str, LoggedValue]] = field(default_factory=dict)
    is_synthetic: bool = False
