"""Measure every operation of a call, without changing what the call computes.

A call may compute several micro-batches at once, so its own operations are not those of an IPU. They are measured in a
separate pass over one micro-batch, on copies, whose results are dropped; only the weight update is measured in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node, Placement, Value, map_values, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._options.strategies import PipelinedExecution, ShardedExecution
from ipurun.emulator._run.checked import Interpreter
from ipurun.emulator._run.executable import Executable, host_generator_kept
from ipurun.emulator._run.half import in_float_storage
from ipurun.emulator._run.kernels import with_quick_kernels

__all__ = ["CallTimes", "OperationRecorder", "OperationTime", "UpdateTime"]

_RESHAPES = names_in(
    "_unsafe_view as_strided clone detach expand permute reshape squeeze sum t transpose unsqueeze view"
)
_PASSES = 2  # the shorter time counts: the first pass fills caches
_WRAPPER = "model."  # what ipurun and PopTorch's training models put before the names of the user's modules


@dataclass(frozen=True)
class OperationTime:
    """One operation of one micro-batch.

    Attributes:
        name: Name of the operation, such as ``addmm``.
        kind: ``forward``, ``recompute`` or ``backward``.
        module: Dotted path of the module that called it; that of its forward operation for a backward one.
        source: `file:line` of the model that called it, "" where unknown.
        stage: Forward stage.
        phase: Phase of a phased execution.
        ipu: Number of the IPU in a replica.
        seconds: Time on this CPU; 0 for code of the user that is not run just to measure it.
    """

    name: str
    kind: str
    module: str
    source: str
    stage: int
    phase: int
    ipu: int
    seconds: float


@dataclass(frozen=True)
class UpdateTime:
    """The update of one parameter; its time is its share by size of all updates, which are measured together."""

    parameter: str
    ipu: int
    seconds: float


@dataclass
class CallTimes:
    """Measurements of one call.

    Attributes:
        begin: When the call began, by `time.perf_counter`.
        end: When it ended, without the pass that only measures.
        strategy: ``pipelined``, ``sharded`` or ``phased``.
        updates: Weight updates in the call; in inference, 1.
        micro_batches: Micro-batches of each replica and update.
        replicas: Replicas.
        training: Whether weights are updated.
        operations: The operations of one micro-batch, in order.
        accumulate_seconds: Time to add the gradients of a micro-batch to those before.
        parameters: The update of each parameter.
    """

    begin: float
    end: float
    strategy: str
    updates: int
    micro_batches: int
    replicas: int
    training: bool
    operations: List[OperationTime] = field(default_factory=list)
    accumulate_seconds: float = 0.0
    parameters: List[UpdateTime] = field(default_factory=list)


class OperationRecorder:
    """Runs the calls of an executor and measures their operations; `calls` has one entry for each.

    Args:
        before_run: Called between the pass that only measures and the call itself.
    """

    def __init__(self, before_run: Optional[Callable[[], None]] = None) -> None:
        self.calls: List[CallTimes] = []
        self._before_run = before_run

    def run(self, executable: Executable, options: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """Run one call, and return its results."""
        operations = _measure(executable, options, tensors)
        optimizer = executable.optimizer
        timed = _TimedOptimizer(optimizer)
        if optimizer is not None:
            executable.optimizer = timed
        if self._before_run is not None:
            self._before_run()
        begin = time.perf_counter()
        try:
            result = executable.run(tensors)
        finally:
            executable.optimizer = optimizer
        layout = executable.layout
        training = optimizer is not None
        updates = layout.device_iterations if training else 1
        micro_batches = layout.accumulation if training else layout.device_iterations
        found = CallTimes(
            begin,
            time.perf_counter(),
            _strategy_name(options),
            updates,
            micro_batches,
            layout.replicas,
            training,
            operations,
            timed.accumulating / max(1, updates * micro_batches * layout.replicas),
        )
        if training:
            found.parameters = _update_times(executable, timed.applying / updates)
        self.calls.append(found)
        return result


class _TimedOptimizer:
    """Measures the two operations of a device's optimizer, and passes on everything else."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.accumulating = 0.0
        self.applying = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def accumulate(self, *args: Any, **kwargs: Any) -> None:
        begin = time.perf_counter()
        self._optimizer.accumulate(*args, **kwargs)
        self.accumulating += time.perf_counter() - begin

    def apply(self) -> None:
        begin = time.perf_counter()
        self._optimizer.apply()
        self.applying += time.perf_counter() - begin


def _measure(executable: Executable, options: Any, tensors: Sequence[torch.Tensor]) -> List[OperationTime]:
    """Run the operations of the first micro-batch on copies, and return their times."""
    graph = _annotated(executable.graph)
    users = {id(node.op) for node in graph.nodes if not _is_pure(node)}
    results = [*graph.outputs, *graph.grads.values()]
    rounds = bool(options._Popart.options.get("enableStochasticRounding", False))
    graph, results = in_float_storage(graph, results, stochastic=rounds)
    graph = with_quick_kernels(graph, results)
    shortest: Dict[int, float] = {}

    def timed(index: int, node: Node) -> Node:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = node.op(*args, **kwargs)
            seconds = time.perf_counter() - begin
            shortest[index] = min(seconds, shortest.get(index, seconds))
            return result

        def skip(*args: Any, **kwargs: Any) -> Any:
            return _empty_results(graph, node)

        return dataclasses.replace(node, op=skip if id(node.op) in users else run)

    nodes = [timed(index, node) for index, node in enumerate(graph.nodes)]
    interpreter = Interpreter(dataclasses.replace(graph, nodes=nodes), results, checks=False)
    with torch.no_grad(), host_generator_kept():
        for _ in range(_PASSES):
            executable.streams.start(0, 0)
            interpreter(_copied_arguments(executable, tensors))
    return [
        OperationTime(
            name=node.name,
            kind="recompute" if node.is_recomputed else "backward" if node.is_backward else "forward",
            module=_without_wrapper(node.module_path),
            source=node.source,
            stage=node.placement.stage_id,
            phase=node.placement.phase_id,
            ipu=node.placement.ipu_id,
            seconds=shortest.get(index, 0.0),
        )
        for index, node in enumerate(graph.nodes)
    ]


def _annotated(graph: Graph) -> Graph:
    """Return the graph with the module and the placement that each node belongs to."""
    nodes = [
        dataclasses.replace(node, module_path=module, placement=place)
        for node, (module, place) in zip(graph.nodes, _modules_and_places(graph))
    ]
    return dataclasses.replace(graph, nodes=nodes)


def _is_pure(node: Node) -> bool:
    """Whether running an operation once more has no effect: functions of the user may print or count."""
    return hasattr(node.op, "_schema") or bool(node.bodies)


def _empty_results(graph: Graph, node: Node) -> Any:
    def empty(value: Value) -> torch.Tensor:
        return torch.zeros(graph.specs[value].shape, dtype=graph.specs[value].dtype)

    return map_values(empty, node.outputs)


def _copied_arguments(executable: Executable, tensors: Sequence[torch.Tensor]) -> List[Any]:
    """Return the arguments of one micro-batch; what the graph writes to is copied."""
    graph = executable.graph
    inputs = [executable.layout.cut(tensor)[0] for tensor in tensors]
    arguments = executable.arguments(0, inputs, executable._seed())
    written = graph.storages_written()
    items = [item for item in graph.inputs if item.kind != "constant"]
    return [
        argument.clone() if argument is not None and graph.specs[item.value].storage in written else argument
        for item, argument in zip(items, arguments)
    ]


def _modules_and_places(graph: Graph) -> List[Tuple[str, Placement]]:
    """Return the module and the placement of each node.

    A backward node that computes the gradient of a parameter belongs to the module of that parameter, any other one to
    the module of the forward values that it reads, or, if it reads only gradients, to the one they come from.
    """
    module_of: Dict[Value, str] = {item.value: _owner(item.name) for item in graph.inputs_of("parameter", "buffer")}
    gradients: Set[Value] = {item.value for item in graph.inputs_of("seed")}
    parameters, places = _parameters_of_gradients(graph), _parameter_places(graph)
    found = []
    for node in graph.nodes:
        reads = list(node.reads())
        module, place = node.module_path, node.placement
        if node.is_backward and not node.is_recomputed:
            known = [value for value in reads if value in module_of]
            forward = [module_of[value] for value in known if value not in gradients]
            helped = [parameters[value] for value in values_in(node.outputs) if value in parameters]
            module = [*map(_owner, helped), *forward[-1:], *(module_of[value] for value in known), ""][0]
            place = places.get(helped[0], place) if helped else place
        is_gradient = any(value in gradients for value in reads)
        for value in values_in(node.outputs):
            module_of.setdefault(value, module)
            if is_gradient:
                gradients.add(value)
        found.append((module, place))
    return found


def _parameters_of_gradients(graph: Graph) -> Dict[Value, str]:
    """Return the parameter whose gradient a value is, possibly in another shape or before a sum over a batch."""
    found = {value: name for name, value in graph.grads.items()}
    for node in reversed(graph.nodes):
        if node.is_backward and node.name in _RESHAPES:
            names = [found[value] for value in values_in(node.outputs) if value in found]
            found.update({value: names[0] for value in node.reads() if names and value not in found})
    # A gradient of activations that is summed for a bias is read by other nodes as well.
    readers: Dict[Value, int] = {}
    for node in graph.nodes:
        for value in set(node.reads()):
            readers[value] = readers.get(value, 0) + 1
    final = set(graph.grads.values())
    return {value: name for value, name in found.items() if value in final or readers.get(value, 0) == 1}


def _parameter_places(graph: Graph) -> Dict[str, Placement]:
    """Return where each parameter is read first."""
    places: Dict[Value, Placement] = {}
    for node in graph.nodes:
        for value in node.reads():
            places.setdefault(value, node.placement)
    return {item.name: places.get(item.value, Placement()) for item in graph.inputs_of("parameter")}


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _update_times(executable: Executable, seconds: float) -> List[UpdateTime]:
    graph, places = executable.graph, _parameter_places(executable.graph)
    sizes = {name: executable.weights.parameters[name].numel() for name in graph.grads}
    total = sum(sizes.values())
    return [
        UpdateTime(_without_wrapper(name), places[name].ipu_id, seconds * size / total) for name, size in sizes.items()
    ]


def _without_wrapper(path: str) -> str:
    return path[len(_WRAPPER) :] if path.startswith(_WRAPPER) else path


def _strategy_name(options: Any) -> str:
    strategy = options._execution_strategy
    if isinstance(strategy, ShardedExecution):
        return "sharded"
    return "pipelined" if isinstance(strategy, PipelinedExecution) else "phased"


@contextlib.contextmanager
def recorded(executor: Any, before_run: Optional[Callable[[], None]] = None) -> Iterator[List[CallTimes]]:
    """Measure the calls that an executor makes inside; see `OperationRecorder`."""
    recorder = OperationRecorder(before_run)
    executor.operation_recorder = recorder
    try:
        yield recorder.calls
    finally:
        executor.operation_recorder = None
