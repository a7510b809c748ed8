"""Compute several micro-batches of a weight update at once, if the results are the same.

The forward operations are batched with vmap, which keeps micro-batches separate by construction, and the operations of
vmap and autograd are recorded as a second graph. It is used only if its results on real data equal those of
micro-batches run one by one.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, needed_nodes, prune, values_in
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._impl import Error
from ipurun.emulator._logging import logger
from ipurun.emulator._run.replay import Replay, generate

# Limit for the activations of micro-batches computed at once, beyond those of a single one.
_MEMORY_BUDGET_BYTES = 24 * 2**20
_MOST_AT_ONCE = 16


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest finite magnitude in some tensors, 0 if there is none."""
    sizes = (t.detach().abs().nan_to_num(0.0, 0.0, 0.0) for t in tensors if t.is_floating_point() and t.numel())
    return max((float(size.max()) for size in sizes), default=0.0)


def alike(expected: torch.Tensor, got: torch.Tensor, *, among: float = 0.0) -> bool:
    """Whether a result equals the expected one up to rounding; integers must be equal.

    Args:
        expected: The result of one computation.
        got: The result of the other.
        among: Magnitude of the values that the result was computed from. If they cancel, as in the gradient of a
            bias before a norm, only their rounding errors are left.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    tolerance = 1e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-4
    smallest = tolerance * max(largest([expected]), 1e-8) + 8 * torch.finfo(expected.dtype).eps * among
    return torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=smallest, equal_nan=True)


def can_run_together(graph: Graph) -> bool:
    """Whether the micro-batches of a graph can be computed at once.

    Not if it has random operations, which use a separate stream for each micro-batch, or writes tensors, which carry
    state to the next one. Nor if autograd was off in places or called hooks or functions of the user: the
    recorded backward pass then differs from that of the recorded forward operations.
    """
    if graph.has_own_gradients:
        return False
    written = graph.storages_written()
    outside = {graph.specs[item.value].storage for item in graph.inputs}
    if written & outside:
        return False
    for node in graph.nodes:
        if node.is_random or not hasattr(node.op, "_schema") or not hasattr(node.op, "overloadpacket"):
            return False
        if graph.grads and not node.is_backward and not node.grad_enabled:
            return False
    return all(spec.dtype not in (torch.float16, torch.bfloat16) for spec in graph.specs.values())


def batch_size_for(graph: Graph, micro_batches: int) -> int:
    """Return the number of micro-batches to compute at once: a divisor of their total within the memory budget."""
    sizes: Dict[int, int] = {}
    for node in graph.nodes:
        for value in values_in(node.outputs):
            spec = graph.specs[value]
            sizes[spec.storage] = max(sizes.get(spec.storage, 0), spec.num_bytes)
    most = min(_MOST_AT_ONCE, micro_batches, max(1, _MEMORY_BUDGET_BYTES // max(1, sum(sizes.values()))))
    divisors = [size for size in range(1, most + 1) if micro_batches % size == 0]
    return divisors[-1]


class Together:
    """A graph that computes several micro-batches at once.

    Args:
        graph: The graph of one micro-batch.
        size: Number of micro-batches to compute at once.
        arguments: Arguments of `graph` for one micro-batch: all inputs but the constants, in order.

    Raises:
        RuntimeError: If torch cannot batch an operation of the graph.
    """

    def __init__(self, graph: Graph, size: int, arguments: Sequence[torch.Tensor]) -> None:
        self.size = size
        self._names = list(graph.grads)
        self._num_outputs = len(graph.outputs)
        self._items = [item for item in graph.inputs if item.kind != "constant"]
        batched = _capture_batched(graph, size, self._items, arguments)
        self._replay = generate(batched, alias_detach=True)

    def run(
        self, arguments: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], seed: Optional[torch.Tensor]
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Return the outputs with a leading dimension for micro-batches, and the summed gradients.

        Args:
            arguments: Arguments for one micro-batch; only parameters and buffers are used.
            inputs: The inputs with a leading dimension for micro-batches.
            seed: Gradient of the loss of one micro-batch.
        """
        results = self._replay(_batched_arguments(self._items, arguments, inputs, seed, self.size))
        return results[: self._num_outputs], dict(zip(self._names, results[self._num_outputs :]))


def _batched_arguments(
    items: Sequence[Any],
    arguments: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    seed: Optional[torch.Tensor],
    size: int,
) -> List[torch.Tensor]:
    remaining = iter(inputs)
    result = []
    for item, argument in zip(items, arguments):
        if item.kind == "input":
            result.append(next(remaining))
        elif item.kind == "seed":
            assert seed is not None
            result.append(seed.expand(size, *seed.shape))
        else:
            result.append(argument)
    return result


def _capture_batched(graph: Graph, size: int, items: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Graph:
    results: List[Value] = list(graph.outputs)
    if graph.grads:
        assert graph.loss is not None
        results.append(graph.loss)
    forward: List[Node] = needed_nodes(graph, [n for n in graph.nodes if not n.is_backward], results)
    call = generate(graph, nodes=forward, results=results, alias_detach=False)
    recorder = Recorder(False, None)
    tensors: List[torch.Tensor] = []
    for item, argument in zip(items, arguments):
        tensor = argument.detach()
        if item.kind in ("input", "seed"):
            tensor = tensor.expand(size, *tensor.shape).contiguous()
        elif item.kind == "parameter" and item.name in graph.grads:
            tensor.requires_grad_()
        recorder.add_input(item.kind, item.name, tensor)
        tensors.append(tensor)
    dimensions = tuple(0 if item.kind == "input" else None for item in items)
    trained = {item.name: t for item, t in zip(items, tensors) if t.requires_grad}
    seeds = [tensor for item, tensor in zip(items, tensors) if item.kind == "seed"]
    with torch.set_grad_enabled(bool(trained)), recorder:
        placed = [t if item.kind != "seed" else t[0] for item, t in zip(items, tensors)]
        outputs = torch.func.vmap(lambda *args: call(args), in_dims=dimensions)(*placed)
        grads: Tuple[torch.Tensor, ...] = ()
        if trained:
            recorder.in_backward = True
            ordered = [trained[name] for name in graph.grads]
            grads = torch.autograd.grad(outputs[-1], ordered, grad_outputs=seeds[0])
    batched = recorder.graph
    batched.outputs = [recorder.value_of(tensor) for tensor in outputs[: len(graph.outputs)]]
    batched.grads = {name: recorder.value_of(grad) for name, grad in zip(graph.grads, grads)}
    recorder.finish()
    prune(batched)
    return batched


class ChunkRunner:
    """Runs chunks of micro-batches at once, if the results equal those of one by one.

    Both methods are run and compared on the first chunk of the first call. All chunks, including those of that call,
    then use the same method, so that a resumed run rounds like an uninterrupted one.

    Args:
        graph: The graph of one micro-batch.
        replay: Computes one micro-batch and returns outputs, then gradients.
        enabled: False to always run one by one.
    """

    def __init__(self, graph: Graph, replay: Replay, enabled: bool) -> None:
        self._graph = graph
        self._replay = replay
        self._possible = enabled and can_run_together(graph)
        self._together: Optional[Together] = None

    def disable(self) -> None:
        """Run one by one from now on."""
        self._possible = False
        self._together = None

    def size_for(
        self,
        micro_batches: int,
        inputs_of: Callable[[int], List[torch.Tensor]],
        arguments: Callable[..., List[Any]],
        seed: Optional[torch.Tensor],
    ) -> int:
        """Return the number of micro-batches to compute at once, 1 for one by one.

        Args:
            micro_batches: Number of micro-batches per weight update.
            inputs_of: Returns the inputs of a micro-batch by its index.
            arguments: Returns the arguments of the graph: ``arguments(replica, inputs, seed)``.
            seed: Gradient of the loss of one micro-batch.
        """
        if self._possible and self._together is None:
            size = batch_size_for(self._graph, micro_batches)
            self._possible = size > 1
            if self._possible:
                self._try(size, [inputs_of(number) for number in range(size)], arguments, seed)
        return 1 if self._together is None else self._together.size

    def run(
        self, arguments: Sequence[Any], inputs: Sequence[torch.Tensor], seed: Optional[torch.Tensor]
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Compute a chunk at once; see `Together.run`."""
        assert self._together is not None
        return self._together.run(arguments, inputs, seed)

    def _try(
        self,
        size: int,
        inputs: List[List[torch.Tensor]],
        arguments: Callable[..., List[Any]],
        seed: Optional[torch.Tensor],
    ) -> None:
        first = arguments(0, inputs[0], seed)
        try:
            together = Together(self._graph, size, first)
            stacked = [torch.stack(list(column)) for column in zip(*inputs)]
            self._compare(
                [self._replay(arguments(0, each, seed)) for each in inputs], *together.run(first, stacked, seed)
            )
            self._together = together
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, Error) as error:
            logger.debug("Micro-batches are run one by one: %s", error)
            self._possible = False

    def _compare(
        self,
        alone: List[Sequence[torch.Tensor]],
        outputs: Sequence[torch.Tensor],
        grads: Dict[str, torch.Tensor],
    ) -> None:
        columns = list(zip(*alone))
        for index, output in enumerate(outputs):
            _require_equal(f"output {index}", torch.stack(list(columns[index])), output)
        summed = [torch.stack(list(column)).sum(0) for column in columns[len(outputs) :]]
        among = largest(summed)
        for expected, name in zip(summed, self._graph.grads):
            _require_equal(f"the gradient of {name}", expected, grads[name], among)


def _require_equal(what: str, expected: torch.Tensor, got: torch.Tensor, among: float = 0.0) -> None:
    if not alike(expected, got, among=among):
        raise RuntimeError(f"{what} differs when micro-batches are computed at once")
