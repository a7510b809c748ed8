"""Devices, placement and batch sizes of training and inference.

Keys that were set win over `options`, and those over poptorch.conf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Optional

from ipurun.api.calls import last_call
from ipurun.config.schema import PipelineConfig, RunConfig
from ipurun.errors import Findings
from ipurun.inspect.facts import Facts
from ipurun.planning.devices import (
    MAX_IPUS,
    DeviceRequest,
    check_share,
    is_power_of_two,
    next_power_of_two,
    plan_instances,
    share_devices,
)
from ipurun.planning.placement.layout import Layout, lay_out, names_first_block
from ipurun.planning.plan import BatchSizes, Devices, Instances
from ipurun.planning.user_settings import UserSettings

__all__ = ["Sizes", "plan_sizes"]


@dataclass(frozen=True)
class Sizes:
    """The numbers from which the rest of the plan is computed."""

    devices: Devices
    training: BatchSizes
    inference: BatchSizes
    layout: Layout
    inference_layout: Layout
    instances: Instances


def plan_sizes(
    config: RunConfig, facts: Facts, settings: UserSettings, environ: Mapping[str, str], found: Findings
) -> Sizes:
    """Return the sizes of a run."""
    instances = plan_instances(config, facts, environ, found)
    strategy = settings.strategy(config.pipeline)
    named = names_first_block(strategy)
    before = len(found.problems)
    layout = lay_out(config.pipeline, facts, found, named_start=named, numbers_blocks=strategy is None)
    is_laid_out = len(found.problems) == before  # else the number of stages is not known
    auto_round = config.pipeline.auto_round
    if not settings.has("pipeline.auto_round"):
        auto_round = auto_round or settings.argument("autoRoundNumIPUs") is True
    factor = config.replication.factor or settings.argument("replicationFactor")
    available = facts.available_ipus if instances.count == 1 else None  # one process cannot see those of the others
    request = DeviceRequest(config.devices, layout.ipus, factor, auto_round, available, facts.purpose, instances.count)
    devices = share_devices(request, found)
    group_size = _group_size(config, settings, devices.replicas, found)
    pipelined = is_laid_out and _is_pipelined(config, settings)
    training = _training_batch(config, settings, devices, group_size, layout, pipelined, found)
    inference_layout = layout
    named = named or names_first_block(settings.inference_argument("setExecutionStrategy"))
    placement = _inference_placement(config)
    if placement is not None or named:
        before = len(found.problems)
        group = "pipeline" if placement is None else "inference"
        inference_layout = lay_out(
            placement or config.pipeline, facts, found, group, named_start=named, numbers_blocks=strategy is None
        )
        is_laid_out = len(found.problems) == before
    stages = inference_layout.stages if is_laid_out and _infers_in_pipeline(config, settings) else 1
    inference = _inference_batch(config, settings, devices, training, inference_layout, stages, auto_round, found)
    check_share(config, instances, training, inference, found)
    return Sizes(devices, training, inference, layout, inference_layout, instances)


def _inference_placement(config: RunConfig) -> Optional[PipelineConfig]:
    """Return the placement of inference; None where it is that of training."""
    split, layers = config.inference.split, config.inference.layers_per_ipu
    if split is None and layers is None:
        return None
    bare = replace(config.pipeline, blocks={}, stages=[], phases=[], ipus=None)
    if split is not None:
        return replace(
            bare, split=split, layers_per_ipu=layers or [], embedding=None, embedding_ipu=None, head=None, head_ipu=None
        )
    # An embedding or head that training puts on an IPU which inference does not use gets its default place.
    embedding, head = (
        ipu if ipu is None or ipu < len(layers or ()) else None for ipu in (bare.embedding_ipu, bare.head_ipu)
    )
    return replace(bare, split=[], layers_per_ipu=layers or [], embedding_ipu=embedding, head_ipu=head)


def _is_pipelined(config: RunConfig, settings: UserSettings) -> bool:
    strategy = settings.strategy(config.pipeline)
    if strategy is not None:
        return strategy.path.endswith("PipelinedExecution")
    return config.pipeline.strategy == "pipelined"


def _infers_in_pipeline(config: RunConfig, settings: UserSettings) -> bool:
    strategy = last_call("setExecutionStrategy", settings.inference)
    if strategy is not None:
        return bool(strategy.args[0].path.endswith("PipelinedExecution"))
    return _is_pipelined(config, settings)


def _group_size(config: RunConfig, settings: UserSettings, replicas: int, found: Findings) -> int:
    size = config.replication.input_group_size
    if not settings.has("replication.input_group_size"):
        size = settings.argument("inputReplicaGrouping") or size
    if size < 1 or replicas % size:
        divisors = [part for part in range(1, replicas + 1) if replicas % part == 0]
        found.problem(
            f"`replication.input_group_size` must be a divisor of the {replicas} replicas",
            seen=f"replication.input_group_size={size}",
            known=", ".join(map(str, divisors)),
            fix=f"replication.input_group_size={max(part for part in divisors if part <= max(size, 1))}",
            key="replication.input_group_size",
        )
        return 1
    return int(size)


def _training_batch(
    config: RunConfig,
    settings: UserSettings,
    devices: Devices,
    group_size: int,
    layout: Layout,
    pipelined: bool,
    found: Findings,
) -> BatchSizes:
    iterations = config.device_iterations
    if not settings.has("device_iterations"):
        iterations = settings.argument("deviceIterations") or iterations
    accumulation = config.gradient_accumulation
    if accumulation is None and config.global_batch_size is None:
        accumulation = settings.argument("Training.gradientAccumulation")
    stages = layout.stages if pipelined else 1
    least = 2 * stages - 1  # micro-batches that fill and drain the pipeline
    solved = _solve_accumulation(
        config.micro_batch_size,
        devices.replicas // group_size,
        accumulation,
        config.global_batch_size,
        least,
        found,
    )
    batch = BatchSizes(config.micro_batch_size, iterations, solved, devices.replicas, group_size)
    if solved < least and (config.global_batch_size is None or accumulation is not None):
        found.problem(
            f"a pipeline of {stages} stages needs `gradient_accumulation` of at least {least} in training",
            seen=f"gradient_accumulation={solved}",
            fix=f"gradient_accumulation={least} (or pipeline.strategy=sharded)",
            key="gradient_accumulation",
        )
    if stages > 1:
        share = solved / (solved + 2 * stages - 2)
        found.note(
            f"{stages} pipeline stages with gradient_accumulation {solved}: about {share:.0%} of the time is useful "
            "work, the rest fills and drains the pipeline"
        )
    return batch


def _inference_batch(
    config: RunConfig,
    settings: UserSettings,
    devices: Devices,
    training: BatchSizes,
    layout: Layout,
    stages: int,
    auto_round: bool,
    found: Findings,
) -> BatchSizes:
    chosen = config.inference.device_iterations or settings.inference_argument("deviceIterations")
    iterations = chosen or training.device_iterations
    if iterations < stages and chosen:
        found.problem(
            f"a pipeline of {stages} stages needs `inference.device_iterations` of at least {stages}",
            seen=f"inference.device_iterations={iterations}",
            fix=f"inference.device_iterations={stages}",
            key="inference.device_iterations",
        )
    elif iterations < stages:
        found.note(f"inference runs {stages} device iterations per host call, the least for {stages} pipeline stages")
        iterations = stages
    replicas = config.inference.replicas or settings.inference_argument("replicationFactor") or training.replicas
    if config.distributed.kind == "none":
        _check_inference_devices(replicas * layout.ipus, replicas, devices, auto_round, found)
    group_size = training.input_group_size if replicas == training.replicas else 1
    grouped = last_call("inputReplicaGrouping", settings.inference)
    if grouped is not None:
        group_size = grouped.args[0]
        if replicas % group_size:
            found.problem(
                f"`inference.options.inputReplicaGrouping` must be a divisor of the {replicas} replicas",
                seen=str(group_size),
                fix="inference.options.inputReplicaGrouping: [1, Consecutive]",
                key="inference.options.inputReplicaGrouping",
            )
            group_size = 1
    accumulation = settings.inference_argument("Training.gradientAccumulation")
    if accumulation not in (None, 1):
        found.problem(
            "inference cannot accumulate gradients",
            seen=f"inference.options.Training.gradientAccumulation={accumulation}",
            fix="remove it",
            key="inference.options.Training.gradientAccumulation",
        )
    micro_batch_size = config.inference.micro_batch_size or training.micro_batch_size
    return BatchSizes(micro_batch_size, iterations, 1, replicas, group_size)


def _check_inference_devices(used: int, replicas: int, devices: Devices, auto_round: bool, found: Findings) -> None:
    limit = min(max(devices.total, 1), MAX_IPUS)
    per_replica = used // replicas
    if devices.replicas * devices.per_replica > limit:
        return  # training does not fit either, which has been reported
    rounded = next_power_of_two(used) if auto_round else used
    if rounded > limit:
        found.problem(
            f"inference needs {rounded} IPUs, more than `devices` allows",
            seen=f"{replicas} replicas x {per_replica} IPUs, devices={devices.total}",
            fix=f"inference.replicas={limit // per_replica}" if per_replica <= limit else f"devices={rounded}",
            key="devices",
        )
    elif not is_power_of_two(rounded) and used != devices.replicas * devices.per_replica:
        found.problem(
            f"inference uses {used} IPUs, which is not a power of two",
            seen=f"{replicas} replicas x {per_replica} IPUs",
            fix=f"inference.replicas={next_power_of_two(replicas) // 2}"
            if is_power_of_two(per_replica)
            else "pipeline.auto_round=true",
        )


def _solve_accumulation(
    micro_batch_size: int,
    distinct_replicas: int,
    accumulation: Optional[int],
    global_batch_size: Optional[int],
    least: int,
    found: Findings,
) -> int:
    """Return the micro-batches per weight update: as set, or as the global batch size requires.

    Args:
        micro_batch_size: Samples of one forward pass.
        distinct_replicas: Replicas that read different data.
        accumulation: `gradient_accumulation`, None where it was not set.
        global_batch_size: Samples per weight update, None where it was not set.
        least: The smallest accumulation that works (2 S - 1 for a pipeline of S stages).
        found: Takes the problems.
    """
    if global_batch_size is None:
        return accumulation or 1
    per_micro_step = micro_batch_size * distinct_replicas
    if accumulation is not None and accumulation * per_micro_step != global_batch_size:
        found.problem(
            "`global_batch_size` and `gradient_accumulation` contradict each other",
            seen=f"micro_batch_size {micro_batch_size} x gradient_accumulation {accumulation} x "
            f"{distinct_replicas} replicas = {accumulation * per_micro_step}, global_batch_size={global_batch_size}",
            fix=f"gradient_accumulation=null, or global_batch_size={accumulation * per_micro_step}",
            key="global_batch_size",
        )
        return accumulation
    solved, rest = divmod(global_batch_size, per_micro_step)
    if rest == 0 and solved >= least:
        return solved
    candidates = sorted({max(solved, least), max(solved + 1, least)})
    what = f"`global_batch_size` must be a multiple of {per_micro_step}"
    if least > 1:
        what += f", at least {least * per_micro_step} for this pipeline"
    found.problem(
        what,
        seen=f"global_batch_size={global_batch_size} with micro_batch_size {micro_batch_size} x "
        f"{distinct_replicas} replicas = {per_micro_step} samples per accumulation step",
        fix=" or ".join(f"global_batch_size={value * per_micro_step}" for value in candidates),
        key="global_batch_size",
    )
    return candidates[0]
