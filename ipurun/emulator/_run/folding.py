"""Run the forward operations of a graph on several micro-batches at once.

A value that depends on micro-batches has one of two forms: *folded*, in which the rows of all micro-batches follow each
other along one of its dimensions, or *stacked*, with a leading dimension for micro-batches. An operation with a rule
runs once on folded tensors, as if the micro-batch were larger. All others run under vmap on stacked tensors. Neither
mixes micro-batches: a rule is applied only if the operation treats the positions of the folded dimension separately.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch

from ipurun.emulator._capture.graph import Graph, Node, Value, map_values, values_in
from ipurun.emulator._capture.op_kinds import names_in

STACKED = -1


class Rows(NamedTuple):
    """A value that differs between micro-batches."""

    tensor: torch.Tensor
    dim: int
    """The folded dimension, or STACKED."""
    shape: Tuple[int, ...]
    """The shape of the value in one micro-batch."""


Batched = Union[torch.Tensor, Rows]
# The result of an operation and the folded dimension of each of its tensors, or one for all of them.
Result = Tuple[Any, Union[int, Sequence[int]]]


class CannotFold(RuntimeError):
    """The micro-batches of a graph cannot be computed at once."""


class BatchStatistics(NamedTuple):
    """What batch norm computed for the running statistics: a row for each micro-batch."""

    buffer: Value
    momentum: float
    tensor: torch.Tensor


# Operations on single elements that torch does not mark as such on both versions.
_POINTWISE = names_in("""
    _prelu_kernel _to_copy alias celu clone copy detach elu empty_like fill full_like gelu hardsigmoid hardswish
    hardtanh leaky_relu lift lift_fresh lift_fresh_copy log_sigmoid_forward masked_fill mish ones_like relu6 selu
    silu softplus threshold type_as where zero zeros_like
""")
_RESHAPES = names_in("_reshape_alias _reshape_copy _unsafe_view flatten reshape unflatten view view_copy")
_ALONG_A_DIMENSION = names_in("""
    _log_softmax _safe_softmax _softmax argsort cummax cummin cumprod cumsum flip glu log_softmax logcumsumexp narrow
    roll slice softmax sort split split_with_sizes topk unsafe_split unsafe_split_with_sizes
""")
_REDUCTIONS = names_in("""
    all amax amin any argmax argmin linalg_vector_norm logsumexp max mean min nansum norm prod std std_mean sum var
    var_mean
""")
_REMOVES_A_DIMENSION = names_in("select unbind")
_BY_INDEX = names_in("gather scatter scatter_add scatter_reduce take_along_dim")
# Operations on the last dimensions, by the number of those.
_SPATIAL = {
    **dict.fromkeys(names_in("avg_pool1d max_pool1d reflection_pad1d replication_pad1d upsample_nearest1d"), 1),
    **dict.fromkeys(
        names_in("""
            _adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d_with_indices reflection_pad2d
            replication_pad2d tril triu upsample_bilinear2d upsample_nearest2d
        """),
        2,
    ),
    **dict.fromkeys(
        names_in("_adaptive_avg_pool3d avg_pool3d max_pool3d_with_indices replication_pad3d upsample_nearest3d"), 3
    ),
    **dict.fromkeys(names_in("pixel_shuffle pixel_unshuffle"), 3),
}
_SHAPE_ONLY = names_in("new_empty new_empty_strided new_full new_ones new_zeros")


class Folding:
    """Interprets forward nodes on values of several micro-batches.

    Args:
        graph: The graph of one micro-batch.
        nodes: The forward nodes to run.
        size: Number of micro-batches.
        drawn: Random numbers for the results of random nodes, stacked, by the node's identity.
        results: The values that are read afterwards.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        size: int,
        drawn: Dict[int, torch.Tensor],
        results: Sequence[Value],
    ) -> None:
        self.size = size
        self.statistics: List[BatchStatistics] = []
        self._graph = graph
        self._nodes = nodes
        self._results = results
        self._drawn = drawn
        self._values: Dict[Value, Batched] = {}
        written = {graph.specs[value].storage for node in nodes for value in node.mutated}
        through_views = _writes_through_views(graph, nodes, results)
        self._in_place_nodes = {id(node) for node in through_views}
        # Views of what they write must stay views.
        self._pinned = {graph.specs[value].storage for node in through_views for value in node.mutated}
        for value, tensor in graph.constants.items():
            self._values[value] = tensor.clone() if graph.specs[value].storage in written else tensor

    def set(self, value: Value, tensor: Batched) -> None:
        """Give a graph input its tensor."""
        self._values[value] = tensor

    def stacked_result(self, value: Value) -> torch.Tensor:
        """Return a value with a leading dimension for micro-batches."""
        return self.stacked(self._values[value])

    def run(self) -> None:
        """Run the nodes; values that are not results are dropped after their last use.

        Raises:
            CannotFold: If a node cannot run on several micro-batches.
        """
        last_use: Dict[Value, int] = {
            v: i for i, node in enumerate(self._nodes) for v in (*node.reads(), *node.writes())
        }
        for value in self._results:
            last_use.pop(value, None)
        dropped: Dict[int, List[Value]] = {}
        for value, index in last_use.items():
            dropped.setdefault(index, []).append(value)
        for index, node in enumerate(self._nodes):
            self._run_node(node)
            for value in dropped.get(index, ()):
                self._values.pop(value, None)

    def _run_node(self, node: Node) -> None:
        args = map_values(self._values.__getitem__, node.args)
        kwargs = map_values(self._values.__getitem__, node.kwargs)
        if id(node) in self._drawn:
            self._store_drawn(node, args)
            return
        if not any(isinstance(leaf, Rows) for leaf in _leaves((args, kwargs))):
            self._store(node, node.op(*args, **kwargs), None)
            return
        op, name = node.op, node.name
        if node.mutated and name != "native_batch_norm":
            if id(node) in self._in_place_nodes:
                self._store(node, *self._in_place(node, args, kwargs))
                return
            # Nothing else uses the memory, so the value can be replaced instead.
            op, name = _functional(node), name[:-1]
        call = _Call(self, node, op, name, args, kwargs)
        result = _fold(call)
        if result is None:
            result = self._under_vmap(op, args, kwargs), STACKED
        self._store(node, *result)

    def _in_place(self, node: Node, args: Any, kwargs: Any) -> Result:
        """Run an operation that writes a tensor with views."""
        targets = [self._values[value] for value in node.mutated]
        if not all(isinstance(target, Rows) for target in targets):
            raise CannotFold(f"{node.name} writes a part of a tensor that is the same for all micro-batches")
        call = _Call(self, node, node.op, node.name, args, kwargs)
        target = targets[0]
        if len(targets) == 1 and target.dim != STACKED and _is_pointwise(_functional(node), node.name[:-1]):
            result = _pointwise(call, [target.dim])
            if result is not None:
                return result
        if all(target.dim == STACKED for target in targets):
            return self._under_vmap(node.op, args, kwargs), STACKED
        raise CannotFold(f"{node.name} writes a part of a tensor")

    def _store_drawn(self, node: Node, args: Any) -> None:
        drawn = self._drawn[id(node)]
        if id(node) in self._in_place_nodes:
            raise CannotFold(f"{node.name} writes a part of a tensor")
        if node.name == "native_dropout":
            # The scale is that of torch: 1 / (1 - p).
            out, mask = node.outputs
            probability = node.args[1]
            scale = 0.0 if probability == 1 else 1 / (1 - probability)
            rows = args[0]
            dim = rows.dim if isinstance(rows, Rows) and rows.dim != STACKED else 0
            taken = self.folded(Rows(drawn, STACKED, tuple(drawn.shape[1:])), dim)
            source = self.folded(rows, dim)
            self._values[mask] = Rows(taken, dim, self._shape(mask))
            self._values[out] = Rows(source.mul(taken).mul(scale), dim, self._shape(out))
            return
        for value in values_in(node.outputs):
            self._values[value] = Rows(drawn, STACKED, tuple(drawn.shape[1:]))

    def _shape(self, value: Value) -> Tuple[int, ...]:
        return self._graph.specs[value].shape

    def _store(self, node: Node, result: Any, dims: Union[int, Sequence[int], None]) -> None:
        outputs, tensors = list(values_in(node.outputs)), [t for t in _leaves(result) if isinstance(t, torch.Tensor)]
        if dims is None:
            for value, tensor in zip(outputs, tensors):
                # What is written later may differ between micro-batches then.
                self._values[value] = self._separate(tensor) if self.is_pinned(value) else tensor
            return
        each = [dims] * len(outputs) if isinstance(dims, int) else list(dims)
        for value, tensor, dim in zip(outputs, tensors, each):
            shape = self._shape(value)
            if tuple(tensor.shape) != self._folded_shape(shape, dim):
                raise CannotFold(f"{node.name} of shape {shape} becomes {tuple(tensor.shape)} for {self.size} at once")
            self._values[value] = Rows(tensor, dim, shape)

    def _separate(self, tensor: torch.Tensor) -> Rows:
        if tensor.dim() == 0:
            return Rows(self.stacked(tensor).clone(), STACKED, ())
        return Rows(self.folded(tensor, 0), 0, tuple(tensor.shape))

    def _folded_shape(self, shape: Tuple[int, ...], dim: int) -> Tuple[int, ...]:
        if dim == STACKED:
            return (self.size, *shape)
        return (*shape[:dim], shape[dim] * self.size, *shape[dim + 1 :])

    def is_pinned(self, value: Value) -> bool:
        """Whether a value shares a storage that is written."""
        return self._graph.specs[value].storage in self._pinned

    def stacked(self, item: Batched) -> torch.Tensor:
        """Return the tensor with a leading dimension for micro-batches."""
        if not isinstance(item, Rows):
            return item.expand(self.size, *item.shape)
        if item.dim == STACKED:
            return item.tensor
        apart = item.tensor.unflatten(item.dim, (self.size, item.shape[item.dim]))
        return apart if item.dim == 0 else apart.movedim(item.dim, 0)

    def folded(self, item: Batched, dim: int) -> torch.Tensor:
        """Return the tensor with the rows of all micro-batches along a dimension."""
        if isinstance(item, Rows) and item.dim == dim:
            return item.tensor
        apart = self.stacked(item)
        return (apart if dim == 0 else apart.movedim(0, dim)).flatten(dim, dim + 1)

    def _under_vmap(self, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        rows: List[torch.Tensor] = []

        def place(item: Any) -> Any:
            if isinstance(item, Rows):
                rows.append(self.stacked(item))
                return _Place(len(rows) - 1)
            return item

        placed = _map_leaves(place, (args, kwargs))

        def call(*tensors: torch.Tensor) -> Any:
            given, named = _map_leaves(lambda item: tensors[item] if isinstance(item, _Place) else item, placed)
            return op(*given, **named)

        return torch.func.vmap(call)(*rows)


def _writes_through_views(graph: Graph, nodes: Sequence[Node], results: Sequence[Value]) -> List[Node]:
    """Return the nodes that write a tensor while other values that share its memory are in use."""
    first: Dict[Value, int] = {}
    last: Dict[Value, int] = {}
    sharing: Dict[int, Set[Value]] = {}
    for index, node in enumerate(nodes):
        for value in (*node.reads(), *node.writes()):
            first.setdefault(value, index)
            last[value] = index
            sharing.setdefault(graph.specs[value].storage, set()).add(value)
    last.update(dict.fromkeys(results, len(nodes)))
    found = []
    for index, node in enumerate(nodes):
        others = {other for value in node.mutated for other in sharing[graph.specs[value].storage] - {value}}
        if any(first[other] < index < last[other] for other in others):
            found.append(node)
    return found


class _Place(int):
    """The position of an argument among those that differ between micro-batches."""


class _Call(NamedTuple):
    """An operation with its arguments, some of which differ between micro-batches."""

    fold: Folding
    node: Node
    op: Any
    name: str
    args: Any
    kwargs: Any

    def named(self) -> Dict[str, Any]:
        """Return the arguments by name, with defaults."""
        bound = {}
        for index, argument in enumerate(self.op._schema.arguments):
            if index < len(self.args):
                bound[argument.name] = self.args[index]
            else:
                default = argument.default_value if argument.has_default_value() else None
                bound[argument.name] = self.kwargs.get(argument.name, default)
        return bound

    def out_shape(self) -> Tuple[int, ...]:
        return self.fold._shape(next(values_in(self.node.outputs)))

    def first(self) -> Optional[Rows]:
        """Return the first argument if it differs between micro-batches, folded."""
        item = self.args[0] if self.args else None
        if not isinstance(item, Rows) or not item.shape:
            return None
        return item if item.dim != STACKED else item._replace(tensor=self.fold.folded(item, 0), dim=0)

    def others_shared(self) -> bool:
        """Whether only the first argument differs between micro-batches."""
        return not any(isinstance(leaf, Rows) for leaf in _leaves((self.args[1:], self.kwargs)))

    def run(self, *changed: Any) -> Any:
        """Run the operation, the given arguments in place of the first ones."""
        return self.op(*changed, *self.args[len(changed) :], **self.kwargs)


def _fold(call: _Call) -> Optional[Result]:
    """Run an operation on folded tensors; return None if it has no rule for its arguments."""
    rule = _RULES.get(call.name)
    if rule is not None:
        return rule(call)
    return _pointwise(call) if _is_pointwise(call.op, call.name) else None


def _is_pointwise(op: Any, name: str) -> bool:
    overload = op if hasattr(op, "tags") else getattr(op, "_op", None)  # operations on integers are wrapped
    return name in _POINTWISE or torch.Tag.pointwise in getattr(overload, "tags", ())


def _pointwise(call: _Call, positions: Optional[List[int]] = None) -> Optional[Result]:
    out = call.out_shape()
    rank = len(out)
    tensors = [leaf for leaf in _leaves((call.args, call.kwargs)) if isinstance(leaf, (Rows, torch.Tensor))]
    rows = [leaf for leaf in tensors if isinstance(leaf, Rows)]
    if positions is None:
        positions = [rank - len(item.shape) + item.dim for item in rows if item.dim != STACKED]
        positions += [0] if rank else []

    def lies_along(item: Rows, position: int) -> bool:
        dim = position - (rank - len(item.shape))
        return dim >= 0 and item.shape[dim] == out[position]

    position = next((p for p in positions if all(lies_along(item, p) for item in rows)), None)
    if position is None:
        return None

    def place(item: Any) -> Any:
        if isinstance(item, Rows):
            return call.fold.folded(item, position - (rank - len(item.shape)))
        if isinstance(item, torch.Tensor):
            dim = position - (rank - item.dim())
            return call.fold.folded(item, dim) if dim >= 0 and item.shape[dim] != 1 else item
        return item

    args, kwargs = _map_leaves(place, (call.args, call.kwargs))
    return call.op(*args, **kwargs), position


def _reshape(call: _Call) -> Optional[Result]:
    """Elements keep their order: micro-batches stay apart if a dimension begins where the folded one did."""
    rows, out = call.first(), call.out_shape()
    if rows is None:
        return None
    before = math.prod(rows.shape[: rows.dim])
    starts = [math.prod(out[:dim]) for dim in range(len(out))]
    dims = [dim for dim, start in enumerate(starts) if start == before]
    is_pinned = call.fold.is_pinned(next(call.node.reads()))
    if not dims or 0 in out:
        return None if is_pinned else (call.fold.stacked(rows).reshape(call.fold.size, *out), STACKED)
    dim = rows.dim if rows.dim in dims else max(dims, key=lambda d: out[d] > 1)
    shape = call.fold._folded_shape(out, dim)
    return (rows.tensor.view(shape) if is_pinned else rows.tensor.reshape(shape)), dim


def _expand(call: _Call) -> Optional[Result]:
    rows, out = call.first(), call.out_shape()
    if rows is None:
        return None
    dim = len(out) - len(rows.shape) + rows.dim
    if out[dim] != rows.shape[rows.dim]:
        return None
    return rows.tensor.expand(call.fold._folded_shape(out, dim)), dim


def _repeat(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None:
        return None
    dim = len(call.args[1]) - len(rows.shape) + rows.dim
    return (call.run(rows.tensor), dim) if call.args[1][dim] == 1 else None


def _permute(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None:
        return None
    rank = len(rows.shape)
    if call.name == "permute":
        order = [_wrap(dim, rank) for dim in call.args[1]]
    else:
        given = call.named()
        first, second = (0, 1) if call.name == "t" else (given["dim0"], given["dim1"])
        order = list(range(rank))
        if rank > 1:
            first, second = _wrap(first, rank), _wrap(second, rank)
            order[first], order[second] = order[second], order[first]
    return call.run(rows.tensor), order.index(rows.dim)


def _unsqueeze(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None:
        return None
    dim = _wrap(call.named()["dim"], len(rows.shape) + 1)
    return call.run(rows.tensor), rows.dim + (dim <= rows.dim)


def _squeeze(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None:
        return None
    given = call.named().get("dim", list(range(len(rows.shape))))
    dims = {_wrap(dim, len(rows.shape)) for dim in _listed(given)}
    if rows.dim in dims and rows.shape[rows.dim] == 1:
        return None
    gone = [dim for dim in dims if rows.shape[dim] == 1 and dim < rows.dim]
    if rows.dim in dims:
        dims.discard(rows.dim)
    return rows.tensor.reshape(call.fold._folded_shape(call.out_shape(), rows.dim - len(gone))), rows.dim - len(gone)


def _along_a_dimension(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None or not call.others_shared():
        return None
    given = call.named()
    dims = _dims_of(given, len(rows.shape))
    if not dims:
        return None
    if rows.dim in dims:
        whole = call.name == "slice" and call.out_shape() == rows.shape and given["step"] == 1
        return (rows.tensor, rows.dim) if whole else None
    return call.run(rows.tensor), rows.dim


def _removes_a_dimension(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None:
        return None
    dim = _wrap(call.named()["dim"], len(rows.shape))
    return None if dim == rows.dim else (call.run(rows.tensor), rows.dim - (dim < rows.dim))


def _reduction(call: _Call) -> Optional[Result]:
    rows = call.first()
    given = call.named()
    if rows is None or not call.others_shared() or "dim" not in given:
        return None
    dims = _dims_of(given, len(rows.shape))
    if not dims or rows.dim in dims:
        return None
    gone = 0 if given.get("keepdim") else sum(dim < rows.dim for dim in dims)
    return call.run(rows.tensor), rows.dim - gone


def _join(call: _Call) -> Optional[Result]:
    items = call.args[0]
    rank = len(call.out_shape()) - (call.name == "stack")
    dim = _wrap(call.named()["dim"], rank + (call.name == "stack"))
    rows = [item for item in items if isinstance(item, Rows)]
    if any(len(item.shape) != rank for item in items) or rank == 0:
        return None
    folded = next((item.dim for item in rows if item.dim != STACKED), 0)
    if call.name == "cat" and folded == dim:
        folded = next((item.dim for item in rows if item.dim not in (STACKED, dim)), STACKED)
        if folded == STACKED:
            return None
    tensors = [call.fold.folded(item, folded) for item in items]
    return call.run(tensors), folded + (call.name == "stack" and dim <= folded)


def _matrix_product(call: _Call) -> Optional[Result]:
    """Rows of the left matrix, or columns of the right one, are separate unless both differ between micro-batches."""
    bias = call.args[0] if call.name == "addmm" else None
    left, right = call.args[-2:] if bias is None else call.args[1:3]
    if isinstance(bias, Rows) or isinstance(left, Rows) == isinstance(right, Rows):
        return None
    if isinstance(left, Rows):
        if bias is not None and bias.dim() > 1 and bias.shape[0] != 1:
            return None
        product = (call.fold.folded(left, 0), right)
        return (call.run(*product) if bias is None else call.run(bias, *product)), 0
    if bias is not None and (bias.dim() == 0 or bias.shape[-1] != 1):
        return None
    product = (left, call.fold.folded(right, 1))
    return (call.run(*product) if bias is None else call.run(bias, *product)), 1


def _batched_product(call: _Call) -> Optional[Result]:
    bias = call.args[0] if call.name == "baddbmm" else None
    left, right = call.args[:2] if bias is None else call.args[1:3]
    if bias is not None:
        if len(bias.shape) != 3 or bias.shape[0] != call.out_shape()[0]:
            return None
        return call.run(call.fold.folded(bias, 0), call.fold.folded(left, 0), call.fold.folded(right, 0)), 0
    if not isinstance(right, Rows) and left.dim == 1:
        return call.run(left.tensor), 1
    if not isinstance(left, Rows) and right.dim == 2:
        return call.run(left, right.tensor), 2
    return call.run(call.fold.folded(left, 0), call.fold.folded(right, 0)), 0


def _convolution(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None or not call.others_shared():
        return None
    return call.run(call.fold.folded(rows, 0)), 0


def _layer_norm(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None or not call.others_shared() or rows.dim >= len(rows.shape) - len(call.args[1]):
        return None
    return call.run(rows.tensor), rows.dim


def _group_norm(call: _Call) -> Optional[Result]:
    if call.first() is None or not call.others_shared():
        return None
    _, weight, bias, count = call.args[:4]
    rows = call.fold.folded(call.args[0], 0).contiguous()  # the kernel expects it, as native_group_norm's callers do
    return call.run(rows, weight, bias, count * call.fold.size), 0


def _batch_norm(call: _Call) -> Optional[Result]:
    """In training, each micro-batch has its own statistics: its channels are computed as separate ones."""
    fold = call.fold
    given = call.named()
    rows = call.first()
    if rows is None or not call.others_shared():
        return None
    if not given["training"]:
        if rows.dim == 1:
            rows = rows._replace(tensor=fold.folded(rows, 0), dim=0)
        statistics = [fold.stacked(torch.empty(0)), fold.stacked(torch.empty(0))]
        return (call.run(rows.tensor)[0], *statistics), (rows.dim, STACKED, STACKED)
    weight, bias = ((None if item is None else item.repeat(fold.size)) for item in (given["weight"], given["bias"]))
    # In half precision the two kernels round too differently to be compared.
    quick = len(rows.shape) > 2 and rows.tensor.dtype == torch.float32
    compute = _batch_norm_of_images if quick else _batch_norm_as_it_is
    result, mean, inverse, variance = compute(call, rows, weight, bias, given["eps"])
    if given["running_mean"] is not None:
        for buffer, computed in zip(call.node.args[3:5], (mean.detach(), variance)):
            fold.statistics.append(BatchStatistics(buffer, given["momentum"], computed.view(fold.size, -1)))
    return (result, mean, inverse), (0 if quick else 1, 0, 0)


def _batch_norm_of_images(call: _Call, rows: Rows, weight: Any, bias: Any, eps: float) -> Tuple[torch.Tensor, ...]:
    """Compute with a group norm whose groups are single channels, several times as quickly as torch's batch norm."""
    apart = call.fold.stacked(rows).transpose(1, 2)
    channels, count = math.prod(apart.shape[:2]), math.prod(apart.shape[2:])
    source = apart.reshape(1, channels, count)
    result, mean, inverse = torch.native_group_norm(source, weight, bias, 1, channels, count, channels, eps)
    mean, inverse = mean.view(channels), inverse.view(channels)
    variance = inverse.detach().pow(-2).sub(eps).clamp(min=0).mul(count).div(count - 1)
    return result.view(apart.shape).transpose(1, 2).flatten(0, 1), mean, inverse, variance


def _batch_norm_as_it_is(call: _Call, rows: Rows, weight: Any, bias: Any, eps: float) -> Tuple[torch.Tensor, ...]:
    source = call.fold.folded(rows, 1).contiguous()
    means, variances = source.new_zeros(source.shape[1]), source.new_zeros(source.shape[1])
    # With a momentum of 1, the running statistics become those of the micro-batch.
    return (*call.op(source, weight, bias, means, variances, True, 1.0, eps), variances)


def _recurrent_layer(call: _Call) -> Optional[Result]:
    """Fold the sequences of an LSTM's layer and the states that they begin with."""
    source, *weights = call.args[:5]
    if not isinstance(source, Rows) or any(isinstance(weight, Rows) for weight in weights):
        return None
    states = [call.fold.folded(state, 0) for state in call.args[5:7]]
    # The workspace that comes last belongs to this very call: its backward operation is recorded with it.
    return call.run(call.fold.folded(source, 1), *weights, *states)[:3], (1, 0, 0)


def _embedding(call: _Call) -> Optional[Result]:
    table, indices = call.args[:2]
    if isinstance(table, Rows) or not indices.shape:
        return None
    dim = max(indices.dim, 0)
    return call.run(table, call.fold.folded(indices, dim)), dim


def _index(call: _Call) -> Optional[Result]:
    source, indices = call.args[:2]
    given = [(position, index) for position, index in enumerate(indices) if index is not None]
    if isinstance(source, Rows):
        folded = call.first()
        if folded is None or any(isinstance(index, Rows) for _, index in given):
            return None
        positions = [position for position, _ in given]
        if folded.dim >= positions[0]:
            return None
        return call.run(folded.tensor), folded.dim
    if len(given) != 1 or not given[0][1].shape:
        return None
    position, index = given[0]
    dim = max(index.dim, 0)
    placed = [call.fold.folded(item, dim) if isinstance(item, Rows) else item for item in indices]
    return call.run(source, placed), position + dim


def _index_select(call: _Call) -> Optional[Result]:
    source, dim, index = call.args
    if isinstance(source, Rows):
        rows = call.first()
        if isinstance(index, Rows) or rows is None or _wrap(dim, len(rows.shape)) == rows.dim:
            return None
        return call.run(rows.tensor), rows.dim
    if not index.shape or not source.shape:
        return None
    return call.run(source, dim, call.fold.folded(index, 0)), _wrap(dim, source.dim())


def _by_index(call: _Call) -> Optional[Result]:
    tensors = [item for item in _leaves((call.args, call.kwargs)) if isinstance(item, (Rows, torch.Tensor))]
    dim = call.named()["dim"]
    rank = len(tensors[0].shape)
    if dim is None or rank == 0 or any(len(item.shape) != rank for item in tensors):
        return None
    rows = [item for item in tensors if isinstance(item, Rows) and item.dim != STACKED]
    folded = next((item.dim for item in rows if item.dim != _wrap(dim, rank)), None)
    if folded is None or len({item.shape[folded] for item in tensors}) > 1:
        return None
    place = lambda item: call.fold.folded(item, folded) if isinstance(item, (Rows, torch.Tensor)) else item  # noqa: E731
    args, kwargs = _map_leaves(place, (call.args, call.kwargs))
    return call.op(*args, **kwargs), folded


def _spatial(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None or not call.others_shared() or rows.dim >= len(rows.shape) - _SPATIAL[call.name]:
        return None
    return call.run(rows.tensor), rows.dim


def _pad(call: _Call) -> Optional[Result]:
    rows = call.first()
    if rows is None or rows.dim >= len(rows.shape) - len(call.args[1]) // 2:
        return None
    return call.run(rows.tensor), rows.dim


def _nll_loss(call: _Call) -> Optional[Result]:
    """The mean over the rows of a micro-batch is computed from the losses of all rows."""
    scores, target, weight, reduction, ignored = (call.named()[n] for n in _NLL_ARGUMENTS)
    if weight is not None or len(scores.shape) != 2:
        return None
    scores, target = call.fold.folded(scores, 0), call.fold.folded(target, 0)
    losses, _ = call.op(scores, target, None, 0, ignored)
    counted = (target != ignored).view(call.fold.size, -1).sum(1, dtype=losses.dtype)
    if reduction == 0:
        return (losses, counted), (0, STACKED)
    total = losses.view(call.fold.size, -1).sum(1)
    return (total / counted if reduction == 1 else total, counted), STACKED


_NLL_ARGUMENTS = ("self", "target", "weight", "reduction", "ignore_index")


def _shape_only(call: _Call) -> Optional[Result]:
    source = call.args[0]
    example = source.tensor if isinstance(source, Rows) else source
    return call.run(example).expand(call.fold.size, *call.out_shape()).contiguous(), STACKED


_RULES: Dict[str, Callable[[_Call], Optional[Result]]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_ALONG_A_DIMENSION, _along_a_dimension),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_REMOVES_A_DIMENSION, _removes_a_dimension),
    **dict.fromkeys(_BY_INDEX, _by_index),
    **dict.fromkeys(_SPATIAL, _spatial),
    **dict.fromkeys(_SHAPE_ONLY, _shape_only),
    **dict.fromkeys(names_in("permute t transpose"), _permute),
    **dict.fromkeys(names_in("cat stack"), _join),
    **dict.fromkeys(names_in("addmm mm"), _matrix_product),
    **dict.fromkeys(names_in("baddbmm bmm"), _batched_product),
    "constant_pad_nd": _pad,
    "convolution": _convolution,
    "embedding": _embedding,
    "expand": _expand,
    "index": _index,
    "index_select": _index_select,
    "mkldnn_rnn_layer": _recurrent_layer,
    "native_batch_norm": _batch_norm,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "nll_loss_forward": _nll_loss,
    "repeat": _repeat,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
}


def _functional(node: Node) -> Callable[..., Any]:
    """Return the operation that computes what an in-place one writes."""
    packet = getattr(torch.ops.aten, node.name[:-1], None) if node.name.endswith("_") else None
    overload = getattr(node.op, "_overloadname", None)
    if packet is None or overload is None or overload not in packet.overloads():
        raise CannotFold(f"{node.name} writes a tensor")
    return getattr(packet, overload)


def _dims_of(given: Dict[str, Any], rank: int) -> List[int]:
    dims = given.get("dim", given.get("dims"))
    return [] if dims is None else [_wrap(dim, rank) for dim in _listed(dims)]


def _listed(item: Any) -> List[Any]:
    return list(item) if isinstance(item, (list, tuple)) else [item]


def _wrap(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _leaves(structure: Any) -> Iterable[Any]:
    if isinstance(structure, Rows):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from _leaves(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from _leaves(item)
    else:
        yield structure


def _map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    if isinstance(structure, (list, tuple)) and not isinstance(structure, Rows):
        return type(structure)([_map_leaves(function, item) for item in structure])
    if isinstance(structure, dict):
        return {key: _map_leaves(function, item) for key, item in structure.items()}
    return function(structure)
