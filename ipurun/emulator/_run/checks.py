"""PopTorch's checks at compile time."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence

import torch

from ipurun.emulator import enums
from ipurun.emulator._capture.graph import Event, Graph, Node, Placement, Value, values_in
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._executor import device
from ipurun.emulator._impl import createNativeError, createPoptorchError
from ipurun.emulator._logging import native_logger, warn_once
from ipurun.emulator._options import checks
from ipurun.emulator._options.strategies import PipelinedExecution, ShardedExecution
from ipurun.emulator._run.batches import BatchLayout
from ipurun.emulator.enums import ConnectionType, OutputMode

_MAX_IPUS = 64
_NO_IPU_MODEL = (
    "The IPU Model is selected (useIpuModel or POPTORCH_IPU_MODEL), but it is part of the Poplar SDK. The CPU emulator "
    "runs the model with torch on the CPU as always; the memory and cycles of an IPU are not modelled."
)


def check_options(options: Any, layout: BatchLayout) -> None:
    """Raise for options that are invalid for every model."""
    checks.check_backend_options(options.toDict())
    if layout.output_mode == OutputMode.EveryN:
        period, iterations = layout.output_period, layout.device_iterations
        if period > iterations or iterations % period:
            raise createNativeError(
                f"EveryN needs a period that divides the device iterations: period {period}, "
                f"deviceIterations {iterations}.",
                "popart_exception",
            )
    uses_model = bool(options.use_model) if options.exists("use_model") else device.uses_ipu_model()
    if options.exists("use_model"):
        native_logger.info("From the user configuration: Ipu model: %s", "Enabled" if uses_model else "Disabled")
    if uses_model:
        warn_once(_NO_IPU_MODEL)
    never = options.connection_type == ConnectionType.Never.value
    if never and uses_model:
        raise createNativeError("ConnectionType.Never is not supported with the IPU model")
    if never and options.exists("ipu_id"):
        raise createNativeError("useIpuId cannot be used with ConnectionType.Never: there is nothing to attach to")
    counts_cycles = options._Popart.options.get("instrumentWithHardwareCycleCounter", False)
    if counts_cycles and (uses_model or device.hardware_version() == 0):
        raise createNativeError(
            f"Cycle count logging is only supported on actual IPU hardware. {device.HOW_TO_SIMULATE}"
        )


def num_ipus(graph: Graph) -> int:
    """Return the number of IPUs that one replica of the captured model uses."""
    used = {node.placement.ipu_id for node in graph.nodes}
    return max([len(used), *(ipu + 1 for ipu in used)]) if used else 0


def check_forward(
    recorder: Recorder, returned: Any, layout: BatchLayout, *, training: bool, input_names: Sequence[str]
) -> None:
    """Raise for blocks, marks or shapes of a forward pass that are incompatible with the options.

    Args:
        recorder: The recorder, after forward and before backward.
        returned: What forward returned.
        layout: How a call is split into micro-batches.
        training: Whether the model is trained.
        input_names: Names of the tensors among the arguments, for messages.
    """
    options = recorder.options
    total = num_ipus(recorder.graph) * layout.replicas
    if total > _MAX_IPUS:
        raise createNativeError(
            f"Too many IPUs requested ({total}). Experiments that need more than {_MAX_IPUS} IPUs must be "
            "distributed over several processes (PopRun)."
        )
    power = 1
    while power < total:
        power *= 2
    is_hardware = device.hardware_version() != 0 and options.connection_type != ConnectionType.Never.value
    if total and power != total and options.auto_round_num_ipus:
        native_logger.warning("%d IPUs are used, %d are reserved (autoRoundNumIPUs)", total, power)
    elif total and power != total and is_hardware:
        raise createNativeError(
            f"The model specifies the use of {total} IPUs, however PopTorch must reserve a minimum of {power} in "
            "order to allow the model to run, because PopTorch must reserve a power of 2 or maximum of "
            f"{_MAX_IPUS} IPUs per process. Please reconfigure your model to use a different number of IPUs or set "
            "poptorch.Options().autoRoundNumIPUs(True)."
        )
    _check_pipeline(recorder, layout, training)
    for node in recorder.graph.nodes:
        _check_not_empty(recorder.graph, node)
    check_overlap(recorder, list(tensors_in(returned)), input_names)


def check_inputs(tensors: Sequence[torch.Tensor]) -> None:
    """Raise for an empty input."""
    for tensor in tensors:
        if tensor.numel() == 0:
            raise createNativeError(f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)}).")


def _check_not_empty(graph: Graph, node: Node) -> None:
    if node.name in ("empty", "native_batch_norm", "lstm", "gru"):
        return  # torch itself creates empty tensors there
    for value in node.reads():
        if 0 in graph.specs[value].shape:
            raise createNativeError(
                f"Zero-sized tensors are unsupported (Got shape {list(graph.specs[value].shape)}) in {node.name} "
                f"at {node.source}. Shapes are fixed, so a tensor cannot start empty and grow: turn off the cache of "
                "keys and values for generating text (use_cache=False in transformers)."
            )


def _check_pipeline(recorder: Recorder, layout: BatchLayout, training: bool) -> None:
    strategy = recorder.options._execution_strategy
    if not isinstance(strategy, PipelinedExecution) or isinstance(strategy, ShardedExecution):
        return
    begins = [event.info["placement"] for event in recorder.graph.events if event.kind == "begin_block"]
    stages, last_ipu = 1, 0
    for placement in begins:
        if placement.ipu_id != last_ipu:
            stages += 1
        last_ipu = placement.ipu_id
    _check_direction(recorder)
    if stages <= 1:
        return
    if training and layout.accumulation < 2 * stages - 1:
        raise createNativeError(
            "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of "
            f"pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution. Please note that a model "
            f"with {stages} pipeline stages in PopTorch will have an additional {stages - 1} stages when training. "
            f"It is {layout.accumulation}."
        )
    if not training and layout.device_iterations < stages:
        raise createNativeError(
            "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline "
            f"stages ({stages}) when using poptorch.PipelinedExecution. It is {layout.device_iterations}."
        )


def check_buffers(written: List[str], options: Any, layout: BatchLayout) -> None:
    """Raise if replicas change buffers that must be broadcast."""
    if written and layout.input_groups > 1 and options.broadcast_buffers:
        raise createPoptorchError(
            "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
            "out of sync between replicas, you can disable buffer broadcasting using "
            f"poptorch.Options.broadcastBuffers(False). Buffers that the model changes: {', '.join(written)}."
        )


def check_named_buffers(options: Any, graph: Graph) -> None:
    """Raise if `Options.updatableNamedBuffers` names a tensor that the device does not hold as a variable."""
    known = [item.name for item in graph.inputs_of("parameter", "buffer") if graph.persists(item)]
    for name in options._Popart.options.get("updatableNamedBuffers", ()):
        if name not in known:
            raise createNativeError(
                f"No Ir::Tensor with TensorId '{name}' in Tensors::get(..): Options.updatableNamedBuffers takes names "
                "of floating-point buffers of the model, which has "
                f"{', '.join(item.name for item in graph.inputs_of('buffer') if item.name in known) or 'none'}.",
                "popart_exception",
            )


def refuse_accumulation(options: Any) -> None:
    """Raise for gradient accumulation in the options of an inference model."""
    factor = options.Training.gradient_accumulation
    if factor == 1:
        return
    strategy = options._execution_strategy
    hint = ""
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        hint = (
            " Use poptorch.Options().deviceIterations to process a sufficient number of batches each run for "
            "pipelined execution instead."
        )
    raise createPoptorchError(
        "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value (1) "
        f"when running a poptorch.inferenceModel().{hint} It is {factor}."
    )


def _check_direction(recorder: Recorder) -> None:
    """Raise if a pipeline stage reads what a later one computes; the order of unrelated blocks does not matter."""
    producers: Dict[Value, Placement] = {}
    for node in recorder.graph.nodes:
        stage = node.placement.stage_id
        for value in filter(recorder.value_varies, node.reads()):
            producer = producers.get(value)
            if producer is not None and producer.stage_id > stage:
                raise createNativeError(
                    f"Pipeline stages must be in ascending order: block {node.placement.block_id!r} in stage {stage} "
                    f"reads a result of block {producer.block_id!r} in stage {producer.stage_id} at {node.source}.",
                    "popart_exception",
                )
        producers.update(dict.fromkeys(node.writes(), node.placement))


def check_overlap(recorder: Recorder, returned: Iterable[torch.Tensor], input_names: Sequence[str] = ()) -> None:
    """Raise poptorch.Error for a requested overlap that a device does not support.

    Args:
        recorder: The recorder, after forward and before the graph is pruned.
        returned: The tensors that forward returned.
        input_names: Names of the model's tensor inputs, for messages.
    """
    graph = recorder.graph
    inputs = _overlapping(graph, "overlap_input")
    outputs = _overlapping(graph, "overlap_output")
    if not inputs and not outputs:
        return
    # The ops that created the marked tensors; each reads the argument of set_overlap_*.
    marked_by: Dict[Value, Node] = {value: node for node in graph.nodes for value in values_in(node.outputs)}
    for event in inputs:
        _check_input(graph, _source(marked_by, event), input_names)
    returned_values = [recorder.value_of(tensor) for tensor in returned]
    for event in outputs:
        _check_output(returned_values, event, _source(marked_by, event))
    _check_options(recorder.options)


def _overlapping(graph: Graph, kind: str) -> List[Event]:
    none = enums.OverlapMode.NoOverlap.value
    return [event for event in graph.events if event.kind == kind and event.info["mode"] != none]


def _source(marked_by: Dict[Value, Node], event: Event) -> Value:
    assert event.value is not None
    return next(marked_by[event.value].reads())


def _check_input(graph: Graph, source: Value, names: Sequence[str]) -> None:
    values = [item.value for item in graph.inputs_of("input")]
    if source not in values:
        raise createNativeError(
            "poptorch.set_overlap_for_input applied on a node which is not a tensor input to the model."
        )
    index = values.index(source)
    name = names[index] if index < len(names) else f"number {index}"
    if sum(source in node.reads() for node in graph.nodes) > 1:
        raise createNativeError(
            "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case "
            f"for input {name} to the model."
        )


def _check_output(returned: Sequence[Value], event: Event, source: Value) -> None:
    if returned.count(event.value) + returned.count(source) > 1:
        raise createNativeError(
            "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please check "
            "all returned tensors including those nested in tuples/lists."
        )
    if event.value not in returned:
        raise createNativeError(
            "poptorch.set_overlap_for_output applied on a node which is not a tensor output to the model."
        )


def _check_options(options: Any) -> None:
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        raise createNativeError(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using only one IPU, "
            "please switch to poptorch.ShardedExecution."
        )
    if not options.TensorLocations.exists("numIOTiles"):
        raise createNativeError(
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    mode = enums.OutputMode(options.output_mode)
    if mode not in (enums.OutputMode.All, enums.OutputMode.Sum):
        raise createNativeError(
            f"Overlapped IO needs the output mode All or Sum, got {mode.name} (poptorch.Options().outputMode)."
        )
