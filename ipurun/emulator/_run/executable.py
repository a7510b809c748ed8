"""A compiled model: runs the captured graph for every micro-batch of a call."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from ipurun.emulator._capture.capture import Captured
from ipurun.emulator._capture.graph import Graph
from ipurun.emulator._capture.structures import rebuild
from ipurun.emulator._executor.anchors import Anchors
from ipurun.emulator._executor.cache_files import Shelf
from ipurun.emulator._executor.weights import DeviceWeights
from ipurun.emulator._run.batches import BatchLayout, OutputCollector
from ipurun.emulator._run.checked import GraphRunner, ReplayMaker
from ipurun.emulator._run.chunks import Block, ChunkRunner
from ipurun.emulator._run.forms import from_words, to_words
from ipurun.emulator.processes import Processes, in_fixed_order

Run = Tuple[int, int, int]
_PLAIN = ReplayMaker()


def default_seed() -> int:
    """Return a seed that depends on torch.manual_seed, for executors without one."""
    return torch.initial_seed()


class RandomStreams:
    """Numbers the runs of an executable and seeds torch's generator for each run.

    Args:
        seed: The seed of the whole sequence.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    @property
    def state(self) -> List[int]:
        """Return the state needed to continue the sequence."""
        return [self.seed, self.position]

    @state.setter
    def state(self, words: List[int]) -> None:
        self.seed = int(words[0])
        self.position = int(words[1]) if len(words) > 1 else 0

    def start(self, run: int, replica: int) -> None:
        """Start the stream of one run, counted from the current position."""
        words = f"{self.seed} {self.position + run} {replica}".encode()
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:7], "little"))

    def advance(self, runs: int) -> None:
        """Move past the runs of a call."""
        self.position += runs


@contextlib.contextmanager
def host_generator_kept() -> Iterator[None]:
    """Restore torch's generator afterwards."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class Timestamps:
    """The times of events in the last call, in seconds on one clock."""

    def __init__(self) -> None:
        self._stamps: Dict[str, List[float]] = {}
        self._last_output = 0.0
        self.duration = 0.0
        self.begin_call()

    def begin_call(self) -> None:
        """Clear the times of the previous call."""
        self._stamps = {"input": [], "input_complete": [], "output": [], "output_complete": []}

    def begin_runs(self, count: int) -> None:
        """Record the start of reading the inputs of some runs."""
        self._stamps["input"] += [time.perf_counter()] * count

    def inputs_complete(self, count: int) -> None:
        """Record that the inputs of some runs were read."""
        self._stamps["input_complete"] += [time.perf_counter()] * count

    def outputs(self) -> None:
        """Record that the outputs of some runs were computed."""
        self._last_output = time.perf_counter()

    def end_run(self) -> None:
        """Record that the outputs of one run were kept for the host."""
        self._stamps["output"].append(self._last_output)
        self._stamps["output_complete"].append(time.perf_counter())

    def end_call(self) -> None:
        """Record the end of the call, when all outputs become complete."""
        now = time.perf_counter()
        self.duration = now - self._stamps["input"][0]
        self._stamps["output_complete"] = [now for _ in self._stamps["output_complete"]]

    def counters(self, num_inputs: int, num_outputs: int) -> Dict[str, List[List[float]]]:
        """Return the times of every input and output tensor, by event."""
        counts = {"input": num_inputs, "input_complete": num_inputs}
        return {
            event: [list(times) for _ in range(counts.get(event, num_outputs))] for event, times in self._stamps.items()
        }

    def latency(self, start: str, end: str) -> Tuple[float, float, float]:
        """Return minimum, maximum and mean seconds between two events.

        There can be more starts than ends; each end is then measured from the earliest of its starts.
        """
        starts, ends = self._stamps[start], self._stamps[end]
        if not ends or not starts:
            return (0.0, 0.0, 0.0)
        share = max(1, len(starts) // len(ends))
        spans = [
            last - min(starts[min(index * share, len(starts) - 1) : (index + 1) * share] or starts[-1:])
            for index, last in enumerate(ends)
        ]
        return (min(spans), max(spans), sum(spans) / len(spans))


class Executable:
    """A captured graph with its weights, optimizer and random streams.

    Args:
        captured: The graph and the structure of its results.
        weights: The device's parameters and buffers.
        layout: How a call is split into micro-batches.
        streams: Seeds of the random operations.
        anchors: Tensors to keep after each call, as named in the options.
        make_replay: Turns a graph into a function that runs it.
        shelf: Where in the executable cache to store what a call makes, None without a cache.
        processes: The processes that train together; None: this one alone.
    """

    def __init__(
        self,
        captured: Captured,
        weights: DeviceWeights,
        layout: BatchLayout,
        streams: RandomStreams,
        anchors: Optional[Dict[str, Any]] = None,
        make_replay: ReplayMaker = _PLAIN,
        shelf: Optional[Shelf] = None,
        processes: Optional[Processes] = None,
    ) -> None:
        self.captured = captured
        self.graph = captured.graph
        self.weights = weights
        self.layout = layout
        self.streams = streams
        self.processes = processes
        self.adds_in_order = in_fixed_order()
        self._first_replica = 0 if processes is None else processes.rank * layout.replicas
        self._of_replicas: List[Dict[str, torch.Tensor]] = []  # gradients of one accumulation step, until all are there
        self.optimizer: Optional[Any] = None
        self.cache_use: Optional[Any] = None
        self.timestamps = Timestamps()
        self.anchors = Anchors(self.graph, anchors or {})
        self._anchored = list(self.anchors.in_graph.values())
        self._run_graph = GraphRunner(make_replay, self.graph, extra=self._anchored)
        enabled = not self.adds_in_order and not make_replay.checks and not weights.groups and not self._anchored
        self.chunks = ChunkRunner(self.graph, make_replay, weights, enabled, shelf)
        self._is_random = make_replay.rounds or any(node.is_random for node in self.graph.nodes)
        self._anchor_results: Sequence[torch.Tensor] = ()
        self._last_seed: Optional[Tuple[float, torch.Tensor]] = None
        self._grad_names = list(self.graph.grads)
        self._borrowed_grads = _grads_in_inputs(self.graph)
        self._varying = [value in self.graph.varying for value in captured.output_values]
        written = self.graph.storages_written()
        self._written_inputs = [
            index
            for index, item in enumerate(self.graph.inputs_of("input"))
            if self.graph.specs[item.value].storage in written
        ]
        # Integer buffers are constants: what a run writes to them is gone at its end.
        self._scratch = {
            item.name
            for item in self.graph.inputs_of("parameter", "buffer")
            if self.graph.specs[item.value].storage in written and not self.graph.persists(item)
        }

    @property
    def state(self) -> List[int]:
        """Return what another run needs to continue: the random streams and, once chosen, the form of micro-batches."""
        form = self.chunks.form
        return [*self.streams.state, *([] if form is None else to_words(form))]

    @state.setter
    def state(self, words: Sequence[int]) -> None:
        self.streams.state = list(words[:2])
        if len(words) > 2:
            self.chunks.adopt(from_words(words[2:]))

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run one call.

        Args:
            tensors: The complete tensors of the call, in the order of the graph's inputs.

        Returns:
            The results in the structure that forward returned.
        """
        self.timestamps.begin_call()
        pieces = [self.layout.cut(tensor) for tensor in tensors]
        collector = OutputCollector(self.layout, self._varying)
        self._anchor_collector = OutputCollector(self.layout, [True] * len(self._anchored))
        guard = host_generator_kept() if self._is_random else contextlib.nullcontext()
        runs = self.layout.runs()
        # Weights change after each training iteration; in inference all runs of a call use the same weights.
        block_size = len(runs) if self.optimizer is None else self.layout.accumulation * self.layout.replicas
        with torch.no_grad(), guard:
            for start in range(0, len(runs), block_size):
                self._run_block(runs[start : start + block_size], tensors, pieces, collector)
        self.streams.advance(self.layout.device_iterations * self.layout.accumulation)
        results = collector.results()
        self._keep_anchors()
        self.timestamps.end_call()
        return rebuild(self.captured.returned, iter(results))

    def write_back(self, host: Sequence[torch.Tensor], device: Sequence[torch.Tensor]) -> None:
        """Copy inputs that the model changed back to the caller's tensors, if those were converted."""
        for index in self._written_inputs:
            if device[index].data_ptr() != host[index].data_ptr():
                with torch.no_grad():
                    host[index].copy_(device[index])

    def _run_block(
        self,
        runs: List[Run],
        tensors: Sequence[torch.Tensor],
        pieces: List[List[torch.Tensor]],
        collector: OutputCollector,
    ) -> None:
        """Run the micro-batches of one weight update, several at once if that gives the same results."""
        seed = self._seed()
        block = Block(
            replicas=[replica for _, _, replica in runs],
            inputs_of=lambda index: self._inputs_of(runs[index], pieces),
            start=lambda index: self._start_stream(runs[index]),
            arguments=self.arguments,
            seed=seed,
        )
        apart = len(runs) == 1 or (self.optimizer is not None and self.optimizer.watches_gradients)
        size = 1 if apart else self.chunks.size_for(block)
        first = 0
        while size > 1 and first + size <= len(runs):
            chunk = runs[first : first + size]
            self.timestamps.begin_runs(size)
            stacked = [self._stack(tensor, chunk) for tensor in tensors]
            self.timestamps.inputs_complete(size)
            wanted = any(collector.wants(iteration, step) for iteration, step, _ in chunk)
            outputs, grads = self.chunks.run(block, first, stacked, with_outputs=wanted)
            first += size
            self.timestamps.outputs()
            for index, (iteration, step, replica) in enumerate(chunk):
                if collector.wants(iteration, step):
                    collector.add(replica, [output[index] for output in outputs])
                if self.layout.hands_over(iteration, step):
                    self.timestamps.end_run()
            if self.optimizer is not None:
                self.optimizer.accumulate(grads, size)
        for run in runs[first:]:
            self._run_alone(run, pieces, seed, collector)
        if self.optimizer is not None:
            self.optimizer.apply()

    def _run_alone(
        self,
        run: Run,
        pieces: List[List[torch.Tensor]],
        seed: Optional[torch.Tensor],
        collector: OutputCollector,
    ) -> None:
        iteration, step, replica = run
        self.timestamps.begin_runs(1)
        inputs = self._inputs_of(run, pieces)
        self._start_stream(run)
        wanted = collector.wants(iteration, step)
        outputs, grads = self.run_once(replica, inputs, seed, with_outputs=wanted)
        if wanted:
            collector.add(replica, outputs)
            self._anchor_collector.add(replica, self._anchor_results)
        if self.layout.hands_over(iteration, step):
            self.timestamps.end_run()
        if self.optimizer is not None:
            self._accumulate(replica, self._per_group(replica, grads))

    def _accumulate(self, replica: int, grads: Dict[str, torch.Tensor]) -> None:
        """Add the gradients of one micro-batch; in a fixed order, those of all processes by replica."""
        assert self.optimizer is not None
        if self.processes is None or not self.adds_in_order:
            self.optimizer.accumulate(grads, 1)
            return
        self._of_replicas.append({name: grad.clone() for name, grad in grads.items()})
        if replica + 1 < self.layout.replicas:
            return
        names = [(place, name) for place, own in enumerate(self._of_replicas) for name in own]
        sent = [self._of_replicas[place][name] for place, name in names]
        for received in self.processes.gathered_lists(sent):
            of_replicas: List[Dict[str, torch.Tensor]] = [{} for _ in self._of_replicas]
            for (place, name), grad in zip(names, received):
                of_replicas[place][name] = grad
            for own in of_replicas:
                self.optimizer.accumulate(own, 1)
        self._of_replicas = []

    def _start_stream(self, run: Run) -> None:
        if self._is_random:
            iteration, step, replica = run
            self.streams.start(iteration * self.layout.accumulation + step, self._first_replica + replica)

    def _inputs_of(self, run: Run, pieces: List[List[torch.Tensor]]) -> List[torch.Tensor]:
        piece = self.layout.piece_of(*run)
        return [cut[piece] if len(cut) > 1 else cut[0] for cut in pieces]

    def optimizer_state(self) -> Dict[str, torch.Tensor]:
        """Return the optimizer's tensors on the device by name."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.read_state()
        return {**(state.get("ipu_state") or {}), **(state.get("ipu_param") or {})}

    def _keep_anchors(self) -> None:
        values = self._anchor_collector.results()
        self.anchors.values = dict(zip(self.anchors.in_graph, values))
        if self.anchors.of_weights:
            buffers = {name: copies[0] for name, copies in self.weights.buffers.items()}
            self.anchors.read_weights({**self.weights.parameters, **buffers}, self.optimizer_state())

    def _stack(self, tensor: torch.Tensor, chunk: Sequence[Run]) -> torch.Tensor:
        """Return the micro-batches of some runs, stacked along a new leading dimension."""
        size = self.layout.micro_batch_size(tensor)
        if tensor.dim() == 0:
            return tensor.expand(len(chunk))
        cut = tensor.view(self.layout.micro_batches, size, *tensor.shape[1:])
        numbers = [self.layout.piece_of(*run) for run in chunk]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return cut[numbers[0] : numbers[0] + len(numbers)]
        return cut[numbers]

    def run_once(
        self,
        replica: int,
        inputs: List[torch.Tensor],
        seed: Optional[torch.Tensor] = None,
        *,
        with_outputs: bool = True,
    ) -> Tuple[Sequence[torch.Tensor], Dict[str, torch.Tensor]]:
        """Run one micro-batch on one replica and return its outputs and its gradients by name.

        Args:
            replica: The replica whose buffers are used.
            inputs: The tensors of the micro-batch, changed in place if the model does so.
            seed: Gradient of the loss; the loss scaling by default.
            with_outputs: False if nobody reads the outputs, which may then be missing.
        """
        seed = self._seed() if seed is None else seed
        originals = list(inputs)
        for index in self._written_inputs:
            inputs[index] = inputs[index].clone()
        self.timestamps.inputs_complete(1)
        outputs, results = self._run_graph(self.arguments(replica, inputs, seed), with_outputs=with_outputs)
        self.timestamps.outputs()
        for index in self._written_inputs:
            originals[index].copy_(inputs[index])
        self._anchor_results = results[len(self._grad_names) :]
        grads = dict(zip(self._grad_names, results))
        for name in self._borrowed_grads:
            grads[name] = grads[name].clone()
        return outputs, grads

    def arguments(self, replica: int, inputs: Sequence[torch.Tensor], seed: Optional[torch.Tensor]) -> List[Any]:
        """Return the arguments of the graph for one run, None for missing inputs."""
        weights = self.weights
        arguments: List[Any] = []
        remaining = iter(inputs)
        for item in self.graph.inputs:
            if item.kind in ("parameter", "buffer"):
                read = weights.parameter_of if item.kind == "parameter" else weights.buffer_of
                tensor = read(item.name, replica)
                arguments.append(tensor.clone() if item.name in self._scratch else tensor)
            elif item.kind == "input":
                arguments.append(next(remaining, None))
            elif item.kind == "seed":
                arguments.append(seed)
        return arguments

    def _seed(self) -> Optional[torch.Tensor]:
        seeds = self.graph.inputs_of("seed")
        if not seeds:
            return None
        spec = self.graph.specs[seeds[0].value]
        scale = 1.0 if self.optimizer is None else self.optimizer.loss_scaling
        if self._last_seed is None or self._last_seed[0] != scale:
            self._last_seed = (scale, torch.full(spec.shape, scale, dtype=spec.dtype))
        return self._last_seed[1]

    def _per_group(self, replica: int, grads: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Move gradients of replica-grouped parameters to the rows that the replica trains."""
        for name, group in self.weights.groups.items():
            if name in grads:
                whole = torch.zeros_like(self.weights.parameters[name])
                whole[group.rows_trained_by(replica, self.layout.replicas)] = grads[name]
                grads[name] = whole
        return grads


def _grads_in_inputs(graph: Graph) -> List[str]:
    """Return the parameters whose gradient shares memory with a weight, buffer or input.

    A user's backward function may return a tensor that it saved. Such a gradient must be copied, because the update
    changes the weights one by one, and the next micro-batch changes buffers.
    """
    outside = {graph.specs[item.value].storage for item in graph.inputs}
    return [name for name, value in graph.grads.items() if graph.specs[value].storage in outside]
