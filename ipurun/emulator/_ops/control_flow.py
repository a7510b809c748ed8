"""for_loop and cond: loops and branches on the device.

The Python code of a body runs once, during compilation. The ops of a loop body are logged and issued again for every
further iteration, so the compiled graph contains the unrolled loop. A branch is one op of the graph that runs the body
chosen by the condition. The ops of each body are moved from the graph of the model to a separate graph; changes that a
body made to outside tensors are undone after the capture and happen only in runs that choose that body.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, GraphInput, Value, values_in
from ipurun.emulator._capture.op_kinds import written_arguments
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._capture.structures import tensors_in
from ipurun.emulator._impl import createPoptorchError
from ipurun.emulator._ops.recording import OpLog, active_recorder, call_recorded, logs_muted, refuse_training
from ipurun.emulator._run.checked import replay_maker

Body = Callable[..., Any]


class CapturedBody:
    """The captured body of a branch.

    Args:
        recorder: The recorder of the compile.
        graph: The ops of the body; its inputs are the outside values that it uses.

    Attributes:
        graph: The ops of the body.
        outer: The outside values that the body reads or changes.
        written: The outside values that it changes.
        outputs: Shape and type of the returned tensors.
        is_random: Whether it draws random numbers.
        run: Takes tensors for `outer`, which it may change, and returns the outputs.
    """

    def __init__(self, recorder: Recorder, graph: Graph) -> None:
        storages = graph.storages_written()
        self.graph = graph
        self.outer: List[Value] = [item.value for item in graph.inputs]
        self.written = {value for value in self.outer if graph.specs[value].storage in storages}
        self.outputs = [graph.specs[value][:2] for value in graph.outputs]
        self.is_random = any(node.is_random for node in graph.nodes)
        self.run = replay_maker(recorder.options)(graph, results=graph.outputs)


def trace_body(
    recorder: Recorder, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> Tuple[CapturedBody, Dict[Value, torch.Tensor]]:
    """Run a body's Python once, on copies of its inputs.

    Returns:
        The captured body and the outside tensors that it uses.
    """
    start = len(recorder.graph.nodes)
    log = _UndoneLog(recorder)
    with logs_muted():
        with log:
            returned = function(*[value.clone() for value in inputs])
        outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        values = [recorder.value_of(tensor) for tensor in outputs]
        log.undo_writes()
    body = CapturedBody(recorder, _take_out(recorder.graph, start, values))
    return body, {value: recorder.tensor_of(value) for value in body.outer}


class Branches:
    """A branch in the compiled graph: a pure function that also returns the tensors it changes.

    Args:
        then_body: Runs if the condition is true.
        else_body: Runs otherwise.

    Attributes:
        graphs: The graphs of the two bodies.
        outer: The arguments of the function after the condition.
        written: The values whose new contents follow the outputs in the results.
    """

    def __init__(self, then_body: CapturedBody, else_body: CapturedBody) -> None:
        _require_alike(then_body.outputs, else_body.outputs)
        self._bodies = (then_body, else_body)
        self.graphs = (then_body.graph, else_body.graph)
        self._types = [torch.promote_types(a[1], b[1]) for a, b in zip(then_body.outputs, else_body.outputs)]
        self.outer: List[Value] = sorted({*then_body.outer, *else_body.outer})
        self.written: List[Value] = sorted(then_body.written | else_body.written)
        self.is_random = then_body.is_random or else_body.is_random

    def __call__(self, condition: torch.Tensor, *outer: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        # Meta tensors have no value to choose by; both bodies return the same shapes.
        body = self._bodies[0 if condition.is_meta or bool(condition) else 1]
        tensors = dict(zip(self.outer, outer))
        tensors.update(_copies({value: tensors[value] for value in body.written}))
        results = body.run([tensors[value] for value in body.outer])
        outputs = [result.to(dtype).clone() for result, dtype in zip(results, self._types)]
        return (*outputs, *[tensors[value].clone() for value in self.written])


class _UndoneLog(OpLog):
    """Logs the ops of a body and the previous contents of the tensors that they write to."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._before: List[Tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tensors_in(written_arguments(func._schema, args, kwargs or {})):
            with self._recorder.paused():
                self._before.append((given, given.detach().clone()))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def undo_writes(self) -> None:
        """Undo all writes."""
        with torch.no_grad(), self._recorder.paused():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)


def _take_out(graph: Graph, start: int, outputs: List[Value]) -> Graph:
    """Move the nodes from a position onwards to a separate graph."""
    nodes = graph.nodes[start:]
    del graph.nodes[start:]
    graph.events = [event._replace(position=min(event.position, start)) for event in graph.events]
    made: Set[Value] = set()
    outer: Dict[Value, None] = {}
    for node in nodes:
        outer.update(dict.fromkeys(value for value in node.reads() if value not in made))
        made.update(values_in(node.outputs))
    outer.update(dict.fromkeys(value for value in outputs if value not in made))
    inputs = [GraphInput("input", f"outer_{int(value)}", value) for value in outer]
    return Graph(nodes=nodes, inputs=inputs, outputs=outputs, specs=graph.specs)


def _require_alike(then_outputs: Sequence[Any], else_outputs: Sequence[Any]) -> None:
    shapes = [[shape for shape, _ in outputs] for outputs in (then_outputs, else_outputs)]
    if shapes[0] != shapes[1]:
        raise createPoptorchError(
            "poptorch.cond: both bodies must return the same number of tensors, of the same shapes. "
            f"then_body returns {shapes[0]}, else_body {shapes[1]}."
        )


def _copies(tensors: Dict[Value, torch.Tensor]) -> Dict[Value, torch.Tensor]:
    """Return copies of tensors that share memory in the same way."""
    storages: Dict[int, Any] = {}
    copies = {}
    for value, tensor in tensors.items():
        if tensor.is_meta:
            copies[value] = tensor.clone()
            continue
        key = tensor.untyped_storage()._cdata
        if key not in storages:
            storages[key] = tensor.untyped_storage().clone()
        view = torch.empty(0, dtype=tensor.dtype)
        copies[value] = view.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    return copies


def _as_list(outputs: Any) -> List[torch.Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _check_inputs(op: str, name: str, inputs: Any) -> None:
    expected = f"poptorch.{op} expects input tensors ({name}) to be a list of tensors."
    if not isinstance(inputs, list):
        raise ValueError(f"{expected} (Object is not list)")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{expected} (Object contained in list at index {index} is not torch.tensor)")


def for_loop(count: int, body: Body, inputs: List[torch.Tensor]) -> List[torch.Tensor]:
    """Run `body` `count` times on the device, each time on the results of the previous iteration.

    Args:
        count: Number of iterations.
        body: Function that returns as many tensors as it takes. Outside an executor, it runs only once.
        inputs: Arguments of the first iteration, passed by value.

    Raises:
        ValueError: `inputs` is not a list of tensors.
        poptorch.Error: In training, or if the results do not match the arguments.
    """
    _check_inputs("for_loop", "inputs", inputs)
    recorder = active_recorder()
    if recorder is None:
        return _as_list(body(*[value.clone() for value in inputs]))
    refuse_training(recorder, "for_loop")

    first = [value.clone() for value in inputs]
    with OpLog() as log:
        outputs = _as_list(body(*first))
    _check_carried(first, outputs)
    if count < 1:
        return [value.clone() for value in inputs]
    carried = outputs
    for _ in range(count - 1):
        new_tensor = log.issue_again(first, [value.clone() for value in carried])
        carried = [new_tensor(value) for value in outputs]
    return carried


def _check_carried(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    before = [(tuple(value.shape), value.dtype) for value in inputs]
    after = [(tuple(value.shape), value.dtype) for value in outputs]
    if before != after:
        raise createPoptorchError(
            "poptorch.for_loop: the body must return as many tensors as it takes, of the same shapes and "
            f"types. It takes {before} and returns {after}."
        )


def cond(
    condition: torch.Tensor,
    then_body: Body,
    then_inps: List[torch.Tensor],
    else_body: Body,
    else_inps: List[torch.Tensor],
) -> List[torch.Tensor]:
    """Run one of two bodies, chosen by a run-time value.

    Args:
        condition: Tensor with one element; true chooses `then_body`.
        then_body: Function of `then_inps`.
        then_inps: Its inputs, passed by value.
        else_body: Function of `else_inps`, returning tensors like those of `then_body`.
        else_inps: Its inputs, passed by value.

    Raises:
        ValueError: The inputs are not lists of tensors.
        poptorch.Error: In training, or if the bodies return different numbers or shapes of tensors.
    """
    _check_inputs("cond", "then_inps", then_inps)
    _check_inputs("cond", "else_inps", else_inps)
    recorder = active_recorder()
    if recorder is None:
        body, inputs = (then_body, then_inps) if bool(condition) else (else_body, else_inps)
        return _as_list(body(*[value.clone() for value in inputs]))
    refuse_training(recorder, "cond")

    chosen, tensors = trace_body(recorder, then_body, then_inps)
    other, more_tensors = trace_body(recorder, else_body, else_inps)
    tensors.update(more_tensors)
    branches = Branches(chosen, other)
    flag = condition.reshape(()).to(torch.bool)
    results = call_recorded(recorder, branches, [flag, *[tensors[value] for value in branches.outer]], name="cond")
    num_outputs = len(results) - len(branches.written)
    with torch.no_grad():
        for value, result in zip(branches.written, results[num_outputs:]):
            tensors[value].copy_(result)
    return list(results[:num_outputs])
