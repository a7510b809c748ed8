"""Compute several micro-batches of a weight update at once, if the results are the same.

The forward operations are run on several micro-batches (see `folding`), and those operations and the ones of autograd
are recorded as a second graph. It is used only if its results on real data equal those of micro-batches run one by one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.capture import gradients
from ipurun.emulator._capture.graph import Graph, Node, Value, needed_nodes, prune, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._capture.recorder import Recorder
from ipurun.emulator._executor.weights import DeviceWeights
from ipurun.emulator._impl import Error
from ipurun.emulator._logging import logger
from ipurun.emulator._run.checked import GraphRunner, ReplayMaker
from ipurun.emulator._run.folding import STACKED, CannotFold, Folding, Rows
from ipurun.emulator._run.forms import Form, choose, program_key, recall, remember, stopwatch
from ipurun.emulator._run.half import float_op, float_specs
from ipurun.emulator._run.replay import generate

# Limit for the memory of micro-batches computed at once, beyond that of a single one.
_MEMORY_BUDGET_BYTES = 68 * 2**20
_MOST_AT_ONCE = 32
# The largest tensor of micro-batches computed at once should stay in the cache; beyond that, larger operations gain
# nothing.
_CACHE_BYTES = 7 * 2**20
# Above this average work of an operation, starting it takes no time worth saving. Measured, as the limits above, on
# some twenty small models.
_LARGE_WORK_FLOPS = 8e6
_BATCH_NORM_COPIES = 2.0
# Random operations that use no values of their tensor argument.
_DRAWN_BY_SHAPE = names_in("""
    bernoulli_.float bernoulli.p cauchy_.default exponential_.default geometric_.default log_normal_.default
    native_dropout.default normal_.default normal.float_float rand.default rand_like.default randint.default randint.low
    randint_like.default randint_like.low_dtype randn.default randn_like.default random_.default random_.from random_.to
    randperm.default uniform_.default
""")


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


def obstacle(graph: Graph) -> str:
    """Return what prevents the micro-batches of a graph from being computed at once, "" if nothing does."""
    if graph.has_own_gradients:
        return "the backward pass calls hooks or functions of the user"
    norms = [node for node in graph.nodes if node.name == "native_batch_norm" and node.mutated]
    statistics = [value for node in norms for value in node.mutated]
    if len(set(statistics)) < len(statistics):
        return "a batch norm is called several times"
    outside = {graph.specs[item.value].storage: item.name for item in graph.inputs}
    for node in graph.nodes:
        if node.is_random and (
            node.is_backward or _overload(node) not in _DRAWN_BY_SHAPE or len(list(node.reads())) > 1
        ):
            return f"{node.name} draws random numbers that depend on values"
        if not hasattr(node.op, "_schema") or not hasattr(node.op, "overloadpacket"):
            return f"{node.name} is a function of the user or has no kernel for its type"
        if graph.grads and not node.is_backward and not node.grad_enabled:
            return f"autograd was off for {node.name}"
        if node not in norms:
            for value in node.mutated:
                if graph.specs[value].storage in outside:
                    return f"{node.name} writes {outside[graph.specs[value].storage]}"
            # In training, the backward pass of batch norm takes them as arguments and does not use them.
            if node.name != "native_batch_norm_backward" and any(value in statistics for value in node.reads()):
                if node.name != "detach":
                    return f"{node.name} reads running statistics"
                statistics.append(node.outputs)
    if set(graph.outputs) & set(statistics):
        return "running statistics are an output"
    if any(spec.dtype == torch.bfloat16 for spec in graph.specs.values()):
        return "it computes in bfloat16"
    return ""


def _overload(node: Node) -> str:
    return f"{node.name}.{getattr(node.op, '_overloadname', '')}"


def peak_bytes(graph: Graph) -> int:
    """Return the memory of the results that are alive at the same time during a run of a graph, at most."""
    size: Dict[int, int] = {}
    first: Dict[int, int] = {}
    last: Dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in values_in(node.outputs):
            spec = graph.specs[value]
            size[spec.storage] = max(size.get(spec.storage, 0), spec.num_bytes)
            first.setdefault(spec.storage, index)
        for value in (*node.reads(), *values_in(node.outputs)):
            last[graph.specs[value].storage] = index
    for value in (*graph.outputs, *graph.grads.values()):
        last[graph.specs[value].storage] = len(graph.nodes)
    changes = [0] * (len(graph.nodes) + 2)
    for storage, begin in first.items():
        changes[begin] += size[storage]
        changes[last[storage] + 1] -= size[storage]
    alive = peak = 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def flops(graph: Graph) -> float:
    """Return the floating-point operations of the convolutions and matrix products of a graph."""
    total = 0.0
    for node in graph.nodes:
        values = [value for value in node.args if isinstance(value, Value)]
        shapes = [graph.specs[value].shape for value in values]
        if node.name in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = shapes[-2:]
            total += 2.0 * _numel(left) * right[-1]
        elif node.name == "convolution":
            total += 2.0 * _numel(graph.specs[node.outputs].shape) * _numel(shapes[1][1:])
        elif node.name == "convolution_backward":
            # The gradients of the input and of the weight; the mask tells which are computed.
            total += 2.0 * _numel(shapes[0]) * _numel(shapes[2][1:]) * sum(bool(wanted) for wanted in node.args[-1][:2])
    return total


def batch_size_for(graph: Graph, micro_batches: int) -> int:
    """Return the number of micro-batches to try to compute at once: a divisor of their total, 1 for one by one.

    It depends only on the graph. So the same run computes the same numbers, unless measuring shows that it is slower.
    """
    graph = dataclasses.replace(graph, specs=float_specs(graph))
    if flops(graph) > _LARGE_WORK_FLOPS * len(graph.nodes):
        return 1
    memory = peak_bytes(graph)
    if any(node.name == "native_batch_norm" and node.mutated for node in graph.nodes):
        memory = int(memory * _BATCH_NORM_COPIES)
    weights = {graph.specs[item.value].storage for item in graph.inputs_of("parameter", "buffer", "constant")}
    grads = {graph.specs[value].storage for value in graph.grads.values()}
    largest_bytes = max(
        (
            graph.specs[value].num_bytes
            for node in graph.nodes
            for value in values_in(node.outputs)
            if graph.specs[value].storage not in weights | grads
        ),
        default=0,
    )
    most = min(
        _MOST_AT_ONCE,
        micro_batches,
        _CACHE_BYTES // max(1, largest_bytes),
        1 + _MEMORY_BUDGET_BYTES // max(1, memory),
    )
    return next(size for size in range(max(1, most), 0, -1) if micro_batches % size == 0)


class _Drawing(NamedTuple):
    """A random node with the shape of its result and its layout in memory."""

    node: Node
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: torch.dtype


class RandomDraws:
    """Draws the random numbers of a graph before it runs, in the order in which the graph would draw them.

    Args:
        graph: The graph of one micro-batch.
        arguments: Its arguments for one micro-batch; what it writes is changed.
    """

    def __init__(self, graph: Graph, arguments: Sequence[torch.Tensor]) -> None:
        self.nodes = [node for node in graph.nodes if node.is_random]
        self._drawings: List[_Drawing] = []
        if not self.nodes:
            return
        results = [_random_result(node) for node in self.nodes]
        forward = needed_nodes(graph, [node for node in graph.nodes if not node.is_backward], results)
        # The order of the numbers in memory follows the layout that a run gives the tensor.
        for node, tensor in zip(self.nodes, generate(graph, nodes=forward, results=results)(arguments)):
            dense = torch.empty_like(tensor).stride() == tensor.stride()
            if not dense:
                raise CannotFold(f"{node.name} draws into a part of a tensor")
            self._drawings.append(_Drawing(node, tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def draw(self, start: Callable[[int], None], count: int) -> List[torch.Tensor]:
        """Return the numbers of several micro-batches, stacked, for each random node.

        Args:
            start: Starts the random stream of a micro-batch, by its index.
            count: Number of micro-batches.
        """
        stacked = [
            torch.empty_strided((count, *drawing.shape), (_numel(drawing.shape), *drawing.strides), dtype=drawing.dtype)
            for drawing in self._drawings
        ]
        if self._drawings:
            for index in range(count):
                start(index)
                for drawing, tensors in zip(self._drawings, stacked):
                    _draw_into(drawing.node, tensors[index])
        return stacked


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _random_result(node: Node) -> Value:
    return node.outputs[1] if node.name == "native_dropout" else node.outputs


def _draw_into(node: Node, target: torch.Tensor) -> None:
    if node.name == "native_dropout":
        target.bernoulli_(1 - node.args[1])
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


class Together:
    """A graph that computes several micro-batches at once.

    Args:
        graph: The graph of one micro-batch.
        size: Number of micro-batches to compute at once.
        arguments: Arguments of `graph` for one micro-batch: all inputs but the constants, in order.

    Raises:
        RuntimeError: If torch cannot batch an operation of the graph.
    """

    def __init__(self, graph: Graph, size: int, arguments: Sequence[torch.Tensor], make_replay: ReplayMaker) -> None:
        self.size = size
        self._names = list(graph.grads)
        self._items = [item for item in graph.inputs if item.kind != "constant"]
        self.draws = RandomDraws(graph, arguments)
        batched, statistics = _capture_batched(graph, size, self._items, arguments, self.draws)
        self.num_nodes = len(batched.nodes)
        named = {item.value: item.name for item in graph.inputs_of("buffer")}
        self._statistics = RunningStatistics(
            [named[value] for value, _ in statistics], [momentum for _, momentum in statistics]
        )
        self._batched = batched
        self.use(make_replay)

    def use(self, make_replay: ReplayMaker) -> None:
        """Compute with another kind of replay from now on."""
        # Half precision would overflow in a sum over micro-batches before it does in each of them.
        self._run_graph = GraphRunner(make_replay, self._batched, sums=list(self._batched.grads.values()))
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
    with torch.set_grad_enabled(bool(trained)), recorder:
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


class Block(NamedTuple):
    """The micro-batches of one weight update, as `ChunkRunner` needs them.

    Attributes:
        replicas: The replica of each micro-batch.
        inputs_of: Returns the inputs of a micro-batch by its index.
        start: Starts the random stream of a micro-batch by its index.
        arguments: Returns the arguments of the graph: ``arguments(replica, inputs, seed)``.
        seed: Gradient of the loss of one micro-batch.
    """

    replicas: Sequence[int]
    inputs_of: Callable[[int], List[torch.Tensor]]
    start: Callable[[int], None]
    arguments: Callable[..., List[Any]]
    seed: Optional[torch.Tensor]


class ChunkRunner:
    """Runs chunks of micro-batches at once, if the results equal those of one by one and that is not slower.

    Both methods are run, compared and measured on the first chunk of the first call. All chunks, including those of
    that call, then use the same method, and so does a run that resumes with the form of this one: it rounds likewise.

    Args:
        graph: The graph of one micro-batch.
        make_replay: Makes the function that runs a graph.
        weights: The device's parameters and buffers.
        enabled: False to always run one by one.
        folder: Folder of the executable cache, where choices are remembered; None without one.
    """

    def __init__(
        self,
        graph: Graph,
        make_replay: ReplayMaker,
        weights: DeviceWeights,
        enabled: bool,
        folder: Optional[str] = None,
    ) -> None:
        self._folder = folder
        self._graph = graph
        self._make_replay = make_replay
        self._weights = weights
        self._enabled = enabled
        self._adopted: Optional[Form] = None
        self._together: Optional[Together] = None
        self.form: Optional[Form] = None
        """The form that was chosen, None before the first call."""

    def disable(self) -> None:
        """Run one by one from now on."""
        self._enabled = False
        self.form = self._together = None

    def adopt(self, form: Form) -> None:
        """Use the form of another run of this program instead of choosing, if the micro-batches allow it."""
        if self.form is None or self.form.size != form.size:
            self._adopted = form
            self.form = self._together = None

    @property
    def size(self) -> int:
        """Return the number of micro-batches that are computed at once, 1 for one by one."""
        return 1 if self.form is None else self.form.size

    def size_for(self, block: Block) -> int:
        """Return the number of micro-batches of a block to compute at once, 1 for one by one."""
        if self.form is None:
            self.form = self._choose(block)
            if self._enabled and len(block.replicas) > 1:
                logger.debug("Micro-batches are run %s", self.form)
        return self.form.size

    def _choose(self, block: Block) -> Form:
        """Return the form for the micro-batches of a block, and make what it needs."""
        count = len(block.replicas)
        reason = obstacle(self._graph) if self._enabled else "each is inspected"
        if reason:
            return Form(1, reason)
        known = self._adopted if self._adopted is not None and self._adopted.fits(count) else None
        size = batch_size_for(self._graph, count) if known is None else known.size
        if size == 1:
            return known or Form(1, "they are large")
        key = program_key(self._graph, size, count, self._make_replay)
        if known is not None:
            return self._try(size, block, known, key)
        known = recall(key, self._folder)
        if known is None:
            return remember(key, self._try(size, block, None, key), self._folder)
        return known if known.size == 1 else self._try(size, block, known, key)

    def run(
        self, block: Block, first: int, inputs: Sequence[torch.Tensor], *, with_outputs: bool = True
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        """Compute a chunk at once; see `Together.run`.

        Args:
            block: The micro-batches of the weight update.
            first: The first micro-batch of the chunk.
            inputs: The inputs of the chunk with a leading dimension for micro-batches.
            with_outputs: False if nobody reads the outputs, which may then be missing.
        """
        assert self._together is not None
        return self._run(self._together, block, first, inputs, with_outputs=with_outputs)

    def _run(
        self, together: Together, block: Block, first: int, inputs: Sequence[torch.Tensor], *, with_outputs: bool = True
    ) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
        return together.run(
            block.arguments(0, [], block.seed),
            inputs,
            block.seed,
            lambda index: block.start(first + index),
            self._weights,
            block.replicas[first : first + together.size],
            with_outputs=with_outputs,
        )

    def _try(self, size: int, block: Block, known: Optional[Form], key: str) -> Form:
        """Make the graph of several micro-batches, compare it with one by one and return the form to use.

        Args:
            size: Number of micro-batches to compute at once.
            block: The micro-batches.
            known: The form to use if the results are equal; None to choose by measuring. If they were compared before,
                for the same program, they are not again: other data might round differently, and end otherwise.
            key: Key of the program.
        """
        written = [copy for name in self._graph.buffers_written() for copy in self._weights.buffers[name]]
        before = [tensor.clone() for tensor in written]

        def restore() -> List[torch.Tensor]:
            after = [tensor.clone() for tensor in written]
            for tensor, value in zip(written, before):
                tensor.copy_(value)
            return after

        inputs = [block.inputs_of(index) for index in range(size)]
        seconds: Dict[str, List[float]] = {"alone": [], "together": []}

        def alone(index: int = 0) -> Sequence[torch.Tensor]:
            block.start(index)
            elapsed = stopwatch()
            results = replay(block.arguments(block.replicas[index], inputs[index], block.seed))
            seconds["alone"].append(elapsed())
            return results

        def at_once() -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
            elapsed = stopwatch()
            results = self._run(together, block, 0, stacked)
            seconds["together"].append(elapsed() / size)
            return results

        try:
            # Stochastic rounding would differ: compare without it.
            nearest = self._make_replay._replace(rounds=False)
            replay = nearest(self._graph)
            together = Together(self._graph, size, block.arguments(0, inputs[0], block.seed), nearest)
            restore()
            if known is None or known.program != key:
                outputs: List[Sequence[torch.Tensor]] = []
                sums: Dict[str, torch.Tensor] = {}
                for index in range(size):
                    results = alone(index)
                    outputs.append(results[: len(self._graph.outputs)])
                    for name, gradient in zip(self._graph.grads, results[len(self._graph.outputs) :]):
                        sums[name] = sums[name] + gradient if name in sums else gradient.clone()
                expected = restore()
                stacked = [torch.stack(list(column)) for column in zip(*inputs)]
                _compare(outputs, sums, *at_once())
                for wanted, got in zip(expected, restore()):
                    _require_equal("a buffer", wanted, got)
            form = dataclasses.replace(known or choose(size, seconds, alone, at_once), program=key)
            restore()
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, KeyError, Error) as error:
            restore()
            return Form(1, str(error), key)
        if form.size > 1:
            if self._make_replay.rounds:
                together.use(self._make_replay)
            self._together = together
            logger.debug("%d operations instead of %d", together.num_nodes, size * len(self._graph.nodes))
        return form


def _compare(
    alone: Sequence[Sequence[torch.Tensor]],
    summed: Dict[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: Dict[str, torch.Tensor],
) -> None:
    for index, (column, output) in enumerate(zip(zip(*alone), outputs)):
        _require_equal(f"output {index}", torch.stack(list(column)), output)
    among = largest(summed.values())
    for name, expected in summed.items():
        _require_equal(f"the gradient of {name}", expected, grads[name].to(expected.dtype), among)


def _require_equal(what: str, expected: torch.Tensor, got: torch.Tensor, among: float = 0.0) -> None:
    if not alike(expected, got, among=among):
        raise RuntimeError(f"{what} differs when micro-batches are computed at once")
