"""Annotations for the compiler: marks on tensors, and scopes that set names, attributes or MultiConv settings."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ipurun.emulator import enums
from ipurun.emulator._capture.recorder import current
from ipurun.emulator._impl import createNativeError, createPoptorchError
from ipurun.emulator._ops.recording import active_recorder, require_tensor

_PARTIALS_CODES = {torch.float32: 0, torch.float16: 1}


def _mark(tensor: torch.Tensor, kind: str, **info: Any) -> torch.Tensor:
    recorder = active_recorder()
    return tensor if recorder is None else recorder.mark(tensor, kind, **info)


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor through an op that the compiler never removes."""
    require_tensor(tensor, "nop: the argument")
    return _mark(tensor, "nop")


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss (or a part of it) that backpropagation starts from.

    Args:
        x: The computed loss.
        reduction: "sum", "mean" or "none".

    Returns:
        The reduced loss; a copy of `x` for "none".
    """
    if reduction == "sum":
        loss = x.sum()
    elif reduction == "mean":
        loss = x.mean()
    else:
        assert reduction == "none", f"Unsupported reduction type! Got {reduction!r}"
        loss = x.clone()
    return _mark(loss, "identity_loss", reduction=reduction)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep tensors for the backward pass that recomputation would drop.

    Args:
        *tensors: Tensors, or one list or tuple of them.

    Returns:
        The same tensors, as one tensor, a container of the given type, or a tuple.

    Raises:
        ValueError: An argument is not a tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        return type(tensors[0])(_checkpoint(tensor) for tensor in tensors[0])
    kept = tuple(_checkpoint(tensor) for tensor in tensors)
    return kept[0] if len(kept) == 1 else kept


def _checkpoint(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"All inputs must be tensors, got {type(tensor)}")
    return _mark(tensor, "recompute")


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Record the proportion of memory for temporary data of the op that produced `tensor` (device only)."""
    require_tensor(tensor, "set_available_memory: the value to set available memory for")
    return _mark(tensor, "available_memory", proportion=available_memory_proportion)


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: enums.MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Return a matrix product that a device computes in `factor` parts to save memory.

    Args:
        lhs: Left matrix, m by n.
        rhs: Right matrix, n by p.
        mode: Dimension to split: InputChannels m, ReducingDim n, OutputChannels p, or Disabled.
        factor: Number of parts; must divide that dimension.
        keep_precision: Add the parts in float32 (device only).

    Raises:
        poptorch.Error: In an executor, when `factor` does not divide the dimension.
    """
    assert isinstance(keep_precision, bool), "keep_precision must be a bool"
    assert isinstance(factor, int), "factor must be an int"
    assert isinstance(mode, enums.MatMulSerializationMode), "mode must be a MatMulSerializationMode"
    if active_recorder() is not None:
        _check_serialization(lhs, rhs, mode, factor)
    product = torch.matmul(lhs, rhs)
    return _mark(product, "serialized_matmul", mode=mode.value, factor=factor, keep_precision=keep_precision)


def _check_serialization(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: enums.MatMulSerializationMode, factor: int
) -> None:
    modes = enums.MatMulSerializationMode
    if mode == modes.Disabled:
        return
    size = {
        modes.InputChannels: lhs.shape[-2] if lhs.dim() > 1 else 1,
        modes.ReducingDim: lhs.shape[-1],
        modes.OutputChannels: rhs.shape[-1],
    }[mode]
    if factor <= 0 or size % factor:
        raise createPoptorchError(
            f"Invalid serialisation factor {factor} for serializedMatMul: with mode {mode.name} it must "
            f"be at least 1 and divide {size}, the size of the dimension to split."
        )


def push_name_scope(name: str) -> None:
    """Prefix the names of the following ops, until `pop_name_scope`."""
    recorder = active_recorder()
    if recorder is not None:
        recorder.record_event("push_name_scope", name=name)


def pop_name_scope() -> None:
    """End the last name scope."""
    recorder = active_recorder()
    if recorder is not None:
        recorder.record_event("pop_name_scope")


_CAST_TYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16}


def internal_cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the tensor in the backend's type ``FLOAT`` or ``FLOAT16``.

    Raises:
        Error: The type is another one.
    """
    if dtype not in _CAST_TYPES:
        raise createNativeError(f"Invalid type {dtype!r} for internal_cast. Valid types: {', '.join(_CAST_TYPES)}.")
    return tensor.to(_CAST_TYPES[dtype])


class NameScope:
    """Context manager that prefixes the names of the ops called inside it.

    Args:
        name: The prefix.
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), "Parameter to NameScope must be a string"
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        pop_name_scope()


def _mark_tensors(structure: Any, kind: str, mode: enums.OverlapMode) -> Any:
    recorder = active_recorder()

    def mark(value: Any) -> Any:
        if recorder is None or not isinstance(value, torch.Tensor):
            return value
        # A view, so that the marked tensor differs from the argument.
        return recorder.mark(value.view_as(value), kind, mode=mode.value)

    return tree_map(mark, structure)


def set_overlap_for_input(input_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Let the copy of model inputs from the host overlap with computation.

    Args:
        input_tensors: A tensor, or tuples, lists and dicts of tensors; other values are kept.
        mode: How far the copy may overlap.

    Returns:
        The same structure, to be used instead of the argument.
    """
    return _mark_tensors(input_tensors, "overlap_input", mode)


def set_overlap_for_output(output_tensors: Any, mode: enums.OverlapMode) -> Any:
    """Let the copy of model outputs to the host overlap with computation.

    Args:
        output_tensors: A tensor, or tuples, lists and dicts of tensors; other values are kept.
        mode: How far the copy may overlap.

    Returns:
        The same structure, to be returned instead of the argument.
    """
    return _mark_tensors(output_tensors, "overlap_output", mode)


class Attribute:
    """Context manager that sets backend attributes of the ops called inside it.

    Args:
        kwargs: A dict of keys and values for each attribute: ``__outline={"layer": "embedding"}``.
    """

    # The current attributes: {attribute: {key: value}}, shared by nested scopes.
    _attributes: Dict[str, Dict[str, str]] = {}

    def __init__(self, **kwargs: Dict[str, str]) -> None:
        self._attrs = kwargs
        self._saved: Dict[str, Dict[str, str]] = {}

    def __enter__(self) -> None:
        self._saved = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
        in_force = {name: dict(pairs) for name, pairs in self._saved.items()}
        for name, pairs in self._attrs.items():
            in_force.setdefault(name, {}).update(pairs)
        self._put_in_force(in_force)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self._put_in_force(self._saved)

    @staticmethod
    def _put_in_force(attributes: Dict[str, Dict[str, str]]) -> None:
        Attribute._attributes = attributes
        recorder = current()
        if recorder is not None:
            recorder.record_event("attributes", attributes=attributes)


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Set an attribute of the ops that follow; programs call it as ``torch.ops.poptorch.set_attribute``."""
    in_force = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
    in_force.setdefault(attribute, {})[key] = value
    Attribute._put_in_force(in_force)


def clear_attribute(attribute: str, key: str) -> None:
    """Clear an attribute of the ops that follow; programs call it as ``torch.ops.poptorch.clear_attribute``."""
    in_force = {name: dict(pairs) for name, pairs in Attribute._attributes.items()}
    in_force.get(attribute, {}).pop(key, None)
    Attribute._put_in_force({name: pairs for name, pairs in in_force.items() if pairs})


class _ConvolutionCounter(TorchDispatchMode):
    """Counts the convolutions called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.overloadpacket.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


class MultiConv:
    """Context manager that combines the convolutions called inside it.

    The results equal those of separate convolutions; the settings affect only a device.
    """

    _open_scope: Optional[MultiConv] = None

    def __init__(self) -> None:
        self._available_memory_proportions: Optional[Sequence[float]] = None
        self._partials_types: Optional[Sequence[int]] = None
        self._plan_type: Optional[enums.MultiConvPlanType] = None
        self._per_conv_reserved_tiles: Optional[int] = None
        self._cycle_back_off: Optional[float] = None
        self._enable_conv_ditherings: Optional[Sequence[bool]] = None
        self._counter: Optional[_ConvolutionCounter] = None

    def availableMemoryProportions(self, value: Union[float, List[float]]) -> MultiConv:
        """Set the proportion of memory for temporary data, for all convolutions or for each."""
        if value is not None:
            values = value if isinstance(value, (list, tuple)) else (value,)
            valid = len(values) > 0 and all(isinstance(item, float) for item in values)
            assert valid, f"Invalid available memory proportion! Got {value!r}"
            self._available_memory_proportions = tuple(values)
        else:
            self._available_memory_proportions = None
        return self

    def partialsTypes(self, value: Union[torch.dtype, List[torch.dtype]]) -> MultiConv:
        """Set the type of partial results (float32 or float16), for all convolutions or for each."""
        values = value if isinstance(value, (list, tuple)) else (value,)
        if not all(item in _PARTIALS_CODES for item in values):
            raise ValueError(f"Invalid partials types. Expecting torch.float or torch.half, got {value!r}")
        self._partials_types = tuple(_PARTIALS_CODES[item] for item in values)
        return self

    def enableConvDithering(self, value: Union[bool, List[bool]]) -> MultiConv:
        """Set whether start tiles are spread, for all convolutions or for each."""
        if value is None:
            self._enable_conv_ditherings = None
            return self
        values = value if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(item, bool) for item in values):
            raise ValueError(f"value must be bool or list of bools, got {value!r}")
        self._enable_conv_ditherings = tuple(values)
        return self

    def planType(self, value: enums.MultiConvPlanType) -> MultiConv:
        """Set whether the convolutions run in parallel or one after another."""
        assert value is None or isinstance(value, enums.MultiConvPlanType), f"Invalid plan type! Got {value!r}"
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the number of tiles reserved for each convolution."""
        assert isinstance(value, int), f"perConvReservedTiles must be an int, got {value!r}"
        self._per_conv_reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set the proportion of cycles by which a parallel plan may be slower."""
        assert isinstance(value, float), f"cycleBackOff must be a float, got {value!r}"
        self._cycle_back_off = value
        return self

    def _settings(self) -> Dict[str, Any]:
        return {
            "available_memory_proportions": self._available_memory_proportions,
            "partials_types": self._partials_types,
            "plan_type": None if self._plan_type is None else self._plan_type.value,
            "per_conv_reserved_tiles": self._per_conv_reserved_tiles,
            "cycle_back_off": self._cycle_back_off,
            "enable_conv_dithering": self._enable_conv_ditherings,
        }

    def __enter__(self) -> None:
        recorder = active_recorder()
        if recorder is None:
            return
        if MultiConv._open_scope is not None:
            raise createPoptorchError("Nested poptorch.MultiConv is not supported.")
        MultiConv._open_scope = self
        recorder.record_event("begin_multi_conv")
        self._counter = _ConvolutionCounter()
        self._counter.__enter__()

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        counter, self._counter = self._counter, None
        if counter is None:
            return
        MultiConv._open_scope = None
        counter.__exit__(type, value, traceback)
        recorder = active_recorder()
        if value is not None or recorder is None:
            return
        if counter.count == 0:
            raise createPoptorchError("Unexpected end_multi_conv: no convolution inside poptorch.MultiConv.")
        recorder.record_event("end_multi_conv", convolutions=counter.count, **self._settings())
