"""Compile a model for the arguments of a call."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch

from ipurun.emulator._capture import op_kinds
from ipurun.emulator._capture.capture import capture
from ipurun.emulator._capture.recompute import add_recomputation, recomputation_mode
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._executor.inputs import Arguments
from ipurun.emulator._executor.model_guard import named_tensors, on_device
from ipurun.emulator._executor.weights import DeviceWeights, ReplicaGroups
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._logs.program import log_placement, log_program
from ipurun.emulator._run import checks, executable_cache
from ipurun.emulator._run.batches import BatchLayout
from ipurun.emulator._run.checked import ReplayMaker, replay_maker
from ipurun.emulator._run.chunks import alike, largest
from ipurun.emulator._run.executable import Executable, RandomStreams, host_generator_kept


@torch.inference_mode(False)  # inference mode would not decompose composite operations
def compile_model(
    model: Callable[..., Any],
    arguments: Arguments,
    *,
    options: Any,
    training: bool,
    seed: int,
    groups: Optional[Dict[str, ReplicaGroups]] = None,
) -> Executable:
    """Capture a model on the first micro-batch of a call and return its executable.

    Args:
        model: The module (or function) whose forward is captured.
        arguments: The arguments of the call, converted for the device.
        options: The executor's options.
        training: Whether to find the loss and add the backward pass.
        seed: Seed of the random operations.
        groups: Parameters whose values differ between replicas.

    Raises:
        Error: If the model or the options cannot be compiled. The model is left unchanged.
    """
    layout = BatchLayout.of(options)
    checks.check_options(options, layout)
    checks.check_inputs(arguments.tensors())
    micro_batch = [layout.cut(tensor)[0].clone() for tensor in arguments.tensors()]
    parameters, buffers = named_tensors(model)
    weights = DeviceWeights(parameters, buffers, layout.replicas, groups)
    # Attaching uploads the other parameters.
    integers = {name: tensor for name, tensor in parameters.items() if not tensor.is_floating_point()}
    host = {name: tensor.detach().clone() for name, tensor in {**integers, **buffers}.items()}
    streams = RandomStreams(seed)
    call_arguments = arguments.with_tensors(micro_batch)
    originals = [tensor.clone() for tensor in micro_batch]
    strategy = options._execution_strategy
    strategy.onStartTracing()
    with host_generator_kept():
        streams.start(0, 0)
        with on_device(model, _first_replica(weights)):
            captured = capture(
                lambda: model(*call_arguments.positional, **call_arguments.named),
                parameters=parameters,
                buffers=buffers,
                inputs=micro_batch,
                training=training,
                options=options,
                modules=dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {},
                check_op=op_kinds.op_checker(),
                before_backward=lambda recorder, returned: checks.check_forward(
                    recorder, returned, layout, training=training, input_names=arguments.tensor_names()
                ),
            )
    strategy.onEndTracing()
    log_placement(captured.graph, options)
    log_program(captured.graph, options)
    add_recomputation(captured.graph, recomputation_mode(captured.graph, options))
    executable = Executable(captured, weights, layout, streams, options.anchored_tensors, replay_maker(options))
    checks.check_named_buffers(options, captured.graph)
    checks.check_buffers(captured.graph.buffers_written_in_place(), options, layout)
    if layout.replicas > 1:
        weights.separate_buffers(captured.graph.buffers_written())
    weights.upload(host, constants=True)
    # Compare with the same kernels as in the captured run, without stochastic rounding or floating-point exceptions.
    check = Executable(captured, weights, layout, streams, make_replay=ReplayMaker(as_captured=True))
    _check_replay(check, originals)
    weights.upload(host, constants=True)
    captured.reference = ([], {})
    executable_cache.store(captured.graph, options)
    return executable


def _first_replica(weights: DeviceWeights) -> Dict[str, torch.Tensor]:
    tensors = {name: weights.parameter_of(name, 0) for name in weights.parameters}
    tensors.update({name: weights.buffer_of(name, 0) for name in weights.buffers})
    return tensors


def _check_replay(executable: Executable, inputs: List[torch.Tensor]) -> None:
    """Compare the results of the graph with those of the captured run."""
    if any(not hasattr(node.op, "_schema") for node in executable.graph.nodes):
        return  # user functions are not run just to compare
    recorder = Recorder(False, None)
    with host_generator_kept(), torch.no_grad(), recorder, recorder.paused():
        executable.streams.start(0, 0)
        outputs, grads = executable.run_once(0, [tensor.clone() for tensor in inputs])
    expected_outputs, expected_grads = executable.captured.reference
    for index, (expected, got) in enumerate(zip(expected_outputs, outputs)):
        _require_close(f"output {index}", expected, got)
    among = 0.0 if any(grad.is_meta for grad in expected_grads.values()) else largest(expected_grads.values())
    for name, expected in expected_grads.items():
        _require_close(f"the gradient of {name}", expected, grads[name], among)


def _require_close(what: str, expected: torch.Tensor, got: torch.Tensor, among: float = 0.0) -> None:
    if not expected.is_meta and not alike(expected, got, among=among):
        raise createPoptorchError(
            f"The captured graph does not compute {what} as the model does, so it is not used. "
            "This is a bug in the emulator: please report it with the model."
        )
