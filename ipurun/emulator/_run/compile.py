"""Compile a model for the arguments of a call."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional

import torch

from ipurun.emulator._capture import op_kinds
from ipurun.emulator._capture.capture import Captured, capture
from ipurun.emulator._capture.forward_trace import ForwardTrace, trace_forward
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
from ipurun.emulator._run.executable_cache import CacheUse
from ipurun.emulator._run.kernels import keep_freed_memory
from ipurun.emulator.processes import Processes


@torch.inference_mode(False)  # inference mode would not decompose composite operations
def compile_model(
    model: Callable[..., Any],
    arguments: Arguments,
    *,
    options: Any,
    training: bool,
    seed: int,
    groups: Optional[Dict[str, ReplicaGroups]] = None,
    optimizer: str = "",
    export: Optional[executable_cache.ExportSlot] = None,
    processes: Optional[Processes] = None,
) -> Executable:
    """Capture a model on the first micro-batch of a call, or load its graph, and return its executable.

    Args:
        model: The module (or function) whose forward is captured.
        arguments: The arguments of the call, converted for the device.
        options: The executor's options.
        training: Whether to find the loss and add the backward pass.
        seed: Seed of the random operations.
        groups: Parameters whose values differ between replicas.
        optimizer: What executables of a device hold of the optimizer: its kind and its constant values.
        export: Takes the place of the cache if the program is exported to, or loaded from, a file.
        processes: The processes that train together; None: this one alone.

    Raises:
        Error: If the model or the options cannot be compiled. The model is left unchanged.
    """
    keep_freed_memory()
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
    originals = [tensor.clone() for tensor in micro_batch]
    program = _Program(model, arguments.with_tensors(micro_batch), options, training, weights, layout)
    slot = program.find_slot(optimizer) if export is None else export
    with executable_cache.locked(slot):
        options._execution_strategy.onStartTracing()
        with host_generator_kept():
            streams.start(0, 0)
            captured = slot.load(program.trace)
        is_loaded = captured is not None
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        if captured is None:
            options._execution_strategy.onStartTracing()
            with host_generator_kept():
                streams.start(0, 0)
                captured = program.capture(slot)
        options._execution_strategy.onEndTracing()
        data = slot.prepare(captured)
        log_placement(captured.graph, options)
        log_program(captured.graph, options)
        add_recomputation(captured.graph, recomputation_mode(captured.graph, options))
        make_replay, anchored = replay_maker(options), options.anchored_tensors
        executable = Executable(
            captured, weights, layout, streams, anchored, make_replay, shelf=slot.shelf, processes=processes
        )
        checks.check_named_buffers(options, captured.graph)
        checks.check_buffers(captured.graph.buffers_written_in_place(), options, layout)
        if layout.replicas > 1:
            weights.separate_buffers(captured.graph.buffers_written())
        weights.upload(host, constants=True)
        if not is_loaded:
            # Compare with the same kernels as in the captured run, without stochastic rounding or floating-point
            # exceptions.
            check = Executable(captured, weights, layout, streams, make_replay=ReplayMaker(as_captured=True))
            _check_replay(check, originals)
            weights.upload(host, constants=True)
            captured.reference = ([], {})
            slot.store(data, time.perf_counter() - begun, time.thread_time() - cpu_begun)
    executable.cache_use = slot.use
    return executable


@torch.inference_mode(False)
def look_up(
    model: Callable[..., Any],
    arguments: Arguments,
    *,
    options: Any,
    training: bool,
    groups: Optional[Dict[str, ReplicaGroups]] = None,
    optimizer: str = "",
) -> CacheUse:
    """Return what the cache would do for a compile, which is not done; `arguments` are those of one micro-batch."""
    parameters, buffers = named_tensors(model)
    layout = BatchLayout.of(options)
    weights = DeviceWeights(parameters, buffers, layout.replicas, groups)
    program = _Program(model, arguments, options, training, weights, layout)
    slot = program.find_slot(optimizer)
    options._execution_strategy.onStartTracing()
    with host_generator_kept():
        slot.look_up(program.trace)
    return slot.use


class _Program:
    """A model with the arguments of one micro-batch, to be traced or captured."""

    def __init__(
        self,
        model: Callable[..., Any],
        arguments: Arguments,
        options: Any,
        training: bool,
        weights: DeviceWeights,
        layout: BatchLayout,
    ) -> None:
        self._model = model
        self._arguments = arguments
        self._training = training
        self._options = options
        self._weights = weights
        self._layout = layout
        self._parameters, self._buffers = named_tensors(model)

    def find_slot(self, optimizer: str) -> executable_cache.Slot:
        """Return the place of the program in the cache; `optimizer` describes the optimizer's constants."""
        tensors = [*self._parameters.items(), *self._buffers.items()]
        shapes = [(name, tuple(item.shape), item.dtype, item.requires_grad) for name, item in tensors]
        inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in self._arguments.tensors()]
        groups = sorted((name, repr(group)) for name, group in self._weights.groups.items())
        return executable_cache.find_slot(self._options, self._training, (shapes, inputs, groups, optimizer))

    def trace(self) -> ForwardTrace:
        """Run the Python code of forward without its computations."""
        return self._on_device(trace_forward, self._check_forward)

    def capture(self, slot: executable_cache.Slot) -> Captured:
        """Run the model and record its graph."""

        def before_backward(recorder: Recorder, returned: Any) -> None:
            self._check_forward(recorder, returned)
            slot.observe(recorder, returned)

        return self._on_device(capture, before_backward)

    def _on_device(self, run: Callable[..., Any], before_backward: Callable[[Recorder, Any], None]) -> Any:
        model, arguments = self._model, self._arguments
        with on_device(model, _first_replica(self._weights)):
            return run(
                lambda: model(*arguments.positional, **arguments.named),
                parameters=self._parameters,
                buffers=self._buffers,
                inputs=arguments.tensors(),
                training=self._training,
                options=self._options,
                modules=dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {},
                check_op=op_kinds.op_checker(),
                before_backward=before_backward,
            )

    def _check_forward(self, recorder: Recorder, returned: Any) -> None:
        names = self._arguments.tensor_names()
        checks.check_forward(recorder, returned, self._layout, training=self._training, input_names=names)


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
