"""A graph that computes several micro-batches at once, recorded from the graph of one."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.capture import collector_off, gradients
from ipurun.emulator._capture.dtypes import layers_of
from ipurun.emulator._capture.graph import Graph, Node, Value, needed_nodes, prune
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._executor.cache_files import cache_versions
from ipurun.emulator._executor.weights import DeviceWeights
from ipurun.emulator._run.checked import GraphRunner, ReplayMaker
from ipurun.emulator._run.folding import STACKED, CannotFold, Folding, Rows
from ipurun.emulator._run.half import float_op
from ipurun.emulator._run.kernels import draw_bernoulli
from ipurun.emulator._run.replay import generate
from ipurun.emulator._run.stored_graph import (
    NotStorableError,
    dtype_name,
    dtype_of,
    graph_from_data,
    graph_to_data,
    only_storable,
)


class _Drawing(NamedTuple):
    """The result of a random node: its shape and its layout in memory."""

    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: torch.dtype


class RandomDraws:
    """Draws the random numbers of a graph before it runs, in the order in which the graph would draw them.

    Args:
        graph: The graph of one micro-batch.
        drawings: The results of its random nodes, in order.
    """

    def __init__(self, graph: Graph, drawings: Sequence[_Drawing]) -> None:
        self.nodes = [node for node in graph.nodes if node.is_random]
        self.drawings = list(drawings)
        if len(self.nodes) != len(self.drawings):
            raise ValueError(f"the graph draws {len(self.nodes)} times, not {len(self.drawings)}")

    @classmethod
    def measured(cls, graph: Graph, arguments: Sequence[torch.Tensor]) -> RandomDraws:
        """Run what the random nodes need, to see the layout of their results.

        Args:
            graph: The graph of one micro-batch.
            arguments: Its arguments for one micro-batch; what it writes is changed.
        """
        nodes = [node for node in graph.nodes if node.is_random]
        if not nodes:
            return cls(graph, [])
        results = [_random_result(node) for node in nodes]
        forward = needed_nodes(graph, [node for node in graph.nodes if not node.is_backward], results)
        drawings = []
        # The order of the numbers in memory follows the layout that a run gives the tensor.
        for node, tensor in zip(nodes, generate(graph, nodes=forward, results=results)(arguments)):
            dense = torch.empty_like(tensor).stride() == tensor.stride()
            if not dense:
                raise CannotFold(f"{node.name} draws into a part of a tensor")
            drawings.append(_Drawing(tuple(tensor.shape), tensor.stride(), tensor.dtype))
        return cls(graph, drawings)

    def draw(self, start: Callable[[int], None], count: int) -> List[torch.Tensor]:
        """Return the numbers of several micro-batches, stacked, for each random node.

        Args:
            start: Starts the random stream of a micro-batch, by its index.
            count: Number of micro-batches.
        """
        stacked = [
            torch.empty_strided(
                (count, *drawing.shape), (math.prod(drawing.shape), *drawing.strides), dtype=drawing.dtype
            )
            for drawing in self.drawings
        ]
        if self.drawings:
            for index in range(count):
                start(index)
                for node, tensors in zip(self.nodes, stacked):
                    _draw_into(node, tensors[index])
        return stacked


def _random_result(node: Node) -> Value:
    return node.outputs[1] if node.name == "native_dropout" else node.outputs


def _draw_into(node: Node, target: torch.Tensor) -> None:
    if node.name == "native_dropout":
        target.bernoulli_(1 - node.args[1])
    elif float_op(node) is torch.ops.aten.bernoulli_.float:
        draw_bernoulli(target, *node.args[1:], **node.kwargs)
    elif node.name.endswith("_"):
        node.op(target, *node.args[1:], **node.kwargs)
    elif node.args and isinstance(node.args[0], Value):
        target.copy_(node.op(target, *node.args[1:], **node.kwargs))
    else:
        target.copy_(node.op(*node.args, **node.kwargs))


class RunningStatistics:
    """Updates the running statistics of batch norm with those of several micro-batches, in their order.

    Args:
        names: The buffers.
        momentums: The momentum of each.
    """

    def __init__(self, names: Sequence[str], momentums: Sequence[float]) -> None:
        self._names = list(names)
        self._momentums = list(momentums)
        self._factors: Dict[Tuple[float, Tuple[int, ...]], Tuple[torch.Tensor, List[float]]] = {}

    def update(self, weights: DeviceWeights, replicas: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Update the buffers of the replicas.

        Args:
            weights: The device's buffers.
            replicas: The replica of each micro-batch.
            rows: For each buffer, the statistics of the micro-batches.
        """
        separate = sorted(set(replicas))
        for momentum in sorted(set(self._momentums)):
            chosen = [index for index, each in enumerate(self._momentums) if each == momentum]
            factors, kept = self._factors_for(momentum, tuple(replicas))
            added = torch.mm(factors, torch.cat([rows[index] for index in chosen], dim=1))
            sizes = [rows[index].shape[1] for index in chosen]
            for replica, parts, remaining in zip(separate, added, kept):
                buffers = [weights.buffer_of(self._names[index], replica) for index in chosen]
                torch._foreach_mul_(buffers, remaining)
                torch._foreach_add_(buffers, list(parts.split(sizes)))

    def _factors_for(self, momentum: float, replicas: Tuple[int, ...]) -> Tuple[torch.Tensor, List[float]]:
        key = (momentum, replicas)
        if key not in self._factors:
            separate = sorted(set(replicas))
            factors = torch.zeros(len(separate), len(replicas), dtype=torch.float64)
            for index, replica in enumerate(replicas):
                row = factors[separate.index(replica)]
                row *= 1 - momentum
                row[index] = momentum
            kept = [(1 - momentum) ** replicas.count(replica) for replica in separate]
            self._factors[key] = (factors.float(), kept)
        return self._factors[key]


class Folded(NamedTuple):
    """Graph that computes several micro-batches at once.

    Attributes:
        size: Number of micro-batches.
        graph: The graph of all of them.
        draws: The random numbers that it takes as inputs.
        statistics: The buffers of running statistics, by their values in the graph of one micro-batch, and momentums.
    """

    size: int
    graph: Graph
    draws: RandomDraws
    statistics: List[Tuple[Value, float]]


def fold(graph: Graph, size: int, arguments: Sequence[torch.Tensor]) -> Folded:
    """Record the graph of several micro-batches from the graph of one.

    Args:
        graph: The graph of one micro-batch.
        size: Number of micro-batches to compute at once.
        arguments: Arguments of `graph` for one micro-batch: all inputs but the constants, in order.

    Raises:
        RuntimeError: If torch cannot batch an operation of the graph.
    """
    draws = RandomDraws.measured(graph, arguments)
    items = [item for item in graph.inputs if item.kind != "constant"]
    batched, statistics = _capture_batched(graph, size, items, arguments, draws)
    return Folded(size, batched, draws, statistics)


def fold_digest(graph: Graph, size: int, arguments: Sequence[torch.Tensor]) -> str:
    """Return a key of all that `fold` depends on; two graphs with the same key have the same folded graph."""
    digest = hashlib.sha256()

    def add(*items: Any) -> None:
        digest.update(repr(items).encode())

    add(size, sorted(cache_versions().items()), graph.outputs, graph.loss, graph.grads)
    items = [item for item in graph.inputs if item.kind != "constant"]
    for item, tensor in zip(items, arguments):
        # The inputs of micro-batches are copied to a separate layout.
        layout = () if item.kind in ("input", "seed") else tensor.stride()
        add(item, graph.specs[item.value], tensor.dtype, layout)
    for value, constant in graph.constants.items():
        add(value, tuple(constant.shape), constant.stride(), constant.dtype)
        digest.update(constant.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for node in graph.nodes:
        layers, op = layers_of(node.op)
        add(layers, str(op), node.args, node.kwargs, node.outputs, node.mutated, node.is_backward, node.is_random)
    return digest.hexdigest()


def folded_to_data(folded: Folded, graph: Graph) -> Dict[str, Any]:
    """Return a folded graph as data for JSON; `graph` is that of one micro-batch.

    Raises:
        NotStorableError: Something in it has no description.
    """
    constants = []
    for value, tensor in folded.graph.constants.items():
        same = [number for number, other in graph.constants.items() if _same_tensor(tensor, other)]
        if not same:
            raise NotStorableError("it has a constant that the model does not have")
        constants.append([int(value), int(same[0])])
    return {
        "size": folded.size,
        "graph": graph_to_data(folded.graph),
        "constants": constants,
        "drawings": [[list(each.shape), list(each.strides), dtype_name(each.dtype)] for each in folded.draws.drawings],
        "statistics": [[int(value), momentum] for value, momentum in folded.statistics],
    }


def folded_from_data(data: Dict[str, Any], graph: Graph) -> Folded:
    """Return the folded graph that `folded_to_data` described; `graph` is that of one micro-batch.

    Raises:
        NotStorableError: The data does not describe one.
    """
    with only_storable():
        constants = {Value(value): graph.constants[Value(of)] for value, of in data["constants"]}
        drawings = [
            _Drawing(tuple(int(n) for n in shape), tuple(int(n) for n in strides), dtype_of(dtype))
            for shape, strides, dtype in data["drawings"]
        ]
        statistics = [(Value(value), float(momentum)) for value, momentum in data["statistics"]]
        batched = graph_from_data(data["graph"], constants)
        return Folded(int(data["size"]), batched, RandomDraws(graph, drawings), statistics)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
    return alike and torch.equal(one, other)


class Together:
    """Runs a folded graph.

    Args:
        graph: The graph of one micro-batch.
        folded: The graph of several.
        make_replay: Makes the function that runs a graph.
    """

    def __init__(self, graph: Graph, folded: Folded, make_replay: ReplayMaker) -> None:
        self.size = folded.size
        self._names = list(graph.grads)
        self._items = [item for item in graph.inputs if item.kind != "constant"]
        self.draws = folded.draws
        self.num_nodes = len(folded.graph.nodes)
        named = {item.value: item.name for item in graph.inputs_of("buffer")}
        self._statistics = RunningStatistics(
            [named[value] for value, _ in folded.statistics], [momentum for _, momentum in folded.statistics]
        )
        self._batched = folded.graph
        self.use(make_replay)

    def use(self, make_replay: ReplayMaker) -> None:
        """Compute with another kind of replay from now on."""
        # Half precision would overflow in a sum over micro-batches before it does in each of them.
        at_once = make_replay._replace(same_bits=False)
        self._run_graph = GraphRunner(at_once, self._batched, sums=list(self._batched.grads.values()))
        self._rounds = make_replay.rounds

    def run(
        self,
        arguments: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        seed: Optional[torch.Tensor],
        start: Callable[[int], None],
        weights: DeviceWeights,
        replicas: Sequence[int],
        *,
        with_outputs: bool = True,
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Return the outputs with a leading dimension for micro-batches, and the summed gradients.

        Args:
            arguments: Arguments for one micro-batch; only parameters and buffers are used.
            inputs: The inputs with a leading dimension for micro-batches.
            seed: Gradient of the loss of one micro-batch.
            start: Starts the random stream of a micro-batch, by its index.
            weights: The device's buffers, for running statistics.
            replicas: The replica of each micro-batch.
            with_outputs: False if nobody reads the outputs, which may then be missing.
        """
        given = _batched_arguments(self._items, arguments, inputs, seed, self.size)
        drawn = self.draws.draw(start, self.size)
        if self._rounds and not drawn:
            start(0)
        outputs, results = self._run_graph(given + drawn, with_outputs=with_outputs)
        statistics = results[len(self._names) :]
        if statistics:
            self._statistics.update(weights, replicas, statistics)
        return outputs, dict(zip(self._names, results))


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


def _capture_batched(
    graph: Graph, size: int, items: Sequence[Any], arguments: Sequence[torch.Tensor], draws: RandomDraws
) -> Tuple[Graph, List[Tuple[Value, float]]]:
    """Return the graph of several micro-batches, and the buffers and momentums of the statistics among its results."""
    results: List[Value] = list(graph.outputs)
    if graph.grads:
        assert graph.loss is not None
        results.append(graph.loss)
    forward: List[Node] = needed_nodes(graph, [n for n in graph.nodes if not n.is_backward], results)
    # The recorder finds kernels for half tensors itself, also for the backward pass.
    forward = [node if node.is_random else dataclasses.replace(node, op=float_op(node)) for node in forward]
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
    drawn = draws.draw(lambda index: None, size)
    for index, tensor in enumerate(drawn):
        recorder.add_input("input", f"random_{index}", tensor)
    trained = {item.name: t for item, t in zip(items, tensors) if t.requires_grad}
    seeds = [tensor for item, tensor in zip(items, tensors) if item.kind == "seed"]
    with torch.set_grad_enabled(bool(trained)), recorder, collector_off():
        random = {id(node): tensor for node, tensor in zip(draws.nodes, drawn)}
        folding = Folding(graph, forward, size, random, results)
        for item, tensor in zip(items, tensors):
            if item.kind == "input":
                folding.set(item.value, Rows(tensor, STACKED, tuple(tensor.shape[1:])))
            else:
                folding.set(item.value, tensor if item.kind != "seed" else tensor[0])
        folding.run()
        outputs = [folding.stacked_result(value) for value in results]
        statistics = [each.tensor for each in folding.statistics]
        grads: Sequence[Any] = ()
        if trained:
            recorder.in_backward = True
            ordered = [trained[name] for name in graph.grads]
            grads = gradients(outputs[-1], ordered, seeds[0])
            if any(grad is None for grad in grads):
                raise CannotFold("a parameter has no gradient")
    batched = recorder.graph
    batched.outputs = [recorder.value_of(tensor) for tensor in outputs[: len(graph.outputs)]]
    batched.grads = {name: recorder.value_of(grad) for name, grad in zip(graph.grads, grads)}
    extra = {f"{index} of the statistics": recorder.value_of(tensor) for index, tensor in enumerate(statistics)}
    recorder.finish()
    batched.grads.update(extra)
    prune(batched)
    return batched, [(each.buffer, each.momentum) for each in folding.statistics]
