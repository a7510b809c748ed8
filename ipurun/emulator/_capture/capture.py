"""Capture a model: run forward (and backward in training) once and record a graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import torch
import torch.utils.checkpoint

from ipurun.emulator._capture.functions import FunctionWatcher, attention_by_parts
from ipurun.emulator._capture.graph import Graph, Node, Value, prune
from ipurun.emulator._capture.host_tensors import attribute_tensors
from ipurun.emulator._capture.losses import find_loss, give_device_shapes
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.repeated import repeated_layers
from ipurun.emulator._capture.saved_tensors import SavedTensors
from ipurun.emulator._capture.structures import rebuild, tensors_in
from ipurun.emulator._ops.blocks import adopted_blocks


class _PlainFunction:
    """Call the checkpointed function directly, in place of the autograd function of `use_reentrant=True`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _plain_generator(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing before and after the call that torch makes between two steps of its generator."""
    yield


def _plain_call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# `checkpoint` itself cannot be replaced: models import it by name. It looks these names up at each call.
_STAND_INS: Dict[str, Any] = {
    "CheckpointFunction": _PlainFunction,
    "_checkpoint_without_reentrant_generator": _plain_generator,
    "_checkpoint_without_reentrant": _plain_call,  # torch before 2.1
}


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function and nothing else.

    The backend chooses what a device keeps for the backward pass (`autoRecomputation`,
    `poptorch.recomputationCheckpoint`). Torch's ways of running a part of the model twice do not work in a capture:
    one rejects `torch.autograd.grad`, the other draws new random numbers.
    """
    module = torch.utils.checkpoint
    originals = {name: getattr(module, name) for name in _STAND_INS if hasattr(module, name)}
    for name in originals:
        setattr(module, name, _STAND_INS[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


@dataclasses.dataclass
class Captured:
    """A graph and what forward returned when it was captured.

    Attributes:
        graph: The captured program.
        returned: The structure that forward returned, with empty tensors.
        output_values: The value of each tensor in the structure, in order.
        reference: Results of the captured run: outputs, then gradients by name.
    """

    graph: Graph
    returned: Any
    output_values: List[Value]
    reference: Tuple[List[torch.Tensor], Dict[str, torch.Tensor]]


def capture(
    call: Callable[[], Any],
    *,
    parameters: Dict[str, torch.Tensor],
    buffers: Dict[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    training: bool,
    options: Any,
    modules: Optional[Dict[str, torch.nn.Module]] = None,
    check_op: Optional[Callable[[Node], None]] = None,
    before_backward: Optional[Callable[[Recorder, Any], None]] = None,
    forward_only: bool = False,
    copy_layers: bool = False,
    refusals: Optional[Dict[str, str]] = None,
) -> Captured:
    """Run a model once and return what it did as a graph.

    Args:
        call: Runs forward on `inputs` and returns its result.
        parameters: The parameters that forward reads, by name.
        buffers: The buffers that forward reads and may change, by name.
        inputs: The tensors that differ between calls.
        training: Whether to look for the loss and add the backward pass.
        options: The options of the executor.
        modules: The modules by name, to find the one that an operation belongs to.
        check_op: Raises for an operation that cannot be lowered.
        before_backward: Called with the recorder and the result of forward before the backward pass.
        forward_only: Whether to leave out the backward pass in training. `Graph.grads` then has the trained parameters
            themselves; `Graph.saved` tells what the backward pass would read.
        copy_layers: Whether to copy the operations of equal layers instead of running each: no value is right then.
        refusals: Where to note what an IPU would refuse, with its line, instead of raising it.

    Raises:
        Error: If a graph cannot represent what the model does, or if training finds no loss.
    """
    recorder = Recorder(training, options, check_op, refusals)
    declare_inputs(recorder, parameters, buffers, inputs)
    with capturing(recorder, modules or {}):
        copying = repeated_layers(recorder, modules or {}) if copy_layers else contextlib.nullcontext()
        with recording(recorder, keep=training and not forward_only), copying:
            returned = call()
            tensors = list(tensors_in(returned))
            if before_backward is not None:
                before_backward(recorder, returned)
            grads: Dict[str, torch.Tensor] = {}
            if training and forward_only:
                recorder.graph.loss = recorder.value_of(find_loss(recorder, tensors))
                grads = _trained(recorder, parameters)
            elif training:
                grads = _backward(recorder, tensors, parameters)
        output_values = values_returned(recorder, tensors)
        graph = recorder.graph
        graph.outputs = output_values
        graph.grads = {name: recorder.value_of(grad) for name, grad in grads.items()}
        results = [tensor.detach().clone() for tensor in tensors]
    recorder.finish()
    for index in give_device_shapes(graph):
        results[index] = results[index].reshape(1)
    reference = (results, {name: g.detach() for name, g in grads.items()})
    prune(graph)
    return Captured(graph, template_of(returned), output_values, reference)


def declare_inputs(
    recorder: Recorder,
    parameters: Dict[str, torch.Tensor],
    buffers: Dict[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> None:
    """Declare what a model reads from outside."""
    for name, tensor in parameters.items():
        recorder.add_input("parameter", name, tensor)
    for name, tensor in buffers.items():
        recorder.add_input("buffer", name, tensor)
    for index, tensor in enumerate(inputs):
        recorder.add_input("input", f"input_{index}", tensor)


@contextlib.contextmanager
def capturing(recorder: Recorder, modules: Dict[str, torch.nn.Module]) -> Iterator[None]:
    """Change torch and the model for one capture, and restore both afterwards."""
    recorder.host.declare_attributes(attribute_tensors(modules))
    plain = _without_mask_check(modules)
    blocks = adopted_blocks()
    with _ConstantGuard(recorder), _module_paths(recorder, modules), attention_by_parts():
        with plain, blocks:
            yield


@contextlib.contextmanager
def recording(recorder: Recorder, keep: Optional[bool] = None) -> Iterator[None]:
    """Record what runs meanwhile, forward and then backward.

    Args:
        recorder: The recorder.
        keep: Whether a backward pass follows; None: in training.
    """
    with _without_validation(), _seeded_by_options(), plain_checkpoints(), collector_off(), recorder:
        # Autograd is on in inference too: a model may read `grad_fn` and `is_leaf`.
        keep = recorder.training if keep is None else keep
        with torch.enable_grad(), SavedTensors(keep, recorder.note_saved) as saved, FunctionWatcher(recorder, saved):
            yield


def values_returned(recorder: Recorder, tensors: Sequence[torch.Tensor]) -> List[Value]:
    """Return the values of the tensors that forward returned; warn about those that are on the host."""
    values = [recorder.value_of(tensor) for tensor in tensors]
    if any(recorder.host.holds(recorder.graph.specs[value]) for value in values):
        warnings.warn("Output expected to be on the IPU but is on cpu", stacklevel=3)
    return values


def template_of(returned: Any) -> Any:
    """Return the structure of a result with empty tensors: its own would keep all activations alive."""
    return rebuild(returned, (torch.empty(0) for _ in tensors_in(returned)))


def _backward(
    recorder: Recorder, returned: Sequence[torch.Tensor], parameters: Dict[str, torch.Tensor]
) -> Dict[str, torch.Tensor]:
    loss = find_loss(recorder, returned)
    recorder.graph.loss = recorder.value_of(loss)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trained or not loss.requires_grad:
        return {}
    with recorder.paused():
        seed = torch.ones_like(loss)
    recorder.add_input("seed", "loss_scaling", seed)
    if has_own_gradients([loss], trained.values()):
        recorder.graph.has_own_gradients = True
    recorder.in_backward = True
    grads = gradients(loss, list(trained.values()), seed)
    return {name: grad for name, grad in zip(trained, grads) if grad is not None}


def _trained(recorder: Recorder, parameters: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Return the parameters that the loss depends on through operations with a gradient."""
    graph = recorder.graph
    assert graph.loss is not None
    reached = {graph.specs[graph.loss].storage}
    for node in reversed(graph.nodes):
        has_gradient = node.grad_enabled and node.name != "detach"
        if has_gradient and any(graph.specs[value].storage in reached for value in node.writes()):
            reached.update(graph.specs[value].storage for value in node.reads())
    values = {name: recorder.value_of(tensor) for name, tensor in parameters.items() if tensor.requires_grad}
    return {name: parameters[name] for name, value in values.items() if graph.specs[value].storage in reached}


def gradients(
    loss: torch.Tensor, parameters: List[torch.Tensor], seed: torch.Tensor
) -> Sequence[Optional[torch.Tensor]]:
    """Call `torch.autograd.grad` without its check of the seed's shape, which loads sympy."""
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        return torch.autograd.grad(loss, parameters, grad_outputs=seed, allow_unused=True)
    return run((loss,), (seed,), False, False, tuple(parameters), True, accumulate_grad=False)


def has_own_gradients(tensors: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the backward pass of some tensors calls a Python function or a hook of a parameter."""
    if any(parameter._backward_hooks for parameter in parameters):
        return True
    seen: Set[Any] = set()
    pending = [tensor.grad_fn for tensor in tensors]
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(function)
        pending.extend(following for following, _ in function.next_functions)
    return False


def forget_history(tensor: torch.Tensor) -> None:
    """Make a tensor a leaf again after a capture changed it in place under autograd."""
    if tensor.grad_fn is not None:
        tensor.detach_()


class _ConstantGuard:
    """Restores plain tensors that the model overwrote with device results: on a device they are constants.

    Operations on plain tensors alone run on the host, once per compile, and their changes are kept.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, failure: Any, *exc: Any) -> None:
        graph = self._recorder.graph
        written = graph.storages_written()
        for value, original in graph.constants.items():
            if graph.specs[value].storage not in written:
                continue
            tensor = self._recorder.tensor_of(value)
            forget_history(tensor)
            if failure is not None or self._recorder.varies(tensor):
                with torch.no_grad():
                    tensor.data.copy_(original)


@contextlib.contextmanager
def _module_paths(recorder: Recorder, modules: Dict[str, torch.nn.Module]) -> Iterator[None]:
    names = {id(module): name for name, module in modules.items()}
    stack = recorder.module_stack

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        if id(module) in names:
            recorder.calls.append((names[id(module)], len(recorder.graph.nodes)))
        stack.append(names.get(id(module), stack[-1]))

    def leave(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if len(stack) > 1:
            stack.pop()

    before = torch.nn.modules.module.register_module_forward_pre_hook(enter)
    after = torch.nn.modules.module.register_module_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def _without_mask_check(modules: Dict[str, torch.nn.Module]) -> Iterator[None]:
    """Stop torch's transformers from comparing a mask with the causal one, which would read its values.

    The comparison only selects a faster kernel; the mask is applied either way.
    """
    flags = {torch.nn.TransformerEncoder: "is_causal", torch.nn.TransformerDecoder: "tgt_is_causal"}
    handles = []
    for module in modules.values():
        flag = next((flag for kind, flag in flags.items() if isinstance(module, kind)), None)
        parameters = list(inspect.signature(module.forward).parameters) if flag is not None else []
        if flag in parameters:
            hook = functools.partial(_pass_not_causal, flag, parameters.index(flag))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pass_not_causal(
    flag: str, position: int, module: torch.nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any]]]:
    if len(args) > position or kwargs.get(flag) is not None:
        return None
    return args, {**kwargs, flag: False}


@contextlib.contextmanager
def _without_validation() -> Iterator[None]:
    """Turn off the checks of torch.distributions, which read values back to Python."""
    distribution = torch.distributions.Distribution
    before = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(before)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Turn garbage collection off: it would clear the weak references that identify tensors.

    A tensor in a garbage cycle (such as a closure that calls itself) survives if autograd still needs it, but
    loses its weak references.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _seeded_by_options() -> Iterator[None]:
    """Ignore calls of `torch.manual_seed` in forward: a device uses the seed of the options."""
    original = torch.manual_seed
    torch.manual_seed = torch.random.manual_seed = lambda seed: torch.default_generator
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = original
