"""Read a captured graph into a `TracedModel`: what each operation computes, moves and keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import AbstractSet, Any, Dict, FrozenSet, List, Mapping, Optional, Set, Tuple

import torch

from ipurun.emulator.graph import Graph, Node, TensorSpec, Value, values_in
from ipurun.inspect.traced_model import TracedModel, TracedOp, TracedParameter

__all__ = ["read_graph"]

_KINDS: Mapping[str, FrozenSet[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "matmul": "mm addmm bmm baddbmm matmul linear addmv mv dot addbmm",
        "conv": "convolution conv1d conv2d conv3d _convolution convolution_overrideable",
        "norm": "native_layer_norm native_batch_norm native_group_norm _native_batch_norm_legit cudnn_batch_norm "
        "_batch_norm_with_update _fused_rms_norm native_norm",
        "softmax": "_softmax _log_softmax _safe_softmax",
        "reduce": "sum mean amax amin max min argmax var std var_mean norm nll_loss_forward nll_loss2d_forward "
        "cumsum topk sort prod logsumexp",
        "gather": "embedding index gather index_select scatter scatter_add index_put index_put_ index_add "
        "embedding_bag _embedding_bag",
        "copy": "clone copy_ cat stack contiguous _to_copy pad constant_pad_nd repeat roll flip _reshape_copy",
        "pool": "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d max_pool2d "
        "upsample_nearest2d upsample_bilinear2d avg_pool1d max_pool3d_with_indices avg_pool3d "
        "adaptive_max_pool2d _adaptive_avg_pool3d",
    }.items()
}
# Floating-point operations per value, to the order of magnitude.
_FLOPS_PER_VALUE = {"norm": 8.0, "softmax": 5.0, "elementwise": 1.0, "reduce": 1.0, "pool": 1.0}
# The device keeps no dropout mask: it draws it a second time from the seed.
_MASK_OPS = frozenset(["bernoulli", "bernoulli_", "rand_like", "native_dropout"])
# Types that a device does not have are converted to smaller ones.
_DEVICE_BYTES = {torch.int64: 4, torch.float64: 4}


def read_graph(
    graph: Graph,
    *,
    micro_batch_size: int,
    prefix: str,
    training: bool,
    unsupported: Tuple[str, ...] = (),
    refused: str = "",
    recurrent: AbstractSet[str] = frozenset(),
) -> TracedModel:
    """Return what a captured forward pass does, and what its backward pass needs.

    Args:
        graph: The captured graph.
        micro_batch_size: Samples it was captured with.
        prefix: Leading part of module and parameter names that ipurun adds, such as ``model.``.
        training: Whether the graph has a backward pass.
        unsupported: Operations that PopTorch is not known to support.
        refused: What an IPU would refuse.
        recurrent: Names of modules whose steps the device runs in a loop.
    """
    traced = _GraphReader(graph, prefix, training, recurrent).read(micro_batch_size, unsupported)
    return replace(traced, refused=refused)


class _GraphReader:
    def __init__(self, graph: Graph, prefix: str, training: bool, recurrent: AbstractSet[str]) -> None:
        self._graph = graph
        self._prefix = prefix
        self._training = training
        self._recurrent = recurrent
        self._specs = graph.specs
        self._parameters = {self._specs[i.value].storage: i.name for i in graph.inputs_of("parameter")}
        self._owner: Dict[int, int] = {}  # storage -> operation that wrote it
        self._size: Dict[int, int] = {}  # storage -> bytes on the device
        self._masks: Set[int] = set()  # storages of dropout masks
        self._batched: Set[Value] = {item.value for item in graph.inputs_of("input")}  # depend on the input
        self._trained: Set[Value] = set()  # get a gradient
        self._has_blocks = any(event.kind == "begin_block" for event in graph.events)

    def read(self, micro_batch_size: int, unsupported: Tuple[str, ...]) -> TracedModel:
        forward = [node for node in self._graph.nodes if not node.is_backward]
        self._trained = {item.value for item in self._graph.inputs_of("parameter") if item.name in self._graph.grads}
        ops = [self._op(index, node) for index, node in enumerate(forward)]
        saved = self._saved()
        ops = [replace(op, saved_bytes=saved[op.index]) if op.index in saved else op for op in ops]
        ops = _with_loops(ops, self._recurrent)
        buffers = sum(_device_bytes(self._specs[item.value]) for item in self._graph.inputs_of("buffer"))
        return TracedModel(
            ops=tuple(ops),
            parameters=self._traced_parameters(ops),
            buffers_bytes=buffers,
            input_bytes=sum(_device_bytes(self._specs[item.value]) for item in self._graph.inputs_of("input")),
            output_bytes=sum(_device_bytes(self._specs[value]) for value in values_in(self._graph.outputs)),
            micro_batch_size=micro_batch_size,
            training=self._training,
            unsupported=unsupported,
        )

    def _op(self, index: int, node: Node) -> TracedOp:
        reads = list(dict.fromkeys(node.reads()))
        produced = list(values_in(node.outputs))
        read_storages = [self._specs[value].storage for value in reads]
        kind = self._kind(node, produced, read_storages)
        fresh = self._register(index, node, produced, read_storages, kind)
        is_batched = any(value in self._batched for value in reads)
        operands = self._gradients(node, kind, reads)
        if is_batched:
            self._batched.update(produced, node.mutated)
        if operands and node.grad_enabled and node.name != "detach":
            self._trained.update(value for value in produced if self._specs[value].dtype.is_floating_point)
            self._trained.update(node.mutated)
        costs = kind != "view"
        dims = _dims(node, kind, self._specs) if costs else ()
        values = sum(math.prod(self._specs[value].shape) for value in produced[:1] or list(node.mutated)[:1])
        traffic = sum(_device_bytes(self._specs[value]) for value in (*reads, *produced)) if costs else 0
        if kind == "gather":  # only some rows of a table are read
            traffic = 2 * sum(_device_bytes(self._specs[value]) for value in produced)
        flops = 2.0 * math.prod(dims) if dims else values * _FLOPS_PER_VALUE.get(kind, 0.0)
        spec = self._specs[(produced or list(node.mutated) or reads)[0]]
        names = dict.fromkeys(self._parameters[s] for s in read_storages if s in self._parameters)
        owners = {self._owner[s] for s in read_storages if s in self._owner}
        return TracedOp(
            index=index,
            name=node.name,
            module=self._module(node.module_path),
            kind=kind,
            flops_forward=flops,
            flops_backward=flops * (operands if dims else min(operands, 1)) if self._training else 0.0,
            output_bytes=fresh,
            traffic_bytes=traffic,
            parameters=tuple(self._user_name(name) for name in names),
            inputs=tuple(sorted(owner for owner in owners if owner < index)),
            dims=dims,
            gradients=operands if self._training else 0,
            element_bytes=_device_bytes(TensorSpec((), spec.dtype, 0)),
            signature=_signature(node, reads, self._specs) if costs else "",
            source=node.source,
            is_batched=is_batched,
            ipu=node.placement.ipu_id if self._has_blocks else None,
        )

    def _kind(self, node: Node, produced: List[Value], read_storages: List[int]) -> str:
        varying = self._graph.varying
        if not node.mutated:
            if produced and all(self._specs[value].storage in read_storages for value in produced):
                return "view"
            if not any(value in varying for value in produced) or node.name in ("empty_like", "new_empty"):
                return "view"  # constants are computed at compile time
        elif all(not self._specs[v].shape and not self._specs[v].dtype.is_floating_point for v in node.mutated):
            return "view"  # a counter that forward reads: constant on an IPU
        return next((kind for kind, names in _KINDS.items() if node.name in names), "elementwise")

    def _register(self, index: int, node: Node, produced: List[Value], read_storages: List[int], kind: str) -> int:
        fresh = 0
        for value in produced:
            spec = self._specs[value]
            if spec.storage in read_storages:
                continue
            is_mask = node.name in _MASK_OPS and (value != produced[0] or len(produced) == 1)
            if is_mask or node.name == "empty_like":
                self._masks.add(spec.storage)
            elif kind != "view":
                fresh += _device_bytes(spec)
            if kind != "view":
                self._owner[spec.storage] = index
            self._size[spec.storage] = _device_bytes(spec)
        for storage in {self._specs[value].storage for value in node.mutated}:
            self._owner[storage] = index
            if storage not in self._masks:
                # From now on the tensor holds this operation's result. Buffers are counted elsewhere.
                fresh += self._size.get(storage, 0)
        return fresh

    def _gradients(self, node: Node, kind: str, reads: List[Value]) -> int:
        """Return how many operands of an operation get a gradient."""
        if kind in ("matmul", "conv"):
            return sum(value in self._trained for value in _factors(node))
        return sum(value in self._trained for value in reads)

    def _saved(self) -> Dict[int, int]:
        """Return how many bytes of each operation's results the backward pass reads."""
        saved: Dict[int, int] = {}
        for storage in set(self._graph.saved) - self._masks if self._training else ():
            owner = self._owner.get(storage)
            if owner is not None:
                saved[owner] = saved.get(owner, 0) + self._size.get(storage, 0)
        return saved

    def _traced_parameters(self, ops: List[TracedOp]) -> Tuple[TracedParameter, ...]:
        readers: Dict[str, List[int]] = {}
        for op in ops:
            for name in op.parameters:
                readers.setdefault(name, []).append(op.index)
        traced = []
        for item in self._graph.inputs_of("parameter"):
            spec, name = self._specs[item.value], self._user_name(item.name)
            traced.append(
                TracedParameter(
                    name=name,
                    elements=math.prod(spec.shape),
                    element_bytes=_device_bytes(TensorSpec((), spec.dtype, 0)),
                    trainable=item.name in self._graph.grads,
                    ops=tuple(readers.get(name, ())),
                )
            )
        return tuple(traced)

    def _user_name(self, name: str) -> str:
        return name[len(self._prefix) :] if name.startswith(self._prefix) else name

    def _module(self, path: str) -> str:
        return self._user_name(path) if path.startswith(self._prefix) else ""


def _with_loops(ops: List[TracedOp], recurrent: AbstractSet[str]) -> List[TracedOp]:
    """Make one operation of the equal ones of each call of a recurrent module: the steps of a loop on the device."""
    if not recurrent:
        return ops
    found: List[TracedOp] = []
    now: Dict[int, int] = {}  # index in the trace -> index in what is returned
    steps: Dict[TracedOp, int] = {}  # of the call at hand
    module = ""
    for op in ops:
        if op.module != module:
            module, steps = op.module, {}
        inputs = {now[producer] for producer in op.inputs}
        index = now[op.index] = len(found)
        if module in recurrent:
            # The loop writes the results of its steps, and reads their gradients, where they are.
            op = replace(op, gradients=min(op.gradients, 2))
            key = replace(op, index=0, inputs=(), flops_forward=0.0, flops_backward=0.0, saved_bytes=0, source="")
            index = now[op.index] = steps.setdefault(key, index)
        if index == len(found):
            found.append(replace(op, index=index, inputs=tuple(sorted(inputs))))
            continue
        first = found[index]
        found[index] = replace(
            first,
            flops_forward=first.flops_forward + op.flops_forward,
            flops_backward=first.flops_backward + op.flops_backward,
            saved_bytes=first.saved_bytes + op.saved_bytes,
            # What a step reads of the one before it comes later in the list.
            inputs=tuple(sorted({*first.inputs, *(producer for producer in inputs if producer < index)})),
            repeats=first.repeats + 1,
        )
    return found


def _device_bytes(spec: TensorSpec) -> int:
    """Return the size of a value on the device, which has no 64-bit types."""
    size = _DEVICE_BYTES.get(spec.dtype) or torch.empty((), dtype=spec.dtype, device="meta").element_size()
    return math.prod(spec.shape) * size


def _factors(node: Node) -> Tuple[Any, ...]:
    """Return the two operands of a product, without bias or sum."""
    start = 1 if node.name in ("addmm", "baddbmm", "addmv", "addbmm") else 0
    return tuple(value for value in node.args[start : start + 2] if isinstance(value, Value))


def _dims(node: Node, kind: str, specs: Dict[Value, TensorSpec]) -> Tuple[int, ...]:
    if kind not in ("matmul", "conv"):
        return ()
    factors = _factors(node)
    if len(factors) != 2:
        return ()
    left, right = (specs[value].shape for value in factors)
    if kind == "conv":
        out = specs[next(iter(values_in(node.outputs)))].shape
        return _convolution_dims(node, left, right, out)
    if len(right) == 1 or len(left) == 1:  # with a vector
        depth = right[0] if len(right) == 1 else left[0]
        return (1, max(1, math.prod(left) // depth), max(1, math.prod(right) // depth), depth, 1)
    depth, columns = (right[-1], right[-2]) if node.name == "linear" else (right[-2], right[-1])
    if len(right) == 2:
        return (1, math.prod(left) // depth, columns, depth, 1)
    return (math.prod(right[:-2]), left[-2], columns, depth, 1)


def _convolution_dims(
    node: Node, data: Tuple[int, ...], weight: Tuple[int, ...], out: Tuple[int, ...]
) -> Tuple[int, ...]:
    transposed: Optional[bool] = node.args[6] if len(node.args) > 6 else False
    groups = int(node.args[8]) if len(node.args) > 8 else 1
    if transposed:
        return (groups, data[0] * math.prod(data[2:]), weight[1], data[1] // groups, math.prod(weight[2:]))
    return (groups, out[0] * math.prod(out[2:]), weight[0] // groups, weight[1], math.prod(weight[2:]))


def _signature(node: Node, reads: List[Value], specs: Dict[Value, TensorSpec]) -> str:
    shapes = ",".join(f"{tuple(specs[value].shape)}{str(specs[value].dtype)[6:]}" for value in reads)
    plain = [str(a) for a in node.args if isinstance(a, (int, float, bool, str, list)) and not list(values_in((a,)))]
    return f"{node.name}({shapes};{','.join(plain)})"
