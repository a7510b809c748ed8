"""Plain data of an estimate: where and how a traced model runs, and the memory and time it takes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Iterable, Mapping, Optional, Tuple

from ipurun.estimate.machine import Machine
from ipurun.inspect.traced_model import TracedModel

__all__ = [
    "Estimate",
    "EstimatedModel",
    "IpuMemory",
    "IpuTime",
    "Settings",
    "StageLayout",
    "TimeEstimate",
    "Trial",
    "Verdict",
    "worst",
]


@dataclass(frozen=True)
class StageLayout:
    """Which operation runs in which stage, and which stage on which IPU.

    Args:
        stage_of_op: Stage of each traced operation, in order; never decreasing under pipelining.
        ipu_of_stage: IPU of each stage; an IPU may run several (the head on the embedding's IPU).
        checkpoints: Operations whose results are kept where the rest is recomputed.
        phase_of_stage: Phase of each stage in phased execution, where only the weights of the running phase have to be
            on chip; empty for other strategies.
    """

    stage_of_op: Tuple[int, ...]
    ipu_of_stage: Tuple[int, ...]
    checkpoints: Tuple[int, ...] = ()
    phase_of_stage: Tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Forward stages."""
        return len(self.ipu_of_stage)

    @property
    def num_ipus(self) -> int:
        """IPUs from 0 to the highest one used."""
        return max(self.ipu_of_stage) + 1

    @property
    def least_accumulation(self) -> int:
        """Micro-batches that a weight update of a pipeline needs at least."""
        return 2 * self.num_stages - 1

    def ipu_of_op(self, index: int) -> int:
        """Return the IPU that runs an operation."""
        return self.ipu_of_stage[self.stage_of_op[index]]


@dataclass(frozen=True)
class Settings:
    """The values of a config that matter for memory and time, besides the model and its layout.

    Args:
        micro_batch_size: Samples of one forward pass on one replica.
        gradient_accumulation: Micro-batches of one weight update.
        replicas: Data-parallel replicas.
        instances: Processes that share them; tensors are sharded over the replicas of one process only.
        device_iterations: Weight updates (batches in inference) of one host call.
        training: Whether there is a backward pass and an optimizer.
        strategy: ``pipelined``, ``sharded``, ``serial_phased`` or ``parallel_phased``.
        recompute: ``none``, ``checkpoints`` (keep stage inputs and checkpoints) or ``norm_only``.
        compute_bytes: 2 where matmuls run on half values, 4 otherwise.
        partials_bytes: 2 where their partial sums are half.
        optimizer: Class name of the optimizer, for display.
        state_bytes: Bytes of optimizer state per parameter value.
        accumulator_bytes: Bytes of gradient accumulator per parameter value, where there is one.
        always_accumulates: Whether there is one even if gradients are not accumulated, because it is also the velocity.
        update_flops: Operations that update one parameter value.
        state_on_chip: Whether optimizer state lives in the IPU.
        state_sharded: Replicated tensor sharding of optimizer state.
        weights_on_chip: Whether weights live in the IPU.
        weights_sharded: Replicated tensor sharding of weights.
        accumulators_on_chip: Whether gradient accumulators live in the IPU.
        activations_on_chip: Whether stashed activations live in the IPU.
        available_proportion: Share of a tile for matmul and convolution temporaries: one per IPU, or one for all.
        module_proportions: Module name -> the share for its product.
        serialized: Module name -> number of parts its matmul or embedding is split into.
        io_tiles: Tiles set aside for overlapped I/O.
        prefetch_depth: Batches buffered on the device side of the host connection.
        returned: Share of micro-batches whose outputs go back to the host.
        host_samples_per_second: Samples that all loading processes load; None if unknown.
        workers: Worker processes that load data, of each instance.
        loads_beside: Whether data is loaded beside the process that trains; otherwise by that one, between host calls.
        is_loading_known: Whether data loads at a known speed, or does not have to be loaded.
        host_cpus: CPUs of the host that loads, for each instance on it; 0 if unknown.
        loading_basis: Where `host_samples_per_second` comes from.
        hosts: Hosts that send data to the machines.
        min_elements_off_chip: Optimizer state with fewer values stays on chip.
        min_weights_off_chip: The same for weights.
        min_accumulators_off_chip: The same for gradient accumulators.
        min_elements_sharded: Tensors with fewer values are not sharded.
        state_tensors: Optimizer state tensors per parameter.
    """

    micro_batch_size: int = 1
    gradient_accumulation: int = 1
    replicas: int = 1
    device_iterations: int = 1
    training: bool = True
    strategy: str = "pipelined"
    recompute: str = "none"
    compute_bytes: int = 4
    partials_bytes: int = 4
    optimizer: str = "SGD"
    state_bytes: float = 0.0
    accumulator_bytes: float = 0.0
    always_accumulates: bool = False
    update_flops: float = 2.0
    state_on_chip: bool = True
    state_sharded: bool = False
    weights_on_chip: bool = True
    weights_sharded: bool = False
    accumulators_on_chip: bool = True
    activations_on_chip: bool = True
    available_proportion: Tuple[float, ...] = ()
    module_proportions: Mapping[str, float] = field(default_factory=dict)
    serialized: Mapping[str, int] = field(default_factory=dict)
    io_tiles: int = 0
    prefetch_depth: int = 2
    returned: float = 1.0
    host_samples_per_second: Optional[float] = None
    workers: int = 0
    loads_beside: bool = False
    is_loading_known: bool = True
    host_cpus: int = 0
    loading_basis: str = ""
    hosts: int = 1
    min_elements_off_chip: int = 2
    min_weights_off_chip: int = 2
    min_accumulators_off_chip: int = 2
    min_elements_sharded: int = 2
    state_tensors: int = 0
    instances: int = 1

    @property
    def loading_processes(self) -> int:
        """Processes of an instance that load at the same time; more than there are CPUs take turns."""
        return min(max(1, self.workers), self.host_cpus or max(1, self.workers))

    @property
    def sharding_replicas(self) -> int:
        """Replicas over which tensors can be sharded: those of one process."""
        return max(self.replicas // self.instances, 1)

    @property
    def global_batch_size(self) -> int:
        """Samples of one weight update."""
        return self.micro_batch_size * self.gradient_accumulation * self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches that pass a pipeline between filling and draining it."""
        return self.gradient_accumulation if self.training else self.device_iterations

    @property
    def gradient_bytes(self) -> float:
        """Bytes of gradient accumulator per parameter value; 0 without accumulation."""
        return self.accumulator_bytes if self.gradient_accumulation > 1 or self.always_accumulates else 0.0


class Verdict(enum.Enum):
    """Whether an estimate is within the limit; tight: closer to the limit than the error of the estimate."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst of some verdicts."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.FITS)


@dataclass(frozen=True)
class IpuMemory:
    """Memory of one IPU of one replica, in bytes. Every figure is an estimate.

    Args:
        ipu: Number of the IPU within its replica.
        weights: Parameters and buffers.
        gradients: Gradients and their accumulators.
        optimizer_state: Momenta and variances.
        activations: Forward results kept for the backward pass.
        temporary: Working memory of the largest operation and of recomputation.
        io: Buffers of host and inter-IPU transfers.
        code: Vertices, exchange code and control code.
        limit: Memory of the chip.
        imbalance: Bytes that the fullest tile holds above the average, times the number of tiles.
        streaming: Streaming memory (off chip) that this IPU uses.
        allowed: In inference, bytes that temporaries of matmuls and convolutions may take beyond `temporary`: the
            compiler takes the fastest way within the available-memory proportion.
    """

    ipu: int
    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    temporary: int
    io: int
    code: int
    limit: int
    imbalance: int = 0
    streaming: int = 0
    allowed: int = 0

    @property
    def total(self) -> int:
        """Bytes on the chip, if all tiles were equally full."""
        return (
            self.weights
            + self.gradients
            + self.optimizer_state
            + self.activations
            + self.temporary
            + self.io
            + self.code
        )

    @property
    def fullest(self) -> int:
        """Bytes compared with the limit: the total if every tile were as full as the fullest."""
        return self.total + self.imbalance

    @property
    def share(self) -> float:
        """Used part of the limit; above 1 the estimate is over the limit."""
        return self.fullest / self.limit

    def parts(self) -> Mapping[str, int]:
        """Return the parts by name, in the order they are shown."""
        names = ("weights", "gradients", "optimizer_state", "activations", "temporary", "io", "code")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class IpuTime:
    """Seconds that one IPU works on one micro-batch, over all stages it runs.

    Args:
        ipu: Number of the IPU within its replica.
        forward: Forward pass.
        recompute: Forward operations done again for the backward pass.
        backward: Backward pass.
        links: Transfers to and from other IPUs of the replica.
        streaming: Transfers of weights and activations from and to streaming memory.
    """

    ipu: int
    forward: float
    recompute: float
    backward: float
    links: float
    streaming: float = 0.0

    @property
    def total(self) -> float:
        """Seconds in total."""
        return self.forward + self.recompute + self.backward + self.links + self.streaming


@dataclass(frozen=True)
class TimeEstimate:
    """Time of one weight update (in inference: of one batch), in seconds. All figures are estimates.

    Args:
        ipus: Work of each IPU on one micro-batch.
        stages: (forward, backward with recomputation) of each forward stage, without transfers.
        cycle: One pipeline cycle (or one pass through all IPUs, where they work in turn).
        cycles: Cycles of one update, filling and draining included.
        bubble: Share of cycles that fill and drain the pipeline.
        compute: All cycles of one update.
        all_reduce: Gradients over the replicas.
        gateways: The part of it between IPU-Link domains.
        update: Optimizer, with its traffic to streaming memory.
        host: Overhead of host calls that is not overlapped, per update.
        host_input: Time the host connection and the workers need for the data of one update; it overlaps with compute.
        loading: Time the training process spends loading data for one update, if there are no workers.
        error: Factor that the throughput may be wrong by, in either direction.
        loading_error: Further factor by which it may be lower, because it is not known how fast data is loaded.
        total: Seconds of one update.
        samples_per_second: Throughput of all replicas.
        host_bound: Whether the host, not the device, limits throughput.
        sending: The part of `host_input` that the connection between hosts and machines takes.
        flops_share: Share of the peak FLOP/s of all IPUs spent on useful operations.
        link_bytes: Bytes that one micro-batch sends between the IPUs of a replica.
        host_bytes_per_second: Input rate the host has to deliver.
    """

    ipus: Tuple[IpuTime, ...]
    stages: Tuple[Tuple[float, float], ...]
    cycle: float
    cycles: int
    bubble: float
    compute: float
    all_reduce: float
    update: float
    host: float
    host_input: float
    total: float
    samples_per_second: float
    host_bound: bool
    flops_share: float
    link_bytes: int
    host_bytes_per_second: float
    loading: float = 0.0
    sending: float = 0.0
    error: float = 1.5
    loading_error: float = 1.0
    gateways: float = 0.0

    @property
    def range(self) -> Tuple[float, float]:
        """Lowest and highest throughput within the error."""
        lowest = self.samples_per_second / (self.error * self.loading_error)
        return lowest, self.samples_per_second * self.error

    @property
    def device(self) -> float:
        """Seconds of one update that the device takes by itself."""
        return self.compute + self.all_reduce + self.update


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a model under a layout. Every figure is an estimate.

    Args:
        ipus: Memory of each IPU of a replica.
        verdicts: Verdict of each IPU.
        verdict: The worst of them.
        time: Time and throughput.
        streaming: Streaming memory of all replicas, in bytes.
        streaming_limit: Streaming memory of the machines, in bytes.
    """

    ipus: Tuple[IpuMemory, ...]
    verdicts: Tuple[Verdict, ...]
    verdict: Verdict
    time: TimeEstimate
    streaming: int = 0
    streaming_limit: int = 0

    @property
    def fullest(self) -> IpuMemory:
        """Memory of the fullest IPU."""
        return max(self.ipus, key=lambda ipu: ipu.fullest)


@dataclass(frozen=True)
class EstimatedModel:
    """A traced model, where and how it runs, and its estimate.

    Args:
        traced: The model.
        layout: The stages of its operations.
        settings: How it runs.
        machine: The device.
        estimate: Its memory and time.
    """

    traced: TracedModel
    layout: StageLayout
    settings: Settings
    machine: Machine
    estimate: Estimate

    @property
    def num_ipus(self) -> int:
        """IPUs of all replicas."""
        return self.layout.num_ipus * self.settings.replicas


@dataclass(frozen=True)
class Trial:
    """A config with some overrides, planned and estimated as if it had been typed.

    Args:
        training: Its training.
        inference: Its evaluation and prediction; None if the model cannot be traced in eval mode.
    """

    training: EstimatedModel
    inference: Optional[EstimatedModel]

    @property
    def verdict(self) -> Verdict:
        """The worse of the verdicts of training and inference."""
        return worst(model.estimate.verdict for model in (self.training, self.inference) if model is not None)
