"""Record every aten operation of a forward pass and of the backward pass that follows it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipurun.emulator._capture.dtypes import kept_in_32_bits, run_op
from ipurun.emulator._capture.graph import (
    Event,
    Graph,
    GraphInput,
    Node,
    Placement,
    TensorSpec,
    Value,
    map_values,
    values_in,
)
from ipurun.emulator._capture.host_tensors import HostTensors
from ipurun.emulator._capture.op_kinds import (
    DATA_DEPENDENT_OPS,
    NEEDS_ONE_LAYOUT,
    RANDOM_OPS,
    VIEWS_IN_PLACE,
    explain_data_dependence,
    refuse_mask_index,
    refuse_open_bincount,
    supposed_result,
    written_arguments,
)
from ipurun.emulator._capture.sources import calling_line
from ipurun.emulator._impl import Error, createPoptorchError


class TensorNumbers:
    """Assigns unique numbers to tensors and storages without keeping tensors alive.

    A tensor is identified by its Python object, which torch preserves while anything refers to the tensor. Its entry
    is dropped with the object, so that a new object at the same address is not mistaken for it.
    """

    def __init__(self) -> None:
        self._value_of: Dict[int, Value] = {}
        self._references: List[Any] = []
        self._storage_of: Dict[int, int] = {}
        self._storage_users: Dict[int, int] = {}
        self._num_storages = 0

    def find(self, tensor: torch.Tensor) -> Optional[Value]:
        """Return the number of a tensor, None if it has none."""
        return self._value_of.get(id(tensor))

    def add(self, tensor: torch.Tensor) -> Value:
        """Give a tensor the next number."""
        value = Value(len(self._references))
        address = tensor.untyped_storage()._cdata
        if address not in self._storage_of:
            self._storage_of[address] = self._num_storages
            self._num_storages += 1
        self._storage_users[address] = self._storage_users.get(address, 0) + 1
        self._value_of[id(tensor)] = value
        self._references.append(weakref.ref(tensor, functools.partial(self._forget, id(tensor), address)))
        return value

    def add_alias(self, tensor: torch.Tensor, value: Value) -> None:
        """Give a tensor that the caller keeps alive the number of another one."""
        self._value_of[id(tensor)] = value

    def has_storage(self, tensor: torch.Tensor) -> bool:
        """Whether a numbered tensor uses the memory of this one."""
        return tensor.untyped_storage()._cdata in self._storage_of

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a numbered tensor's storage."""
        return self._storage_of[tensor.untyped_storage()._cdata]

    def tensor(self, value: Value) -> torch.Tensor:
        """Return the tensor with a number; it must be alive."""
        found = self._references[value]()
        assert found is not None, f"the tensor number {int(value)} is gone"
        return found

    def counts(self) -> Tuple[int, int]:
        """Return how many tensors and storages have a number."""
        return len(self._references), self._num_storages

    def reserve(self, values: int, storages: int) -> None:
        """Use up the next numbers for tensors that do not exist."""
        self._references += [_nothing] * values
        self._num_storages += storages

    def assign(self, tensor: torch.Tensor, value: Value, storage: int) -> None:
        """Give a tensor a reserved number, and its memory that of a storage."""
        address = tensor.untyped_storage()._cdata
        self._storage_of[address] = storage
        self._storage_users[address] = 1
        self._value_of[id(tensor)] = value
        self._references[value] = weakref.ref(tensor, functools.partial(self._forget, id(tensor), address))

    def clear(self) -> None:
        """Forget all tensors."""
        self._value_of.clear()
        self._references.clear()
        self._storage_of.clear()
        self._storage_users.clear()

    def _forget(self, key: int, address: int, reference: Any) -> None:
        self._value_of.pop(key, None)
        users = self._storage_users.get(address, 0) - 1
        if users > 0:
            self._storage_users[address] = users
        else:
            self._storage_users.pop(address, None)
            self._storage_of.pop(address, None)


def _nothing() -> None:
    """Stand in for the reference to a tensor that does not exist."""


class Counts(NamedTuple):
    """Sizes of a recording so far."""

    nodes: int
    events: Tuple[int, int]
    values: int
    storages: int
    saved: int
    calls: int


# Operations before a value that is read from a tensor without values, beyond which all numbers are taken to be 1.
_SUPPOSED_DEPTH = 8
_active: List[Recorder] = []


def current() -> Optional[Recorder]:
    """Return the recorder of the compile that is running, None outside a compile."""
    return _active[-1] if _active else None


class Recorder(TorchDispatchMode):
    """Records the operations that run while it is entered, with autograd running above it.

    Args:
        training: Whether a training graph is being captured.
        options: The options of the executor that compiles.
        check_op: Called with each new forward node; raises for an operation that cannot be lowered.
        refusals: Where to note what an IPU would refuse, each with its line, and to record past it; None: raise.
    """

    def __init__(
        self,
        training: bool,
        options: Any,
        check_op: Optional[Callable[[Node], None]] = None,
        refusals: Optional[Dict[str, str]] = None,
    ) -> None:
        super().__init__()
        self._refusals = refusals
        self.training = training
        self.options = options
        self.graph = Graph()
        self.in_backward = False
        self.module_stack: List[str] = [""]
        self.calls: List[Tuple[str, int]] = []  # module that was called, number of operations before it
        self.host = HostTensors()
        self._check_op = check_op
        self._numbers = TensorNumbers()
        self._kept: List[torch.Tensor] = []
        self._masks: Dict[Value, int] = {}
        self._storage_masks: Dict[int, int] = {}
        self._placement: Optional[Placement] = Placement()
        self._placement_of: Dict[Value, Placement] = {}
        self._loss_dependencies: List[int] = []
        self.loss_values: List[Value] = []
        self._paused = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles this class, and torch's guard against it would load torch._dynamo, which takes seconds.
        return False

    # Bits of a mask: what a value depends on. Bit 0: varies between runs; bit i+1: loss number i.

    def __enter__(self) -> Recorder:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        _active.remove(self)
        super().__exit__(*exc)

    def add_input(self, kind: str, name: str, tensor: torch.Tensor) -> Value:
        """Declare a tensor as a program input; one declared twice keeps its first name."""
        known = self._numbers.find(tensor)
        if known is not None:
            return known
        value = self._register(tensor, 0 if kind == "constant" else 1)
        self._kept.append(tensor)
        self.graph.inputs.append(GraphInput(kind, name, value))
        return value

    def begin_block(self, stage_id: int, phase_id: int, ipu_id: int, user_id: str) -> None:
        """Set the placement of the operations that follow."""
        self._placement = Placement(stage_id, phase_id, ipu_id, user_id)
        self.record_event("begin_block", placement=self._placement)

    def end_block(self) -> None:
        """End the block; an operation before the next block is an error."""
        self._placement = None
        self.record_event("end_block")

    def record_event(self, kind: str, **info: Any) -> None:
        """Record an event between two operations."""
        self.graph.events.append(Event(kind, len(self.graph.nodes), None, info))

    def mark(self, tensor: torch.Tensor, kind: str, **info: Any) -> torch.Tensor:
        """Record an event for a tensor and return the tensor."""
        value = self.value_of(tensor)
        self.graph.events.append(Event(kind, len(self.graph.nodes), value, info))
        if kind == "identity_loss":
            self.mark_loss(tensor)
        return tensor

    def mark_loss(self, tensor: torch.Tensor) -> None:
        """Declare a tensor to be a loss; it replaces the losses that it was computed from."""
        value = self.value_of(tensor)
        before = self._mask_of(value)
        self._loss_dependencies.append(before >> 1)
        self.loss_values.append(value)
        self._kept.append(tensor)
        self._masks[value] = before | 1 << len(self.loss_values)

    def independent_losses(self, returned: Sequence[torch.Tensor]) -> List[Value]:
        """Return the losses that the returned tensors depend on, without those contained in another one."""
        live = 0
        for tensor in returned:
            live |= self._mask_of(self.value_of(tensor)) >> 1
        contained = 0
        for index, dependencies in enumerate(self._loss_dependencies):
            if live >> index & 1:
                contained |= dependencies
        kept = live & ~contained
        return [value for index, value in enumerate(self.loss_values) if kept >> index & 1]

    def call(
        self,
        fn: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        backward: Optional[Callable[..., Any]] = None,
        name: str = "",
    ) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        """Run a Python function now and at every replay, as one operation.

        Args:
            fn: Called with the tensors; returns a tensor or a tuple of tensors. It must not change them. Its attributes
                `is_random` and `graphs` (bodies), if it has them, describe the operation.
            tensors: The arguments.
            backward: Called with (tensors, outputs, gradients of the outputs), each a tuple, and returns the
                gradient of each tensor, None where there is none. Without it, no gradient flows.
            name: Name of the operation in messages.
        """
        if backward is None and self.training:
            with torch.no_grad():
                return self._call_opaque(fn, tuple(tensors), name)
        return _OpaqueFunction.apply(self, fn, backward, name, *tensors)

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the number of a tensor; an unknown one becomes a constant."""
        known = self._numbers.find(tensor)
        if known is not None:
            return known
        if self.in_backward:
            raise createPoptorchError(
                "The capture lost track of a tensor between forward and backward "
                f"(shape {tuple(tensor.shape)}); the gradients would be wrong."
            )
        is_alias = self._numbers.has_storage(tensor)  # shares storage with a known tensor, as `.data` does
        value = self._register(tensor, 0)
        if not is_alias:
            self.host.found(tensor, self.graph.specs[value].storage)
        self._kept.append(tensor)
        with self.paused():
            self.graph.constants[value] = tensor.detach().clone()
        self.graph.inputs.append(GraphInput("constant", f"constant_{int(value)}", value))
        return value

    def number_of(self, tensor: torch.Tensor) -> Optional[Value]:
        """Return the number of a tensor, None if it is not known."""
        return self._numbers.find(tensor)

    def mask_of(self, value: Value) -> int:
        """Return what a value depends on, as bits."""
        return self._mask_of(value)

    @property
    def placement(self) -> Placement:
        """Where the next operation runs."""
        return self._placement or Placement()

    @property
    def is_placed(self) -> bool:
        """Whether an operation may run now: not after a block that has ended."""
        return self._placement is not None

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Note a tensor that autograd saves."""
        if self._numbers.has_storage(tensor):
            self.graph.saved.append(self._numbers.storage_of(tensor))

    def counts(self) -> Counts:
        """Return how much is recorded."""
        values, storages = self._numbers.counts()
        events = (len(self.graph.events), len(self.loss_values))
        return Counts(len(self.graph.nodes), events, values, storages, len(self.graph.saved), len(self.calls))

    def add_copy(self, original: Value, copy: Value, spec: TensorSpec) -> None:
        """Declare a value that is like another one; its number has to be reserved."""
        self.graph.specs[copy] = spec
        self._masks[copy] = self._masks[original]
        self._placement_of[copy] = self.placement
        before = self.graph.specs[original]
        if before.storage in self._storage_masks:
            self._storage_masks[spec.storage] = self._storage_masks[before.storage]
        if self.host.holds(before):
            self.host.made([spec])

    def reserve(self, values: int, storages: int) -> None:
        """Use up the next numbers of values and storages for copies."""
        self._numbers.reserve(values, storages)

    def adopt(self, value: Value, stride: Tuple[int, ...], needs_gradient: bool) -> torch.Tensor:
        """Return an empty tensor for a copied value."""
        spec = self.graph.specs[value]
        with self.paused():
            tensor = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=self._kept[0].device)
            if needs_gradient:
                # The result of an operation: a leaf could not be changed in place.
                tensor = tensor.requires_grad_() * 1
        self._numbers.assign(tensor, value, spec.storage)
        self._kept.append(tensor)
        return tensor

    def tensor_of(self, value: Value) -> torch.Tensor:
        """Return the tensor with this number."""
        return self._numbers.tensor(value)

    def varies(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor depends on an input, a parameter, a buffer or a random draw."""
        known = self._numbers.find(tensor)
        return known is not None and self.value_varies(known)

    def value_varies(self, value: Value) -> bool:
        """Whether the tensor with this number depends on an input, a parameter, a buffer or a random draw."""
        return bool(self._mask_of(value) & 1)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Note what an IPU would refuse instead of raising it, if that was asked for."""
        try:
            yield
        except Error as error:
            if self._refusals is None:
                raise
            self._refusals.setdefault(str(error), self._calling_line())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run operations without recording them."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def finish(self) -> Graph:
        """Close the graph and release all tensors."""
        self.graph.varying = {value for value in self.graph.specs if self.value_varies(value)}
        self._kept.clear()
        self._numbers.clear()
        return self.graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        base_name = func._schema.name.split("::")[-1]
        if func in NEEDS_ONE_LAYOUT and args[0].stride() != args[1].stride():
            clone, layout = torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}
            args = (*(self.__torch_dispatch__(clone, types, (tensor,), layout) for tensor in args[:2]), *args[2:])
        node = self._node(func, self._encode(args), self._encode(kwargs), base_name)
        node.is_random = base_name in RANDOM_OPS
        mask = self._mask_of_all(node.reads())
        if mask & 1:
            with self.refusing():
                self._refuse_dynamic(base_name, args, kwargs)
        mutated = _mutated(func, node.args, node.kwargs)
        on_host = False
        with self.refusing():
            on_host = not self.in_backward and self.host.runs_here(base_name, self._specs(node.reads()), node.source)
        if not self.in_backward and base_name != "detach":
            if self._placement is None:
                raise createPoptorchError(
                    f"No active Block: {base_name} at {node.source or 'an unknown line'} is called after a "
                    "Block ended and before the next one begins. All the operations must be in a Block."
                )
            if self._check_op is not None and (mask & 1 or node.is_random):
                self._check_op(node)  # operations on constants alone run on the host
        if self._refusals is not None and base_name == "_local_scalar_dense" and args[0].is_meta:
            return func(self._supposed(node.args[0]))
        result = None if self._refusals is None else supposed_result(func, base_name, args)
        if result is None:
            node.op, args, result = self._run(func, args, kwargs, node, bool(mask & 1))
        node.args = self._encode(args)
        if func in VIEWS_IN_PLACE:
            # No memory is written: from here on, the tensor is another value, a view of the one that it was.
            node.op, node.name, mutated = VIEWS_IN_PLACE[func], base_name[:-1], ()
            self._register(result, mask)
        self._append(node, result, mask | int(node.is_random), mutated)
        if on_host:
            self.host.made(self._specs(values_in(node.outputs)))
        if base_name == "lift_fresh":
            self.host.lifted(self.graph.specs[node.outputs])
        return result

    def _refuse_dynamic(self, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        """Raise if an operation reads values, or if its result has a shape that depends on them."""
        if name in DATA_DEPENDENT_OPS:
            raise createPoptorchError(explain_data_dependence(name))
        if name == "index" and not self.in_backward:
            refuse_mask_index(args[1])
        if name == "bincount":
            refuse_open_bincount(*args[1:], **kwargs)

    def _supposed(self, value: Value) -> torch.Tensor:
        """Return the value of a tensor without values, as if those that it is computed from were all 1.

        Random draws and numbers count as themselves: whether a layer is skipped is decided as in a run.
        """
        made = {output: node for node in self.graph.nodes for output in values_in(node.outputs)}

        def run(wanted: Value, depth: int) -> Any:
            node = made.get(wanted)
            if node is not None and isinstance(node.outputs, Value) and not node.mutated and depth < _SUPPOSED_DEPTH:
                values = {read: run(read, depth + 1) for read in node.reads()}
                kwargs = {key: torch.device("cpu") if key == "device" else given for key, given in node.kwargs.items()}
                with contextlib.suppress(Exception):  # a single number has no dimensions
                    return node.op(*map_values(values.__getitem__, node.args), **map_values(values.__getitem__, kwargs))
            return torch.ones((), dtype=self.graph.specs[wanted].dtype)

        with self.paused():
            return run(value, 0)

    def _run(
        self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], node: Node, varies: bool
    ) -> Tuple[Callable[..., Any], Tuple[Any, ...], Any]:
        """Run an operation; return the one that was actually called, its positional arguments and its result."""
        op, args, result = run_op(func, args, kwargs, node.is_random)
        if varies:
            op, result = kept_in_32_bits(op, node.name, result)
        return op, args, result

    def _specs(self, values: Iterable[Value]) -> List[TensorSpec]:
        return [self.graph.specs[value] for value in values]

    def _call_opaque(self, fn: Callable[..., Any], tensors: Tuple[torch.Tensor, ...], name: str) -> Any:
        node = self._node(fn, self._encode(tensors), {}, name or getattr(fn, "__name__", "opaque"))
        mask = self._mask_of_all(node.reads())
        node.is_random, node.bodies = getattr(fn, "is_random", False), getattr(fn, "graphs", ())
        if not self.in_backward:
            self.host.runs_here(node.name, self._specs(node.reads()), node.source)
        with self.paused():
            result = fn(*tensors)
            # An output that is one of the arguments would get that argument's number.
            result = _map_tensors(lambda t: t.clone() if any(t is x for x in tensors) else t, result)
        node.op = fn if not tensors else _never_aliasing(fn)
        self._append(node, result, mask | int(node.is_random), ())
        return result

    def _node(self, op: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any], name: str) -> Node:
        """Return a node for an operation that is about to run; its outputs are not known yet."""
        return Node(
            op=op,
            args=args,
            kwargs=kwargs,
            outputs=None,
            placement=self._placement or Placement(),
            module_path=self.module_stack[-1],
            source="" if self.in_backward else self._calling_line(),
            is_backward=self.in_backward,
            grad_enabled=torch.is_grad_enabled(),
            name=name,
        )

    def _calling_line(self) -> str:
        return calling_line() if self.options is None else calling_line(self.options._source_location_excludes)

    def _append(self, node: Node, result: Any, mask: int, mutated: Tuple[Value, ...]) -> None:
        node.mutated = mutated
        node.outputs = self._encode_outputs(result, mask)
        produced = list(values_in(node.outputs))
        if not produced and not mutated:
            return
        for value in mutated:
            storage = self.graph.specs[value].storage
            self._storage_masks[storage] = self._storage_masks.get(storage, 0) | mask
        if self.in_backward:
            node.placement = self._backward_placement(node)
        else:
            node.position = len(self.graph.nodes)
        for value in produced:
            self._placement_of.setdefault(value, node.placement)
        self.graph.nodes.append(node)

    def _backward_placement(self, node: Node) -> Placement:
        placements = [self._placement_of[v] for v in node.reads() if v in self._placement_of]
        return placements[-1] if placements else Placement()

    def _encode(self, structure: Any) -> Any:
        return _map_tensors(self.value_of, structure)

    def _encode_outputs(self, structure: Any, mask: int) -> Any:
        def number(tensor: torch.Tensor) -> Value:
            known = self._numbers.find(tensor)
            return known if known is not None else self._register(tensor, mask)

        return _map_tensors(number, structure)

    def _register(self, tensor: torch.Tensor, mask: int) -> Value:
        value = self._numbers.add(tensor)
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype, self._numbers.storage_of(tensor))
        self.graph.specs[value] = spec
        self._masks[value] = mask
        return value

    def _mask_of_all(self, values: Iterable[Value]) -> int:
        mask = 0
        for value in values:
            mask |= self._mask_of(value)
        return mask

    def _mask_of(self, value: Value) -> int:
        return self._masks[value] | self._storage_masks.get(self.graph.specs[value].storage, 0)


class _OpaqueFunction(torch.autograd.Function):
    """Attaches the given backward function to an opaque operation."""

    @staticmethod
    def forward(  # type: ignore[override]  # the extra arguments are not tensors
        ctx: Any, recorder: Recorder, fn: Callable, backward: Optional[Callable], name: str, *tensors: torch.Tensor
    ) -> Any:
        outputs = recorder._call_opaque(fn, tensors, name)
        listed = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.save_for_backward(*tensors, *listed)
        ctx.recorder, ctx.backward_fn, ctx.name, ctx.num_inputs = recorder, backward, name, len(tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        count, num_saved, function = ctx.num_inputs, len(saved), ctx.backward_fn

        def run(*values: torch.Tensor) -> Any:
            result = function(values[:count], values[count:num_saved], values[num_saved:])
            return tuple(result) if isinstance(result, (list, tuple)) else (result,)

        result = ctx.recorder._call_opaque(run, tuple(saved) + grads, ctx.name + "_backward")
        return (None, None, None, None, *result)


def _never_aliasing(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        return _map_tensors(lambda t: t.clone() if any(t is x for x in tensors) else t, fn(*tensors))

    return call


def _map_tensors(function: Callable[[torch.Tensor], Any], structure: Any) -> Any:
    if isinstance(structure, torch.Tensor):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        mapped = [_map_tensors(function, item) for item in structure]
        return mapped if isinstance(structure, list) else tuple(mapped)
    if isinstance(structure, dict):
        return {key: _map_tensors(function, item) for key, item in structure.items()}
    return structure


def _mutated(func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Value, ...]:
    schema = func._schema
    written = written_arguments(schema, args, kwargs)
    if schema.name == "aten::native_batch_norm" and args[5]:
        written += args[3:5]  # its schema does not say that it updates the running statistics
    return tuple(values_in(written))
