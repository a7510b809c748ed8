"""Make up for what is slow in torch on a CPU: the memory allocator's defaults, and kernels that a quicker one replaces.

A replacement returns the same bits as the operation, with the same layout in memory, so that it can be used anywhere;
dropout draws other numbers than torch does, the same ones in every form of a graph.
Those that round differently are used only for several micro-batches at once, where sums round differently anyway and
results are compared with those of one micro-batch after the other.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import os
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, values_in
from ipurun.emulator._capture.op_kinds import NEEDS_ONE_LAYOUT
from ipurun.emulator._run.rounding import ROUNDINGS

# Parameters of glibc's mallopt, and the largest values that all its versions take.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _HEAP_BYTES = 2**30, 32 * 2**20
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
# Channels that a vectorised kernel computes side by side; the number of elements below which a copy costs too much.
_MOST_CHANNELS, _LEAST_CHANNELS = 128, 16
_LEAST_ELEMENTS = 4096
# GELU's approximation is x * sigmoid(x * (scale + cubic * x ** 2)).
_GELU_SCALE = torch.tensor(2 * math.sqrt(2 / math.pi))
_GELU_CUBIC = 0.044715 * 2 * math.sqrt(2 / math.pi)


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> bool:
    """Let the process keep the memory that a step frees for the next step; return whether that was possible.

    By default, glibc returns the large tensors of a step to the system, and every step pays for the page faults of
    getting them again: up to a quarter of its time. What the user set in the environment stays.
    """
    if any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def with_quick_kernels(graph: Graph, results: Sequence[Value], *, same_bits: bool = True) -> Graph:
    """Return the graph with quicker functions in place of some operations.

    Args:
        graph: A graph to run; its nodes are left unchanged.
        results: The values to return.
        same_bits: Whether the results must have the same bits; otherwise some are rounded differently.
    """
    spare = _spare_operands(graph, results)
    nodes = [_quick(node, spare.get(id(node), ()), same_bits) for node in graph.nodes]
    return dataclasses.replace(graph, nodes=nodes)


def _quick(node: Node, spare: Sequence[int], same_bits: bool) -> Node:
    if not isinstance(node.op, torch._ops.OpOverload):
        return node
    if not same_bits and node.op in _ROUNDED_DIFFERENTLY:
        return dataclasses.replace(node, op=_ROUNDED_DIFFERENTLY[node.op])
    if node.op in _QUICKER:
        return dataclasses.replace(node, op=_QUICKER[node.op])
    if node.op in _INTO_FIRST and 0 in spare:
        return dataclasses.replace(node, op=_INTO_FIRST[node.op])
    if node.op in _COMMUTATIVE and 1 in spare and len(node.args) == 2 and not node.kwargs:
        return dataclasses.replace(node, op=functools.partial(_into_second, node.op, _INTO_FIRST[node.op]))
    return node


def _spare_operands(graph: Graph, results: Sequence[Value]) -> Dict[int, List[int]]:
    """Return the positions of operands in whose memory a node can put its result, by the node's identity.

    Such an operand has the shape and type of the result, and nothing else uses its memory from then on.
    """
    kept = {graph.specs[value].storage for value in results} | {
        graph.specs[item.value].storage for item in graph.inputs
    }
    last_use: Dict[int, int] = {}
    views: Dict[int, Set[Value]] = {}
    for index, node in enumerate(graph.nodes):
        for value in (*node.reads(), *values_in(node.outputs)):
            last_use[graph.specs[value].storage] = index
        if node.name != "detach":
            for value in values_in(node.outputs):
                views.setdefault(graph.specs[value].storage, set()).add(value)
        if not hasattr(node.op, "_schema") and not isinstance(node.op, ROUNDINGS):
            kept.update(graph.specs[value].storage for value in node.reads())  # a function may keep its arguments
    spare: Dict[int, List[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.op not in _INTO_FIRST or not isinstance(node.outputs, Value):
            continue
        result = graph.specs[node.outputs]
        for position, value in enumerate(node.args[:2]):
            spec = graph.specs[value] if isinstance(value, Value) else None
            if spec is None or (spec.shape, spec.dtype) != (result.shape, result.dtype) or spec.storage in kept:
                continue
            if last_use[spec.storage] == index and len(views.get(spec.storage, ())) == 1:
                spare.setdefault(id(node), []).append(position)
    return spare


def _into_second(
    op: Callable[..., torch.Tensor], in_place: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """Put the result into the second operand, if it then lies in memory as that of the operation would."""
    return in_place(right, left) if right.stride() == left.stride() else op(left, right)


def _max_pool2d(image: torch.Tensor, *args: Any, **kwargs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Pool with the kernel for channels that lie next to each other: it is vectorised, the other one guesses branches.

    Images and channels are independent, so any number of them can take the place of the channels.
    """
    pool = torch.ops.aten.max_pool2d_with_indices.default
    width = _channels_at_once(image)
    if not width:
        return pool(image, *args, **kwargs)
    together = image.view(-1, width, *image.shape[2:]).contiguous(memory_format=torch.channels_last)
    values, indices = pool(together, *args, **kwargs)
    shape = (*image.shape[:2], *values.shape[2:])
    return values.contiguous().view(shape), indices.contiguous().view(shape)


def _channels_at_once(image: torch.Tensor) -> int:
    """Return how many images and channels to put next to each other, 0 if that is not worth it."""
    if image.dim() != 4 or image.numel() < _LEAST_ELEMENTS or not image.is_contiguous():
        return 0
    planes = image.shape[0] * image.shape[1]
    return next((n for n in range(min(_MOST_CHANNELS, planes), _LEAST_CHANNELS - 1, -1) if planes % n == 0), 0)


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    """Look for rows of which everything is masked in the result, where they are NaN, instead of in all scores."""
    weights = torch.softmax(scores, dim, dtype)
    if weights.dim() and weights.numel() and bool(weights.select(dim, 0).sum().isnan()):
        return torch.ops.aten._safe_softmax.default(scores, dim, dtype)
    return weights


def draw_bernoulli(target: torch.Tensor, probability: float = 0.5, *, generator: Any = None) -> torch.Tensor:
    """Fill a tensor with ones, with a probability, and zeros: uniform numbers take half the time of torch's kernel."""
    if generator is None and target.dtype == torch.float32:
        return target.uniform_().lt_(probability)
    if generator is None and target.dtype == torch.float16:  # the same numbers as in float32
        return target.copy_(draw_bernoulli(torch.empty_like(target, dtype=torch.float32), probability))
    return _ATEN.bernoulli_.float(target, probability, generator=generator)


def _gelu(source: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Compute the approximation with a sigmoid: torch's tanh takes several times as long."""
    if approximate != "tanh":
        return _ATEN.gelu.default(source, approximate=approximate)
    return _gelu_gate(source).mul_(source)


def _gelu_backward(grad: torch.Tensor, source: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate != "tanh":
        return _into_gradient(_ATEN.gelu_backward, grad, source, approximate=approximate)
    gate = _gelu_gate(source)
    slope = torch.addcmul(_GELU_SCALE, source, source, value=3 * _GELU_CUBIC).mul_(source)
    return slope.addcmul_(slope, gate, value=-1).add_(1).mul_(gate).mul_(grad)


def _gelu_gate(source: torch.Tensor) -> torch.Tensor:
    """Return what the approximation multiplies its input by: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    return torch.addcmul(_GELU_SCALE, source, source, value=_GELU_CUBIC).mul_(source).sigmoid_()


def _into_gradient(op: Any, grad: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Put the gradient of an input into that of the output, if both inputs lie in memory alike."""
    if grad.stride() != source.stride():
        both = (grad.contiguous(), source.contiguous()) if op.default in NEEDS_ONE_LAYOUT else (grad, source)
        return op.default(*both, *args, **kwargs)
    return op.grad_input(grad, source, *args, grad_input=grad, **kwargs)


_ATEN = torch.ops.aten
_QUICKER: Dict[Any, Callable[..., Any]] = {
    _ATEN.max_pool2d_with_indices.default: _max_pool2d,
    _ATEN.bernoulli_.float: draw_bernoulli,
}
if hasattr(_ATEN, "_safe_softmax"):  # since torch 2.5
    _QUICKER[_ATEN._safe_softmax.default] = _safe_softmax
_INTO_FIRST: Dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.add.Tensor: _ATEN.add_.Tensor,
    _ATEN.div.Scalar: _ATEN.div_.Scalar,
    _ATEN.div.Tensor: _ATEN.div_.Tensor,
    _ATEN.gelu_backward.default: functools.partial(_into_gradient, _ATEN.gelu_backward),
    _ATEN.mul.Scalar: _ATEN.mul_.Scalar,
    _ATEN.mul.Tensor: _ATEN.mul_.Tensor,
    _ATEN.relu.default: _ATEN.relu_.default,
    _ATEN.sub.Tensor: _ATEN.sub_.Tensor,
    _ATEN.threshold_backward.default: functools.partial(_into_gradient, _ATEN.threshold_backward),
}
_ROUNDED_DIFFERENTLY: Dict[Any, Callable[..., torch.Tensor]] = {
    _ATEN.gelu.default: _gelu,
    _ATEN.gelu_backward.default: _gelu_backward,
}
_COMMUTATIVE = (_ATEN.add.Tensor, _ATEN.mul.Tensor)
