"""A traced model as plain data: what one micro-batch computes, moves and keeps."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Set, Tuple

__all__ = ["TracedModel", "TracedOp", "TracedParameter"]


@dataclass(frozen=True)
class TracedOp:
    """One operation of the forward pass, for one micro-batch on one replica.

    Args:
        index: Position in the forward pass.
        name: Name of the operation, as torch has it: ``addmm``.
        module: Dotted name of the user's module that called it, "" for the model itself or the loss.
        kind: ``matmul``, ``conv``, ``norm``, ``softmax``, ``elementwise``, ``reduce``, ``gather``, ``copy``,
            ``pool`` or ``view`` (moves nothing, costs nothing).
        flops_forward: Floating-point operations.
        flops_backward: Floating-point operations of its gradient.
        output_bytes: Memory of its results; 0 for a view.
        saved_bytes: The part of its results that the backward pass reads.
        traffic_bytes: Bytes it reads and writes.
        parameters: Names of the parameters it reads.
        inputs: Operations whose results it reads, directly or through views.
        dims: For a matmul or convolution: (groups, rows, columns, depth, kernel points).
        gradients: How many of its operands get a gradient; 0 if nothing before it is trained.
        element_bytes: Size of one number of its result: 2 in half precision.
        signature: Equal for operations of equal kind, shapes and attributes, which share compiled code.
        source: ``file:line`` of the model that called it.
        is_batched: Whether its cost grows with the micro-batch.
        ipu: IPU of the block that the model's own code began; None if the code begins no blocks.
        repeats: How often it runs: steps of a recurrent layer, which the device runs in a loop. Floating-point
            operations and saved bytes are those of all of them.
    """

    index: int
    name: str
    module: str
    kind: str
    flops_forward: float = 0.0
    flops_backward: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0
    traffic_bytes: int = 0
    parameters: Tuple[str, ...] = ()
    inputs: Tuple[int, ...] = ()
    dims: Tuple[int, ...] = ()
    gradients: int = 0
    element_bytes: int = 2
    signature: str = ""
    source: str = ""
    is_batched: bool = True
    ipu: Optional[int] = None
    repeats: int = 1


@dataclass(frozen=True)
class TracedParameter:
    """One parameter of the model, under the user's name; tied parameters appear once.

    Args:
        name: Dotted name.
        elements: Number of values.
        element_bytes: Size of one value on the device.
        trainable: Whether it gets a gradient.
        ops: Operations that read it, by index.
    """

    name: str
    elements: int
    element_bytes: int
    trainable: bool
    ops: Tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the parameter on the device."""
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class TracedModel:
    """A model with its loss, for one micro-batch.

    Args:
        ops: The forward pass.
        parameters: All parameters.
        buffers_bytes: Size of all buffers (running statistics, tables).
        input_bytes: Bytes that one micro-batch reads from the host.
        output_bytes: Bytes that one micro-batch returns.
        micro_batch_size: Samples of the micro-batch that was traced.
        training: Whether the backward pass was traced.
        unsupported: Operations that PopTorch may not support, with the line that calls them.
        refused: What an IPU would refuse in it, if the trace went past something.
    """

    ops: Tuple[TracedOp, ...]
    parameters: Tuple[TracedParameter, ...]
    buffers_bytes: int
    input_bytes: int
    output_bytes: int
    micro_batch_size: int
    training: bool = True
    unsupported: Tuple[str, ...] = ()
    refused: str = ""

    @property
    def num_parameters(self) -> int:
        """Number of values in all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of one sample, forward and backward, without recomputation."""
        return sum(op.flops_forward + op.flops_backward for op in self.ops) / self.micro_batch_size

    @functools.cached_property
    def trained_bytes(self) -> Mapping[str, int]:
        """Size of every parameter that gets a gradient."""
        return {parameter.name: parameter.num_bytes for parameter in self.parameters if parameter.trainable}

    @functools.cached_property
    def kinds(self) -> Tuple[Tuple[int, ...], Tuple[int, ...]]:
        """The kind of every operation, and the first operation of each kind: those of a kind cost the same."""
        numbers: Dict[Tuple[object, ...], int] = {}
        first: List[int] = []
        kinds: List[int] = []
        for op in self.ops:
            dropout = (op.index in self.dropout_masks, not self.dropout_masks.isdisjoint(op.inputs))
            costs = (op.gradients, op.traffic_bytes, op.dims, bool(op.parameters), op.is_batched, op.repeats)
            key = (op.name, op.kind, op.signature, costs, dropout)
            if key not in numbers:
                numbers[key] = len(first)
                first.append(op.index)
            kinds.append(numbers[key])
        return tuple(kinds), tuple(first)

    @functools.cached_property
    def dropout_masks(self) -> FrozenSet[int]:
        """The operations that draw and scale dropout masks: the device does both while it multiplies."""
        masks: Set[int] = set()
        for op in self.ops:
            if op.name == "bernoulli_" or (op.name == "div_" and op.index - 1 in masks):
                masks.add(op.index)
        return frozenset(masks)

    @functools.cached_property
    def working_bytes(self) -> Tuple[Tuple[int, int], ...]:
        """Of every operation the bytes of its operands and results while it runs, and of its weights' gradients."""
        found = []
        for op in self.ops:
            operands = max((self.ops[index].output_bytes for index in op.inputs), default=0)
            # Elementwise operations overwrite their operands.
            live = max(op.output_bytes, operands) if op.kind == "elementwise" else op.output_bytes + operands
            gradient = sum(self.trained_bytes.get(name, 0) for name in op.parameters) if op.gradients else 0
            found.append((0, 0) if op.kind == "view" else (live, gradient))
        return tuple(found)

    @functools.cached_property
    def known_costs(self) -> Dict[Any, Any]:
        """Costs that were computed before, by what they depend on."""
        return {}

    @functools.cached_property
    def _scaled_before(self) -> Dict[int, TracedModel]:
        return {}

    def with_micro_batch(self, micro_batch_size: int) -> TracedModel:
        """Scale to another micro-batch; exact for what is computed sample by sample."""
        if micro_batch_size == self.micro_batch_size:
            return self
        if micro_batch_size not in self._scaled_before:
            self._scaled_before[micro_batch_size] = self._scaled_to(micro_batch_size)
        return self._scaled_before[micro_batch_size]

    def _scaled_to(self, micro_batch_size: int) -> TracedModel:
        factor = micro_batch_size / self.micro_batch_size
        return replace(
            self,
            ops=tuple(_scaled(op, factor) if op.is_batched else op for op in self.ops),
            input_bytes=round(self.input_bytes * factor),
            output_bytes=round(self.output_bytes * factor),
            micro_batch_size=micro_batch_size,
        )


def _scaled(op: TracedOp, factor: float) -> TracedOp:
    dims = op.dims
    if dims:
        # Batched products (attention) get more groups, all others more rows.
        grows = 0 if dims[0] > 1 and op.kind == "matmul" else 1
        dims = tuple(max(1, round(size * factor)) if axis == grows else size for axis, size in enumerate(dims))
    return replace(
        op,
        flops_forward=op.flops_forward * factor,
        flops_backward=op.flops_backward * factor,
        output_bytes=round(op.output_bytes * factor),
        saved_bytes=round(op.saved_bytes * factor),
        traffic_bytes=round(op.traffic_bytes * factor),
        dims=dims,
    )
