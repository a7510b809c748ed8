"""Compute several micro-batches of a weight update at once, if the results are the same.

The forward operations are run on several micro-batches (see `folding`), and those operations and the ones of autograd
are recorded as a second graph (see `together`). It is used only if its results on real data equal those of
micro-batches run one by one. The executable cache keeps it for the next process.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, values_in
from ipurun.emulator._capture.op_kinds import names_in
from ipurun.emulator._executor.cache_files import CacheFile, Shelf, least_seconds
from ipurun.emulator._executor.weights import DeviceWeights
from ipurun.emulator._impl import Error
from ipurun.emulator._logging import logger
from ipurun.emulator._run.checked import ReplayMaker
from ipurun.emulator._run.forms import Form, choose, program_key, recall, remember, share, stopwatch
from ipurun.emulator._run.half import float_specs
from ipurun.emulator._run.stored_graph import NotStorableError
from ipurun.emulator._run.together import (
    Folded,
    Together,
    fold,
    fold_digest,
    folded_from_data,
    folded_to_data,
)

# Limit for the memory of micro-batches computed at once, beyond that of a single one.
_MEMORY_BUDGET_BYTES = 60 * 2**20
_MOST_AT_ONCE = 32
# The largest tensor of micro-batches computed at once should stay in the cache; beyond that, larger operations gain
# nothing.
_CACHE_BYTES = 7 * 2**20
# Above this average work of an operation, or size of its result, starting it takes no time worth saving. Measured, as
# the limits above, on some sixty small models.
_LARGE_WORK_FLOPS = 4e7
_LARGE_RESULT_BYTES = 450 * 2**10
_BATCH_NORM_COPIES = 2.0
# How far sums of many terms differ by rounding, in units of the precision of the largest of them.
_NOISE_EPS, _HALF_NOISE_EPS = 100, 8
# Comparisons before results count as different, and the share by which weights are changed for all but the first.
_COMPARISONS, _NUDGE = 3, 1e-2
_LEAST_SECONDS = 0.05  # a folded graph that is made more quickly is not stored
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
        among: Magnitude of the values that the result is a sum of. A long sum rounds much, and if they cancel, as in
            the gradient of a bias before a norm, only their rounding errors are left.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(expected, got)
    is_half = expected.dtype in (torch.float16, torch.bfloat16)
    tolerance = 1e-2 if is_half else 1e-3 if among else 1e-4
    noise = (_HALF_NOISE_EPS if is_half else _NOISE_EPS) * torch.finfo(expected.dtype).eps * among
    smallest = tolerance * max(largest([expected]), 1e-8) + noise
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


def peak_bytes(graph: Graph, shared: Collection[int] = ()) -> int:
    """Return the memory of the results that are alive at the same time during a run of a graph, at most.

    Args:
        graph: The graph of one micro-batch.
        shared: Storages that do not count.
    """
    size: Dict[int, int] = {}
    first: Dict[int, int] = {}
    last: Dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in values_in(node.outputs):
            spec = graph.specs[value]
            if spec.storage not in shared:
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
            total += 2.0 * math.prod(left) * right[-1]
        elif node.name == "convolution":
            total += 2.0 * math.prod(graph.specs[node.outputs].shape) * math.prod(shapes[1][1:])
        elif node.name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
            steps, rows, _ = shapes[0]
            passes = 2 if node.is_backward else 1
            total += 2.0 * passes * steps * rows * sum(math.prod(weight) for weight in shapes[1:3])
        elif node.name == "convolution_backward":
            # The gradients of the input and of the weight; the mask tells which are computed.
            total += (
                2.0
                * math.prod(shapes[0])
                * math.prod(shapes[2][1:])
                * sum(bool(wanted) for wanted in node.args[-1][:2])
            )
    return total


def batch_size_for(graph: Graph, micro_batches: int) -> int:
    """Return the number of micro-batches to try to compute at once: a divisor of their total, 1 for one by one.

    It depends only on the graph. So the same run computes the same numbers, unless measuring shows that it is slower.
    """
    graph = dataclasses.replace(graph, specs=float_specs(graph))
    if flops(graph) > _LARGE_WORK_FLOPS * len(graph.nodes):
        return 1
    # All micro-batches share the weights, and a gradient is as large for several as for one.
    weights = {graph.specs[item.value].storage for item in graph.inputs_of("parameter", "buffer", "constant")}
    shared = weights | {graph.specs[value].storage for value in graph.grads.values()}
    results: Dict[int, int] = {}
    for node in graph.nodes:
        for spec in (graph.specs[value] for value in values_in(node.outputs)):
            if spec.storage not in shared:
                results[spec.storage] = max(results.get(spec.storage, 0), spec.num_bytes)
    if sum(results.values()) > _LARGE_RESULT_BYTES * len(graph.nodes):
        return 1
    memory = peak_bytes(graph, shared)
    if any(node.name == "native_batch_norm" and node.mutated for node in graph.nodes):
        memory = int(memory * _BATCH_NORM_COPIES)
    most = min(
        _MOST_AT_ONCE,
        micro_batches,
        _CACHE_BYTES // max(1, max(results.values(), default=0)),
        1 + _MEMORY_BUDGET_BYTES // max(1, memory),
    )
    return next(size for size in range(max(1, most), 0, -1) if micro_batches % size == 0)


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

    Both methods are run and compared, and measured if a folder can remember the choice, on the first chunk of the first
    call. All chunks, including those of that call, then use the same method, and so does a run that resumes with the
    form of this one: it rounds likewise.

    Args:
        graph: The graph of one micro-batch.
        make_replay: Makes the function that runs a graph.
        weights: The device's parameters and buffers.
        enabled: False to always run one by one.
        shelf: Where in the executable cache choices and folded graphs are kept; None without a cache.
    """

    def __init__(
        self,
        graph: Graph,
        make_replay: ReplayMaker,
        weights: DeviceWeights,
        enabled: bool,
        shelf: Optional[Shelf] = None,
    ) -> None:
        self._shelf = shelf
        self._folder = None if shelf is None else shelf.folder
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
        form = recall(key, self._folder)
        if form is None and self._folder is not None:
            measured = self._try(size, block, None, key)
            form = share(key, measured, self._folder)
            if form is measured:
                return remember(key, measured, self._folder)
        if form is None:
            form = Form(size, "not measured, since no cache remembers the choice for the next process")
        if form.size > 1:
            form = self._try(size, block, form, key)
        return remember(key, form, self._folder)

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

    def _folded(
        self, size: int, arguments: Sequence[torch.Tensor], *, may_load: bool
    ) -> Tuple[Folded, Optional[_Entry]]:
        """Return the graph of several micro-batches, and its place in the cache if it is to be stored there."""
        file: Optional[CacheFile] = None
        about: Dict[str, Any] = {}
        if self._shelf is not None:
            about = {**self._shelf.about, "mode": f"{self._shelf.about.get('mode', '')}, {size} at once"}
            digest = fold_digest(self._graph, size, arguments)
            file = CacheFile(self._shelf.folder, f"{digest[:32]}-at-once")
        if file is not None and may_load and os.path.exists(file.path):
            cpu_begun = time.thread_time()
            try:
                folded = folded_from_data(file.read(), self._graph)
                if folded.size != size:
                    raise NotStorableError(f"it is for {folded.size} micro-batches, not {size}")
                file.count_hit(time.thread_time() - cpu_begun, about)
                return folded, None
            except (OSError, ValueError, NotStorableError) as error:
                file.set_aside(str(error))
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        folded = fold(self._graph, size, arguments)
        if file is None:
            return folded, None
        about["compile_seconds"] = time.perf_counter() - begun
        return folded, _Entry(file, about, time.thread_time() - cpu_begun)

    def _one_after_another(
        self, size: int, run: Callable[[int], Sequence[torch.Tensor]]
    ) -> Tuple[List[Sequence[torch.Tensor]], Dict[str, torch.Tensor]]:
        """Run micro-batches and return the outputs of each and the sums of their gradients."""
        outputs: List[Sequence[torch.Tensor]] = []
        sums: Dict[str, torch.Tensor] = {}
        for index in range(size):
            results = run(index)
            outputs.append(results[: len(self._graph.outputs)])
            for name, gradient in zip(self._graph.grads, results[len(self._graph.outputs) :]):
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
        return outputs, sums

    def _nudged(self, block: Block, attempt: int) -> Block:
        """Return the block with slightly different parameters.

        A value on a kink, such as 0 before a ReLU, falls to either side of it by rounding, and its gradient changes
        altogether. With other weights it lies elsewhere, while a graph that computes something else still does.
        """
        kinds = [item.kind for item in self._graph.inputs if item.kind != "constant"]

        def arguments(*given: Any) -> List[Any]:
            generator = torch.Generator().manual_seed(attempt)  # not the random numbers of the program
            pairs = zip(kinds, block.arguments(*given))
            return [_nudge(each, generator) if kind == "parameter" else each for kind, each in pairs]

        return block._replace(arguments=arguments)

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

        def alone(index: int = 0, block: Block = block) -> Sequence[torch.Tensor]:
            block.start(index)
            elapsed = stopwatch()
            results = replay(block.arguments(block.replicas[index], inputs[index], block.seed))
            seconds["alone"].append(elapsed())
            return results

        def at_once(block: Block = block) -> Tuple[Tuple[torch.Tensor, ...], Dict[str, torch.Tensor]]:
            elapsed = stopwatch()
            results = self._run(together, block, 0, stacked)
            seconds["together"].append(elapsed() / size)
            return results

        def compare(block: Block) -> None:
            outputs, sums = self._one_after_another(size, lambda index: alone(index, block))
            expected = restore()
            _compare(outputs, sums, *at_once(block))
            among = largest(expected)
            for wanted, got in zip(expected, restore()):
                _require_equal("a buffer", wanted, got, among)

        try:
            # Stochastic rounding would differ: compare without it.
            nearest = self._make_replay._replace(rounds=False)
            is_compared = known is not None and known.program == key
            folded, entry = self._folded(size, block.arguments(0, inputs[0], block.seed), may_load=is_compared)
            together = Together(self._graph, folded, nearest)
            restore()
            if not is_compared:
                replay = nearest(self._graph)
                stacked = [torch.stack(list(column)) for column in zip(*inputs)]
                for attempt in range(_COMPARISONS):
                    try:
                        compare(self._nudged(block, attempt) if attempt else block)
                        break
                    except _Different:
                        restore()
                        if attempt == _COMPARISONS - 1:
                            raise
            form = dataclasses.replace(known or choose(size, seconds, alone, at_once), program=key)
            restore()
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, KeyError, Error) as error:
            restore()
            return Form(1, str(error), key)
        if form.size > 1:
            if entry is not None:
                entry.store(folded, self._graph)
            if self._make_replay.rounds:
                together.use(self._make_replay)
            self._together = together
            logger.debug("%d operations instead of %d", together.num_nodes, size * len(self._graph.nodes))
        return form


class _Entry(NamedTuple):
    """The place of a folded graph in the cache that is not there yet."""

    file: CacheFile
    about: Mapping[str, Any]
    cpu_seconds: float

    def store(self, folded: Folded, graph: Graph) -> None:
        """Write the folded graph, unless it is made as quickly as it would be loaded."""
        if self.cpu_seconds < least_seconds(_LEAST_SECONDS):
            return
        try:
            self.file.write(folded_to_data(folded, graph), self.about, self.cpu_seconds)
        except (OSError, NotStorableError) as error:  # a full disk, say: the program itself does not need the file
            logger.debug("The graph of %d micro-batches is not cached: %s", folded.size, error)


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


class _Different(RuntimeError):
    """Results differ by more than rounding."""


def _nudge(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not parameter.is_floating_point():
        return parameter
    noise = torch.rand(parameter.shape, generator=generator) - 0.5
    return (parameter.detach() * (1 + _NUDGE * noise)).to(parameter.dtype)


def _require_equal(what: str, expected: torch.Tensor, got: torch.Tensor, among: float = 0.0) -> None:
    if not alike(expected, got, among=among):
        raise _Different(f"{what} differs when micro-batches are computed at once")
